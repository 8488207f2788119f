"""Tables of the trials for other programs: one row per trial, and one row per evaluation."""

import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carbonopt.core.csv_table import csv_table
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import (
    TRIAL_PHASES,
    Durations,
    Energy,
    Failure,
    Forecast,
    GpuEnergy,
    QualityResult,
    Stage,
    StageCost,
    TrialRecord,
    TrialState,
)

if TYPE_CHECKING:
    import pyarrow

TRIALS_CSV = "trials.csv"
TRIALS_PARQUET = "trials.parquet"
EVALUATIONS_CSV = "evaluations.csv"
NAMES = (TRIALS_CSV, TRIALS_PARQUET, EVALUATIONS_CSV)

# The folders in a line of a traceback, up to the file's place in its package or to its name.
_FOLDERS = re.compile(r'(?<=File ")/(?:[^"\n]*?/(?=(?:site-packages|carbonopt)/)|[^"\n]*/)')


def data_files(records: Iterable[TrialRecord], *, is_replay: bool = False) -> dict[str, bytes]:
    """Return the contents of the tables by file name; nested fields have dotted names.

    The same records give the same bytes. The CSV tables hold no lists, so evaluations have a table
    of their own; in the Parquet file they are lists of structs.

    These files are passed on, so tracebacks and names of logs have no folders of the machine on
    which the study ran. Text in a CSV that a spreadsheet would take for a formula (it begins with =
    + - or @, a tab or a line break) has an apostrophe before it.
    """
    rows = _rows(records, is_replay=is_replay)
    return {
        TRIALS_CSV: _csv(_trial_rows(rows)).encode(),
        TRIALS_PARQUET: _parquet(rows),
        EVALUATIONS_CSV: _csv(_evaluation_rows(rows)).encode(),
    }


def trials_table(records: Iterable[TrialRecord], *, is_replay: bool = False) -> "pyarrow.Table":
    """Return the table of `TRIALS_CSV`, a row for each trial."""
    return _table(_trial_rows(_rows(records, is_replay=is_replay)))


def evaluations_table(records: Iterable[TrialRecord]) -> "pyarrow.Table":
    """Return the table of `EVALUATIONS_CSV`, a row for each evaluation."""
    return _table(_evaluation_rows(_rows(records)))


def usual_columns() -> tuple[list[str], list[str]]:
    """Return the columns that tables of trials and of evaluations can have, but for parameters.

    A table has those of a field's parts only if one of its trials has the field.
    """
    phases = {"train": 0.0, "setup": 0.0, "eval": 0.0, "total": 0.0}
    gpu = GpuEnergy(counter=0.0, codecarbon=0.0, idle=0.0, uncertainty=0.0)
    example = TrialRecord(
        trial=0,
        state=TrialState.COMPLETE,
        seed=0,
        params=TrialParams.from_record({}),
        quality=QualityResult.named(PERPLEXITY),
        energy_kwh=Energy(**phases),
        duration_s=Durations(**phases),
        stages=dict.fromkeys(Stage, StageCost()),
        evals=(EvalPoint.of(PERPLEXITY, 0.0, 1, step=0, tokens=0),),
        failure=Failure(kind="", text=""),
        gpu_energy_kwh=dict.fromkeys(TRIAL_PHASES, gpu),
        after_reported=StageCost(),
        forecast=Forecast(step=0, value=0.0, sds_short=0.0, sds_needed=0.0, checked_trials=0),
    )
    rows = _rows([example])
    columns = [name for name in _columns(_trial_rows(rows)) if not name.startswith("params.")]
    return columns, _columns(_evaluation_rows(rows))


def _rows(records: Iterable[TrialRecord], *, is_replay: bool = False) -> list[dict[str, Any]]:
    return [_flat(_without_folders(record).as_exported(is_replay=is_replay)) for record in records]


def _trial_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not isinstance(value, list)} for row in rows
    ]


def _evaluation_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"trial": row["trial"], **evaluation} for row in rows for evaluation in row["evals"]]


def _without_folders(record: TrialRecord) -> TrialRecord:
    if (failure := record.failure) is None:
        return record
    # The last three parts of the path are trials/NUMBER/FILE.
    log = None if failure.log is None else "/".join(Path(failure.log).parts[-3:])
    shorter = failure.model_copy(update={"text": _FOLDERS.sub("", failure.text), "log": log})
    return record.model_copy(update={"failure": shorter})


def csv_text(records: Iterable[dict[str, Any]]) -> str:
    """Return records as one CSV table.

    Nested fields have dotted names, and lists are JSON text.
    """
    rows = map(_flat, records)
    return _csv(
        [
            {key: json.dumps(v) if isinstance(v, list) else v for key, v in row.items()}
            for row in rows
        ]
    )


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows' column names, a field with parts by the names of its parts alone.

    A record without such a field, such as `failure`, has null under the field's own name.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    wholes = wholes_of(names)
    return [
        name
        for name in names
        if name not in wholes or any(row.get(name) is not None for row in rows)
    ]


def wholes_of(names: Iterable[str]) -> set[str]:
    """Return the names of the fields that dotted names are parts of: `a` and `a.b` for `a.b.c`."""
    return {name[:end] for name in names for end, character in enumerate(name) if character == "."}


def _csv(rows: list[dict[str, Any]]) -> str:
    columns = _columns(rows)
    return csv_table(columns, [{name: row.get(name) for name in columns} for row in rows])


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(_table(rows), buffer)
    return buffer.getvalue()


def _table(rows: list[dict[str, Any]]) -> "pyarrow.Table":
    import pyarrow

    # Column by column: rows may lack fields that others have, and whole numbers may stand beside
    # other numbers.
    return pyarrow.table({name: _array([row.get(name) for row in rows]) for name in _columns(rows)})


def _array(values: list[Any]) -> "pyarrow.Array":
    """Return a column as an Arrow array, whatever its values are.

    Whole numbers that do not fit 64 bits make a column of floats, or of text where a float would
    change them. Values of several kinds make such columns, too.
    """
    import pyarrow

    try:
        return pyarrow.array(values)
    except (OverflowError, pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        exact = all(value is None or _is_exact(value) for value in values)
        return pyarrow.array(
            [None if value is None else (float if exact else str)(value) for value in values]
        )


def _is_exact(value: Any) -> bool:
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and float(value) == value
        )
    except OverflowError:
        return False


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
