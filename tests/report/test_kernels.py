"""Kernels, compiled once and kept in a cache: which trials compiled them, and what the report says
of those.
"""

from pathlib import Path
from typing import Any

import pytest
from analysis.test_stages import PREPARED, cost, report_of, timed
from commands import within
from documents import caveats_of, document_of, rows_of, tables_of
from small_studies import study, trial

from carbonopt.analysis.footprint import footprint
from carbonopt.core.trial import Energy, Kernels, Stage, StopReason, TrialRecord, TrialState
from carbonopt.report.document import Caveat
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url


def compiling(
    number: int, first_s: float, batch: int = 16, done: int = 10, **changes
) -> TrialRecord:
    """Its steps after the first take 0.1 s per 16 sequences, and 10 W."""
    step_s = 0.1 * batch / 16
    parts = {Stage.COMPILE: cost(first_s, 10 * first_s)}
    if done > 1:
        parts[Stage.STEPS] = cost(step_s * (done - 1), 10 * step_s * (done - 1))
    train = sum(part.energy_kwh for part in parts.values())
    energy = Energy(train=train, setup=0.0, eval=0.0, total=train)
    params = {"torch_compile": True, "global_batch_size": batch, **changes.pop("params", {})}
    values = {"stages": parts, "steps_done": done, "energy_kwh": energy, "params": params}
    return trial(number, train, changes.pop("perplexity", 5.0), **{**values, **changes})


def stopped(number: int, first_s: float, **changes) -> TrialRecord:
    values: dict[str, Any] = {
        "perplexity": None,
        "state": TrialState.PRUNED,
        "stop_reason": StopReason.CAP,
    }
    return compiling(number, first_s, **{**values, **changes})


@pytest.mark.parametrize(
    ("params", "raw", "told"),
    [
        ({"torch_compile": True}, {}, True),
        ({"torch_compile": None}, {}, False),
        ({"torch_compile": None, "output_layer": "fused"}, {}, True),
        (
            {"torch_compile": None, "output_layer": "fused"},
            {"launch": {"kind": "local", "gpus": []}},
            False,
        ),
        ({"torch_compile": None, "output_layer": "standard"}, {}, False),
        ({"torch_compile": None, "attention_implementation": "flex_attention"}, {}, True),
        ({"torch_compile": None}, {"arguments": {"torch_compile": True}}, True),
        ({"torch_compile": None}, {"arguments": {"torch_compile_mode": "default"}}, True),
        ({"torch_compile": None}, {"arguments": {"torch_compile": False}}, False),
    ],
)
@pytest.mark.slow
def test_what_compiles(params: dict[str, Any], raw: dict[str, Any], told: bool, tmp_path):
    of_first = (Kernels.COMPILED, Kernels.LOADED) if told else (None, None)
    records = [
        compiling(number, (22.0, 2.0)[number], params=params, kernels=of_first[number])
        for number in (0, 1)
    ]
    arguments = raw.get("arguments", {})
    workload = {
        "model": {"from_config": {"model_type": "gpt2"}},
        "tokenizer": {"kind": "char"},
        "dataset": {"builtin": "python-docs"},
        "sequence_length": 64,
        "training_arguments": arguments,
    }
    raw = {"workload": workload, **{key: value for key, value in raw.items() if key != "arguments"}}
    text = report_of(*records, raw=raw)
    assert ("| the first step, compilation in it |" in text) is told
    assert ("| the first step |" in text) is not told
    assert ("| 0 | 10,240 | 0.977 | compiled | 22.0 | 219 | 95.6 % |\n" in text) is told
    assert ("| 1 | 10,240 | 0.977 | from the cache | 2.00 | 19.0 | 65.5 % |\n" in text) is told


def test_the_report_says_which_trials_were_stopped_when_they_had_hardly_done_more_than_compile():
    records = (
        compiling(0, 1.0, params={"torch_compile": False}, done=40),
        stopped(1, 22.2, done=2, kernels=Kernels.COMPILED),
        stopped(2, 2.0, done=10, kernels=Kernels.LOADED),
        stopped(
            3, 4.0, done=2, params={"torch_compile": False}
        ),  # half of two steps' energy says nothing
        stopped(4, 0.5, done=40),  # most of its energy is its other steps'
        stopped(
            5, 9.0, done=1, params={"micro_batch_size_per_gpu": 4}, stop_reason=StopReason.TARGET
        ),
        stopped(6, 9.0, done=2, stop_reason=StopReason.BUDGET),
        compiling(7, 20.0),
    )
    document = document_of(study(*records, prepared=PREPARED))
    rows = rows_of(tables_of(document)["stopped-early"])
    assert [tuple(row.values()) for row in rows] == [
        ("1", "2 of 40", "222 J", "223 J", "compilation"),
        ("2", "10 of 40", "20.0 J", "29.0 J", "kernels from the cache"),
        ("5", "1 of 40", "90.0 J", "90.0 J", "compilation or the cache"),
    ]


PLAIN: dict[str, Any] = {"params": {"torch_compile": False}}
NOT_COMPARED = "compiled_not_compared"


def beside(*records: TrialRecord) -> dict[str, Caveat]:
    return caveats_of(
        study(timed(0, 0, 100, **PLAIN), timed(1, 0, 110, **PLAIN), *records, prepared=PREPARED)
    )


def test_what_compiled_trials_that_are_not_compared_would_cost_is_said_and_what_is_not_known_of_them():
    fast: dict[str, Any] = {"params": {"torch_compile": True}}
    cut: dict[str, Any] = {**fast, "state": TrialState.PRUNED, "stop_reason": StopReason.CAP}
    caveat = beside(timed(2, 400, 60, None, **cut), timed(3, 400, 70, None, **cut))[NOT_COMPARED]
    assert caveat.numbers == {"other": 2, "count": 2, "less": pytest.approx(0.4), "trial": 0}
    assert beside(timed(2, 400, 60, 7.0, **fast))[NOT_COMPARED].numbers["other"] == 2
    assert NOT_COMPARED not in beside(
        timed(2, 400, 99.5, None, **cut), timed(3, 400, 140, 7.0, **fast)
    )
    assert NOT_COMPARED not in beside(timed(2, 400, 140, 7.0, **fast))
    assert NOT_COMPARED not in beside(timed(2, 0, 60, 7.0, **PLAIN))
    assert NOT_COMPARED not in beside(timed(2, 0, 60, None, **fast, state=TrialState.DIVERGED))
    assert NOT_COMPARED not in beside(timed(2, 400, 60, **fast))  # it is


@pytest.mark.slow
def test_a_probe_compiles_and_trials_find_the_kernels(
    tmp_path: Path, tiny_study, write_study, monkeypatch
):
    """Both trials that compile find what their shape's probe has compiled; the others need none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    tiny_study["search"] |= {
        "space": {
            "global_batch_size": 64,
            "learning_rate": {"choices": [1e-3, 2e-3]},
            "epochs": 0.02,
            "torch_compile": {"choices": [True, False]},
        },
        "sampler": "grid",
        "pruning": {"target": False, "cap": False},
    }
    tiny_study |= {"target": {"perplexity": 1e6}, "budget": {"trials": 4}}
    folder = tmp_path / "run"
    done = within("run", write_study(tiny_study), "--out", folder)
    assert done.returncode == 0, done.stderr
    data = StudyStorage.of_folder(
        connect(storage_url(StudyPaths(folder), None)), StudyPaths(folder)
    ).read()
    compiled = {record.kernels for record in data.records if record.params.torch_compile}
    assert compiled == {Kernels.LOADED}
    assert {record.kernels for record in data.records if not record.params.torch_compile} == {None}
    (probe,) = data.probes
    assert (probe.kernels, probe.stop_reason, probe.params.torch_compile) == (
        Kernels.COMPILED,
        StopReason.PROBE,
        True,
    )
    assert (probe.steps_done, probe.step_kwh) == (
        1,
        None,
    ) and probe.first_step_excess_kwh is not None
    warm = [record.first_step_excess_kwh for record in data.records if record.kernels]
    assert probe.first_step_excess_kwh > 2 * max(excess for excess in warm if excess is not None)
    # Charged to the study and shown, and in no trial.
    spent = footprint(data)
    assert spent.probes_kwh == pytest.approx(probe.spent_kwh) and spent.closure == pytest.approx(
        1, abs=0.005
    )
    assert sum(spent.by_phase_kwh.values()) + spent.probes_kwh == pytest.approx(spent.energy_kwh)
    shown = rows_of(tables_of(document_of(data))["probes"])
    assert len(shown) == 1 and shown[0]["Kernels"] == "compiled"
