"""A CSV table as text, safe to open in a spreadsheet."""

import csv
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# The characters that can begin a formula, alone or after white space that spreadsheets skip.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
# An option of a command, such as --shuffle, computes nothing and reaches no other program. With
# digits it could be a reference to a cell, as -O2 is.
_OPTION = re.compile(r"--(?!true$|false$)[a-z][a-z_-]*", re.IGNORECASE)


def csv_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a header; None is an empty cell.

    Text that a spreadsheet would take for a formula (it begins with = + - or @, a tab or a line
    break) gets an apostrophe before it, unless it is an option's name such as --shuffle.
    """
    lines: list[str] = []
    # The csv module quotes the characters of its own line end only, and readers take a bare \r
    # without quotes for the end of a row. So rows end with \r\n here, and the \r is removed below.
    writer = csv.DictWriter(_Lines(lines.append), columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


class _Lines(NamedTuple):
    """A file for the csv module that passes each row to a function."""

    write: Callable[[str], object]


def _no_formula(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would take for a formula.

    OWASP advises it under the name "CSV Injection". Numbers stay as they are.
    """
    if not isinstance(value, str) or _OPTION.fullmatch(value):
        return value
    return f"'{value}" if value.startswith(_FORMULA) else value
