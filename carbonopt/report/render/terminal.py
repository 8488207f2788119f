"""The top of a document as plain text."""

from carbonopt.core.format import count_text
from carbonopt.report.document import MOST_CAVEATS, Document


def render(document: Document, all_caveats: str = "in the report and in --json") -> str:
    """Return what to do, what it saves and how sure that is, as plain text.

    The most serious caveats follow, and the number of the others.

    Args:
        all_caveats: Where the others are, in words.
    """
    lines = [document.headline, *(f"  {line}" for line in document.details)]
    width = max((len(tile.label) for tile in document.tiles), default=0)
    for tile in document.tiles:
        lines.append(
            f"  {tile.label:{width}}  {tile.text}{f'  ({tile.note})' if tile.note else ''}"
        )
    lines += [
        f"  {caveat.level.name.lower()}: {caveat.text}"
        for caveat in document.caveats[:MOST_CAVEATS]
    ]
    if (more := len(document.caveats) - MOST_CAVEATS) > 0:
        lines.append(f"  and {count_text(more, 'more caveat')}, {all_caveats}")
    return "\n".join(lines)
