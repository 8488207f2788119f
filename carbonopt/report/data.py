"""The trials as tables for other programs: one row a trial, and one row an evaluation."""

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from carbonopt.trial import TrialRecord

TRIALS_CSV = "trials.csv"
TRIALS_PARQUET = "trials.parquet"
EVALUATIONS_CSV = "evaluations.csv"


def data_files(records: Iterable[TrialRecord]) -> dict[str, bytes]:
    """Contents by file name; nested fields have dotted names. The same records give the same bytes.

    The CSV tables hold no lists: evaluations have a table of their own. In the Parquet file they are lists of structs.
    """
    rows = [_flat(record.as_json()) for record in records]
    evaluations = [{"trial": row["trial"], **one} for row in rows for one in row["evals"]]
    return {
        TRIALS_CSV: _csv([{name: value for name, value in row.items() if name != "evals"} for row in rows]).encode(),
        TRIALS_PARQUET: _parquet(rows),
        EVALUATIONS_CSV: _csv(evaluations).encode(),
    }


def csv_text(records: Iterable[dict[str, Any]]) -> str:
    """Records as one CSV table: nested fields by dotted names, lists as JSON text."""
    rows = [_flat(record) for record in records]
    return _csv(
        [{name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows]
    )


def _csv(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = list(dict.fromkeys(name for row in rows for name in row))
    # Column by column: a row may lack what another one has, and whole numbers stand beside others.
    table = pyarrow.table({name: pyarrow.array([row.get(name) for row in rows]) for name in columns})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
