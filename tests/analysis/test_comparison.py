"""The saving's interval against SciPy's t test, Fieller's theorem and simulated truth; equal
quality by hand.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from analysis.test_confidence import TARGET, repeated, runs
from analysis.test_recommend import INTENSITY_G_PER_KWH, PUE, record, study
from documents import caveats_of, markdown_of, numbers_of, texts_of, written
from scipy import stats

from carbonopt.analysis.comparison import Comparison, comparison
from carbonopt.analysis.confidence import LEVEL, Configuration, Evidence
from carbonopt.analysis.recommend import recommend
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.format import percent_text
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import Durations, TrialRecord
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.report.assemble import top
from carbonopt.report.document import Level
from carbonopt.report.render.terminal import render
from carbonopt.report.sections.citation_section import sentence
from carbonopt.report.sections.comparison_section import section
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import details, headline, tiles
from carbonopt.spec.study_data import StudyData

SURE = [9.0, 9.01, 9.02]
BETTER = [8.0, 8.01, 8.02]  # the baseline is the most accurate


def compared(data: StudyData) -> Comparison:
    against_baseline = comparison(data, recommend(data))
    assert against_baseline is not None
    return against_baseline


def test_the_interval_is_scipys_t_test_of_the_logarithms() -> None:
    ours, theirs = [1.0, 1.1, 0.9], [2.1, 2.0, 1.9]
    saving = compared(repeated(runs(0, ours, SURE), runs(1, theirs, BETTER))).saving
    assert saving.fraction == pytest.approx(0.5)
    assert (saving.seeds, saving.baseline_seeds, saving.level) == (3, 3, LEVEL)
    interval = stats.ttest_ind(np.log(ours), np.log(theirs)).confidence_interval(LEVEL)
    half = (interval.high - interval.low) / 2  # its middle is that of the geometric means
    assert saving.lowest == pytest.approx(1 - 0.5 * math.exp(half))
    assert saving.highest == pytest.approx(1 - 0.5 * math.exp(-half))


def test_the_interval_is_fiellers_where_runs_differ_by_some_percent() -> None:
    ours, theirs = [1.0, 1.03, 0.97], [2.06, 2.0, 1.94]
    saving = compared(repeated(runs(0, ours, SURE), runs(1, theirs, BETTER))).saving
    # Equal relative deviations: with relative variance v of each mean, Fieller's limits r of the
    # ratio m solve (m − r)² = t² v (m² + r²).
    v = 0.03**2 / 3
    t2v = stats.t.ppf((1 + LEVEL) / 2, df=4) ** 2 * v
    limits = np.roots([1 - t2v, -2 * 0.5, 0.5**2 * (1 - t2v)])
    assert [saving.highest, saving.lowest] == pytest.approx(1 - np.sort(limits), abs=1e-3)


def test_every_repeated_configuration_counts_for_the_deviation() -> None:
    """The baseline ran once; a third one was repeated."""
    groups = [[1.0, 1.1, 0.9], [2.0], [5.0, 5.5]]
    perplexities = [SURE, BETTER[:1], [9.0, 9.01]]
    saving = compared(
        repeated(*(runs(k, *both) for k, both in enumerate(zip(groups, perplexities, strict=True))))
    ).saving
    squares = sum(np.var(np.log(group)) * len(group) for group in groups)
    half = stats.t.ppf((1 + LEVEL) / 2, df=3) * math.sqrt(squares / 3) * math.sqrt(1 / 3 + 1)
    assert saving.lowest == pytest.approx(1 - 0.5 * math.exp(half))
    assert (saving.seeds, saving.baseline_seeds) == (3, 1)


def test_no_interval_where_nothing_was_repeated() -> None:
    saving = compared(study(record(0, 1.0, 9.0), record(1, 2.0, 8.0))).saving
    assert (
        saving.fraction,
        saving.lowest,
        saving.highest,
        saving.seeds,
        saving.baseline_seeds,
    ) == (
        0.5,
        None,
        None,
        1,
        1,
    )


def test_what_emitted_nothing_has_no_share() -> None:
    """Of a third configuration it leaves the interval as it is; the recommended one's saving has
    none.
    """
    pair = runs(0, [1.0, 1.1, 0.9], SURE), runs(1, [2.0], BETTER[:1])
    without = compared(repeated(*pair)).saving
    assert without.lowest is not None
    third = runs(2, [3.0, 0.0], [9.0, 9.01])
    assert _interval(compared(repeated(*pair, third))) == _interval(compared(repeated(*pair)))
    nothing = compared(
        repeated(runs(0, [0.0, 0.0, 0.0], SURE), runs(1, [2.0, 2.1], BETTER[:2]))
    ).saving
    assert (nothing.fraction, nothing.lowest, nothing.highest) == (1.0, None, None)


def _interval(against_baseline: Comparison) -> tuple[float | None, float | None]:
    return against_baseline.saving.lowest, against_baseline.saving.highest


@pytest.mark.slow
def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        kg = np.array([[1.0], [2.0]]) * np.exp(rng.normal(0.0, 0.04, (2, 3)))
        data = repeated(runs(0, list(kg[0]), SURE), runs(1, list(kg[1]), BETTER))
        saving = compared(data).saving
        held += saving.lowest <= 0.5 <= saving.highest
    assert held / 1000 == pytest.approx(LEVEL, abs=0.025)


def test_a_negative_quality_that_rises_has_a_positive_difference() -> None:
    data = study(record(0, 3.0, 9.0), record(1, 1.0, 20.0), start=True)
    rec = recommend(data, 25.0)
    assert rec.baseline is not None
    negative = {"value": -1.0, "baseline": rec.baseline.model_copy(update={"value": -2.0})}
    found = comparison(data, rec.model_copy(update=negative))
    assert found is not None and found.value_difference == pytest.approx(0.5)


def test_a_negative_saving() -> None:
    data = study(record(0, 3.0, 9.0), record(1, 1.0, 20.0), start=True)
    assert recommend(data, 9.5).baseline.trial == 0
    assert comparison(data, recommend(data, 9.5)) is None  # its own baseline
    against_baseline = comparison(data, recommend(data, 25.0))
    assert (against_baseline.trial, against_baseline.baseline_trial) == (1, 0)
    assert against_baseline.value_difference == pytest.approx(20 / 9 - 1)
    dear = compared(
        study(record(0, 1.0, 20.0), record(1, 3.0, 9.0), start=True)
    )  # the start misses the target
    assert dear.saving.fraction == -2.0


@pytest.mark.parametrize(
    "records",
    [
        (),
        (record(0, 1.0, 20.0),),
        (record(0, 1.0, 9.0),),
        (record(0, 0.0, 9.0), record(1, 0.0, 8.0)),
    ],
)
def test_nothing_to_compare(records: tuple[TrialRecord, ...]) -> None:
    """No trial, none that meets the target, one that is its own baseline, and one that emitted
    nothing.
    """
    data = study(*records)
    assert comparison(data, recommend(data)) is None


def evals(*points: tuple[int, float, float | None]) -> tuple[EvalPoint, ...]:
    """Of step, perplexity, and kg CO2e so far."""
    a_kwh_kg = emissions_kg_co2e(1.0, INTENSITY_G_PER_KWH, PUE)
    return tuple(
        EvalPoint.of(PERPLEXITY, math.log(perplexity), 1, step=step, tokens=None).model_copy(
            update={"train_energy_kwh": None if kg is None else kg / a_kwh_kg}
        )
        for step, perplexity, kg in points
    )


def against(*points: tuple[int, float, float | None], perplexity: float = 8.0) -> Comparison:
    start = record(0, 4.0, perplexity, evals=evals(*points))
    return compared(study(start, record(1, 1.5, 9.0), target=TARGET, start=True))


def test_equal_quality() -> None:
    equal = against(
        (1, math.nan, 0.5), (2, 20.0, 1.0), (3, 9.9, 2.0), (4, 10.5, 3.0), (5, 8.0, 4.0)
    ).equal_quality
    assert equal.baseline_step == 3
    assert equal.baseline_emissions_kg_co2e == pytest.approx(2.0)
    assert equal.baseline_emissions_before_kg_co2e == pytest.approx(1.0)
    assert equal.saving_fraction == pytest.approx(0.25)
    assert equal.saving_fraction_before == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("train_s", "unsure_kg"), [(0.5, 0.8), (1.9, 0.8 * 0.5 / 1.9), (2.1, 0.0), (100.0, 0.0)]
)
def test_what_readings_50_ms_apart_leave_open_of_a_short_training_is_in_the_bounds(
    train_s: float, unsure_kg: float
) -> None:
    """The whole run emitted 4 kg in `train_s`, up to where it met the target 2 kg in half of that."""
    took = Durations(train=train_s, setup=0, eval=0, total=train_s)
    start = record(
        0, 4.0, 8.0, evals=evals((2, 20.0, 1.0), (3, 9.9, 2.0), (5, 8.0, 4.0)), duration_s=took
    )
    ours = record(1, 1.5, 9.0, evals=evals((3, 11.0, 0.9), (4, 9.8, 1.2), (5, 9.0, 1.5)))
    equal = compared(study(start, ours, target=TARGET, start=True)).equal_quality
    assert equal.baseline_emissions_kg_co2e == pytest.approx(2.0 + unsure_kg)
    assert equal.baseline_emissions_before_kg_co2e == pytest.approx(1.0 - unsure_kg)
    assert equal.is_short == (unsure_kg > 0)
    assert (equal.both_stopped is None) == equal.is_short


def test_both_stopped_at_the_target() -> None:
    """The recommended run met it with 1.2 kg, the baseline with 2 kg; their evaluations before were
    at 0.9 and 1 kg.
    """
    start = record(0, 4.0, 8.0, evals=evals((2, 20.0, 1.0), (3, 9.9, 2.0), (5, 8.0, 4.0)))
    ours = record(1, 1.5, 9.0, evals=evals((3, 11.0, 0.9), (4, 9.8, 1.2), (5, 9.0, 1.5)))
    data = study(start, ours, target=TARGET, start=True)
    both = compared(data).equal_quality.both_stopped
    assert (both.step, both.emissions_kg_co2e) == (4, pytest.approx(1.2))
    assert both.emissions_before_kg_co2e == pytest.approx(0.9)
    assert both.saving_fraction == pytest.approx(1 - 1.2 / 2)
    assert (both.lowest, both.highest) == (pytest.approx(1 - 1.2 / 1), pytest.approx(1 - 0.9 / 2))
    last = texts_of(section(StudyView(data)), "comparison")[-1]
    assert last[0].startswith("recommended, up to where it met the target (step 4)")
    assert last[2:] == ["1.20", "40 %", "-20 % to 55 %"]


@pytest.mark.parametrize("deviation", [0.01, 0.03])
def test_the_range_at_equal_quality_has_the_error_between_runs(deviation: float) -> None:
    """Of 50 evaluations of the start, which emits 3 kg, the 30th is the first at the target."""
    rng, held = np.random.default_rng(0), 0
    truth = 1 - 1.75 / (3.0 * 29.5 / 50)
    for _ in range(200):
        kg = np.exp(rng.normal(0, deviation, 4)) * [3.0, 1.75, 1.75, 1.75]
        points = [(k, 9.0 if k >= 30 else 11.0, kg[0] * k / 50) for k in range(1, 51)]
        start = record(0, kg[0], 9.0, evals=evals(*points))
        equal = compared(repeated([start], runs(1, list(kg[1:]), SURE), start=True)).equal_quality
        assert equal.lowest < equal.saving_fraction_before < equal.saving_fraction < equal.highest
        held += equal.lowest <= truth <= equal.highest
    # By the evaluations alone, 88 % and 41 % of the ranges held it.
    assert held >= 0.95 * 200


EQUAL = "equal_quality"


def said_of(data: StudyData, folder: Path) -> dict[str, str]:
    """What a reader meets first, by where."""
    shown, looked_at = written(data, folder), StudyView(data)
    statement = (folder / "paper/statement.tex").read_text().replace("~", " ").replace("\\%", "%")
    return {
        "headline": shown["headline"],
        "sentence": sentence(looked_at) or "",
        "statement": statement.replace("$-$", "-"),
        "terminal": render(top(looked_at)),
    }


def test_a_saving_that_is_none_at_equal_quality_says_so_wherever_it_is_said(tmp_path: Path) -> None:
    """1.5 kg save 62.5 % of the baseline's 4 kg, which met the target after 1.2 kg, and not yet
    after 1 kg.
    """
    start = record(0, 4.0, 8.0, evals=evals((2, 20.0, 1.0), (3, 9.9, 1.2), (5, 8.0, 4.0)))
    ours = record(1, 1.5, 9.0, evals=evals((3, 11.0, 0.9), (4, 9.8, 1.1), (5, 9.0, 1.5)))
    data = study(start, ours, target=TARGET, start=True)
    words = said_of(data, tmp_path)
    assert words["headline"].startswith(
        "62.5 % less CO2e at the target quality (against the baseline's whole run; against its run up"
        " to the target, no saving)"
    )
    equal = caveats_of(data)[EQUAL]
    assert equal.level is Level.CRITICAL
    assert (equal.numbers["step"], equal.numbers["saving"]) == (3, pytest.approx((-0.5, -0.25)))
    assert "25 % to 50 % more than that stopped when it first met the target" in words["sentence"]
    assert equal.text in words["statement"] and equal.text in words["terminal"]
    assert numbers_of(data, "equal_quality_both_stopped")["saving"] == pytest.approx(1 - 1.1 / 1.2)


def test_a_saving_that_may_be_none_at_equal_quality_says_so_too(tmp_path: Path) -> None:
    start = record(0, 4.0, 8.0, evals=evals((2, 20.0, 1.0), (3, 9.9, 2.0), (5, 8.0, 4.0)))
    data = study(start, record(1, 1.5, 9.0), target=TARGET, start=True)
    assert "run up to the target, perhaps no saving" in said_of(data, tmp_path)["headline"]
    assert numbers_of(data, EQUAL)["saving"] == pytest.approx((-0.5, 0.25))


@pytest.mark.slow
def test_a_saving_that_lasts_at_equal_quality_is_left_alone(tmp_path: Path) -> None:
    start = record(0, 4.0, 8.0, evals=evals((2, 20.0, 2.0), (3, 9.9, 3.0), (5, 8.0, 4.0)))
    data = study(start, record(1, 1.5, 9.0), target=TARGET, start=True)
    assert EQUAL not in caveats_of(data)
    said = said_of(data, tmp_path)
    assert not any("stopped" in said[where] for where in ("headline", "sentence"))
    assert "25 % to 50 %" in said["terminal"]


def test_report_says_that_another_seed_meets_the_target_at_another_step() -> None:
    start = record(0, 4.0, 8.0, evals=evals((2, 20.0, 2.0), (3, 9.9, 3.0), (5, 8.0, 4.0)))
    said = markdown_of(study(start, record(1, 1.5, 9.0), target=TARGET, start=True))
    assert "another step, which is in no range" in said
    never_met = record(0, 4.0, 12.0, evals=evals((2, 20.0, 2.0), (5, 12.0, 4.0)))
    said = markdown_of(study(never_met, record(1, 1.5, 9.0), target=TARGET, start=True))
    assert "another step" not in said


def test_of_a_recommended_run_without_energy_by_step_it_is_not_known() -> None:
    assert against((2, 20.0, 1.0), (3, 9.9, 2.0)).equal_quality.both_stopped is None


def test_how_many_runs_pay_back_has_the_error_of_both_configurations() -> None:
    data = repeated(runs(0, [1.0, 1.1, 0.9], SURE), runs(1, [2.1, 2.0, 1.9], BETTER))
    rec, saving = recommend(data), compared(data).saving
    study_kg = 1.5 * (3.0 + 6.0)  # with set-up and evaluation
    # Student's t with 4 degrees of freedom; a run's logarithm spreads by 0.0801.
    ours, theirs = (math.exp(2.7764 * 0.0801 / math.sqrt(3)) for _ in range(2))
    lowest = 1.0 - math.hypot(2.0 - 2.0 / theirs, ours - 1.0)
    highest = 1.0 + math.hypot(2.0 * theirs - 2.0, 1.0 - 1.0 / ours)
    expected = math.ceil(study_kg / highest), math.ceil(study_kg / lowest)
    assert rec.break_even_interval == saving.break_even_interval == expected
    assert expected[0] < rec.break_even_runs == 14 < expected[1]
    paid = {tile.label: (tile.text, tile.note) for tile in tiles(StudyView(data))}[
        "Pays back after"
    ]
    assert paid[0] == "14 runs"
    assert paid[1].endswith(f"; {expected[0]} to {expected[1]} with 95 % confidence")


@pytest.mark.parametrize(("baseline_runs", "deviation"), [(1, 0.1), (3, 0.02), (6, 0.05)])
def test_what_a_run_saves_lies_in_its_interval_in_95_of_100_studies(
    baseline_runs: int, deviation: float
) -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(1000):
        winner, start = (
            Configuration(runs(number, list(kg * np.exp(rng.normal(0, deviation, count))), quality))
            for number, kg, count, quality in (
                (0, 1.0, 3, [9.0] * 3),
                (1, 2.5, baseline_runs, [8.0] * baseline_runs),
            )
        )
        evidence = Evidence([winner, start], None, seeds=3)
        lowest, highest = evidence.saved_interval_kg_co2e(winner, start)
        held += lowest <= 1.5 * math.exp(deviation**2 / 2) <= highest
    assert held / 1000 == pytest.approx(0.95, abs=0.02)


def test_a_saving_within_the_noise_has_no_upper_end_of_pay_back_and_is_called_so() -> None:
    data = repeated(runs(0, [1.95, 2.05, 1.85], SURE), runs(1, [2.1, 2.0, 1.9], BETTER))
    rec, against_baseline = recommend(data), compared(data)
    assert (
        against_baseline.saving.lowest
        < 0
        < against_baseline.saving.fraction
        < against_baseline.saving.highest
    )
    fewest, most = rec.break_even_interval
    assert most is None and fewest < rec.break_even_runs
    assert headline(StudyView(data)).startswith(
        "2.5 % less CO2e at the target quality, within the noise: "
    )
    noise = caveats_of(data)["saving_within_noise"]
    assert noise.level is Level.CRITICAL
    assert noise.numbers == {
        "lowest": against_baseline.saving.lowest,
        "highest": against_baseline.saving.highest,
    }
    notes = {tile.label: tile.note for tile in tiles(StudyView(data))}
    assert notes["Saving on a run"].endswith("confidence, 3 seeds each")
    assert notes["Pays back after"].endswith(f"; {fewest} or more with 95 % confidence")


def test_a_baseline_that_ran_once_lends_its_spread_and_that_is_said() -> None:
    ours = runs(0, [1.0, 1.1, 0.9], SURE)
    for theirs, said in (
        (runs(1, [2.0], BETTER[:1]), True),
        (runs(1, [2.1, 2.0, 1.9], BETTER), False),
    ):
        data = repeated(ours, theirs)
        assert ("baseline_single_run" in caveats_of(data)) is said


def test_a_difference_of_the_gpus_temperatures_is_bounded() -> None:
    """The recommended runs began at 50, 48 and 52 °C, the baseline's at 38 and 52: 5 °C, of at most
    0.4 % each.
    """

    def began(records: list[TrialRecord], *temperatures_c: float | None) -> list[TrialRecord]:
        return [
            record.model_copy(update={"gpu_start_temperature_c": temperature_c})
            for record, temperature_c in zip(records, temperatures_c, strict=True)
        ]

    def compared_at(ours_c: list[float | None], theirs_c: list[float | None]) -> StudyData:
        ours, theirs = runs(0, [1.0, 1.1, 0.9], SURE), runs(1, [2.1, 2.0], BETTER[:2])
        return repeated(began(ours, *ours_c), began(theirs, *theirs_c))

    warmer = compared_at([50.0, 48.0, 52.0], [38.0, 52.0])
    assert compared(warmer).began_warmer_c == pytest.approx(5.0)
    assert caveats_of(warmer)["began_warmer"].numbers == pytest.approx(
        {"degrees": 5.0, "most": 0.02}
    )
    cooler = compared_at([40.0, 41.0, 39.0], [45.0, 50.0])
    assert caveats_of(cooler)["began_cooler"].numbers == pytest.approx(
        {"degrees": 7.5, "most": 0.03}
    )
    alike = compared_at([50.0, 48.0, 52.0], [50.0, 48.0])  # 1 °C: below half a per cent
    unknown = compared_at([50.0, None, 52.0], [38.0, 52.0])
    assert compared(unknown).began_warmer_c is None
    for data in (alike, unknown):
        assert not {"began_warmer", "began_cooler"} & caveats_of(data).keys()


def test_an_excess_within_the_noise_is_no_plain_fact_either(tmp_path: Path) -> None:
    """The start misses the target and costs as much but for the noise."""
    start, ours = runs(0, [2.0, 1.9, 2.1], [20.0, 20.1, 20.2]), runs(1, [2.05, 1.95, 2.15], SURE)
    data = repeated(start, ours)
    search = data.config.search.model_copy(update={"start": {"epochs": 1}})
    data = data.model_copy(update={"config": data.config.model_copy(update={"search": search})})
    rec, against_baseline = recommend(data), compared(data)
    assert (
        rec.break_even_runs is None
        and against_baseline.saving.fraction < 0 < against_baseline.saving.highest
    )
    fewest, most = rec.break_even_interval
    saved_kg = 2.0 * against_baseline.saving.highest
    assert most is None and fewest == pytest.approx(rec.study_emissions_kg_co2e / saved_kg, rel=0.1)
    assert headline(StudyView(data)).startswith(
        "2.5 % more CO2e at the target quality, within the noise: "
    )
    noise = caveats_of(data)["saving_within_noise"].text
    assert (
        f"{percent_text(against_baseline.saving.lowest)} to"
        f" {percent_text(against_baseline.saving.highest)}" in noise
    )
    paid = {tile.label: tile.text for tile in tiles(StudyView(data))}["Pays back after"]
    assert paid == "not known"
    statement = said_of(data, tmp_path)["statement"]
    assert "saves nothing" not in statement and f"{fewest} or more" in statement


def test_a_clear_excess_pays_nothing_back() -> None:
    data = study(record(0, 1.0, 20.0), record(1, 3.0, 9.0), start=True)
    rec = recommend(data)
    assert (rec.saving_interval, rec.break_even_interval) == (None, None)
    view = StudyView(data)
    assert headline(view).startswith(
        "200 % more CO2e at the target quality (the baseline misses the target): "
    )
    assert details(view) == ()
    shown = {tile.label: tile for tile in tiles(view)}
    assert shown["Saving on a run"].note == (
        "against trial 0, the start configuration: run-to-run spread not known"
    )
    assert shown["Pays back after"].text == "never"


def test_equal_quality_at_the_first_evaluation_has_no_lower_bound() -> None:
    equal = against((2, 9.0, 2.0), (5, 8.0, 4.0)).equal_quality
    assert (equal.baseline_step, equal.baseline_emissions_before_kg_co2e) == (2, 0.0)
    assert (equal.saving_fraction, equal.saving_fraction_before) == (pytest.approx(0.25), None)


def test_an_evaluation_before_the_first_step_bounds_no_energy() -> None:
    equal = against((0, 20.0, 1e-6), (2, 9.0, 2.0), (5, 8.0, 4.0)).equal_quality
    assert (equal.baseline_step, equal.baseline_emissions_before_kg_co2e) == (2, 0.0)
    assert equal.saving_fraction_before is None
    assert against((0, 9.0, 1e-6), (5, 8.0, 4.0)).equal_quality is None, "met before the training"


def test_equal_quality_of_a_baseline_that_met_the_target_on_its_way_only() -> None:
    assert (
        against(
            (2, 20.0, 1.0), (3, 9.9, 2.0), (5, 11.0, 4.0), perplexity=11.0
        ).equal_quality.baseline_step
        == 3
    )


@pytest.mark.parametrize(
    "points",
    [
        ((2, 20.0, 1.0), (5, 11.0, 4.0)),  # never met
        ((2, 20.0, 1.0), (5, 9.0, None)),  # of unknown energy
        ((2, 20.0, None), (5, 9.0, 4.0)),
        (),
    ],
)
def test_no_equal_quality(points: tuple) -> None:
    assert against(*points, perplexity=11.0).equal_quality is None
