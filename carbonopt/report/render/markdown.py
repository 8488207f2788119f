"""A document as Markdown, for a repository or a pull request.

Text of users can't become markup.
"""

import re
from collections.abc import Mapping

from carbonopt.core.format import escape_markdown as escape
from carbonopt.core.format import shown_directions
from carbonopt.report import document as doc


def render(document: doc.Document, pictures: Mapping[str, str]) -> str:
    """Return a document as Markdown.

    Args:
        document: The document.
        pictures: The files of the figures, relative to the text, by the figures' names. Figures
            without one are left out.
    """
    tiles = [
        f"- {escape(tile.label)}: **{escape(tile.text)}** ({escape(tile.note)})"
        for tile in document.tiles
    ]
    parts = [
        f"# {escape(document.name)}",
        f"**{escape(document.headline)}**",
        *map(escape, document.details),
    ]
    parts += ["\n".join(tiles), _caveats("Caveats", document.caveats[: doc.MOST_CAVEATS])]
    for section in document.sections:
        parts.append(f"{'#' * section.level} {escape(section.title)}")
        parts += [_block(block, pictures) for block in section.blocks]
    parts.append(_caveats("More caveats", document.caveats[doc.MOST_CAVEATS :]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: doc.Block, pictures: Mapping[str, str]) -> str:
    match block:
        case doc.Paragraph():
            return f"> {escape(block.text)}" if block.style == "quote" else escape(block.text)
        case doc.Table():
            return _captioned(block) if block.rows else ""
        case doc.InteractiveFigure():
            return _block(block.figure, pictures)
        case doc.Figure():
            return (
                f"![{escape(block.alt)}]({pictures[block.name]})" if block.name in pictures else ""
            )
        case doc.Steps():
            steps = "\n".join(
                f"- {escape(step.label)}: {escape(step.text)}" for step in block.steps
            )
            return f"{escape(block.label)}:\n\n{steps}"
        case doc.Code():
            return f"{escape(block.title)}:\n\n{_fenced(block)}"


def _caveats(title: str, caveats: tuple[doc.Caveat, ...]) -> str:
    listed = "\n".join(
        f"- {caveat.level.name.capitalize()}: {escape(caveat.text)}" for caveat in caveats
    )
    return f"## {title}\n\n{listed}" if caveats else ""


def _captioned(table: doc.Table) -> str:
    head = [escape(column.label) for column in table.columns]
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    body = [
        [f"**{escape(cell.text)}**" if cell.strong else escape(cell.text) for cell in row]
        for row in table.rows
    ]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])
    return "\n\n".join(
        part for part in (f"{escape(table.caption)}:", lines, escape(table.note)) if part
    )


def _fenced(code: doc.Code) -> str:
    """Return a code block whose fence is longer than any run of backticks inside."""
    text = shown_directions(code.text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{code.language}\n{text.rstrip()}\n{fence}"
