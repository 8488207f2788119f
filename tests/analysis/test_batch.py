"""The batch's effect on an epoch, against figures worked out by hand and against recorded runs."""

from pathlib import Path

import numpy as np
import pytest
from small_studies import pruned, study, trial

from carbonopt.analysis.batch import batch_effect
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import (
    Durations,
    Failure,
    QualityResult,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.core.units import emissions_kg_co2e, joules_from_kwh, kwh_from_joules
from carbonopt.engines.replay import read_table
from carbonopt.report.document import Figure, Table
from carbonopt.report.sections.batch_section import section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.trial_spec import Prepared

ROOT = Path(__file__).parents[2]
WHOLE = {"total_steps": 100, "steps_done": 100}
STOPPED = {
    "state": TrialState.PRUNED,
    "stop_reason": StopReason.TARGET,
    "perplexity": None,
    "total_steps": 100,
}


def at(batch: int, **changes) -> dict:
    return {"params": {"global_batch_size": batch, **changes}}


def test_figures_are_of_an_epoch() -> None:
    records = (
        trial(0, 4e-3, **at(16, epochs=4), **WHOLE, peak_memory_gib=2.0),
        trial(1, 1e-3, **at(16, epochs=2), **WHOLE, peak_memory_gib=3.0),
        trial(2, 1.2e-3, **at(64, epochs=2), **WHOLE, peak_memory_gib=5.0),
    )
    data = study(*records)
    effect = batch_effect(data)
    assert effect is not None
    small, large = effect.batches
    assert (small.global_batch_size, small.trials) == (16, (0, 1))
    assert (
        small.energy_kwh.lowest,
        small.energy_kwh.median,
        small.energy_kwh.highest,
    ) == pytest.approx((0.5e-3, 0.75e-3, 1e-3))
    assert (small.duration_s.lowest, small.duration_s.highest) == (15, 30)
    assert (small.peak_memory_gib.lowest, small.peak_memory_gib.median) == (2.0, 2.5)
    expected = emissions_kg_co2e(
        0.6e-3, data.provenance.intensity.g_co2e_per_kwh, data.config.carbon.pue
    )
    assert large.emissions_kg_co2e.median == pytest.approx(expected)
    assert (effect.least_energy, effect.least_duration, effect.least_memory) == (16, 16, 16)


def test_examples_that_whole_batches_leave_out_make_no_epoch_cheaper() -> None:
    """Of 583 examples, an epoch of whole batches of 64 has 576, one of 128 has 512.

    An example costs 5 % more at 128. By the trials' own epochs, 128 took 7 % less.
    """
    prepared = Prepared(fingerprint="0", train_examples=583, eval_examples=10, versions={})
    records = (
        trial(0, 576e-6, **at(64, epochs=1), total_steps=9),
        trial(1, 512e-6 * 1.05, **at(128, epochs=1), total_steps=4),
        trial(2, 64e-6, **at(64, epochs=0.15), total_steps=1),  # of 1.35 steps
    )
    effect = batch_effect(study(*records, prepared=prepared))
    assert effect is not None
    small, large = effect.batches
    assert (small.energy_kwh.lowest, small.energy_kwh.highest) == pytest.approx((583e-6, 583e-6))
    assert large.energy_kwh.median == pytest.approx(583e-6 * 1.05)
    assert effect.least_energy == 64


def test_sizes_that_differ_by_rounding_alone_share_the_minimum() -> None:
    def training(batch: int, seconds: float, kwh: float, epochs: int) -> TrialRecord:
        durations = Durations(train=seconds, setup=0, eval=0, total=seconds)
        return trial(batch, kwh, **at(batch, epochs=epochs), **WHOLE, duration_s=durations)

    equal_s = 0.1 + 0.2, 0.3, 0.9
    assert equal_s[0] > equal_s[1]
    records = (
        training(16, equal_s[0], 2e-3, 1),
        training(32, equal_s[1], 1e-3, 1),
        training(64, equal_s[2], 9e-3, 3),
    )
    view = StudyView(study(*records))
    effect = view.batch
    assert effect is not None
    assert (effect.least_energy, effect.least_duration) == (32, None)
    made = section(view)
    assert made is not None
    (shown,) = (block for block in made.blocks if isinstance(block, Table))
    strong = [[cell.strong for cell in row] for row in shown.rows]
    labels = [column.label.partition(" ")[0] for column in shown.columns]
    assert [row[labels.index("Time")] for row in strong] == [False] * 3
    assert [row[labels.index("Energy")] for row in strong] == [False, True, False]
    assert "least energy at 32" in shown.note
    assert "16, 32 and 64 alike" in shown.note


def test_a_stopped_trial_counts_for_what_it_trained_where_none_completed() -> None:
    stopped = trial(
        1,
        0.3e-3,
        **at(32),
        **STOPPED,
        steps_done=30,
        duration_s=Durations(train=9, setup=1, eval=1, total=11),
    )
    also = trial(2, 9.0, **at(16), **STOPPED, steps_done=50)
    effect = batch_effect(study(trial(0, **at(16), **WHOLE), stopped, also))
    assert effect is not None
    small, large = effect.batches
    assert (small.only_stopped, large.only_stopped) == (False, True)
    assert small.trials == (
        0,
    )  # a whole trial is there: the stopped one's dear first steps stay out
    assert large.energy_kwh.median == pytest.approx(0.3e-3 / (2 * 0.3))
    assert large.duration_s.median == pytest.approx(15)
    assert (effect.least_energy, effect.least_duration) == (None, 32), "the energies are equal"


@pytest.mark.parametrize(
    ("steps", "total", "counts"),
    [(9, 100, False), (10, 100, True), (49, 1000, False), (50, 1000, True)],
)
def test_too_short_a_trial_says_nothing(steps: int, total: int, counts: bool) -> None:
    stopped = trial(1, **at(32), **{**STOPPED, "total_steps": total}, steps_done=steps)
    assert (batch_effect(study(trial(0, **at(16), **WHOLE), stopped)) is not None) is counts


def test_the_last_evaluation_says_how_far_where_nothing_else_does() -> None:
    points = tuple(EvalPoint.of(PERPLEXITY, 1.0, 1, step=step, tokens=None) for step in (20, 40))
    stopped = trial(1, 0.8e-3, **at(32), **STOPPED, steps_done=None, evals=points)
    effect = batch_effect(study(trial(0, **at(16), **WHOLE), stopped))
    assert effect is not None
    assert effect.batches[1].energy_kwh.median == pytest.approx(1e-3)


def test_what_ran_out_of_memory_before_a_step_is_left_out() -> None:
    failed = trial(
        1,
        0.0,
        None,
        **at(512),
        state=TrialState.INFEASIBLE,
        evals=(),
        total_steps=None,
        failure=Failure(kind="out of memory", text="CUDA out of memory."),
    )
    records = (trial(0, **at(16), **WHOLE), failed, trial(2, **at(64), **WHOLE))
    effect = batch_effect(study(*records))
    assert effect is not None
    assert [batch.global_batch_size for batch in effect.batches] == [16, 64]


def test_without_a_gpu_memory_is_not_known() -> None:
    effect = batch_effect(
        study(trial(0, **at(16), **WHOLE), trial(1, 2e-3, **at(64), **WHOLE, peak_memory_gib=1.0))
    )
    assert effect is not None
    assert effect.batches[0].peak_memory_gib is None
    assert effect.least_memory is None  # known of one batch only: no minimum
    assert effect.least_energy == 16


def test_one_batch_size_has_no_effect() -> None:
    assert batch_effect(study()) is None
    assert batch_effect(study(trial(0, **at(16)), trial(1, **at(16)))) is None
    assert batch_effect(study(trial(0, **at(16)), trial(1, **at(32), energy_kwh=None))) is None


def held_up(number: int, batch: int, times: float):
    """A trial of 1 Wh at most, or of so many times the time and energy because the machine was
    busy.
    """
    duration = Durations(train=60 * times, setup=0, eval=0, total=60 * times)
    return trial(number, 1e-3 * times, **at(batch), **WHOLE, duration_s=duration)


def test_table_and_figure_go_by_the_same_value_where_a_run_was_held_up() -> None:
    data = study(held_up(0, 8, 0.9), held_up(1, 8, 25), held_up(2, 16, 1.0), held_up(3, 16, 1.1))
    shown = section(StudyView(data))
    assert shown is not None
    figure, table = shown.blocks
    assert isinstance(figure, Figure) and isinstance(table, Table)
    assert [[cell.text for cell in row] for row in table.rows] == [
        [
            "8",
            "2",
            "27.0 (388 to 750)",
            "–",
            "0.000450 (0.00648 to 0.0125)",
            "0.114 (1.64 to 3.16)",
            "5.000",
        ],
        [
            "16",
            "2",
            "30.0 (31.5 to 33.0)",
            "–",
            "0.000500 (0.000525 to 0.000550)",
            "0.127 (0.133 to 0.139)",
            "5.000",
        ],
    ]
    assert [[cell.strong for cell in row] for row in table.rows] == [
        [False, False, True, False, True, True, True],
        [False] * 7,
    ]
    assert figure.alt.startswith(
        "An epoch over batch sizes 8, 16: least energy at 8, least time at 8."
    )
    assert "least energy at 16, least time at 16" in table.note  # by the medians


def slowed(number: int, batch: int, times: float) -> TrialRecord:
    """A trial as `held_up`, which has recorded that it waited for its cores."""
    return held_up(number, batch, times).model_copy(update={"cpu_wait_fraction": 0.5})


def test_trials_that_other_work_slowed_are_named_and_their_figures_stay() -> None:
    records = slowed(0, 8, 2.0), held_up(1, 16, 1.0), slowed(2, 16, 1.6), held_up(3, 32, 1.2)
    data = study(*records)
    effect = batch_effect(data)
    assert effect is not None
    assert [(row.slowed, row.only_slowed) for row in effect.batches] == [
        ((0,), True),
        ((2,), False),
        ((), False),
    ]
    alone = batch_effect(study(*(held_up(*which) for which in ((0, 8, 2.0), (1, 16, 1.0)))))
    assert alone is not None
    assert effect.batches[0].energy_kwh == alone.batches[0].energy_kwh
    shown = section(StudyView(data))
    assert shown is not None
    figure, table = shown.blocks
    assert isinstance(figure, Figure) and isinstance(table, Table)
    assert [row[1].text for row in table.rows] == ["1 (1 slowed)", "2 (1 slowed)", "1"]
    assert "trials 0, 2, whose time is too high, and whose energy is, too" in table.note
    assert "slowed trials of batch size 8, 16." in figure.alt


def test_only_time_is_too_high_where_trials_are_charged_by_cpu_time() -> None:
    records = slowed(0, 8, 2.0), held_up(1, 16, 1.0)
    by_cpu_time = study(*records)
    ledgers = [session.model_copy(update={"other_kwh": 0.0}) for session in by_cpu_time.sessions]
    sources = {"cpu": "modelled"}
    provenance = by_cpu_time.provenance.model_copy(update={"energy_source": sources})
    changes = {"sessions": tuple(ledgers), "provenance": provenance}
    shown = section(StudyView(by_cpu_time.model_copy(update=changes)))
    assert shown is not None
    assert "trial 0, whose time is too high, and whose energy may be" in shown.blocks[1].note


def test_without_slowed_trials_none_is_named() -> None:
    shown = section(StudyView(study(held_up(0, 8, 2.0), held_up(1, 16, 1.0))))
    assert shown is not None
    assert "slowed" not in shown.blocks[1].note + shown.blocks[0].alt
    assert [row[1].text for row in shown.blocks[1].rows] == ["1", "1"]


def sweep(**of_last) -> list[TrialRecord]:
    """Two trials of each batch size, all of two epochs; `of_last`: parameters of the last one."""
    reached = {8: (4.0, 5.0), 16: (3.0, 6.0), 32: (3.5, 3.5)}
    runs = [(batch, value) for batch, values in reached.items() for value in values]
    records = [
        trial(number, 1e-3, value, **at(batch), **WHOLE)
        for number, (batch, value) in enumerate(runs)
    ]
    last = records[-1]
    return [
        *records[:-1],
        last.model_copy(update={"params": last.params.model_copy(update=of_last)}),
    ]


def test_the_quality_is_compared_where_all_trained_equally_long() -> None:
    data = study(*sweep(), pruned(6, 1.5).model_copy(update={"steps_done": 30, "total_steps": 40}))
    effect = batch_effect(data)
    assert effect is not None
    spans = [(at.quality.lowest, at.quality.median, at.quality.highest) for at in effect.batches]
    assert (
        spans == [(4.0, 4.5, 5.0), (3.0, 4.5, 6.0), (3.5, 3.5, 3.5)] and effect.best_quality == 16
    )
    shown = section(StudyView(data))
    assert shown is not None
    figure, table = shown.blocks
    assert table.columns[-1].label == "Perplexity"
    assert [row[-1].text for row in table.rows] == [
        "4.000 (4.500 to 5.000)",
        "3.000 (4.500 to 6.000)",
        "3.500",
    ]
    assert [row[-1].strong for row in table.rows] == [False, True, False]
    assert figure.svg.count("Perplexity") == 1
    longer = batch_effect(study(*sweep(epochs=3)))
    assert longer is not None
    assert [at.quality for at in longer.batches] == [None] * 3 and longer.best_quality is None


def test_of_a_quality_of_which_more_is_better_the_highest_is_marked() -> None:
    accuracies = {8: (0.4, 0.5), 16: (0.3, 0.6), 32: (0.35, 0.45)}
    runs = [(batch, value) for batch, values in accuracies.items() for value in values]
    of_accuracy = [
        trial(
            number,
            1e-3,
            None,
            **at(batch),
            **WHOLE,
            evals=(),
            quality=QualityResult(name="accuracy", value=value),
        )
        for number, (batch, value) in enumerate(runs)
    ]
    replay = {
        "workload": None,
        "launch": {"kind": "replay", "table": "/runs.jsonl"},
        "target": {"accuracy": 0.5},
    }
    data = study(*of_accuracy, raw=replay)
    effect = batch_effect(data)
    assert effect is not None and effect.best_quality == 16
    shown = section(StudyView(data))
    assert shown is not None
    cells = [row[-1] for row in shown.blocks[1].rows]
    assert [cell.text for cell in cells] == [
        "0.5000 (0.4500 to 0.4000)",
        "0.6000 (0.4500 to 0.3000)",
        "0.4500 (0.4000 to 0.3500)",
    ]
    assert [cell.strong for cell in cells] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "joules", "least"),
    [("text2sql-tune", (136.4305, 63.258), 128), ("wikitext-overfit", (71.253, 47.6568), 256)],
)
def test_on_recorded_runs_the_largest_batch_takes_the_least(
    name: str, joules: tuple[float, float], least: int
) -> None:
    runs = read_table(ROOT / "reports" / "search" / "tables" / f"{name}.jsonl", PERPLEXITY)
    records = []
    for number, run in enumerate(runs):
        train_kwh = kwh_from_joules(run.joules_per_step * run.total_steps)
        train_s = run.seconds_per_step * run.total_steps
        records.append(
            trial(
                number,
                train_kwh,
                params={"micro_batch_size_per_gpu": 1, **run.params},
                duration_s=Durations(train=train_s, setup=0, eval=0, total=train_s),
            )
        )
    effect = batch_effect(study(*records))
    assert effect is not None
    assert {len(batch.trials) for batch in effect.batches} == {len(runs) // 5}
    ends = [joules_from_kwh(effect.batches[end].energy_kwh.median) for end in (0, -1)]
    assert ends == pytest.approx(joules)
    assert (effect.least_energy, effect.least_duration) == (least, least)
    # The tables have one figure for the steps of a batch size: length and rate must make no
    # difference.
    assert all(
        batch.energy_kwh.highest == pytest.approx(batch.energy_kwh.lowest)
        for batch in effect.batches
    )


def test_sizes_with_more_trials_are_said_to_look_cheaper() -> None:
    """Of equal batch sizes whose runs spread by 5 %, the lowest of 12 is 8 % below a single one."""
    rng, less = np.random.default_rng(0), []
    for _ in range(100):
        kwh = np.exp(rng.normal(0, 0.05, 13)) * 1e-3
        records = [
            trial(number, float(energy), **at(16 if number < 12 else 32), **WHOLE)
            for number, energy in enumerate(kwh)
        ]
        many, single = batch_effect(study(*records)).batches
        less.append(1 - many.energy_kwh.lowest / single.energy_kwh.lowest)
    assert np.mean(less) == pytest.approx(0.08, abs=0.02)
    shown = section(StudyView(study(*records)))
    assert "lowest of 12 trials is lower by chance than that of 1" in shown.blocks[1].note
    equal = section(StudyView(study(*records[11:])))
    assert "by chance" not in equal.blocks[1].note
