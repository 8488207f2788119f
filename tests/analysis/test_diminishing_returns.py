"""Diminishing returns inside a run, by hand and on a recorded one."""

import json
import math
from pathlib import Path

import pytest
from analysis.test_comparison import evals
from analysis.test_recommend import INTENSITY_G_PER_KWH, PUE, record, study

from carbonopt.analysis.comparison import DiminishingReturns, diminishing_returns
from carbonopt.analysis.recommend import recommend
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.units import emissions_kg_co2e, kwh_from_joules
from carbonopt.spec.study_data import StudyData

TABLE = Path(__file__).parents[2] / "reports" / "search" / "tables" / "wikitext-overfit.jsonl"
CURVE = ((10, 20.0, 1.0), (20, 10.0, 2.0), (30, 8.04, 3.0), (40, 8.0, 4.0), (50, 8.2, 5.0))


def returns_of(data: StudyData) -> DiminishingReturns | None:
    return diminishing_returns(data, recommend(data))


def run(*points: tuple[int, float, float | None], kg: float = 5.0, **changes) -> TrialRecord:
    return record(
        0,
        kg,
        points[-1][1] if points else 8.2,
        evals=evals(*points),
        **{"total_steps": 50, **changes},
    )


def test_milestones() -> None:
    returns = returns_of(study(run(*CURVE), target=10.5))
    assert (returns.trial, returns.total_steps) == (0, 50)
    assert [point.share for point in returns.points] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert [point.emissions_kg_co2e for point in returns.points] == pytest.approx([1, 2, 3, 4, 5])
    assert returns.points[0].gained_per_kg_co2e is None
    assert [point.gained_per_kg_co2e for point in returns.points[1:]] == pytest.approx(
        [10.0, 1.96, 0.04, -0.2]
    )
    assert (returns.best.step, returns.enough.step, returns.first_meeting.step) == (40, 30, 20)
    assert returns.saved_fraction == pytest.approx(0.4)


def test_of_a_run_that_improves_to_its_end_nothing_could_have_been_saved() -> None:
    """The energy of the last few milliseconds, after the last evaluation, does not count as such."""
    returns = returns_of(study(run((25, 20.0, 2.0), (50, 8.0, 4.999))))
    assert (returns.enough.step, returns.saved_fraction) == (50, 0.0)


def test_the_closest_trial_where_none_meets_the_target() -> None:
    returns = returns_of(study(run(*CURVE), target=5.0))
    assert (returns.trial, returns.first_meeting) == (0, None)


def test_evaluations_that_say_nothing_are_left_out() -> None:
    returns = returns_of(
        study(
            run(
                (10, math.nan, 1.0),
                (20, 10.0, None),
                (30, 9.0, 3.0),
                (40, 8.5, 3.0),
                (50, 8.0, 5.0),
            )
        )
    )
    assert [point.step for point in returns.points] == [30, 40, 50]
    assert [point.gained_per_kg_co2e for point in returns.points] == [
        None,
        None,
        pytest.approx(0.25),
    ]


@pytest.mark.parametrize(
    "data",
    [
        study(),
        study(run()),
        study(run((50, 8.0, None))),
        study(run((50, 8.0, 0.0), kg=0.0)),
        study(run(*CURVE, state=TrialState.PRUNED)),
        study(run(*CURVE, energy_kwh=None)),
    ],
    ids=[
        "no trial",
        "no evaluation",
        "no energy by step",
        "no energy",
        "none complete",
        "energy not known",
    ],
)
def test_nothing_to_look_into(data: StudyData) -> None:
    assert returns_of(data) is None


@pytest.mark.parametrize(
    ("scheduler", "warmup", "given", "decays"),
    [
        (None, None, {}, True),
        ("cosine", None, {}, True),
        ("constant", None, {}, False),
        ("constant_with_warmup", 0.1, {}, False),
        ("inverse_sqrt", None, {}, False),
        ("inverse_sqrt", 0.1, {}, True),
        ("inverse_sqrt", None, {"warmup_steps": 10}, True),
        (None, None, {"lr_scheduler_type": "constant"}, False),
    ],
)
def test_rate_decays(
    scheduler: str | None, warmup: float | None, given: dict, decays: bool
) -> None:
    params = TrialParams(
        global_batch_size=8,
        micro_batch_size_per_gpu=4,
        learning_rate=1e-3,
        epochs=1,
        lr_scheduler=scheduler,
        warmup_ratio=warmup,
    )
    data = study(run(*CURVE, params=params))
    workload = {
        "model": {"from_config": {"model_type": "gpt2"}},
        "tokenizer": {"kind": "byte"},
        "dataset": {"builtin": "python-docs"},
        "sequence_length": 64,
        "training_arguments": given,
    }
    raw = {
        **data.config.model_dump(mode="json"),
        "workload": workload,
        "launch": {"kind": "local", "gpus": []},
    }
    returns = returns_of(data.model_copy(update={"config": type(data.config).model_validate(raw)}))
    assert returns.rate_decays is decays


@pytest.mark.parametrize(("scheduler", "decays"), [(None, False), ("cosine", True)])
def test_the_rate_of_a_recorded_run_falls_if_the_table_says_so(
    scheduler: str | None, decays: bool
) -> None:
    data = study(run(*CURVE))
    assert data.config.workload is None
    params = data.records[0].params.model_copy(update={"lr_scheduler": scheduler})
    assert returns_of(study(run(*CURVE, params=params))).rate_decays is decays


def test_a_recorded_run_that_overfits() -> None:
    row = max(
        map(json.loads, TABLE.read_text().splitlines()),
        key=lambda row: row["evals"][-1]["nll"] - min(point["nll"] for point in row["evals"]),
    )
    a_step_kg = emissions_kg_co2e(kwh_from_joules(row["joules_per_step"]), INTENSITY_G_PER_KWH, PUE)
    points = [
        (evaluation["step"], math.exp(evaluation["nll"]), evaluation["step"] * a_step_kg)
        for evaluation in row["evals"]
    ]
    returns = returns_of(
        study(run(*points, kg=row["total_steps"] * a_step_kg, total_steps=row["total_steps"]))
    )
    nlls = [evaluation["nll"] for evaluation in row["evals"]]
    best = nlls.index(min(nlls))
    assert returns.best.step == row["evals"][best]["step"] < row["total_steps"]
    assert all(point.gained_per_kg_co2e < 0 for point in returns.points[best + 1 : best + 2])
    assert returns.enough.value <= 1.01 * returns.best.value
    assert all(
        point.value > 1.01 * returns.best.value
        for point in returns.points
        if point.step < returns.enough.step
    )
    assert returns.saved_fraction == pytest.approx(1 - returns.enough.step / row["total_steps"])
