"""The tables for other programs: what stands in them is what `carbonopt export` says."""

import csv
import io
import json
import math

import pyarrow.parquet
import pytest

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import Failure, QualityResult, TrialRecord, TrialState
from carbonopt.report.data_files import (
    EVALUATIONS_CSV,
    TRIALS_CSV,
    TRIALS_PARQUET,
    csv_text,
    data_files,
)


def record(
    number: int, state: TrialState = TrialState.COMPLETE, *, steps: int = 2, **fields: object
) -> TrialRecord:
    params = TrialParams(
        global_batch_size=8,
        micro_batch_size_per_gpu=4,
        learning_rate=1e-3,
        epochs=1 + number / 2,
    )
    evals = tuple(
        EvalPoint.of(
            PERPLEXITY, math.nan if step > 2 else 3.5 * step, 4, step=step, tokens=step * 8
        )
        for step in range(1, 1 + steps)
    )
    quality = QualityResult(name=PERPLEXITY.name, value=fields.pop("perplexity", None))
    return TrialRecord(
        trial=number,
        state=state,
        seed=number,
        params=params,
        quality=quality,
        evals=evals,
        **fields,
    )


RECORDS = (
    record(0, perplexity=float("inf"), emissions_kg_co2e=1e-7),
    record(
        1,
        TrialState.FAILED,
        steps=0,
        failure=Failure(kind="crash", text="=1+1\nlast line", log='a,\n"b'),
    ),
    record(2, TrialState.PRUNED, steps=3),
)


def rows(text: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.decode())))


def test_the_tables_hold_what_the_export_says() -> None:
    files = data_files(RECORDS)
    exported = [trial_record.as_json() for trial_record in RECORDS]
    trials = rows(files[TRIALS_CSV])
    assert [int(row["trial"]) for row in trials] == [0, 1, 2]
    assert [row["state"] for row in trials] == ["complete", "failed", "pruned"]
    assert trials[1]["failure.log"] == 'a,\n"b'
    assert float(trials[0]["emissions_kg_co2e"]) == 1e-7
    assert trials[0]["quality.value"] == "" and trials[1]["failure.kind"] == "crash"
    assert "evals" not in trials[0]
    assert [(int(row["trial"]), int(row["step"])) for row in rows(files[EVALUATIONS_CSV])] == [
        (exported_record["trial"], point["step"])
        for exported_record in exported
        for point in exported_record["evals"]
    ]

    table = pyarrow.parquet.read_table(io.BytesIO(files[TRIALS_PARQUET])).to_pylist()
    assert [row["evals"] for row in table] == [
        exported_record["evals"] for exported_record in exported
    ]
    assert [row["params.epochs"] for row in table] == [1, 1.5, 2]
    assert files == data_files(RECORDS)


def test_no_folder_of_the_machine_is_passed_on() -> None:
    paths = (
        "/home/me/a b/site-packages/torch/nn/functional.py",
        "/srv/carbonopt/train/training_loop.py",
        "/home/me/train.py",
    )
    text = "out of memory\n" + "\n".join(f'  File "{path}", line 3, in step' for path in paths)
    failure = Failure(
        kind="out_of_memory", text=text, log="/home/me/runs/mine/trials/0003/log-1.txt"
    )
    (row,) = rows(data_files([record(3, TrialState.INFEASIBLE, failure=failure)])[TRIALS_CSV])
    assert "/home" not in str(row) and "/srv" not in str(row)
    assert [line.split('"')[1] for line in row["failure.text"].splitlines()[1:]] == [
        "site-packages/torch/nn/functional.py", "carbonopt/train/training_loop.py", "train.py"
    ]  # fmt: skip
    assert row["failure.log"] == "trials/0003/log-1.txt"


@pytest.mark.parametrize("records", [(), RECORDS[1:2]])
def test_nothing_to_tell_is_an_empty_table(records: tuple[TrialRecord, ...]) -> None:
    files = data_files(records)
    assert len(rows(files[TRIALS_CSV])) == len(records)
    assert rows(files[EVALUATIONS_CSV]) == []
    assert pyarrow.parquet.read_table(io.BytesIO(files[TRIALS_PARQUET])).num_rows == len(records)


def test_the_exported_csv_keeps_evaluations_as_json() -> None:
    (row,) = rows(csv_text([RECORDS[0].as_json()]).encode())
    assert json.loads(row["evals"]) == RECORDS[0].as_json()["evals"]


def test_no_text_becomes_a_formula_of_a_spreadsheet() -> None:
    texts = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "--x|y", "a=1", "'=1", "--x-y")
    records = [
        record(number, TrialState.FAILED, failure=Failure(kind=text, text="x"))
        for number, text in enumerate(texts)
    ]
    records[0] = records[0].model_copy(update={"gpu_disagreement": -0.5})
    files = data_files(records)
    expected = [f"'{text}" for text in texts[:7]] + list(texts[7:])
    for text in (
        files[TRIALS_CSV],
        csv_text([trial_record.as_json() for trial_record in records]).encode(),
    ):
        table_rows = list(csv.DictReader(io.StringIO(text.decode(), newline="")))
        assert [row["failure.kind"] for row in table_rows] == expected
        assert table_rows[0]["gpu_disagreement"] == "-0.5"  # a number
    table = pyarrow.parquet.read_table(io.BytesIO(files[TRIALS_PARQUET])).to_pylist()
    assert [row["failure.kind"] for row in table] == list(texts)


def test_whole_numbers_beyond_64_bits() -> None:
    long = RECORDS[0].params.model_copy(
        update={"epochs": 1e20, "global_batch_size": 4 * (10**30 + 1)}
    )
    records = [RECORDS[0].model_copy(update={"params": long}), RECORDS[2]]
    files = data_files(records)
    exported = rows(files[TRIALS_CSV])[0]
    assert (exported["params.epochs"], exported["params.global_batch_size"]) == (
        "1" + 20 * "0",
        str(4 * (10**30 + 1)),
    )
    table = pyarrow.parquet.read_table(io.BytesIO(files[TRIALS_PARQUET])).to_pylist()
    assert [row["params.epochs"] for row in table] == [1e20, 2.0]
    assert [row["params.global_batch_size"] for row in table] == [str(4 * (10**30 + 1)), "8"]
