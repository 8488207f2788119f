"""The phases and stages of a trial: what each took, and that they add up to the trial."""

import math
import time

import pytest

from carbonopt.core.trial import Phase, Stage
from carbonopt.energy.meter_reading import Reading
from carbonopt.energy.replay_meter import ReplayMeter
from carbonopt.study.phases import TrialPhases


def test_a_stage_too_short_for_a_reading_has_its_share_of_the_next_one() -> None:
    """A first step of some milliseconds took no energy by the meter's readings, which are 50 ms
    apart.
    """
    meter = ReplayMeter()
    meter.enter(Phase.SETUP)
    phases = TrialPhases(meter)
    meter.advance(Phase.SETUP, 1e-6, 0.01)
    phases.enter(Phase.TRAIN)
    time.sleep(0.02)
    phases.begin(Stage.STEPS)  # nothing was read since the training began
    time.sleep(0.06)
    meter.advance(Phase.TRAIN, 8e-6, 0.08)
    phases.enter(Phase.EVAL)
    first, steps = phases.stages[Stage.COMPILE], phases.stages[Stage.STEPS]
    assert first["energy_kwh"] / first["duration_s"] == pytest.approx(
        steps["energy_kwh"] / steps["duration_s"]
    )
    assert first["energy_kwh"] + steps["energy_kwh"] == pytest.approx(8e-6)
    assert math.fsum(stage["energy_kwh"] for stage in phases.stages.values()) == pytest.approx(9e-6)


class SlowMeter(ReplayMeter):
    """Looks at the clock, then takes longer for each reading; the open phase counts that later."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self._takes_s = 100.0, 0.0

    def _read(self, phase: Phase) -> None:
        self._takes_s += 0.1
        self.advance(phase, 1.0, self._takes_s)
        self.now_s += self._takes_s

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self._read(phase)

    def running(self, phase: Phase) -> Reading:
        reading = super().running(phase)
        if phase is self._phase:
            self._read(phase)
        return reading


def test_stages_add_up_to_their_phases_however_long_a_reading_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = SlowMeter()
    monkeypatch.setattr(time, "monotonic", lambda: meter.now_s)
    meter.enter(Phase.SETUP)
    phases = TrialPhases(meter)
    for phase in (Phase.TRAIN, Phase.EVAL, Phase.TRAIN, Phase.EVAL, Phase.SETUP, Phase.GAP):
        phases.enter(phase)
    duration_s = {stage: cost["duration_s"] for stage, cost in phases.stages.items()}
    assert duration_s == {
        Stage.IMPORTS: pytest.approx(0.3),
        Stage.COMPILE: pytest.approx(meter.running(Phase.TRAIN).duration_s),
        Stage.EVALUATION: pytest.approx(meter.running(Phase.EVAL).duration_s),
        Stage.TEARDOWN: pytest.approx(meter.running(Phase.SETUP).duration_s - 0.3),
    }


def test_an_evaluation_without_a_block_is_no_training_however_short() -> None:
    """Each of many evaluations is as short as a reading's distance from the next one."""
    meter = ReplayMeter()
    meter.enter(Phase.SETUP)
    phases = TrialPhases(meter)
    phases.enter(Phase.TRAIN)
    for _ in range(20):
        meter.advance(Phase.TRAIN, 4e-6, 0.04)
        meter.advance(Phase.TRAIN, 6e-6, 0.06)
        phases.stepped(ago_s=0.06)
        phases.claim(Phase.EVAL, Stage.EVALUATION)
    phases.enter(Phase.SETUP)
    train, evaluation = meter.running(Phase.TRAIN), meter.running(Phase.EVAL)
    assert train.total_kwh == pytest.approx(20 * 4e-6)
    assert train.duration_s == pytest.approx(20 * 0.04)
    assert evaluation.total_kwh == pytest.approx(20 * 6e-6)
    assert phases.stages[Stage.EVALUATION]["energy_kwh"] == pytest.approx(20 * 6e-6)
    assert math.fsum(stage["energy_kwh"] for stage in phases.stages.values()) == pytest.approx(2e-4)


def test_a_wait_for_an_answer_is_the_study_s_whenever_it_hears_of_it() -> None:
    """The meter is read after the phase has changed, and only 0.01 s of the wait are known by then.

    A reading shows the wait for the answer to a report only after the next one.
    """
    meter = ReplayMeter()
    meter.enter(Phase.SETUP)
    phases = TrialPhases(meter)
    phases.enter(Phase.TRAIN)
    phases.begin(Stage.STEPS)
    meter.advance(Phase.TRAIN, 12e-6, 0.12)
    phases.look()
    phases.answered()
    meter.advance(Phase.TRAIN, 1e-6, 0.01)
    phases.enter(Phase.EVAL)
    phases.waited(0.03)
    assert meter.running(Phase.TRAIN).duration_s == pytest.approx(0.10)
    assert meter.running(Phase.TRAIN).total_kwh == pytest.approx(10e-6)
    meter.advance(Phase.EVAL, 5e-6, 0.05)
    phases.look()
    phases.answered()
    phases.waited(0.03)
    meter.advance(Phase.EVAL, 2e-6, 0.02)
    phases.look()
    meter.advance(Phase.EVAL, 3e-6, 0.03)
    phases.enter(Phase.SETUP)
    phases.waited(0.0)
    assert meter.running(Phase.EVAL).duration_s == pytest.approx(0.07)
    assert meter.running(Phase.GAP).duration_s == pytest.approx(0.06)
    assert math.fsum(stage["energy_kwh"] for stage in phases.stages.values()) == pytest.approx(
        17e-6
    )
