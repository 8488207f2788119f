"""A document as Markdown, for a repository or a pull request. User text can't become markup."""

import re
from collections.abc import Mapping

from carbonopt.core.markup import escape_markdown as escape
from carbonopt.core.markup import shown_directions
from carbonopt.report.document import (
    MOST_CAVEATS,
    Block,
    Caveat,
    Code,
    Document,
    Figure,
    InteractiveFigure,
    Paragraph,
    Section,
    Steps,
    Table,
)


def render(document: Document, pictures: Mapping[str, str]) -> str:
    """`pictures`: where the figures lie, relative to the text, by their names; others are left out."""
    parts = [
        f"# {escape(document.name)}",
        f"**{escape(document.headline)}**",
        *map(escape, document.details),
        "\n".join(f"- {escape(tile.label)}: **{escape(tile.text)}** ({escape(tile.note)})" for tile in document.tiles),
        _caveats("Caveats", document.caveats[:MOST_CAVEATS]),
        *(part for section in document.sections for part in _section(section, pictures)),
        _caveats("More caveats", document.caveats[MOST_CAVEATS:]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section, pictures: Mapping[str, str]) -> list[str]:
    return [f"{'#' * section.level} {escape(section.title)}", *(_block(block, pictures) for block in section.blocks)]


def _block(block: Block, pictures: Mapping[str, str]) -> str:
    match block:
        case Paragraph():
            return f"> {escape(block.text)}" if block.style == "quote" else escape(block.text)
        case Table():
            return _captioned(block)
        case InteractiveFigure():
            return _block(block.figure, pictures)
        case Figure():
            return f"![{escape(block.alt)}]({pictures[block.name]})" if block.name in pictures else ""
        case Steps():
            steps = "\n".join(f"- {escape(step.label)}: {escape(step.text)}" for step in block.steps)
            return f"{escape(block.label)}:\n\n{steps}"
        case Code():
            return f"{escape(block.title)}:\n\n{_fenced(block)}"


def _caveats(title: str, caveats: tuple[Caveat, ...]) -> str:
    listed = "\n".join(f"- {caveat.level.name.capitalize()}: {escape(caveat.text)}" for caveat in caveats)
    return f"## {title}\n\n{listed}" if caveats else ""


def _captioned(table: Table) -> str:
    if not table.rows:
        return ""
    head = [escape(column.label) for column in table.columns]
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    body = [[f"**{escape(cell.text)}**" if cell.strong else escape(cell.text) for cell in row] for row in table.rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])
    return "\n\n".join(part for part in (f"{escape(table.caption)}:", lines, escape(table.note)) if part)


def _fenced(code: Code) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text = shown_directions(code.text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{code.language}\n{text.rstrip()}\n{fence}"
