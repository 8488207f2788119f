"""A pipeline as a whole: its sums, its paths, and what is handed on."""

import math

import pytest
from small_studies import study, trial

from carbonopt.analysis.pipeline_summary import handed_on, summarise
from carbonopt.spec.pipeline_file import Pipeline, PipelineData, PipelineSession
from carbonopt.spec.study_data import StudyData

START = {"start": {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 2}}


def with_start(*records, **changes) -> StudyData:
    search = {**study().config.search.model_dump(mode="json", exclude_none=True), **START}
    search["space"] = {
        "global_batch_size": {"choices": [8, 16]},
        "learning_rate": {"low": 1e-5, "high": 1.0},
        "epochs": 2,
    }
    return study(*records, raw={"search": search}, **changes)


def session(between_kwh: float = 1e-4, outer_kwh: float | None = None) -> PipelineSession:
    return PipelineSession(
        started_at="2026-01-01T00:00:00Z",
        duration_s=200.0,
        between_kwh=between_kwh,
        outer_kwh=outer_kwh,
    )


def pipeline(carry: int = 1) -> Pipeline:
    steps = [
        {"step": "sft", "study": "a.yaml", "carry": carry},
        {"step": "dpo", "study": "b.yaml", "needs": {"model": "sft"}},
    ]
    return Pipeline(name="chain", pipeline=steps)


SFT = with_start(trial(0, 4e-3, 5.0), trial(1, 1e-3, 5.5), trial(2, 2e-3, 4.0))
DPO = with_start(trial(0, 6e-3, 5.0), trial(1, 3e-3, 5.0))


def test_the_front_is_handed_on_before_what_it_dominates():
    assert handed_on(SFT, 0) == ()
    assert handed_on(SFT, 1) == (1,)
    assert handed_on(SFT, 3) == (1, 2, 0), "trial 0 is dominated by trial 2"
    assert handed_on(SFT, 9) == (1, 2, 0)
    assert handed_on(study(trial(0, perplexity=9.0)), 2) == ()


def test_sums_are_those_of_the_steps():
    summary = summarise(
        PipelineData(pipeline=pipeline(), studies={"sft": SFT, "dpo": DPO}, sessions=(session(),))
    )
    (path,) = summary.paths
    assert [run.taken.trial for run in path.steps] == [1, 1]
    assert path.energy_kwh == pytest.approx(4e-3) and path.baseline_energy_kwh == pytest.approx(
        1e-2
    )
    assert path.duration_s == path.baseline_duration_s == 120
    assert summary.saving_fraction == pytest.approx(0.6) and summary.saving_interval is None
    spent_kwh = SFT.spent_kwh() + DPO.spent_kwh() + 1e-4
    assert summary.energy_kwh == pytest.approx(spent_kwh)
    assert summary.break_even_runs == math.ceil(spent_kwh / 6e-3)
    assert summary.closure is None and summary.ended and summary.not_begun == ()
    closed = PipelineData(
        pipeline=pipeline(),
        studies={"sft": SFT},
        sessions=(session(outer_kwh=1e-2), session(0, 1e-2)),
    )
    assert summarise(closed).closure == pytest.approx((SFT.spent_kwh() + 1e-4) / 2e-2)
    assert summarise(closed).not_begun == ("dpo",) and not summarise(closed).met


def test_the_path_with_the_least_emissions_is_the_first():
    worse = with_start(trial(0, 6e-3, 5.0), trial(1, 5e-3, 5.0))
    better = with_start(trial(0, 6e-3, 5.0), trial(1, 1e-3, 5.0))
    data = PipelineData(
        pipeline=pipeline(2), studies={"sft": SFT, "dpo": worse, "dpo@sft-2": better}, sessions=()
    )
    paths = summarise(data).paths
    assert [path.ranks["sft"] for path in paths] == [2, 1]
    assert [path.energy_kwh for path in paths] == pytest.approx([3e-3, 6e-3])
    assert [run.study for run in paths[0].steps] == ["sft", "dpo@sft-2"]
    missed = with_start(trial(0, 6e-3, 9.0))
    data = PipelineData(
        pipeline=pipeline(2), studies={"sft": SFT, "dpo": worse, "dpo@sft-2": missed}, sessions=()
    )
    assert [path.ranks["sft"] for path in summarise(data).paths] == [1]


def test_half_widths_of_independent_steps_add_up_in_squares():
    def repeated(factor: float) -> StudyData:
        runs = [
            trial(0, 4e-3),
            trial(1, 1e-3),
            trial(2, 1e-3 * factor, repeat_of=1, seed=4, params={"learning_rate": 2e-3}),
        ]
        return with_start(*runs)

    one = repeated(1.2)
    single = summarise(
        PipelineData(pipeline=pipeline(), studies={"sft": one, "dpo": repeated(1.2)}, sessions=())
    )
    (path,) = single.paths
    low, high = path.steps[0].saved_interval_kg_co2e
    baseline_kg, taken_kg = (
        path.steps[0].baseline.emissions_kg_co2e,
        path.steps[0].taken.emissions_kg_co2e,
    )
    saved_kg = baseline_kg - taken_kg
    expected = [
        (2 * saved_kg + sign * math.sqrt(2) * abs(saved_kg - end)) / (2 * baseline_kg)
        for sign, end in ((-1, low), (1, high))
    ]
    assert single.saving_interval == pytest.approx(expected)
