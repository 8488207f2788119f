"""A pipeline as a whole: its sums, its paths, and what is handed on."""

import math
import random

import pytest
from small_studies import study, trial

from carbonopt.analysis.pipeline_summary import PipelineSummary, handed_on, summarise
from carbonopt.analysis.recommend import recommend
from carbonopt.spec.pipeline_file import Pipeline, PipelineData, PipelineSession
from carbonopt.spec.study_data import SessionLedger, StudyData

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


def ended(data: StudyData) -> StudyData:
    return data.model_copy(update={"ended": "its budget of 3 trials is used up"})


def test_a_pipeline_ends_with_a_step_that_misses_its_target() -> None:
    missed, met = ended(with_start(trial(0, perplexity=9.0))), ended(SFT)
    begun = SFT.model_copy(update={"ended": None})
    again = trial(3, 1e-3, 5.5, repeat_of=1), trial(4, 2e-3, 4.0, repeat_of=2)
    both = ended(with_start(*SFT.records, *again))
    dpo = ended(DPO)
    for carry, studies, to_begin, has_ended in (
        (1, {"sft": missed}, (), True),
        (1, {"sft": begun}, ("dpo",), False),
        (1, {"sft": met}, ("dpo",), False),
        (2, {"sft": missed}, (), True),
        (2, {"sft": both, "dpo": dpo}, ("dpo@sft-2",), False),
        (2, {"sft": both, "dpo": missed}, ("dpo@sft-2",), False),
        # Nothing but the recommended configuration was run once more for its weights.
        (2, {"sft": ended(with_start(*SFT.records, again[0])), "dpo": dpo}, (), True),
        (1, {"sft": met, "dpo": begun}, (), False),
    ):
        data = PipelineData(pipeline=pipeline(carry), studies=studies, sessions=())
        summary = summarise(data)
        assert (summary.to_begin, summary.ended) == (to_begin, has_ended), (carry, [*studies])
        assert set(summary.to_begin) <= set(summary.not_begun)


def test_killed_call_lasted_as_long_as_its_studies() -> None:
    """The call stored its own duration when its second study began, 30 s after the first ended."""
    first, second = (
        SessionLedger(started_at=f"2026-01-01T{at}Z", duration_s=duration_s)
        for at, duration_s in (("00:00:10", 100.0), ("00:02:20", 7000.0))
    )
    call = PipelineSession(started_at="2026-01-01T00:00:00Z", duration_s=140.0)
    studies = {
        "sft": SFT.model_copy(update={"sessions": (first,)}),
        "dpo": DPO.model_copy(update={"sessions": (second,)}),
    }
    summary = summarise(PipelineData(pipeline=pipeline(), studies=studies, sessions=(call,)))
    assert [study.duration_s for study in summary.spent] == [100.0, 7000.0]
    assert summary.duration_s == pytest.approx(7140.0)


def test_each_study_is_priced_at_its_own_intensity() -> None:
    """A study keeps the intensity that it began with; another CodeCarbon can have a new one."""
    provenance = DPO.provenance
    intensity = provenance.intensity
    cleaner = intensity.model_copy(update={"g_co2e_per_kwh": intensity.g_co2e_per_kwh / 2})
    own = provenance.model_copy(update={"intensity": cleaner})
    later = DPO.model_copy(update={"provenance": own})
    summary = summarise(
        PipelineData(pipeline=pipeline(), studies={"sft": SFT, "dpo": later}, sessions=(session(),))
    )
    between_kg = SFT.emissions_kg_co2e(1e-4)
    parts = [*(study.emissions_kg_co2e for study in summary.spent), between_kg]
    assert summary.emissions_kg_co2e == pytest.approx(math.fsum(parts))


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


def repeated(start_kwh: list[float], taken_kwh: list[float]) -> StudyData:
    """Return a study that has run its start and, if given, a cheaper trial with several seeds."""
    runs = [trial(0, start_kwh[0]), *([trial(1, taken_kwh[0])] if taken_kwh else [])]
    for first, rest in ((0, start_kwh[1:]), (1, taken_kwh[1:])):
        runs += [
            trial(len(runs) + seed, kwh, repeat_of=first, seed=seed + 4)
            for seed, kwh in enumerate(rest)
        ]
    return with_start(*runs)


def summary_of(sft: StudyData, dpo: StudyData) -> PipelineSummary:
    return summarise(
        PipelineData(pipeline=pipeline(), studies={"sft": sft, "dpo": dpo}, sessions=())
    )


def test_two_like_steps_have_a_margin_smaller_by_the_root_of_two():
    step = repeated([4e-3], [1e-3, 1.2e-3])
    alone = recommend(step)
    both = summary_of(step, step)

    ratio = 1 - alone.saving_fraction
    margins = [
        math.log((1 - found.saving_interval[0]) / (1 - found.saving_interval[1])) / 2
        for found in (alone, both)
    ]
    assert both.saving_fraction == pytest.approx(alone.saving_fraction)
    assert margins[1] == pytest.approx(margins[0] / math.sqrt(2))
    assert both.saving_interval == pytest.approx(
        (1 - ratio * math.exp(margins[1]), 1 - ratio * math.exp(-margins[1]))
    )


def test_the_interval_of_a_pipeline_holds_its_true_saving_where_a_step_keeps_its_start():
    """The error of that step's emissions moves the share that the other step saves."""
    rng = random.Random(3)

    def runs(kwh: float, count: int) -> list[float]:
        return [kwh * math.exp(rng.gauss(0, 0.03)) for _ in range(count)]

    simulated = 120
    held = 0
    for _ in range(simulated):
        kept, cheaper = repeated(runs(1e-3, 3), []), repeated(runs(1e-3, 1), runs(1e-4, 3))
        lowest, highest = summary_of(kept, cheaper).saving_interval
        held += lowest <= 1 - 1.1 / 2 <= highest
    # An interval that left the first step's error out held it in half of the cases.
    assert held >= 0.93 * simulated


def test_the_runs_that_pay_a_pipeline_back_hold_their_true_number():
    rng, held, simulated = random.Random(5), 0, 120

    def runs(kwh: float, count: int) -> list[float]:
        return [kwh * math.exp(rng.gauss(0, 0.1)) for _ in range(count)]

    for _ in range(simulated):
        dear, cheaper = (
            repeated(runs(1e-3, 2), runs(7e-4, 3)),
            repeated(runs(4e-4, 1), runs(1e-4, 3)),
        )
        summary = summary_of(dear, cheaper)
        true_kg = 6e-4 * dear.emissions_kg_co2e(1.0)
        true_runs = math.ceil(summary.emissions_kg_co2e / true_kg)
        fewest, most = summary.break_even_interval
        assert fewest <= summary.break_even_runs <= (most or math.inf)
        held += fewest <= true_runs <= (most or math.inf)
    assert 0.93 * simulated <= held


def test_a_saving_within_the_noise_may_never_pay_a_pipeline_back():
    step = repeated([1e-3], [9.5e-4, 9.9e-4])
    summary = summary_of(step, step)
    assert summary.break_even_runs is not None and summary.saving_interval[0] < 0
    assert summary.break_even_interval[1] is None


def test_a_pipeline_that_keeps_all_its_starts_saves_nothing_for_sure():
    kept = repeated([1e-3, 1.1e-3], [])
    summary = summary_of(kept, kept)
    assert summary.saving_interval == (0.0, 0.0)
    assert summary.break_even_runs is summary.break_even_interval is None
