"""Front and recommendation against brute force; the footprint against sums done by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.front import pareto_front
from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.repeated_configurations import repeats
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import (
    Energy,
    GpuEnergy,
    Phase,
    QualityResult,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.report.assemble import top
from carbonopt.report.render.terminal import render
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import Intensity, Provenance, SessionLedger, StudyData
from carbonopt.study_file.reader import parse_study

INTENSITY_G_PER_KWH = 200.0
PUE = 1.5
KWH_OF_A_KG = 1 / emissions_kg_co2e(1.0, INTENSITY_G_PER_KWH, PUE)


def record(
    trial: int, emissions_kg: float | None, perplexity: float | None, **changes
) -> TrialRecord:
    """A complete trial whose energy fits its emissions; set-up and evaluation add half as much
    again.
    """
    energy = None
    if emissions_kg is not None and math.isfinite(emissions_kg):
        train = emissions_kg * KWH_OF_A_KG
        energy = Energy(train=train, setup=0.4 * train, eval=0.1 * train, total=1.5 * train)
    values = {
        "trial": trial,
        "state": TrialState.COMPLETE,
        "seed": 0,
        "params": TrialParams(
            global_batch_size=8, micro_batch_size_per_gpu=4, learning_rate=1e-3, epochs=1 + trial
        ),
        "quality": QualityResult(name=PERPLEXITY.name, value=perplexity),
        "emissions_kg_co2e": emissions_kg,
        "energy_kwh": energy,
    }
    return TrialRecord(**{**values, **changes})


def study(
    *records: TrialRecord, target: float = 10.0, start: bool = False, sessions=()
) -> StudyData:
    search = {
        "space": {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": {"low": 1, "high": 9}}
    }
    raw = {
        "name": "analysis",
        "target": {"perplexity": target},
        "search": {**search, "start": {"epochs": 1}} if start else search,
        "budget": {"trials": 9},
        "carbon": {"intensity_g_co2e_per_kwh": INTENSITY_G_PER_KWH, "pue": PUE},
        "launch": {"kind": "replay", "table": "runs.jsonl"},
    }
    intensity = Intensity(g_co2e_per_kwh=INTENSITY_G_PER_KWH, source="given in the study file")
    return StudyData(
        config=parse_study(raw, "test"),
        records=records,
        sessions=sessions,
        provenance=Provenance(
            hardware=None, versions={}, intensity=intensity, energy_source={}, study_file=""
        ),
    )


# Few different values, so that ties and identical points are common. Values that differ in their last
# bits alone are left out: the front takes them for equal.
EMISSIONS = st.one_of(
    st.sampled_from([1.0, 2.0, 3.0]), st.none(), st.floats(1.0, 4.0).map(lambda x: round(x, 6))
)
VALUES = st.one_of(EMISSIONS, st.sampled_from([math.inf, math.nan]))
STATES = st.sampled_from([TrialState.COMPLETE] * 4 + [TrialState.PRUNED, TrialState.FAILED])
RECORDS = st.lists(st.tuples(EMISSIONS, VALUES, STATES), max_size=8).map(
    lambda rows: [
        record(index, kg, value, state=state) for index, (kg, value, state) in enumerate(rows)
    ]
)


def points(records: list[TrialRecord]) -> dict[int, tuple[float, float]]:
    return {
        run.trial: (run.emissions_kg_co2e, run.value)
        for run in records
        if run.state is TrialState.COMPLETE
        and run.emissions_kg_co2e is not None
        and run.value is not None
        and math.isfinite(run.value)
    }


@given(RECORDS)
def test_front_is_what_nothing_dominates(records):
    candidates = points(records)

    def dominated(point):
        return any(
            other[0] <= point[0] and other[1] <= point[1] and other != point
            for other in candidates.values()
        )

    expected = {trial for trial, point in candidates.items() if not dominated(point)}
    front = pareto_front(records)
    assert set(front) == expected
    assert len(front) == len(expected)
    assert [candidates[trial][0] for trial in front] == sorted(
        candidates[trial][0] for trial in front
    )


@given(RECORDS, st.floats(1.0, 4.5))
def test_recommendation_is_the_cheapest_that_meets_the_target(records, target):
    meets = {trial: point for trial, point in points(records).items() if point[1] <= target}
    rec = recommend(study(*records), target)
    assert rec.met == bool(meets)
    if meets:
        assert rec.trial == min(meets, key=lambda trial: (*meets[trial], trial))
        assert rec.trial in rec.pareto_front
    else:
        assert rec.saving_fraction is None and rec.break_even_runs is None


def test_front_of_every_order_of_ties():
    rows = [(1.0, 3.0), (1.0, 3.0), (2.0, 2.0), (1.0, 4.0), (3.0, 2.0)]
    for order in itertools.permutations(range(len(rows))):
        records = [record(trial, *rows[trial]) for trial in order]
        assert pareto_front(records) == (0, 1, 2)


def test_of_emissions_that_are_equal_but_for_rounding_the_better_quality_is_recommended():
    kg = 3.5595845254774885e-05
    by_rounding_cheaper = record(1, math.nextafter(kg, 0), 8.5)
    data = study(record(0, 1e-3, 5.0), by_rounding_cheaper, record(2, kg, 8.0))
    assert recommend(data).trial == 2
    assert pareto_front(data.records) == (2, 0)


def test_json_has_exactly_the_contract():
    answer = recommend(
        study(record(0, 4.0, 8.0), record(1, 1.0, 9.0), record(2, 0.5, 20.0))
    ).as_json()
    assert list(answer) == [
        "target",
        "met",
        "trial",
        "params",
        "quality",
        "emissions_kg_co2e",
        "energy_kwh",
        "baseline",
        "saving_fraction",
        "saving_interval",
        "pareto_front",
        "study",
        "confidence",
        "ties",
        "failed_replicates",
        "rejected",
    ]
    assert answer["target"] == {"quality": "perplexity", "at_most": 10.0}
    assert answer["quality"] == {"name": "perplexity", "value": 9.0}
    assert answer["confidence"] is None and answer["ties"] == []  # nothing was repeated
    assert (
        answer["met"] is True
        and answer["trial"] == 1
        and answer["params"]["gradient_accumulation_steps"] == 2
    )
    assert answer["energy_kwh"] == pytest.approx(KWH_OF_A_KG)
    assert set(answer["baseline"]) == {
        "trial",
        "why",
        "params",
        "value",
        "emissions_kg_co2e",
    }
    assert answer["baseline"]["value"] == 8.0
    assert answer["saving_fraction"] == 0.75
    assert answer["pareto_front"] == [2, 1, 0]
    assert answer["study"]["trials"]["complete"] == 3 and answer["study"]["trials"]["failed"] == 0
    assert set(answer["study"]) == {
        "trials", "energy_kwh", "emissions_kg_co2e", "break_even_runs", "break_even_interval",
    }  # fmt: skip
    assert answer["saving_interval"] is answer["study"]["break_even_interval"] is None
    # 1.5 × (4 + 1 + 0.5) kg in all, 3 kg saved on a run
    assert answer["study"]["emissions_kg_co2e"] == pytest.approx(8.25)
    assert answer["study"]["break_even_runs"] == 3


def test_baseline_is_the_start_configuration_even_if_it_misses_the_target():
    rec = recommend(study(record(0, 1.0, 30.0), record(1, 2.0, 9.0), start=True))
    assert rec.baseline is not None and rec.baseline.trial == 0
    assert "start configuration" in rec.baseline.why and "misses the target" in rec.baseline.why
    assert rec.saving_fraction == -1.0
    assert rec.break_even_runs is None


def test_baseline_is_the_most_accurate_trial_without_a_completed_start():
    failed = record(0, 1.0, None, state=TrialState.FAILED)
    rec = recommend(
        study(failed, record(1, 2.0, 9.0), record(2, 3.0, 8.0), record(3, 2.5, 8.0), start=True)
    )
    assert rec.baseline is not None and rec.baseline.trial == 3
    assert "most accurate" in rec.baseline.why and "did not complete" in rec.baseline.why


def test_a_rounding_error_makes_no_baseline_and_no_front():
    """ZeRO 0 and 3 of one training: they add up in another order."""
    rec = recommend(study(record(0, 1.0, 61.15816145), record(1, 6.6, 61.15816115)))
    assert rec.baseline is not None
    assert (rec.baseline.trial, rec.pareto_front) == (0, (0,))
    rec = recommend(study(record(0, 1.0, 61.1582), record(1, 6.6, 61.1581)))
    assert rec.baseline is not None
    assert (rec.baseline.trial, rec.pareto_front) == (1, (0, 1))


def test_a_winner_that_is_its_own_baseline_saves_nothing():
    rec = recommend(study(record(0, 1.0, 5.0)))
    assert (rec.trial, rec.saving_fraction, rec.break_even_runs) == (0, 0.0, None)


def test_a_baseline_of_zero_emissions_has_no_share():
    rec = recommend(study(record(0, 0.0, 5.0), record(1, 0.0, 5.0)))
    assert rec.met and rec.saving_fraction is None and rec.break_even_runs is None


def test_a_stopped_trial_that_came_closer_is_the_closest():
    last = EvalPoint.of(PERPLEXITY, math.log(10.5), 1, step=3, tokens=9)
    pruned = record(1, 1.0, None, state=TrialState.PRUNED, evals=(last,))
    closest = recommend(study(record(0, 2.0, 12.0), pruned, record(2, 1.0, 11.0))).closest
    assert closest is not None
    assert (closest.trial, closest.value) == (1, pytest.approx(10.5))
    assert closest.why == "the best last evaluation, at step 3"


def test_closest_is_the_most_accurate_complete_trial():
    last = EvalPoint.of(PERPLEXITY, math.log(11.5), 1, step=3, tokens=9)
    pruned = record(1, 1.0, None, state=TrialState.PRUNED, evals=(last,))
    answer = recommend(study(record(0, 2.0, 12.0), pruned, record(2, 1.0, 11.0))).as_json()
    assert answer["met"] is False
    assert answer["trial"] is answer["params"] is answer["saving_fraction"] is None
    assert answer["quality"] == {"name": "perplexity", "value": None}
    assert (answer["closest"]["trial"], answer["closest"]["value"]) == (2, 11.0)
    assert answer["closest"]["state"] == "complete"


def test_closest_of_unfinished_trials_has_the_lowest_last_evaluation():
    def unfinished(trial, *nlls, **changes):
        evals = [
            EvalPoint.of(
                PERPLEXITY, math.nan if nll is None else nll, 1, step=10 * (1 + index), tokens=None
            )
            for index, nll in enumerate(nlls)
        ]
        return record(
            trial, 1.0, None, state=TrialState.PRUNED, evals=tuple(evals), total_steps=80, **changes
        )

    # Trial 1 was better once, trial 3 became NaN: the last evaluation counts.
    rec = recommend(
        study(unfinished(0), unfinished(1, 2.0, 6.0), unfinished(2, 5.0), unfinished(3, 3.0, None))
    )
    assert rec.closest is not None and rec.closest.trial == 2
    assert rec.closest.value == pytest.approx(math.exp(5.0))
    assert "step 10 of 80" in rec.closest.why and "interrupted" not in rec.closest.why
    stopped = {"stop_reason": StopReason.INTERRUPTED}
    data = study(unfinished(0), unfinished(1, 2.0, **stopped))
    rec = recommend(data)
    assert rec.closest.interrupted and "interrupted" in rec.closest.why
    assert rec.closest.why in render(top(StudyView(data)))


def test_a_study_without_trials_has_no_answer():
    answer = recommend(study()).as_json()
    assert answer["met"] is False and answer["closest"] is None and answer["baseline"] is None
    assert answer["study"]["energy_kwh"] == 0


@pytest.mark.parametrize("target", [0.0, 0.999, -1.0, 1e10, math.nan, math.inf])
def test_an_impossible_target_is_refused(target):
    with pytest.raises(BadInput, match=f"perplexity from 1 to 1e.09, but is {target}"):
        recommend(study(), target)


def test_footprint_counts_everything_once():
    energy = Energy(train=3.0, setup=2.0, eval=1.0, total=6.0, train_gpu=2.0, train_cpu=1.0)
    records = (
        record(0, 1.0, 5.0, energy_kwh=energy),
        record(
            1,
            1.0,
            None,
            state=TrialState.PRUNED,
            energy_kwh=energy,
            earlier_attempts_energy_kwh=4.0,
        ),
        record(2, None, None, state=TrialState.RUNNING),
    )
    ledger = SessionLedger(
        started_at="2026-01-01T00:00:00Z", prepare_kwh=0.5, gap_kwh=0.25, outer_kwh=10.0
    )
    spent = footprint(study(*records, sessions=(ledger, ledger)))
    assert spent.energy_kwh == 6 + 6 + 4 + 2 * 0.75
    assert spent.emissions_kg_co2e == pytest.approx(17.5 * 0.2 * 1.5)
    assert spent.by_phase_kwh == {
        "prepare": 1.0,
        "gap": 0.5,
        "setup": 4.0,
        "train": 6.0,
        "eval": 2.0,
    }
    assert sum(spent.by_phase_kwh.values()) + spent.earlier_attempts_kwh == spent.energy_kwh
    assert spent.by_state_kwh == {"complete": 6.0, "pruned": 10.0, "running": 0.0}
    assert spent.train_by_component_kwh == {
        "gpu": 4.0,
        "cpu": 2.0,
    }  # RAM was not measured: absent, not 0
    assert spent.unmeasured_trials == (), "the one without energy still runs"
    failed = records[2].model_copy(update={"state": TrialState.FAILED})
    assert footprint(study(*records[:2], failed)).unmeasured_trials == (2,)
    assert spent.closure == 17.5 / 20.0


def test_closure_needs_a_reading_of_every_session():
    with_reading = SessionLedger(started_at="2026-01-01T00:00:00Z", outer_kwh=1.0)
    without = SessionLedger(started_at="2026-01-02T00:00:00Z")
    assert footprint(study(sessions=(with_reading, without))).closure is None
    assert footprint(study(sessions=(with_reading,))).closure == 0.0
    assert footprint(study()).closure is None


def gpu_energy(counter: float) -> dict[Phase, GpuEnergy]:
    """Of one phase this much, by the counter; CodeCarbon reads 1 % more, and a quarter of it is
    idle.
    """
    phase_energy = GpuEnergy(
        counter=counter, codecarbon=1.01 * counter, idle=counter / 4, uncertainty=0.3 * counter
    )
    return {Phase.SETUP: phase_energy, Phase.TRAIN: phase_energy, Phase.EVAL: phase_energy}


def gpu_study(*records: TrialRecord, **session: float | None) -> StudyData:
    parts = {"prepare_gpu_kwh": 0.5, "gap_gpu_kwh": 0.5, "outer_gpu_kwh": 20.0, **session}
    return study(*records, sessions=(SessionLedger(started_at="2026-01-01T00:00:00Z", **parts),))


def test_the_gpus_parts_against_their_outer_reading():
    pruned = record(1, 1.0, None, state=TrialState.PRUNED, gpu_energy_kwh=gpu_energy(2.0))
    again = pruned.model_copy(
        update={"earlier_attempts_energy_kwh": 9.0, "earlier_attempts_gpu_kwh": 4.0}
    )
    untouched = record(2, None, None, state=TrialState.FAILED)
    spent = footprint(
        gpu_study(record(0, 1.0, 5.0, gpu_energy_kwh=gpu_energy(3.0)), again, untouched)
    )
    assert spent.gpu_kwh == 3 * 3.0 + 3 * 2.0 + 4.0 + 0.5 + 0.5
    assert spent.gpu_closure == 20.0 / 20.0
    training = spent.gpu_by_phase_kwh[Phase.TRAIN]
    assert (training.counter, training.idle, training.net_of_idle) == (5.0, 1.25, 3.75)
    assert training.codecarbon == pytest.approx(5.05)
    assert training.uncertainty == pytest.approx(math.sqrt(0.9**2 + 0.6**2))


def test_a_gpu_part_that_is_not_known_leaves_no_gpu_sum():
    known = record(0, 1.0, 5.0, gpu_energy_kwh=gpu_energy(3.0))
    assert footprint(gpu_study(known)).gpu_kwh == 10.0
    assert (
        footprint(gpu_study(known, record(1, 1.0, 5.0))).gpu_kwh is None
    )  # made by a version without the counter
    early = known.model_copy(update={"earlier_attempts_energy_kwh": 1.0})
    assert footprint(gpu_study(early)).gpu_kwh is None
    assert footprint(gpu_study(known, gap_gpu_kwh=None)).gpu_closure is None
    assert footprint(gpu_study(known, outer_gpu_kwh=None)).gpu_closure is None
    assert footprint(study()).gpu_kwh is None


def test_repeats_of_one_configuration_whatever_the_seed():
    params = record(0, 1.0, 1.0).params
    runs = [
        record(4, 4.0, 9.0, params=params, seed=2),
        record(0, 1.0, 5.0, params=params),
        record(2, 1.0, 7.0, params=params, seed=1),
        record(1, 1.0, 5.0),
        record(3, 8.0, None, params=params, state=TrialState.PRUNED),
        record(5, 8.0, math.inf, params=params),
    ]
    (configuration,) = repeats(runs)
    assert (configuration.n, configuration.trials, configuration.seeds, configuration.params) == (
        3,
        (0, 2, 4),
        (0, 1, 2),
        params,
    )
    assert configuration.value.model_dump() == {
        "mean": 7.0,
        "standard_deviation": 2.0,
        "lowest": 5.0,
        "highest": 9.0,
    }
    assert configuration.emissions_kg_co2e.mean == 2.0
    assert configuration.emissions_kg_co2e.standard_deviation == pytest.approx(
        math.sqrt(((1 - 2) ** 2 * 2 + (4 - 2) ** 2) / 2)
    )
    assert repeats(runs[1:2] + runs[3:]) == ()
