"""Text that users name, as it can stand in a page: it can't become markup, nor turn round what follows."""

import re

_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")  # embeddings, overrides and isolates of Unicode
_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!$@])")


def shown_directions(text: str) -> str:
    """Characters that turn the text behind them round, such as [U+202E], as people see them: in a user's name they
    would turn round what the report says of it. Letters of any script keep their own direction."""
    return _DIRECTIONS.sub(lambda match: f"[U+{ord(match.group()):04X}]", text)


def escape_markdown(text: str) -> str:
    """Text on one line that no Markdown dialect reads as markup, HTML included."""
    one_line = " ".join(shown_directions(text).split())
    entities = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", entities)
