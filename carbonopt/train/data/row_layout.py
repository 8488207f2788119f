"""How rows stand in a file: their ends, a repeated header, and JSON in lines or a list."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from carbonopt.core.errors import BadInput
from carbonopt.train.data.opened_files import data_suffix, open_text, readable


class RowEnds:
    """The line ends that separate the rows of a table.

    Python takes a carriage return alone for an end of a row, too, as old files from a Mac have it.
    Between other ends it is a part of a cell that was written without quotes.
    """

    def __init__(self) -> None:
        self._last = ""  # the line that was read last
        self._alone: bool | None = None  # whether the rows so far end with a carriage return alone

    def lines(self, file: TextIO) -> Iterator[str]:
        for line in file:
            self._last = line
            yield line

    def check(self, where: str) -> None:
        """Check that the row that was read last ends as those before.

        Raises:
            BadInput: if it doesn't.
        """
        if not self._last.endswith(("\r", "\n")):
            return  # the end of the file
        is_alone = self._last.endswith("\r")
        if self._alone not in (None, is_alone):
            raise BadInput(
                f"{where}: rows must all end with a line feed, or all with a carriage return alone,"
                " but here the end differs from that of the row before; put cells that hold a"
                " carriage return into quotes, or convert the ends of lines."
            )
        self._alone = is_alone


def check_no_header(cells: Sequence[str], named: Sequence[str], where: str) -> None:
    """Raise BadInput if a row repeats the names of the columns, as in files that were joined.

    A single column may hold its own name: a list of words does.
    """
    written, names = ([cell.strip("\ufeff ") for cell in of] for of in (cells, named))
    if len(names) > 1 and written == names:
        raise BadInput(
            f"{where}: a row must not repeat the names of the columns ({', '.join(named)}), as"
            " joined files do; remove it."
        )


def has_plain_rows(path: Path) -> bool:
    """Return whether a file holds JSON rows as its suffix says: lines, or in .json also a list.

    The datasets library also reads lists in .jsonl, and objects written over several lines.
    """
    is_json = data_suffix(path) == ".json"
    with readable(path), open_text(path) as lines:
        first = next((line.strip() for line in lines if line.strip()), "")
        has_more = any(map(str.strip, lines)) if is_json else True
    if is_json and first.startswith("["):
        return True
    return has_more and first.startswith("{") and first.endswith(("}", "},"))
