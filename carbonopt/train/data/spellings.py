"""Labels that differ in their spelling alone, which would be classes of their own."""

import re
import unicodedata
from collections.abc import Sequence

from carbonopt.core.errors import BadInput
from carbonopt.train.data.rows import Row

_TRUTHS = ("true", "false", "yes", "no")
_NUMBER = re.compile(r"[-+]?(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})(?:[eE][-+]?\d{1,2})?")
_VARIATION = re.compile("[\u034f\ufe00-\ufe0f]")  # how the character before is drawn or joined
# Unicode's kinds of letters that mean what the usual ones mean. The 2 of m² is not among them.
_WIDTHS = ("<wide>", "<narrow>")
_FORMS = (*_WIDTHS, "<compat>", "<noBreak>")
_QUOTES = str.maketrans("‘’‚‛′`´“”„‟″«»", "'''''''" + '"' * 7)
_QUOTED = re.compile(r"""(["'])(.+)\1""")
_DASHES = re.compile("[\u2010-\u2015\u2212]")
# Labels of fewer letters may differ in their case: A and a as signs, Co and CO as elements.
_FEWEST_LETTERS = 3


def check_spellings(words: Sequence[str], rows: Sequence[Row], column: str) -> None:
    """Refuse classes that differ in their spelling alone.

    "spam ", 1.0, "True" or Spam beside "spam", 1, "true" or spam would be classes of their own, and
    so would an é of two characters beside that of one.

    Args:
        words: the classes of the rows, in their order.
    """
    first: dict[str | float, tuple[str, Row]] = {}
    for word, row in dict(zip(reversed(words), reversed(rows), strict=True)).items():
        other, of = first.setdefault(_meaning(word), (word, row))
        if other != word:
            is_seen = all(as_seen(repr(text)) == repr(text) for text in (word, other))
            shown = repr if is_seen else ascii
            spelt = f"{row.where} has {shown(word):.40} and {of.where} has {shown(other):.40}"
            raise BadInput(
                f"column {column!r} must spell each label in one way, but {spelt}; write one of"
                " them in all rows, or rename one if they are two classes, as in"
                f" {f'{word} (2)':.40}."
            )


def as_seen(word: str) -> str:
    """Return a word without what can't be seen of it.

    That is how a letter with an accent is stored, characters without a width, and how much white
    space there is.
    """
    visible = "".join(letter for letter in word if unicodedata.category(letter) != "Cf")
    return " ".join(unicodedata.normalize("NFC", _VARIATION.sub("", visible)).split())


def _meaning(word: str) -> str | float:
    """Return what all spellings of a label have in common; for a number, its value."""
    text = as_seen(word)
    is_sign = len(text) == 1  # such a label may mean how it is drawn: ſ beside s
    if any(map(str.isalnum, text)):  # `` and '' are different parts of speech
        text = _DASHES.sub("-", text.translate(_QUOTES))
    text = "".join(_usual_form(letter, _WIDTHS if is_sign else _FORMS) for letter in text)
    while quoted := _QUOTED.fullmatch(text):
        text = quoted[2].strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    letters = sum(map(str.isalpha, text))
    return text.casefold() if letters >= _FEWEST_LETTERS or text.casefold() in _TRUTHS else text


def _usual_form(letter: str, forms: Sequence[str]) -> str:
    """Return the letter of which another is one of these forms."""
    kind, *_ = unicodedata.decomposition(letter).split() or [""]
    return unicodedata.normalize("NFKC", letter) if kind in forms else letter
