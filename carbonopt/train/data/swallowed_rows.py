"""Rows of a table that a cell may have swallowed, because its text begins with a quote.

A program that writes tables without quotes leaves `"6 inch pipe,a` as it is. Whoever reads the
table takes the quote for the beginning of a cell, which goes on to the next quote, many rows below
perhaps. What was read is then a valid cell of several lines, as a poem is. But unlike a poem's, its
lines have a row's number of delimiters.
"""

import re
from collections.abc import Iterable, Sequence

from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.train.data.data_notes import note

# From so many lines on that look like whole rows, a cell's quote was hardly meant to open a cell;
# and from so many rows on that cells of a table may have swallowed, nor were the quotes of them.
_SWALLOWED_ROWS = 3
QUOTES_REMEDY = (
    "put a cell that begins with a quote into quotes and double those within it, or give the data"
    " as JSON lines"
)


class SwallowedRows:
    """The cells of a table that look like several rows.

    Args:
        columns: the names of the table's columns, in order.
        delimiter: what stands between two cells.
    """

    def __init__(self, columns: Sequence[str], delimiter: str) -> None:
        self._columns, self._delimiter = columns, delimiter
        self._long_cells = 0  # cells of several lines
        self._cells = 0  # those among them whose lines could be rows
        self._rows = 0  # the rows that these would have swallowed
        # The same without cells that have white space after a delimiter, as prose has.
        self._unspaced_rows = 0
        self._first = ""  # where the first such cell stands

    def look_at(self, cells: Iterable[str], where: str) -> None:
        """Look at the cells of one row.

        Args:
            cells: the cells from the first column on.
            where: where the row stands, for errors.

        Raises:
            BadInput: if a cell has certainly swallowed rows.
        """
        for place, cell in enumerate(cells):
            if "\n" in cell or "\r" in cell:
                self._look_at_lines(cell, place, where)

    def _look_at_lines(self, cell: str, place: int, where: str) -> None:
        lines = [line for line in cell.splitlines() if line.strip()]
        if len(lines) < 2:
            return
        self._long_cells += 1
        delimiters = [line.count(self._delimiter) for line in lines]
        others, inner = len(self._columns) - 1, len(lines) - 2
        # A row hardly begins with an empty cell, but a line of indented code with a tab.
        are_indented = any(line.startswith(self._delimiter) for line in lines)
        are_rows = all(count == others for count in delimiters[1:-1]) and not are_indented
        # The first line ends a row that began before the cell, and the last line begins one that
        # ends after it.
        if not are_rows or (delimiters[0], delimiters[-1]) != (others - place, place):
            return
        # Text has commas, but hardly ever tabs beside ends of lines.
        if others and (inner >= _SWALLOWED_ROWS or self._delimiter == "\t"):
            has_rows = f"{inner} lines in it that look like rows"
            found = has_rows if inner >= _SWALLOWED_ROWS else f"{len(lines)} lines with tabs"
            raise BadInput(
                f"{where}: a cell must not hold other rows, but {self._columns[place]!r} has"
                f" {found}; {QUOTES_REMEDY}."
            )
        self._cells += 1
        self._rows += len(lines) - 1
        if not re.search(rf"{re.escape(self._delimiter)}(?:\s|$)", cell, re.MULTILINE):
            self._unspaced_rows += len(lines) - 1
        self._first = self._first or where

    def finish(self, name: str) -> None:
        """Judge the whole table, and note what is uncertain for the report.

        Args:
            name: what the report calls the table.

        Raises:
            BadInput: if the table's cells have most likely swallowed rows.
        """
        if not self._cells:
            return
        cells, rows = count_text(self._cells, "cell"), count_text(self._rows, "row")
        most = 2 * self._cells >= self._long_cells
        if len(self._columns) > 1 and most and self._unspaced_rows >= _SWALLOWED_ROWS:
            raise BadInput(
                f"{self._first}: cells must not hold other rows, but from here on {cells} of"
                f" several lines look as if they had swallowed {rows}; {QUOTES_REMEDY}."
            )
        note(
            f"In {name} {cells} of several lines might be rows that a quote at the beginning of a"
            f" text has joined. If its texts have one line each, {rows} are missing."
        )
