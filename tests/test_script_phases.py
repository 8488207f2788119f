"""What counts as training in a user's own script: optimizer steps and what they need, and nothing
else.
"""

import textwrap
import time
from pathlib import Path

import pytest
from small_studies import study, trial
from test_script import watched

from carbonopt.core.trial import Node, Phase, Stage, TrialRecord, TrialState
from carbonopt.energy.meter_reading import Reading
from carbonopt.energy.node_meters import NodeMeters
from carbonopt.energy.replay_meter import ReplayMeter
from carbonopt.report.sections.trial_conduct_section import caveats
from carbonopt.report.study_view import StudyView
from carbonopt.search.cap import may_stop_early
from carbonopt.study.phases import SHORTEST_S, TrialPhases

# Each test takes seconds of real time.
pytestmark = [pytest.mark.slow, pytest.mark.timed]

BEGIN = "import time\nimport carbonopt.script as carbon\nwait = time.sleep\n"
NODE = Node(name="here", devices=("cpu",))
TOLERANCE_S = 0.25  # of a busy machine's scheduler
END_S = 0.45  # that a process takes to end there, too


class OneWatt(ReplayMeter):
    """Charges a joule for every second, by the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._read_at_s = time.monotonic()

    def _read(self) -> None:
        now_s = time.monotonic()
        if self._phase is not None:
            self.advance(self._phase, (now_s - self._read_at_s) / 3.6e6, now_s - self._read_at_s)
        self._read_at_s = now_s

    def enter(self, phase: Phase) -> None:
        self._read()
        super().enter(phase)

    def running(self, phase: Phase):
        self._read()
        return super().running(phase)


def timed(script: str, folder: Path, **rules) -> TrialRecord:
    """The record of a trial that runs this script, by a meter whose joules are its seconds."""
    return watched(
        BEGIN + textwrap.dedent(script), folder, meter=NodeMeters({NODE: OneWatt()}, [1]), **rules
    )


def assert_seconds(record: TrialRecord, expected: dict[str, float]) -> None:
    """Each stage has about so many seconds, and as many joules; those that are not named have none."""
    assert record.state == TrialState.COMPLETE, record.failure
    parts = record.stages
    trained = [parts[stage] for stage in (Stage.COMPILE, Stage.STEPS) if stage in parts]
    own = {"train": trained} | {
        stage: [parts[stage]] for stage in ("evaluation", "saving", "after") if stage in parts
    }
    expected = dict.fromkeys(("train", "evaluation", "saving", "after"), 0.0) | expected
    for name, seconds in expected.items():
        costs, margin_s = own.get(name, []), END_S if name == "after" else TOLERANCE_S
        assert sum(cost.duration_s for cost in costs) == pytest.approx(seconds, abs=margin_s), name
        assert sum(cost.energy_kwh for cost in costs) * 3.6e6 == pytest.approx(
            seconds, abs=margin_s
        ), name
    assert record.duration_s.train == pytest.approx(expected["train"], abs=TOLERANCE_S)
    assert record.duration_s.eval == pytest.approx(expected["evaluation"], abs=TOLERANCE_S)
    total = sum(cost.duration_s for cost in parts.values())
    assert total == pytest.approx(record.duration_s.total, abs=0.05)


SCRIPTS = {
    "a total of micro batches": (
        """
        run = carbon.run(total_steps=40)
        for _ in range(10):
            wait(0.05); run.step()
        with run.evaluation():
            wait(0.5)
        run.report(accuracy=0.9)
        wait(1.5)
        """,
        {"train": 0.5, "evaluation": 0.5, "after": 1.5},
    ),
    "work between the last step and the evaluation": (
        """
        run = carbon.run(total_steps=5)
        for _ in range(5):
            wait(0.1); run.step()
        wait(1)
        with run.evaluation():
            wait(0.5)
        run.report(accuracy=0.9)
        """,
        {"train": 0.5, "evaluation": 0.5, "after": 1.0},
    ),
    "steps faster than they are heard, then nothing": (
        """
        run = carbon.run(total_steps=10_000)
        for _ in range(300):
            wait(0.003); run.step()
        run.report(accuracy=0.9)
        wait(1.5)
        """,
        {"train": 1.0, "after": 1.5},
    ),
    "short evaluations without the block": (
        """
        run = carbon.run(total_steps=20)
        for _ in range(20):
            wait(0.05); run.step()
            wait(0.08)
            run.report(accuracy=0.9)
        """,
        {"train": 1.0, "evaluation": 1.6},
    ),
    "an evaluation without the block": (
        """
        run = carbon.run(total_steps=8)
        for step in range(8):
            wait(0.1); run.step()
            if step % 4 == 3:
                wait(0.6)
                run.report(accuracy=0.9)
        """,
        {"train": 0.8, "evaluation": 1.2},
    ),
    "an evaluation before the first step": (
        """
        run = carbon.run(total_steps=4)
        with run.evaluation():
            wait(0.5)
        run.report(accuracy=0.1)
        for step in range(4):
            wait(0.1); run.step()
        run.report(accuracy=0.9)
        """,
        {"train": 0.4, "evaluation": 0.5},
    ),
    "more steps than were told": (
        """
        run = carbon.run(total_steps=4)
        for step in range(1, 8):
            wait(0.2); run.step(step)
            if step in (4, 6):
                with run.evaluation():
                    wait(0.5)
                run.report(accuracy=0.9)
        """,
        {"train": 1.4, "evaluation": 1.0},
    ),
    "a training that goes on after its end was told": (
        """
        with carbon.run(total_steps=2) as run:
            for _ in range(2):
                wait(0.2); run.step()
        for _ in range(3):
            wait(0.3); run.step()
        run.report(accuracy=0.9)
        """,
        {"train": 1.3},
    ),
    "steps after an end that was told early": (
        """
        run = carbon.run(total_steps=6)
        for _ in range(2):
            wait(0.2); run.step()
        wait(0.2)
        run.end()
        for _ in range(4):
            wait(0.2); run.step()
        run.report(accuracy=0.9)
        wait(0.7)
        """,
        {"train": 1.4, "after": 0.7},
    ),
    "steps after a block that was left early, an evaluation and a checkpoint": (
        """
        with carbon.run(total_steps=6) as run:
            for _ in range(2):
                wait(0.2); run.step()
        wait(0.4)
        with run.evaluation():
            wait(0.5)
        wait(0.4)
        with run.saving():
            wait(0.6)
        wait(0.4)
        run.step(3)
        run.end()
        wait(0.3)
        run.step(3)
        run.report(accuracy=0.9)
        """,
        {"train": 1.9, "evaluation": 0.5, "saving": 0.6},
    ),
    "an evaluation amid an accumulation": (
        """
        run = carbon.run(total_steps=2)
        for batch in range(1, 9):
            wait(0.1)
            if batch % 4 == 0:
                run.step()
            if batch % 3 == 0:
                with run.evaluation():
                    wait(0.4)
                run.report(accuracy=0.9)
        run.report(accuracy=0.9)
        """,
        {"train": 0.8, "evaluation": 0.8},
    ),
    "checkpoints": (
        """
        run = carbon.run(total_steps=4)
        for step in range(1, 5):
            wait(0.1); run.step()
            if step % 2 == 0:
                with run.saving():
                    wait(0.4)
        run.report(accuracy=0.9)
        """,
        {"train": 0.4, "saving": 0.8},
    ),
    "blocks within blocks": (
        """
        run = carbon.run(total_steps=2)
        wait(0.2); run.step()
        with run.evaluation():
            wait(0.3)
            with run.evaluation():
                wait(0.3)
            with run.saving():
                wait(0.2)
            wait(0.2)
        run.report(accuracy=0.9)
        wait(0.2); run.step()
        run.report(accuracy=0.9)
        """,
        {"train": 0.4, "evaluation": 1.0},
    ),
    "a report within the block": (
        """
        run = carbon.run(total_steps=4)
        for step in range(4):
            wait(0.2); run.step()
            if step % 2:
                with run.evaluation():
                    wait(0.3)
                    run.report(accuracy=0.9)
                    wait(0.5)
        wait(0.5)
        """,
        {"train": 0.8, "evaluation": 1.6, "after": 0.5},
    ),
    "an evaluation that fails": (
        """
        run = carbon.run(total_steps=2)
        wait(0.3); run.step()
        try:
            with run.evaluation():
                wait(0.5)
                raise ValueError
        except ValueError:
            pass
        wait(0.3); run.step()
        run.report(accuracy=0.9)
        wait(0.5)
        """,
        {"train": 0.6, "evaluation": 0.5, "after": 0.5},
    ),
    "an end by itself": (
        """
        with carbon.run(total_steps=100) as run:
            for _ in range(4):
                wait(0.1); run.step()
            with run.evaluation():
                wait(0.3)
            run.report(accuracy=0.9)
        wait(0.5)
        with run.evaluation():
            wait(0.4)
        """,
        {"train": 0.4, "evaluation": 0.7, "after": 0.5},
    ),
    "steps by numbers that leave some out": (
        """
        run = carbon.run(total_steps=30)
        for step in (1, 10, 10, 30):
            wait(0.2); run.step(step)
        run.report(accuracy=0.9)
        wait(0.5)
        """,
        {"train": 0.8, "after": 0.5},
    ),
    "an end by os._exit": (
        """
        run = carbon.run(total_steps=100)
        for _ in range(3):
            wait(0.6); run.step()
        run.report(accuracy=0.9)
        wait(1)
        import os; os._exit(0)
        """,
        {"train": 1.8, "after": 1.0},
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_steps_and_what_they_need_are_training(name: str, tmp_path: Path) -> None:
    script, seconds = SCRIPTS[name]
    assert_seconds(timed(script, tmp_path), seconds)


def test_a_wrong_total_is_noted_with_both_numbers_and_said(tmp_path: Path) -> None:
    record = timed(SCRIPTS["a total of micro batches"][0], tmp_path)
    assert (record.steps_done, record.total_steps, record.planned_steps) == (10, 10, 40)
    assert TrialRecord.from_json(record.as_json()) == record
    longer = timed(SCRIPTS["more steps than were told"][0], tmp_path)
    assert (longer.steps_done, longer.total_steps, longer.planned_steps) == (7, 7, 4)
    exact = timed(SCRIPTS["checkpoints"][0], tmp_path)
    assert (exact.total_steps, exact.planned_steps) == (4, None)
    assert not list(caveats(StudyView(study(trial(0), trial(1)))))
    (caveat,) = caveats(StudyView(study(trial(0), trial(1, planned_steps=40, steps_done=10))))
    assert (caveat.key, caveat.numbers["planned"]) == ("planned_steps", 40)


@pytest.mark.parametrize(
    ("evaluation", "seconds"),
    [
        ("wait(0.1)\n    ask()", {"evaluation": 0.5}),
        ("with run.evaluation():\n        wait(0.1)\n    ask()", {"evaluation": 0.5}),
        ("with run.evaluation():\n        wait(0.1)\n        ask()", {"evaluation": 0.5}),
        ("ask()", {}),
    ],
    ids=["without a block", "after the block", "in the block", "at once"],
)
def test_time_in_which_the_study_decides_is_no_time_of_the_script(
    evaluation: str, seconds: dict[str, float], tmp_path: Path
) -> None:
    script = f"""run = carbon.run(total_steps=6)
ask = lambda: run.report(accuracy=0.9)
for step in range(1, 7):
    wait(0.1); run.step()
    if step == 6:
        break
    {evaluation}
run.report(accuracy=0.9)
"""
    record = timed(script, tmp_path, should_prune=lambda *_: time.sleep(0.2))
    assert_seconds(record, {"train": 0.6} | seconds)
    assert len(record.evals) == 6


def test_what_follows_the_last_step_does_not_count_for_the_cap(tmp_path: Path) -> None:
    script = """
        run = carbon.run(total_steps=10)
        for _ in range(5):
            wait(0.1); run.step()
        run.report(accuracy=0.9)
        wait(2)
    """
    record = timed(script, tmp_path, cap_kg_co2e=1.7 / 3.6e6)
    assert record.state == TrialState.COMPLETE and record.energy_kwh.train * 3.6e6 < 1.0
    assert record.evals[-1].train_energy_kwh <= record.energy_kwh.train


@pytest.mark.parametrize("projects", [True, False])
def test_steps_that_a_script_may_never_make_cost_nothing(projects: bool, tmp_path: Path) -> None:
    """It announces 60 and stops after 30, as others of its study did."""
    script = """
        run = carbon.run(total_steps=60)
        for _ in range(30):
            wait(0.1); run.step()
        run.report(accuracy=0.9)
    """
    record = timed(script, tmp_path, cap_kg_co2e=4 / 3.6e6, projects_cost=projects)
    stopped = record.state is not TrialState.COMPLETE
    # Nothing is projected while other work slows the trial.
    assert stopped or record.is_contended if projects else not stopped


def test_a_study_whose_trials_stop_early_projects_no_cost() -> None:
    assert may_stop_early([trial(0), trial(1, planned_steps=100, steps_done=40)])
    assert not may_stop_early([trial(0), trial(1, planned_steps=30, steps_done=40)])


def test_a_report_before_the_first_step_is_the_quality_at_the_start(tmp_path: Path) -> None:
    record = timed(SCRIPTS["an evaluation before the first step"][0], tmp_path)
    assert [(point.step, point.value) for point in record.evals] == [(0, 0.1), (4, 0.9)]


@pytest.mark.parametrize(
    ("script", "trains"),
    [("import carbonopt.script, sys; sys.exit(3)", False), ("import sys; sys.exit(3)", True)],
    ids=["with lines", "without"],
)
def test_what_fails_before_a_script_s_first_line_is_its_setup(
    script: str, trains: bool, tmp_path: Path
) -> None:
    record = watched(script, tmp_path)
    assert record.failure.kind == "crash"
    assert (record.energy_kwh.train > 0, record.energy_kwh.setup > 0) == (trains, not trains)


@pytest.mark.parametrize("first", ["run.step(3)", "run.step(0)", "run.step(85)"])
def test_a_training_that_begins_at_another_step_is_refused(first: str, tmp_path: Path) -> None:
    record = timed(
        f"run = carbon.run(total_steps=100)\n{first}\nrun.report(accuracy=0.9)", tmp_path
    )
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert first[9:-1] in record.failure.text


@pytest.mark.parametrize(
    "source", [None, {"pattern": '"accuracy": (.+)}'}], ids=["printed", "read by a pattern"]
)
def test_all_of_a_script_without_lines_is_in_the_stage_of_its_steps(
    source: dict | None, tmp_path: Path
) -> None:
    script = """import time; time.sleep(0.5); print('{"accuracy": 0.5}')"""
    meter = NodeMeters({NODE: OneWatt()}, [1])
    record = watched(script, tmp_path, meter=meter, workload={"quality_from": source})
    assert record.state == TrialState.COMPLETE, record.failure
    assert set(record.stages) == {Stage.STEPS} and record.duration_s.train >= 0.5
    assert record.stages[Stage.STEPS].duration_s == pytest.approx(record.duration_s.train, abs=0.05)
    assert record.stages[Stage.STEPS].energy_kwh == pytest.approx(record.energy_kwh.train)


def test_a_reading_that_falls_leaves_every_stage_with_no_less_than_nothing() -> None:
    """On a busy machine a window's later reading may charge the trial less than an earlier one."""
    meter = ReplayMeter()
    phases = TrialPhases(meter)
    for stage, kwh in ((Stage.DATA, 5e-6), (Stage.MODEL, -1e-6), (Stage.ENGINE, 3e-6)):
        meter.advance(Phase.SETUP, kwh, 0.5)
        time.sleep(1.2 * SHORTEST_S)
        phases.begin(stage)
    energies = [cost["energy_kwh"] for cost in phases.stages.values()]
    assert min(energies) >= 0.0
    assert sum(energies) == pytest.approx(7e-6)


def test_no_part_of_a_phase_is_less_than_nothing() -> None:
    before, after = (
        Reading(cpu_kwh=3e-6, ram_kwh=2e-6, duration_s=1.0),
        Reading(cpu_kwh=4e-6, ram_kwh=1e-6, duration_s=2.0),
    )
    part = after.part_since(before)
    assert part.ram_kwh == 0.0
    assert part.cpu_kwh == pytest.approx(1e-6)
    rest = before.without(after)
    assert rest.cpu_kwh == pytest.approx(-1e-6)
    assert rest.at_least_nothing() == rest.model_copy(update={"cpu_kwh": 0.0, "duration_s": 0.0})
