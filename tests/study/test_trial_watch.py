"""How a trial ends: each way has its own state, keeps its energy, and leaves the study running."""

import math
import os
import sys
import textwrap
from pathlib import Path

import pytest
from speaking_trials import SPEAKING, JoulePerPhase

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import Forecast, Kernels, Phase, StopReason, TrialRecord, TrialState
from carbonopt.energy.meter_reading import Reading
from carbonopt.energy.replay_meter import ReplayMeter
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.search.cap import exceeds_cap
from carbonopt.search.models.line import straight_line_loss
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trial_watch import Rules, TrialWatch, begun_record


def watched(
    script: str, tmp_path: Path, meter: ReplayMeter | None = None, **rules: object
) -> TrialRecord:
    """The record of a trial whose process runs this script."""
    params = TrialParams(
        global_batch_size=8, micro_batch_size_per_gpu=8, learning_rate=1e-3, epochs=1
    )
    spec = TrialSpec(
        number=3,
        attempt=1,
        seed=0,
        params=params,
        workload={},
        prepared_dir=str(tmp_path),
        trial_dir=str(tmp_path),
    )
    settings = {
        "should_prune": None,
        "audit": False,
        "cap_kg_co2e": None,
        "emissions_kg_co2e": lambda energy_kwh: energy_kwh * 10,
        "budget_spent": lambda: False,
        "interrupted": lambda: False,
        "timeout_s": 60.0,
    } | rules
    meter = meter or JoulePerPhase()
    meter.enter(Phase.SETUP)
    argv = [sys.executable, "-c", SPEAKING + textwrap.dedent(script)]
    stored: list[TrialRecord] = []
    watch = TrialWatch(
        spec=spec,
        so_far=begun_record(spec, PERPLEXITY, "worker", None),
        trial=WorkProcesses(argv, [{}], dict(os.environ), tmp_path / "log.txt"),
        meter=meter,
        rules=Rules(**settings),
        observers=[],
        progress=lambda *_: None,
        store=stored.append,
    )
    record = watch.run()
    energy = record.energy_kwh
    assert energy.setup >= 1
    assert energy.train + energy.setup + energy.eval == pytest.approx(energy.total)
    assert record.emissions_kg_co2e == pytest.approx(energy.train * 10)
    assert all(stored_record.state == TrialState.RUNNING for stored_record in stored)
    return record


def test_a_trial_that_ends_by_itself_is_complete(tmp_path: Path) -> None:
    script = "evaluated(50, 3.0, peak_memory_gib=2.0)\nevaluated(100, 1.5, peak_memory_gib=2.5)\n"
    record = watched(f'{script}say("Finished", summary={{}})', tmp_path)
    assert (record.state, record.stop_reason, record.failure) == (TrialState.COMPLETE, None, None)
    assert record.value == pytest.approx(math.exp(1.5))
    assert [point.step for point in record.evals] == [50, 100]
    assert record.evals[0].train_energy_kwh < record.evals[1].train_energy_kwh
    assert record.peak_memory_gib == 2.5


class JoulesPerLook(JoulePerPhase):
    """Training also uses 1 kWh in a second each time that the study listens in vain."""

    def running(self, phase: Phase) -> Reading:
        if phase is Phase.TRAIN and self._phase is Phase.TRAIN and self.goes_on():
            self.advance(phase, 1.0, 1.0)
        return super().running(phase)

    goes_on = staticmethod(lambda: True)


def test_a_step_costs_what_training_took_up_to_its_report(tmp_path: Path) -> None:
    said = tmp_path / "said"
    meter = JoulesPerLook()
    meter.goes_on = said.exists
    script = f"""
    say("StageBegun", stage="steps")
    say("Progress", step=5, total_steps=100)
    ask("PhaseChanged", phase="eval")
    ask("PhaseChanged", phase="train")
    say("Progress", step=11, total_steps=100)
    time.sleep(1)
    open({str(said)!r}, "w").close()  # what follows is never reported
    time.sleep(600)
    """
    record = watched(script, tmp_path, meter, cap_kg_co2e=45.0)
    assert (record.state, record.stop_reason) == (TrialState.PRUNED, StopReason.CAP)
    assert record.steps_done == 11
    train_kwh, rest = record.energy_kwh.train, record.after_reported
    assert train_kwh >= 5 and rest is not None
    assert rest.energy_kwh == pytest.approx(train_kwh - 2)  # two windows up to step 11
    assert record.reported_training.energy_kwh == pytest.approx(2.0)


def test_a_probe_ends_with_what_its_steps_took(tmp_path: Path) -> None:
    measured = {
        "step": 40,
        "total_steps": 100,
        "peak_memory_gib": 3.5,
        "rank_peak_memory_gib": [3.0, 3.5],
    }
    script = f"""
    say("StageBegun", stage="steps", kernels="compiled")
    say("Probed", **{measured})
    time.sleep(600)
    """
    record = watched(script, tmp_path)
    assert (record.state, record.stop_reason, record.failure) == (
        TrialState.PRUNED,
        StopReason.PROBE,
        None,
    )
    assert (record.steps_done, record.total_steps, record.peak_memory_gib) == (40, 100, 3.5)
    assert record.rank_peak_memory_gib == (3.0, 3.5) and record.kernels is Kernels.COMPILED
    assert record.value is None and record.evals == ()


class BlindWhileTraining(JoulePerPhase):
    """Training is over before there is another reading."""

    def advance(self, phase: Phase, energy_kwh: float, duration_s: float) -> None:
        super().advance(phase, 0.0 if phase is Phase.TRAIN else energy_kwh, 0.02)


def test_a_training_too_short_for_a_reading_is_unmeasured_not_free(tmp_path: Path) -> None:
    record = watched(
        'evaluated(100, 1.5)\nsay("Finished", summary={})', tmp_path, BlindWhileTraining()
    )
    assert (record.state, record.value, record.failure.kind) == (
        TrialState.FAILED,
        None,
        "unmeasured",
    )
    # Two windows of training: before the evaluation and after it.
    assert (
        "the GPUs in the 0.04 s that it trained: readings are 50 ms apart; train longer"
        in record.failure.text
    )
    assert record.energy_kwh.total > 0, "what was measured is kept"


def test_finished_without_its_last_evaluation_is_a_failure(tmp_path: Path) -> None:
    assert (
        watched('evaluated(50, 3.0)\nsay("Finished", summary={})', tmp_path).state
        == TrialState.FAILED
    )


def test_out_of_memory_is_infeasible(tmp_path: Path) -> None:
    record = watched(
        'say("Failed", kind="out_of_memory", text="full", peak_memory_gib=80.0)', tmp_path
    )
    assert (record.state, record.failure.kind, record.peak_memory_gib) == (
        TrialState.INFEASIBLE,
        "out_of_memory",
        80.0,
    )
    assert watched("sys.exit(78)", tmp_path).state == TrialState.INFEASIBLE


def test_a_loss_that_is_no_number_is_divergence(tmp_path: Path) -> None:
    assert (
        watched('say("Failed", kind="diverged", text="NaN at step 3")', tmp_path).state
        == TrialState.DIVERGED
    )
    record = watched("evaluated(50, None)", tmp_path)
    assert (record.state, record.value) == (TrialState.DIVERGED, None)
    (point,) = record.as_json()["evals"]
    assert point["value"] is point["sum"] is None and point["count"] == 1


def test_a_crash_keeps_the_logs_last_lines(tmp_path: Path) -> None:
    record = watched('print("the disk is full")\nsys.exit(1)', tmp_path)
    assert record.state == TrialState.FAILED
    assert "code 1" in record.failure.text
    assert "the disk is full" in record.failure.text
    assert record.failure.log == str(tmp_path / "log.txt")


def test_silence_is_a_timeout(tmp_path: Path) -> None:
    record = watched("time.sleep(600)", tmp_path, timeout_s=1.0)
    assert record.state == TrialState.TIMEOUT
    assert "1 s" in record.failure.text


def test_a_trial_above_the_cap_is_pruned(tmp_path: Path) -> None:
    script = (
        "evaluated(25, 3.0, peak_memory_gib=2.0)\nevaluated(50, 2.0,"
        " peak_memory_gib=2.5)\ntime.sleep(600)"
    )
    record = watched(script, tmp_path, cap_kg_co2e=15.0)  # the second window of training: 20 kg
    assert (record.state, record.stop_reason) == (TrialState.PRUNED, StopReason.CAP)
    assert record.peak_memory_gib == 2.0, "what a stopped trial needed is known, too"


def test_how_long_it_waited_for_cores_is_known_before_the_first_evaluation_too(
    tmp_path: Path,
) -> None:
    early = 'say("Progress", step=1, total_steps=100, cpu_wait_fraction=0.4)\n'
    later = 'evaluated(50, 2.0, cpu_wait_fraction=0.5)\nsay("Progress", step=51, total_steps=100)\n'
    evaluating = (  # from there on it is left to the evaluations
        'say("Progress", step=50, total_steps=100)\n'
    )
    for script, known in (
        (early, 0.4),
        (early + evaluating, 0.4),
        (early + evaluating + later, 0.5),
    ):
        record = watched(script + "time.sleep(600)", tmp_path, timeout_s=1.0)
        assert (record.state, record.cpu_wait_fraction) == (TrialState.TIMEOUT, known)


def test_the_cap_spares_a_trial_that_has_trained_to_its_end(tmp_path: Path) -> None:
    script = 'ask("PhaseChanged", phase="eval")\nevaluated(100, 0.5)\nsay("Finished", summary={})'
    assert watched(script, tmp_path, cap_kg_co2e=1e9).state == TrialState.COMPLETE


def test_a_hopeless_curve_is_pruned_and_an_audited_one_is_not(tmp_path: Path) -> None:
    script = "\n".join(f"evaluated({step}, {5 - step / 100})" for step in (20, 40, 60, 80, 100))
    script += '\nsay("Finished", summary={})'

    def should_prune(evals: list[EvalPoint], total_steps: int) -> Forecast | None:
        step = evals[-1].step
        forecast = Forecast(step=step, value=70.0, sds_short=3.0, sds_needed=2.5, checked_trials=4)
        return forecast if step >= 60 else None

    record = watched(script, tmp_path, should_prune=should_prune)
    assert (record.state, record.stop_reason) == (TrialState.PRUNED, StopReason.TARGET)
    assert (record.evals[-1].step, record.steps_done, record.audited_at_step) == (60, 60, None)
    assert (record.forecast.step, record.forecast.sds_needed) == (60, 2.5)
    audited = watched(script, tmp_path, should_prune=should_prune, audit=True, cap_kg_co2e=45.0)
    assert (audited.state, audited.audited_at_step, audited.forecast) == (
        TrialState.COMPLETE,
        60,
        record.forecast,
    )
    assert watched(script, tmp_path).state == TrialState.COMPLETE


def test_budget_and_interruption_end_a_running_trial(tmp_path: Path) -> None:
    spent = watched("time.sleep(600)", tmp_path, budget_spent=lambda: True)
    assert (spent.state, spent.stop_reason) == (TrialState.PRUNED, StopReason.BUDGET)
    ended = watched("time.sleep(600)", tmp_path, interrupted=lambda: True)
    assert (ended.state, ended.stop_reason) == (TrialState.FAILED, StopReason.INTERRUPTED)


# ---------------------------------------------------------------------------------------------------------------
# rules


def points(*values: float, every: int = 10) -> list[EvalPoint]:
    return [
        EvalPoint.of(PERPLEXITY, nll * 7, 7, step=(index + 1) * every, tokens=None)
        for index, nll in enumerate(values)
    ]


def line(evals: list[EvalPoint], total_steps: int) -> float | None:
    return straight_line_loss(
        [(point.step / total_steps, point.loss(PERPLEXITY)) for point in evals]
    )


def test_the_straight_line_goes_on_as_steeply_as_the_curve_last_did() -> None:
    # 0.2 a stretch of 10 steps at the steeper of the last two; 50 steps to go.
    assert line(points(2.3, 2.1, 2.0), 80) == pytest.approx(2.0 - 1.0)
    # Past half the way, over the logarithm of the steps: 0.2 for a doubling at the steeper one, 5/3
    # to go.
    assert line(points(2.3, 2.1, 2.0), 50) == pytest.approx(2.0 - 0.2 * math.log2(5 / 3))
    assert line(points(2.0, 2.1, 2.2), 50) == pytest.approx(2.2), "a rising curve promises nothing"
    # Evaluations close to each other are noise: 0.1 up and down every step, 0.02 down a step.
    noisy = points(*(3 - 0.02 * step + 0.1 * (step % 2) for step in range(50)), every=1)
    assert line(noisy, 100) > 0.5, "from one step to the next it falls by 0.12: to −4 at the end"


def test_it_is_too_early_before_three_evaluations_and_a_third() -> None:
    assert line(points(2.3, 2.1), 30) is None
    assert line(points(2.3, 2.1, 2.0), 100) is None


def test_the_cap_needs_a_feasible_trial_and_is_strict() -> None:
    assert not exceeds_cap(None, 1e9)
    assert not exceeds_cap(1.0, 1.0)
    assert exceeds_cap(1.0, 1.1)


def test_a_projection_above_the_cap_counts_from_a_twentieth_of_the_way() -> None:
    assert not exceeds_cap(None, 0.0, 0.5, 1e9)
    assert not exceeds_cap(1.0, 0.0, 0.04, 2.0)
    assert not exceeds_cap(1.0, 0.0, 0.5, 1.1), "the half that is left may be cheaper by a quarter"
    assert exceeds_cap(1.0, 0.0, 0.9, 1.1)
    assert exceeds_cap(1.0, 0.0, 0.05, 1.4)
    assert not exceeds_cap(1.0, 0.0, 0.5, 9.0, measured_s=1.9), "the meter tells too little of it"
    assert exceeds_cap(1.0, 0.0, 0.5, 9.0, measured_s=2.0)
    assert not exceeds_cap(1.0, 1.0, 0.5, 9.0, contended=True), (
        "its first steps say little of what it takes alone"
    )
    assert exceeds_cap(1.0, 1.1, 0.5, 9.0, contended=True), "what it has spent is spent"
