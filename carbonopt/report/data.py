"""The trials as tables for other programs: one row a trial, and one row an evaluation."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from carbonopt.core.trial import TrialRecord

if TYPE_CHECKING:
    import pyarrow

TRIALS_CSV = "trials.csv"
TRIALS_PARQUET = "trials.parquet"
EVALUATIONS_CSV = "evaluations.csv"
NAMES = (TRIALS_CSV, TRIALS_PARQUET, EVALUATIONS_CSV)

# What a traceback's line has before the file's place in its package, or before its name.
_FOLDERS = re.compile(r'(?<=File ")/(?:[^"\n]*?/(?=(?:site-packages|carbonopt)/)|[^"\n]*/)')
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how a formula can begin, by itself or behind what is skipped


def data_files(records: Iterable[TrialRecord]) -> dict[str, bytes]:
    """Contents by file name; nested fields have dotted names. The same records give the same bytes.

    The CSV tables hold no lists: evaluations have a table of their own. In the Parquet file they are lists of structs.
    These files are passed on: tracebacks and names of logs have no folders of the machine on which the study ran.
    Text in a CSV that a spreadsheet would take for a formula (it begins with = + - or @) has an apostrophe before it.
    """
    rows = [_flat(_without_folders(record).as_json()) for record in records]
    flat = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    evaluations = [{"trial": row["trial"], **evaluation} for row in rows for evaluation in row["evals"]]
    return {
        TRIALS_CSV: _csv(flat).encode(),
        TRIALS_PARQUET: _parquet(rows),
        EVALUATIONS_CSV: _csv(evaluations).encode(),
    }


def _without_folders(record: TrialRecord) -> TrialRecord:
    if (failure := record.failure) is None:
        return record
    log = None if failure.log is None else "/".join(Path(failure.log).parts[-3:])  # trials/NUMBER/FILE
    shorter = failure.model_copy(update={"text": _FOLDERS.sub("", failure.text), "log": log})
    return record.model_copy(update={"failure": shorter})


def csv_text(records: Iterable[dict[str, Any]]) -> str:
    """Records as one CSV table: nested fields by dotted names, lists as JSON text."""
    rows = map(_flat, records)
    return _csv([{key: json.dumps(v) if isinstance(v, list) else v for key, v in row.items()} for row in rows])


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _csv(rows: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    # Python quotes what is in its own line end, and without quotes readers take a bare \r for the end of a row.
    writer = csv.DictWriter(_Lines(lines.append), _columns(rows), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


class _Lines(NamedTuple):
    """What the csv module writes to, a row at a time."""

    write: Callable[[str], object]


def _no_formula(value: Any) -> Any:
    """As OWASP has it ("CSV Injection"); numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow.parquet

    # Column by column: a row may lack what another one has, and whole numbers stand beside others.
    table = pyarrow.table({name: _array([row.get(name) for row in rows]) for name in _columns(rows)})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def _array(values: list[Any]) -> "pyarrow.Array":
    """Whole numbers that 64 bits don't hold make a column of floats, or of text where a float would change them; so do
    values of several kinds."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except (OverflowError, pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        exact = all(value is None or _is_exact(value) for value in values)
        return pyarrow.array([None if value is None else (float if exact else str)(value) for value in values])


def _is_exact(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and float(value) == value
    except OverflowError:
        return False


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
