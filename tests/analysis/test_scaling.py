"""How many GPUs, by figures worked out by hand."""

import math

import pytest
from small_studies import study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.scaling import scaling
from carbonopt.core.trial import Durations, TrialRecord, TrialState
from carbonopt.report.sections.scaling_section import section
from carbonopt.report.study_view import StudyView


def on(ranks: int, seconds: float, **more) -> dict:
    params = {"global_batch_size": 16, "micro_batch_size_per_gpu": 4, "world_size": ranks}
    return {
        "params": params,
        "duration_s": Durations(train=seconds, setup=5, eval=1, total=seconds + 6),
        **more,
    }


def test_each_number_has_its_cheapest_run_that_met_the_target() -> None:
    data = study(
        trial(0, 4e-3, **on(1, 100.0)),
        trial(1, 2e-3, **on(1, 60.0)),
        trial(2, 1e-3, 9.0, **on(1, 30.0)),  # missed it
        trial(3, 3e-3, **on(2, 40.0)),
        trial(4, 5e-3, 8.0, **on(4, 25.0)),
        trial(5, 4e-3, 7.0, **on(4, 20.0)),  # missed it, but less
        trial(6, 1e-9, **on(4, 1.0), state=TrialState.PRUNED),
    )
    effect = scaling(data)
    assert [(row.world_size, row.trial, row.met) for row in effect.rows] == [
        (1, 1, True),
        (2, 3, True),
        (4, 5, False),
    ]
    assert [row.speed_up for row in effect.rows] == pytest.approx([1.0, 1.5, 3.0])
    assert [row.energy_ratio for row in effect.rows] == pytest.approx([1.0, 1.5, 2.0])
    assert [row.step_s for row in effect.rows] == pytest.approx([1.5, 1.0, 0.5])
    assert [row.emissions_kg_co2e for row in effect.rows] == [
        data.emissions_kg_co2e(row.energy_kwh) for row in effect.rows
    ]
    assert (effect.least_energy, effect.fastest) == (1, 2), "of those that met it"
    (made,) = section(StudyView(data)).blocks
    assert "which is 1.5 × as fast at 1.5 × the energy" in made.note


def test_one_number_of_ranks_says_nothing() -> None:
    assert scaling(study(trial(0, **on(2, 10.0)), trial(1, **on(2, 20.0)))) is None
    assert scaling(study(trial(0, **on(2, 10.0)), trial(1, **on(1, 20.0), repeat_of=0))) is None


def test_a_trial_that_other_work_slowed_is_named() -> None:
    data = study(
        trial(0, 4e-3, **on(1, 100.0)), trial(1, 3e-3, **on(2, 90.0), cpu_wait_fraction=0.4)
    )
    assert [row.slowed for row in scaling(data).rows] == [False, True]
    (made,) = section(StudyView(data)).blocks
    assert [row[1].text for row in made.rows] == ["0", "1 (slowed)"]
    assert "slowed trial 1" in made.note


def again(
    first: TrialRecord, number: int, train_kwh: float, perplexity: float = 5.0
) -> TrialRecord:
    """A repeat of a trial with another seed."""
    changes = {"params": first.params, "repeat_of": first.trial, "seed": number}
    run = trial(number, train_kwh, perplexity, duration_s=first.duration_s)
    return run.model_copy(update=changes)


def test_repeated_configurations_count_by_their_means_as_in_the_recommendation() -> None:
    """The first run on two GPUs used least and met the target; its repeats refute it."""
    one, two, other = (
        trial(0, 2e-3, **on(1, 60.0)),
        trial(1, 1e-3, **on(2, 30.0)),
        trial(2, 4e-3, **on(2, 35.0)),
    )
    data = study(
        *(
            one,
            again(one, 10, 2.1e-3),
            two,
            again(two, 11, 1e-3, 9.0),
            other,
            again(other, 12, 4e-3),
        ),
        raw={"confirm": {"seeds": 2, "runners_up": 2}},
    )
    effect, rec = scaling(data), recommend(data)
    assert rec.trial == 0 and [row.trial for row in effect.rows] == [0, 2]
    assert effect.rows[0].energy_kwh == pytest.approx(rec.energy_kwh) == pytest.approx(2.05e-3)
    assert effect.least_energy == 1
    # ln(2.1 ÷ 2) ÷ √2 pooled over three configurations of two runs; Student's t of three degrees
    margin = 3.182446 * math.log(1.05) / math.sqrt(2 * 3)
    ratio = 4 / 2.05
    assert effect.rows[1].energy_ratio_interval == pytest.approx(
        (ratio * math.exp(-margin), ratio * math.exp(margin)), rel=1e-6
    )
    assert effect.rows[0].energy_ratio_interval is None and effect.ties == ()
    (made,) = section(StudyView(data)).blocks
    assert made.rows[1][-1].text == "1.95 × (1.83 to 2.08)"


def test_number_of_ranks_that_the_noise_does_not_tell_from_the_least_is_named() -> None:
    one, two = trial(0, 2e-3, **on(1, 60.0)), trial(1, 2.04e-3, **on(2, 40.0))
    single = study(one, two)
    assert scaling(single).ties is None
    (made,) = section(StudyView(single)).blocks
    assert "spread not known" in made.note
    runs = one, again(one, 10, 2.1e-3), two, again(two, 11, 2.1e-3)
    repeated = study(*runs, raw={"confirm": {"seeds": 2, "runners_up": 1}})
    assert scaling(repeated).ties == (2,)
    (made,) = section(StudyView(repeated)).blocks
    assert "less than the error" in made.note
