"""How many GPUs, by figures worked out by hand."""

import pytest
from small_studies import study, trial

from carbonopt.analysis.scaling import scaling
from carbonopt.core.trial import Durations, TrialState
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
