"""What a trial of several attempts has used: each step counted once, and the sum is exact."""

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import within
from running_studies import open_study, ranks, read, start, wait_for, workers
from small_studies import script_run, script_study
from small_studies import study as small_study
from small_studies import trial as small_trial
from speaking_trials import SPEAKING, JoulePerPhase

from carbonopt.analysis.footprint import footprint
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import (
    Energy,
    Node,
    Phase,
    Stage,
    StageCost,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.energy.meter_reading import Reading
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.report.document import Caveat
from carbonopt.report.sections import trial_conduct_section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import Program, TrialSpec, checkpoint_name
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.hopeless_studies import check_job_is_long_enough
from carbonopt.study.trial_checkpoint import Checkpoint, keep_only
from carbonopt.study.trial_runner import TrialRunner, stored_checkpoint
from carbonopt.study.trial_watch import Rules, TrialWatch, begun_record
from carbonopt.study_file.reader import parse_study

SAVING = """
def saved(step):
    ask("PhaseChanged", phase="setup", stage="saving")
    say("Saved", step=step)
    ask("PhaseChanged", phase="train")
def progress(step):
    say("Progress", step=step, total_steps=100)
"""


def attempt(
    script: str,
    folder: Path,
    earlier: TrialRecord | None = None,
    checkpoint: Checkpoint | None = None,
    program: Program | None = None,
    speaks: bool = True,
    interrupted_at_step: int | None = None,
    **rules: object,
) -> tuple[TrialRecord, list[Checkpoint], list[TrialRecord]]:
    """One attempt whose process runs this script; each window of a phase has 1 kWh and 1 s.

    Returns its record, the checkpoints that it stored, and its records as they were stored.
    """
    spec = TrialSpec(
        number=3,
        attempt=1 if earlier is None else earlier.attempt + 1,
        seed=0,
        params=TrialParams(
            global_batch_size=8, micro_batch_size_per_gpu=8, learning_rate=1e-3, epochs=1
        ),
        workload={},
        prepared_dir=str(folder),
        trial_dir=str(folder),
        program=program,
    )

    def is_interrupted() -> bool:
        return watch.so_far.steps_done == interrupted_at_step is not None

    settings = {
        "emissions_kg_co2e": lambda energy_kwh: energy_kwh * 10,
        "budget_spent": lambda: False,
        "interrupted": is_interrupted,
        "timeout_s": 60.0,
    } | rules
    meter = JoulePerPhase()
    meter.enter(Phase.SETUP)
    argv = [sys.executable, "-c", (SPEAKING + SAVING) * speaks + textwrap.dedent(script)]
    checkpoints: list[Checkpoint] = []
    stored: list[TrialRecord] = []

    def store_checkpoint(checkpoint: Checkpoint) -> bool:
        checkpoints.append(checkpoint)
        return True

    watch = TrialWatch(
        spec=spec,
        so_far=begun_record(spec, PERPLEXITY, "worker", earlier),
        trial=WorkProcesses(argv, [{}], dict(os.environ), folder / "log.txt"),
        meter=meter,
        rules=Rules(**settings),
        observers=[],
        progress=lambda *_: None,
        store=stored.append,
        checkpoint=checkpoint,
        store_checkpoint=store_checkpoint,
    )
    record = watch.run()
    return record, [Checkpoint.from_text(each.as_text(), 3) for each in checkpoints], stored


FIRST = """
progress(10)
evaluated(20, 3.0)
saved(40)
evaluated(60, 2.0)
progress(70)
os._exit(9)
"""


def test_two_attempts_count_each_step_once(tmp_path: Path) -> None:
    """The first one is charged for 1 window of set-up and 1 of its end, 4 of training, 2 of
    evaluations and 1 of saving; when it saved, it had 2 of training, 1 of evaluation, 1 of each
    other.
    """
    first, (saved,), stored = attempt(FIRST, tmp_path)
    assert (first.state, first.stop_reason) == (TrialState.FAILED, StopReason.INTERRUPTED)
    assert first.failure is not None, "it crashed, and goes on"
    assert (first.energy_kwh.train, first.energy_kwh.eval) == (4.0, 2.0)
    assert first.energy_kwh.total == 9.0
    assert saved.step == 40 and [point.step for point in saved.record.evals] == [20]
    kept = saved.record.energy_kwh
    assert (kept.train, kept.setup, kept.eval) == (2.0, 2.0, 1.0)
    assert saved.spent_kwh == 5.0
    assert any(record.energy_kwh == kept for record in stored), "stored before its checkpoint"

    second, (again,), _ = attempt(
        'say("Continued", step=40)\nprogress(41)\nsaved(50)\nevaluated(60, 2.0)\nevaluated(100, 1.0)'
        '\nsay("Finished", summary={})',
        tmp_path,
        first,
        saved,
    )
    assert second.state is TrialState.COMPLETE and second.attempt == 2
    assert second.continued_at_steps == (40,)
    (before,) = second.earlier_attempts
    assert before.started_at == first.started_at == second.counted_from == second.first_started_at
    assert before.counted_s == pytest.approx(5.0), "its windows until it saved"
    own_s = (second.span[1] - second.span[0]).total_seconds()
    assert own_s == pytest.approx(second.duration_s.total - 5.0, abs=1e-3)
    assert second.span[0].isoformat(timespec="milliseconds") == second.started_at
    assert [point.step for point in second.evals] == [20, 60, 100]
    assert second.earlier_attempts_energy_kwh == 9.0 - 5.0, "what was lost"
    own = second.energy_kwh
    assert second.spent_kwh == 9.0 + (own.total - 5.0)
    # its own windows: training before it said where it goes on, after saving, after an evaluation
    assert own.train == 2.0 + 4.0 and own.eval == 1.0 + 2.0
    assert second.emissions_kg_co2e == own.train * 10
    assert [point.train_energy_kwh for point in second.evals] == [1.0, 4.0, 5.0]
    for each in (saved, again):
        stages = each.stages.values()
        assert sum(stage.energy_kwh for stage in stages) == pytest.approx(each.spent_kwh)
    assert again.step == 50 and again.record.continued_at_steps == (40,)
    assert again.spent_kwh == saved.spent_kwh + 3.0
    json.dumps(second.as_json(), allow_nan=False)
    assert TrialRecord.from_json(second.as_json()) == second


def test_budget_counts_what_was_used_before_the_checkpoint_beside_other_workers() -> None:
    """It had used 5 kWh by its checkpoint and 2 after it in vain, and 1 since; others used 4."""
    meter = JoulePerPhase()
    meter.enter(Phase.TRAIN)
    used = Energy(train=6.0, setup=0.0, eval=0.0, total=6.0)
    running = small_trial(
        1,
        perplexity=None,
        state=TrialState.RUNNING,
        energy_kwh=used,
        earlier_attempts_energy_kwh=2.0,
    )
    of_others = Energy(train=4.0, setup=0.0, eval=0.0, total=4.0)
    data = small_study(small_trial(0, energy_kwh=of_others), running, sessions=())
    engine = SimpleNamespace(meter=meter)
    runner = TrialRunner(
        SimpleNamespace(
            checked=SimpleNamespace(engine=engine), display=None, trackers=None, notifications=None
        ),
        SimpleNamespace(snapshot=lambda living: SimpleNamespace(data=data)),
        SimpleNamespace(living={"one", "another"}),
        account=None,
        budget=SimpleNamespace(limits_energy=True),
    )
    runner._look_at_others()
    assert runner._spent_elsewhere_kwh == 4.0 + 5.0 + 2.0


def test_attempt_that_begins_again_counts_nothing_of_the_earlier_one(tmp_path: Path) -> None:
    """Its checkpoint was damaged, say: no step of the earlier attempt is part of the trial."""
    first, (saved,), _ = attempt(FIRST, tmp_path)
    script = 'progress(1)\nevaluated(100, 1.0)\nsay("Finished", summary={})'
    again, _, _ = attempt(script, tmp_path, first, saved)
    plain, _, _ = attempt(script, tmp_path)
    assert again.continued_at_steps == () and "continued_at_steps" not in again.as_json()
    assert again.energy_kwh == plain.energy_kwh and again.evals == plain.evals
    assert (again.first_started_at, again.counted_from) == (first.started_at, again.started_at)
    assert len(again.spans) == 1
    assert again.earlier_attempts_energy_kwh == first.spent_kwh == 9.0


def test_attempt_cut_in_its_set_up_loses_only_that(tmp_path: Path) -> None:
    """A third one still goes on from the first one's checkpoint, and the sum is exact."""
    first, (saved,), _ = attempt(FIRST, tmp_path)
    second, none, _ = attempt("os._exit(9)", tmp_path, first, saved)
    assert none == [] and second.stop_reason is None, "it came no further: it has failed"
    assert second.earlier_attempts_energy_kwh == 9.0
    third, _, _ = attempt(
        'say("Continued", step=40)\nevaluated(100, 1.0)\nsay("Finished", summary={})',
        tmp_path, second, saved,
    )  # fmt: skip
    lost = 9.0 + second.energy_kwh.total - saved.spent_kwh
    assert third.earlier_attempts_energy_kwh == lost
    assert [each.counted_s for each in third.earlier_attempts] == [pytest.approx(5.0), 0.0]
    assert [each.started_at for each in third.earlier_attempts] == [
        first.started_at,
        second.started_at,
    ]
    assert len(third.spans) == 2
    assert third.spent_kwh == lost + third.energy_kwh.total


def test_cap_sees_the_sum(tmp_path: Path) -> None:
    first, (saved,), _ = attempt(FIRST, tmp_path)
    capped, _, _ = attempt(
        'say("Continued", step=40)\nprogress(50)\ntime.sleep(600)',
        tmp_path, first, saved, cap_kg_co2e=25.0,
    )  # fmt: skip
    assert (capped.state, capped.stop_reason) == (TrialState.PRUNED, StopReason.CAP)
    assert capped.energy_kwh.train == 3.0, "neither attempt alone has 2.5 kWh"


def test_trial_goes_on_only_from_its_own_checkpoint(tmp_path: Path) -> None:
    first, (saved,), _ = attempt(FIRST, tmp_path)
    record, _, _ = attempt('say("Continued", step=39)\ntime.sleep(600)', tmp_path, first, saved)
    assert record.state is TrialState.FAILED and "39" in record.failure.text


OWN = Program(argv=(), folder="/", environment={}, keeps_checkpoints=True)
SCRIPT_BEGUN = """
progress(1)
evaluated(20, 3.0)
progress(30)
time.sleep(600)
"""


def interrupted_soon() -> Callable[[], bool]:
    until_s = time.monotonic() + 0.6
    return lambda: time.monotonic() > until_s


def test_attempts_of_a_script_that_saves_itself_are_added_up(tmp_path: Path) -> None:
    """Also one that is cut off before its first step, and one that makes some steps again."""
    first, kept, _ = attempt(SCRIPT_BEGUN, tmp_path, program=OWN, interrupted_at_step=30)
    assert first.stop_reason is StopReason.INTERRUPTED and kept[-1].record.steps_done == 30
    assert kept[-1].spent_kwh == pytest.approx(first.energy_kwh.total)
    second, cut, _ = attempt(
        "time.sleep(600)", tmp_path, first, kept[-1], OWN, interrupted=interrupted_soon()
    )
    assert second.spent_kwh > first.spent_kwh and second.earlier_attempts_energy_kwh == 0.0
    assert second.energy_kwh.train > first.energy_kwh.train
    rest = "progress(26)\nevaluated(100, 1.0)\nos._exit(0)"
    third, _, _ = attempt(rest, tmp_path, second, cut[-1], OWN)
    assert (third.state, third.attempt) == (TrialState.COMPLETE, 3)
    assert third.continued_at_steps[-1] == 25 and third.earlier_attempts_energy_kwh == 0.0
    assert [point.step for point in third.evals] == [20, 100]
    alone, _, _ = attempt(rest, tmp_path, program=OWN)
    assert third.energy_kwh.total == pytest.approx(second.energy_kwh.total + alone.energy_kwh.total)
    assert third.energy_kwh.train == pytest.approx(second.energy_kwh.train + alone.energy_kwh.train)


@pytest.mark.parametrize(("begins_with", "lost"), [(36, 0), (37, 1), (90, 54)])
def test_steps_that_a_killed_study_has_not_measured_are_counted(
    begins_with: int, lost: int, tmp_path: Path
) -> None:
    """A step takes 0.2 s here: five may have been measured after the last report."""
    first, kept, _ = attempt(SCRIPT_BEGUN, tmp_path, program=OWN, interrupted_at_step=30)
    (stored,) = kept[-1:]
    train = stored.readings[Phase.TRAIN].model_copy(update={"duration_s": 6.0})  # 0.2 s a step
    readings = stored.readings | {Phase.TRAIN: train}
    killed = stored.model_copy(update={"readings": readings})
    script = f"progress({begins_with})\nevaluated(100, 1.0)\nos._exit(0)"
    second, _, _ = attempt(script, tmp_path, first, killed, OWN)
    assert second.unmeasured_steps == (lost or None)
    if lost > 1:
        assert (second.state, second.failure.kind) == (TrialState.FAILED, "unmeasured")
    else:
        assert second.state is TrialState.COMPLETE


def test_script_that_begins_again_counts_alone(tmp_path: Path) -> None:
    first, kept, _ = attempt(SCRIPT_BEGUN, tmp_path, program=OWN, interrupted_at_step=30)
    script = "progress(1)\nevaluated(100, 1.0)\nos._exit(0)"
    again, _, _ = attempt(script, tmp_path, first, kept[-1], OWN)
    alone, _, _ = attempt(script, tmp_path, program=OWN)
    assert again.energy_kwh == alone.energy_kwh and again.evals == alone.evals
    assert again.continued_at_steps == ()
    assert again.earlier_attempts_energy_kwh == pytest.approx(first.energy_kwh.total)


def test_attempts_of_a_script_without_lines_are_all_training(tmp_path: Path) -> None:
    wait, end = "import time; time.sleep(600)", """print('{"perplexity": 5.0}')"""
    cut = {"program": OWN, "speaks": False}
    first, kept, _ = attempt(wait, tmp_path, **cut, interrupted=interrupted_soon())
    last, _, _ = attempt(end, tmp_path, first, kept[-1], **cut)
    assert (last.state, last.value) == (TrialState.COMPLETE, pytest.approx(5.0))
    assert last.earlier_attempts_energy_kwh == 0.0
    assert last.energy_kwh.train == last.energy_kwh.total > first.energy_kwh.total > 0


def test_readings_of_several_machines_survive_the_storage() -> None:
    part = Reading(gpu_kwh=1.0, cpu_kwh=0.5, ram_kwh=None, duration_s=3.0, disagreement=-0.01)
    reading = part + Reading(nodes={Node(name="a", devices=("GPU-1",)): part}, utilisation_sum=0.3)
    assert Reading.from_json(json.loads(json.dumps(reading.as_json()))) == reading


def test_damaged_checkpoint_of_the_storage_is_refused(tmp_path: Path) -> None:
    _, (saved,), _ = attempt(FIRST, tmp_path)
    for text in (
        "",
        "{}",
        saved.as_text()[:-9],
        saved.as_text().replace('"step": 40', '"step": -1'),
    ):
        with pytest.raises(BadInput, match="trial 3"):
            Checkpoint.from_text(text, 3)


def test_slurm_job_too_short_for_a_checkpoint_ends_the_study(tmp_path: Path) -> None:
    first, (saved,), _ = attempt(FIRST, tmp_path)
    config = parse_study(
        {
            "name": "jobs",
            "workload": {"task": "script", "command": "python train.py {lr}"},
            "target": {"accuracy": 0.5},
            "search": {"space": {"lr": {"choices": [1, 2]}}},
            "budget": {"trials": 2},
            "carbon": {"intensity_g_co2e_per_kwh": 500},
            "launch": {"kind": "slurm", "gpus_per_node": 0, "time": 15},
        },
        "test",
    )
    durations = first.duration_s.model_copy(update={"total": 890.0})
    cut = first.model_copy(update={"duration_s": durations})
    with pytest.raises(CarbonoptError, match="trial 3"):
        check_job_is_long_enough(cut, None, small_study(cut), config)
    check_job_is_long_enough(cut, saved, small_study(cut), config)  # the attempt came to step 40
    stuck = cut.model_copy(update={"continued_at_steps": (40,)})
    with pytest.raises(CarbonoptError, match="trial 3"):
        check_job_is_long_enough(stuck, saved, small_study(stuck), config)
    own = saved.record.duration_s.total  # of the 890 s, these are the first attempt's
    assert own > 0


def test_trial_that_is_cut_twice_in_jobs_that_it_began_ends_the_study(tmp_path: Path) -> None:
    first, _, _ = attempt(FIRST, tmp_path)
    jobs = {"kind": "slurm", "gpus_per_node": 0, "time": 20}  # of which trials have 900 s

    def check(seconds: float, attempt: int, *others: TrialRecord, **changes: object) -> None:
        study = small_study(raw={"launch": jobs, **changes}).config
        durations = first.duration_s.model_copy(update={"total": seconds})
        cut = first.model_copy(update={"duration_s": durations, "attempt": attempt})
        check_job_is_long_enough(cut, None, small_study(cut, *others), study)

    before = first.model_copy(update={"trial": 2, "started_at": "2020-01-01T00:00:00+00:00"})
    check(600.0, 1)
    check(600.0, 2, before)  # another trial had begun that job
    check(300.0, 2)  # preempted, say
    with pytest.raises(CarbonoptError, match="trial 3"):
        check(600.0, 2)
    check(600.0, 2, checkpoint={"every_minutes": 10})
    with pytest.raises(CarbonoptError, match="trial 3"):
        check(600.0, 2, checkpoint={"every_minutes": 30})  # it would never be saved


def test_report_names_what_went_on() -> None:
    """Once for carbonopt's own trainings, whose lost work is the study's; scripts add all up."""
    lost = {"continued_at_steps": (40,), "attempt": 2, "earlier_attempts_energy_kwh": 2e-3}
    assert caveats_of(small_study(small_trial(0), small_trial(1))) == []
    (told,) = caveats_of(small_study(small_trial(0), small_trial(1, **lost)))
    assert told.key == "continued"
    assert (told.numbers["trials"], told.numbers["kwh"]) == ([1], 2e-3)
    run = script_run(0, 30.0, **{**lost, "earlier_attempts_energy_kwh": 0.0})
    assert [each.key for each in caveats_of(script_study(run))] == ["continued_script"]


@pytest.mark.parametrize("of_script", [True, False])
def test_report_says_that_lost_steps_may_have_stopped_a_scripts_trial(of_script: bool) -> None:
    capped = {"state": TrialState.PRUNED, "stop_reason": StopReason.CAP}
    changes = {**capped, "continued_at_steps": (40,), "attempt": 2}
    if of_script:
        data = script_study(script_run(0, 30.0), script_run(1, 30.0, **changes))
    else:
        data = small_study(small_trial(0), small_trial(1, **changes))
    told = {each.key: each.numbers for each in caveats_of(data)}
    assert told.get("continued_script_pruned") == ({"trials": [1]} if of_script else None)


def caveats_of(data: StudyData) -> list[Caveat]:
    told = trial_conduct_section.caveats(StudyView(data))
    return [each for each in told if each.key.startswith("continued")]


def test_steps_of_several_attempts_have_a_mean_energy() -> None:
    """Each attempt has a first step of its own, which is no mean one."""
    stages = {
        Stage.COMPILE: StageCost(duration_s=2.0, energy_kwh=3.0),
        Stage.STEPS: StageCost(duration_s=8.0, energy_kwh=8.0),
    }
    record = small_trial(0, stages=stages, steps_done=10, continued_at_steps=(4,))
    assert record.step_kwh == 1.0 and record.first_step_excess_kwh == 0.5


def test_tidying_keeps_one(tmp_path: Path) -> None:
    for name in (checkpoint_name(4), checkpoint_name(40), ".step-50.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.pt").write_text("")
    (tmp_path / "mine.txt").write_text("")
    keep_only(tmp_path, 40)
    assert (tmp_path / "mine.txt").exists()
    (tmp_path / "mine.txt").unlink()
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(40)]
    keep_only(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf"), "x"])
def test_impossible_intervals_are_refused(minutes: object, tiny_study: dict) -> None:
    with pytest.raises(BadInput, match=r"checkpoint\.every_minutes"):
        parse_study({**tiny_study, "checkpoint": {"every_minutes": minutes}}, "test")


def test_checkpoint_needs_a_training_of_carbonopts(tiny_study: dict, replay_study: dict) -> None:
    given = {"checkpoint": {"every_minutes": 30}}
    assert parse_study({**tiny_study, **given}, "test").checkpoint.every_minutes == 30
    with pytest.raises(BadInput, match="replay"):
        parse_study({**replay_study, **given}, "test")
    script = {**tiny_study, **given, "workload": {"task": "script", "command": "python t.py {lr}"}}
    script["search"] = {"space": {"lr": 1}}
    with pytest.raises(BadInput, match="checkpoint_dir"):
        parse_study(script, "test")


# ------------------------------------------------------------------------------------------------------
# real trials


@pytest.fixture
def saving_study(tiny_study: dict) -> dict:
    """One trial of some seconds, saved several times a second."""
    tiny_study["workload"]["evaluations"] = 6
    tiny_study["search"]["space"] = {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 0.4}
    tiny_study["search"]["pruning"] = {"target": False, "cap": False}
    tiny_study["budget"] = {"trials": 1}
    tiny_study["checkpoint"] = {"every_minutes": 0.005}
    return tiny_study


def points(record: TrialRecord) -> list[tuple]:
    return [(point.step, point.value, point.sum, point.count) for point in record.evals]


def has_saved(folder: Path, fewest: int = 1) -> bool:
    """Return whether the study has stored a checkpoint of trial 0 from a step on."""
    if not StudyPaths(folder).trial(0).exists():
        return False
    checkpoint = stored_checkpoint(open_study(folder).snapshot(), 0)
    return checkpoint is not None and checkpoint.step >= fewest


def assert_exact(folder: Path) -> None:
    data = read(folder)
    for record in data.records:
        energy, stages = record.energy_kwh, record.stages
        assert energy.train + energy.setup + energy.eval == pytest.approx(energy.total, rel=1e-9)
        assert sum(stage.energy_kwh for stage in stages.values()) == pytest.approx(
            energy.total, rel=1e-6
        )
        # The meter reads every 0.05 s: that is what each attempt's beginning and end are known to.
        attempts = 1 + len(record.continued_at_steps)
        assert sum(stage.duration_s for stage in stages.values()) == pytest.approx(
            record.duration_s.total, abs=0.1 * attempts
        )
    assert footprint(data).closure == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_study_goes_on_at_the_last_checkpoint(saving_study: dict, write_study, tmp_path: Path):
    """SIGKILL of the study, then of the rank, then it ends: the digits of a trial without cuts."""
    plain = {key: value for key, value in saving_study.items() if key != "checkpoint"}
    assert (
        within("run", write_study(plain, "plain.yaml"), "--out", tmp_path / "plain").returncode == 0
    )
    (whole,) = read(tmp_path / "plain").records
    assert Stage.SAVING not in whole.stages and whole.state is TrialState.COMPLETE

    study, folder = write_study(saving_study), tmp_path / "out"
    command = start(study, folder)
    wait_for(lambda: has_saved(folder, 10))
    command.kill()
    command.wait()
    wait_for(lambda: workers(folder) == [], 15)
    (killed,) = read(folder).records
    assert (killed.state, killed.stop_reason) == (TrialState.FAILED, StopReason.INTERRUPTED)

    command = start(study, folder)
    wait_for(lambda: read(folder).records[0].attempt == 2 and has_saved(folder, 100))
    for pid in ranks(folder):
        os.kill(pid, signal.SIGKILL)
    _, errors = command.communicate(timeout=240)
    assert command.returncode in (0, 3), errors
    data = read(folder)
    (record,) = data.records
    assert (record.state, record.attempt) == (TrialState.COMPLETE, 3), errors
    first, second = record.continued_at_steps
    assert 0 < first < second  # the last that the study had stored
    assert points(record) == points(whole)
    assert record.value == whole.value and record.steps_done == whole.steps_done
    assert record.stages[Stage.SAVING].duration_s > 0
    assert record.earlier_attempts_energy_kwh > 0
    assert_exact(folder)
    assert len(data.sessions) == 2, "the crash ended no session"
    assert not StudyPaths(folder).trial_checkpoints(0).exists()
    report = json.loads((folder / "report" / "data" / "report.json").read_text())
    assert report


@pytest.mark.slow
def test_kill_in_the_middle_of_writing(saving_study: dict, write_study, tmp_path: Path) -> None:
    """What is half written is neither read nor kept; the one before is."""
    study, folder = write_study(saving_study), tmp_path / "out"
    command = start(study, folder)
    wait_for(lambda: has_saved(folder, 10))
    trial = StudyPaths(folder).trial_checkpoints(0)
    deadline = time.monotonic() + 60
    while not list(trial.glob(".*.part")):
        assert time.monotonic() < deadline
    command.kill()
    command.wait()
    wait_for(lambda: workers(folder) == [], 15)
    done = within("run", study, "--out", folder)
    assert done.returncode in (0, 3), done.stderr
    (record,) = read(folder).records
    assert record.state is TrialState.COMPLETE and record.continued_at_steps[0] > 0
    assert_exact(folder)


# It saves its step every time, and takes a moment for each. Its first attempt is cut off, for which
# it waits.
RESUMING = """
import json, pathlib, sys, time
import carbonopt.script as carbon
folder = pathlib.Path(sys.argv[1])
saved = folder / "step.json"
begin = json.loads(saved.read_text()) if saved.exists() else 0
print("begins after", begin, folder.is_dir())
run = carbon.run(total_steps=90)
for step in range(begin + 1, 91):
    time.sleep(0.1)
    run.step(step)
    if step % 30 == 0:  # before it saves, so that no cut can skip the report
        run.report(accuracy=step / 100, count=100)
    with run.saving():
        (folder / "part").write_text(json.dumps(step))
        (folder / "part").rename(saved)
    if begin == 0 and step == 40:
        time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_script_that_saves_itself_goes_on(
    saves: bool, tiny_study: dict, write_study, tmp_path: Path
) -> None:
    """With {checkpoint_dir} all attempts are the trial's; without it the first step is refused."""
    (tmp_path / "train.py").write_text(RESUMING)
    own = tmp_path / "own"
    own.mkdir()
    given = "{checkpoint_dir}" if saves else own
    tiny_study["workload"] = {
        "task": "script",
        "command": f"{sys.executable} train.py {given} {{my_width}}",
    }
    tiny_study["target"] = {"accuracy": 0.5}
    tiny_study["search"] = {"space": {"my_width": {"choices": [1]}}}
    tiny_study["budget"] = {"trials": 1}
    study, folder = write_study(tiny_study), tmp_path / "out"

    def steps() -> int:
        records = read(folder).records if (folder / "study.db").exists() else ()
        return (records[0].steps_done or 0) if records else 0

    command = start(study, folder)
    wait_for(lambda: StudyPaths(folder).trial(0).exists() and steps() >= 32)
    os.killpg(command.pid, signal.SIGINT)
    command.communicate(timeout=60)
    assert command.returncode == 130
    (cut,) = read(folder).records
    assert cut.stop_reason is StopReason.INTERRUPTED and 32 <= cut.steps_done < 90

    done = within("run", study, "--out", folder)
    (record,) = read(folder).records
    if not saves:
        assert record.state is TrialState.FAILED and "first step" in record.failure.text
        assert record.earlier_attempts_energy_kwh == pytest.approx(cut.energy_kwh.total)
        return
    assert done.returncode == 0, done.stderr
    assert (record.state, record.attempt, record.value) == (TrialState.COMPLETE, 2, 0.9)
    assert record.earlier_attempts_energy_kwh == pytest.approx(0.0, abs=1e-12)
    assert record.energy_kwh.train > cut.energy_kwh.train
    assert record.energy_kwh.total > cut.energy_kwh.total
    (begun,) = record.continued_at_steps
    # The cut may fall between the script's last step and the saving of it.
    assert begun >= cut.steps_done - 1
    assert [point.step for point in record.evals] == [30, 60, 90]
    energies = [point.train_energy_kwh for point in record.evals]
    assert energies == sorted(energies) and energies[-1] <= record.energy_kwh.train
    assert not StudyPaths(folder).trial_checkpoints(0).exists()
    assert_exact(folder)
