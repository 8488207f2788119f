"""A user's own training script: what its lines tell the study, and how it ends without them."""

import json
import os
import py_compile
import shlex
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import yaml
from commands import refusal, within

from carbonopt.cli.check_text import describe_study
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY, quality_of
from carbonopt.core.trial import Forecast, Phase, StopReason, TrialRecord, TrialState
from carbonopt.energy.cpu_time import CpuTime
from carbonopt.energy.replay_meter import ReplayMeter
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.spec.quality_source import QualitySource
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trial_watch import Rules, TrialWatch, begun_record
from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_checks import check
from carbonopt.train.scripts.script_values import points
from carbonopt.train.tasks.script import Script, ScriptWorkload

LOOP = """
import carbonopt.script as carbon
run = carbon.run(total_steps=6)
for step in range(1, 7):
    run.step(step)
    if step % 2 == 0:
        with run.evaluation():
            accuracy = step / 8
        if run.report(accuracy=accuracy, count=8, loss=1 - accuracy):
            print("told to stop")
            break
"""
PARAMS = TrialParams(learning_rate=0.5, my_width=3, zero_stage=None, offload=None)


class JoulePerPhase(ReplayMeter):
    """Charges 1 kWh in every window that is opened."""

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.advance(phase, 1.0, 1.0)


PYTHON = shlex.quote(sys.executable)


def watched(
    script: str,
    folder: Path,
    *,
    quality: str = "accuracy",
    steps: int | None = None,
    meter: ReplayMeter | None = None,
    command: str = f"{PYTHON} train.py {{learning_rate}} {{my_width}}",
    params: TrialParams = PARAMS,
    workload: dict | None = None,
    looks: list[float] | None = None,
    warned: list[str] | None = None,
    **rules,
) -> TrialRecord:
    """The record of a trial that runs this script.

    `looks` gets its energy at each look at it, and `warned` the messages for the user.
    """
    looks = [] if looks is None else looks
    (folder / "train.py").write_text(textwrap.dedent(script))
    (folder / "trial").mkdir(exist_ok=True)
    task = Script(
        ScriptWorkload(command=command, folder=str(folder), steps=steps, **(workload or {}))
    )
    spec = TrialSpec(
        number=3,
        attempt=1,
        seed=7,
        params=params,
        workload={},
        prepared_dir="",
        trial_dir=str(folder / "trial"),
    )
    judged_by = quality_of(quality, "maximize")
    program = task.program(spec, judged_by)
    for path, text in program.files.items():
        Path(path).write_text(text)
    settings = {
        **dict.fromkeys(("should_prune", "cap_kg_co2e")),
        "audit": False,
        "emissions_kg_co2e": lambda energy_kwh: energy_kwh,
        "budget_spent": lambda: False,
        "interrupted": lambda: False,
        "timeout_s": 60.0,
    } | rules
    meter = meter or JoulePerPhase()
    meter.enter(Phase.SETUP)
    environment = {**os.environ, **program.environment}
    log = folder / "log.txt"
    trial = WorkProcesses(
        [*program.argv], [{}], environment, log, folder=program.folder, invites=True
    )
    trial.cpu_time.become_trial()
    return TrialWatch(
        spec=spec.model_copy(update={"program": program}),
        so_far=begun_record(spec, judged_by, "worker", None),
        trial=trial,
        meter=meter,
        rules=Rules(**settings),
        observers=[],
        progress=lambda *_: None,
        still_running=looks.append,
        store=lambda record: None,
        warn=([] if warned is None else warned).append,
    ).run()


def test_a_loop_tells_its_phases_steps_and_evaluations(tmp_path: Path) -> None:
    record = watched(LOOP, tmp_path)
    assert (record.state, record.value, record.total_steps) == (TrialState.COMPLETE, 0.75, 6)
    assert [(point.step, point.sum, point.count) for point in record.evals] == [
        (2, 2, 8),
        (4, 4, 8),
        (6, 6, 8),
    ]
    assert record.evals[-1].other_qualities == {"loss": 0.25}
    # Training begins once and again after each evaluation but the last; set-up once before it, and
    # after its end.
    energy = record.energy_kwh
    assert (energy.train, energy.eval, energy.setup) == (3.0, 3.0, 2.0)
    assert record.peak_memory_gib > 0
    assert 0 <= record.cpu_wait_fraction < 1


def test_waiting_of_a_script_without_lines_is_read_from_outside(tmp_path: Path) -> None:
    script = """
    import os, time
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    os.fork()  # two processes on one core
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        pass
    print('{"accuracy": 0.5}')
    """
    looks: list[float] = []
    record = watched(script, tmp_path, looks=looks)
    assert record.state == TrialState.COMPLETE
    assert len(looks) >= 3 and looks[-1] > 0, "two a second"
    if CpuTime(1.0, 0.0).wait_fraction(1.0) is None:
        pytest.skip("this kernel doesn't tell for how long threads wait")
    assert record.cpu_wait_fraction > 0.3 and record.is_contended


def test_outside_a_study_the_lines_do_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP + "print(accuracy)\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("CARBONOPT")
    }
    program = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.75\n", "")


def test_the_lines_import_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, carbonopt.script; print(sorted({'torch', 'transformers', 'optuna', 'numpy'} &"
        " set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_a_study_can_stop_it_at_an_evaluation(tmp_path: Path) -> None:
    forecast = Forecast(step=4, value=0.4, sds_short=3.0, sds_needed=2.0, checked_trials=3)
    stops = {(4, 6): forecast}
    record = watched(
        LOOP, tmp_path, should_prune=lambda evals, total: stops.get((evals[-1].step, total))
    )
    assert (record.state, record.stop_reason) == (TrialState.PRUNED, StopReason.TARGET)
    assert [point.step for point in record.evals] == [2, 4]


def test_its_command_has_the_configuration(tmp_path: Path) -> None:
    script = (
        'import json, os, sys; print(json.dumps({"accuracy": 0.5, "argv": sys.argv[1:], "cwd":'
        " os.getcwd()}))"
    )
    record = watched(script, tmp_path)
    assert record.value == 0.5
    said = json.loads((tmp_path / "log.txt").read_text())
    assert said["argv"] == ["0.5", "3"] and said["cwd"] == str(tmp_path)


def test_without_the_lines_a_last_json_line_is_enough_and_all_energy_counts_as_training(
    tmp_path: Path,
) -> None:
    script = """
        print("{not json")
        print('{"accuracy": 0.25}')
        print('{"accuracy": 0.75, "count": 200, "step": 40}')
        print("bye")
    """
    record = watched(script, tmp_path)
    assert (record.state, record.value, record.steps_done) == (TrialState.COMPLETE, 0.75, 40)
    assert (record.quality.sum, record.quality.count) == (150, 200)
    assert (record.energy_kwh.train, record.energy_kwh.setup, record.energy_kwh.eval) == (
        1.0,
        0.0,
        0.0,
    )


def test_a_loop_that_ends_early_ends_its_training_there(tmp_path: Path) -> None:
    script = """
        import carbonopt.script as carbon
        with carbon.run(total_steps=6) as run:
            run.step()
            run.report(accuracy=0.5)
        print("what comes now is no training")
    """
    record = watched(script, tmp_path)
    assert (record.state, record.total_steps, record.steps_done) == (TrialState.COMPLETE, 1, 1)
    assert (record.energy_kwh.train, record.energy_kwh.setup) == (1.0, 2.0)


PHASES = {
    "within another": "with run.evaluation(), run.evaluation(): pass",
    "one that fails": (
        """
try:
    with run.evaluation():
        raise ValueError("a batch that can't be read")
except ValueError:
    pass
"""
    ),
}


@pytest.mark.parametrize("evaluation", PHASES)
def test_training_goes_on_after_any_evaluation(evaluation: str, tmp_path: Path) -> None:
    begin = "import carbonopt.script as carbon\nrun = carbon.run(total_steps=2)\nrun.step()\n"
    record = watched(
        begin + PHASES[evaluation] + "\nrun.step()\nrun.report(accuracy=0.5)\n", tmp_path
    )
    assert (record.state, record.value) == (TrialState.COMPLETE, 0.5)
    assert (record.energy_kwh.train, record.energy_kwh.eval) == (2.0, 1.0)


def test_what_a_script_forks_does_not_speak_for_it(tmp_path: Path) -> None:
    script = """
        import os
        import carbonopt.script as carbon
        run = carbon.run(total_steps=2)
        run.step()
        if os.fork() == 0:
            run.step(2)
            run.report(accuracy=0.9)
            os._exit(0)
        os.wait()
        run.step()
        run.report(accuracy=0.5)
    """
    record = watched(script, tmp_path)
    assert [(point.step, point.value) for point in record.evals] == [(2, 0.5)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_training_in_a_process_of_its_own_is_named_where_it_is_not_heard(
    method: str, tmp_path: Path
) -> None:
    script = f"""
        import multiprocessing
        import carbonopt.script as carbon
        def train(run):
            run.step()
            run.report(accuracy=0.9)
        if __name__ == "__main__":
            run = carbon.run(total_steps=1)
            child = multiprocessing.get_context("{method}").Process(target=train, args=(run,))
            child.start()
            child.join()
    """
    record = watched(script, tmp_path)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "no_quality")
    assert "made no step" in record.failure.text and "forks" in record.failure.text


def test_steps_are_known_where_the_quality_is_printed(tmp_path: Path) -> None:
    record = watched(BEGIN + "    run.step()\n" + PRINTED("{'accuracy': 0.5}"), tmp_path)
    assert (record.state, record.value, record.evals[-1].step) == (TrialState.COMPLETE, 0.5, 2)


def test_a_script_may_remove_its_log(tmp_path: Path) -> None:
    removed = f"import pathlib; pathlib.Path({str(tmp_path / 'log.txt')!r}).unlink()\n"
    record = watched(
        removed + BEGIN + "    run.report(accuracy=0.5)\n" + "raise SystemExit(3)", tmp_path
    )
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "crash")
    assert "can't be read: No such file" in record.failure.text


def test_of_a_long_line_the_record_has_the_end(tmp_path: Path) -> None:
    record = watched("print('x' * 3_000_000, 'the end')\nraise SystemExit(3)", tmp_path)
    assert record.failure.text.endswith("xxx the end") and len(record.failure.text) < 20_000


@pytest.mark.slow
def test_a_callback_without_its_metric_says_which_there_are(tmp_path: Path) -> None:
    script = """
        from types import SimpleNamespace as Having
        import carbonopt.script as carbon
        trainer, control = carbon.callback("eval_accuracy"), Having(should_evaluate=True, should_training_stop=False)
        trainer.on_train_begin(None, Having(max_steps=2), control)
        for step in (1, 2):
            trainer.on_step_end(None, Having(global_step=step), control)
            trainer.on_evaluate(None, None, control, metrics={"eval_loss": 1.0, "eval_acc": 0.5})
        trainer.on_train_end(None, None, control)
    """
    record = watched(script, tmp_path)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "'eval_accuracy' is none of eval_loss, eval_acc" in record.failure.text


CALLBACKS = {
    "Trainer": ('callback("eval_{}")', "Having(max_steps=2), None"),
    "Trainer, without eval_": ('callback("{}")', "Having(max_steps=2), None"),
    "Lightning": ('lightning_callback("val_{}")', "None"),
    "Lightning, another prefix": ('lightning_callback("valid_{}")', "None"),
}


@pytest.mark.parametrize(
    ("trainer", "metric"),
    [
        ("Trainer", "accuracy"),
        ("Trainer", "accuracy/all"),
        ("Trainer, without eval_", "acc"),
        ("Lightning", "accuracy"),
        ("Lightning", "acc"),
        ("Lightning, another prefix", "accuracy/all"),
    ],
)
@pytest.mark.slow
def test_a_callback_of_another_quality_is_refused_before_the_training(
    trainer: str, metric: str, tmp_path: Path
) -> None:
    made, begin = CALLBACKS[trainer]
    hook = "on_train_start" if "lightning" in made else "on_train_begin"
    script = f"""
        from types import SimpleNamespace as Having
        import carbonopt.script as carbon
        lightning = Having(estimated_stepping_batches=2, world_size=1, global_step=0, save_checkpoint=None)
        carbon.{made.format(metric)}.{hook}({"lightning" if "lightning" in made else "None"}, {begin})
        print("TRAINED")
    """
    record = watched(script, tmp_path)
    is_target = metric == "accuracy" and trainer != "Lightning, another prefix"
    assert ("TRAINED" in (tmp_path / "log.txt").read_text()) == is_target
    if not is_target:
        given = made.format(metric).split('"')[1]
        assert record.failure.kind == "bad_input"
        assert (
            "accuracy, the quality of the target" in record.failure.text
            and repr(given) in record.failure.text
        )


@pytest.mark.slow
def test_each_fold_s_trainer_is_no_training_of_its_own(tmp_path: Path) -> None:
    script = """
        from types import SimpleNamespace as Having
        import carbonopt.script as carbon
        for fold in range(3):
            trainer = carbon.callback("eval_accuracy")
            control = Having(should_evaluate=True, should_training_stop=False)
            trainer.on_train_begin(None, Having(max_steps=1, global_step=0), control)
            trainer.on_step_end(None, Having(global_step=1), control)
            trainer.on_evaluate(None, None, control, metrics={"eval_accuracy": 0.9 - 0.3 * fold})
            trainer.on_train_end(None, None, control)
    """
    record = watched(script, tmp_path)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "one training" in record.failure.text


@pytest.mark.parametrize(
    "command",
    [
        "for fold in 0 1 2; do {0} train.py $fold; done",
        "{0} train.py 0 && {0} train.py 1",
        "{0} train.py crash || {0} train.py 0",
        "{0} train.py 0 & {0} train.py 1; wait",
        "{0} train.py parent",
    ],
)
@pytest.mark.slow
def test_each_process_s_training_is_no_training_of_its_own(command: str, tmp_path: Path) -> None:
    """The quality would be that of the last one, but the energy that of all."""
    script = """
        import subprocess, sys
        import carbonopt.script as carbon
        run = carbon.run(total_steps=2)
        for _ in range(2):
            run.step()
        if sys.argv[1] == "crash":
            sys.exit(3)
        run.report(accuracy=0.5)
        if sys.argv[1] == "parent":
            subprocess.run([sys.executable, "train.py", "0"], check=True)
    """
    command = f"{command.format(PYTHON)} # {{learning_rate}} {{my_width}}"
    record = watched(script, tmp_path, command=command)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "one training" in record.failure.text


def test_a_batch_of_two_optimizers_is_one_step(tmp_path: Path) -> None:
    script = """
        from types import SimpleNamespace as Having
        from carbonopt.script.callbacks import _LightningHooks
        trainer = Having(estimated_stepping_batches=3, world_size=1, global_step=0, callback_metrics={},
                         should_stop=False, save_checkpoint=print)
        hooks = _LightningHooks("val_accuracy")
        hooks.on_train_start(trainer, None)
        for batch in (1, 2, 3):
            trainer.global_step += 2  # Lightning counts the steps of both
            hooks.on_train_batch_end(trainer)
        hooks.on_validation_start(trainer, None)
        trainer.callback_metrics["val_accuracy"] = 0.75
        hooks.on_validation_end(trainer, None)
        hooks.on_train_end(trainer, None)
    """
    record = watched(script, tmp_path)
    assert (record.state, record.value, record.total_steps) == (
        TrialState.COMPLETE,
        0.75,
        3,
    ), record.failure


LIGHTNING_HOOKS = """
from types import SimpleNamespace as Having
from carbonopt.script.callbacks import _LightningHooks
trainer = Having(estimated_stepping_batches=TOTAL, world_size=1, global_step=0, callback_metrics={},
                 should_stop=False, save_checkpoint=print)
hooks = _LightningHooks("val_accuracy")

def validated(metric):
    hooks.on_validation_start(trainer, None)
    trainer.callback_metrics[metric] = 0.75
    hooks.on_validation_end(trainer, None)

hooks.on_train_start(trainer, None)
for batch in (1, 2):
    trainer.global_step += 1
    hooks.on_train_batch_end(trainer)
for metric in WHILE: validated(metric)
hooks.on_train_end(trainer, None)
for metric in LATER: validated(metric)
"""


@pytest.mark.parametrize(
    ("total", "during", "later", "said"),
    [
        ("float('inf')", ["val_accuracy"], [], "workload.steps"),  # max_time
        ("-1", ["val_accuracy"], [], "workload.steps"),  # data without a length
        ("2", ["val_accuracy/dataloader_idx_0"], [], "is none of val_accuracy/dataloader_idx_0"),
        ("2", [], ["val_accuracy"], None),
    ],
)
@pytest.mark.slow
def test_what_lightning_does_not_say_is_named(
    total: str, during: list[str], later: list[str], said: str | None, tmp_path: Path
) -> None:
    script = LIGHTNING_HOOKS.replace("TOTAL", total)
    record = watched(script.replace("WHILE", repr(during)).replace("LATER", repr(later)), tmp_path)
    if said is None:
        assert (record.state, record.value) == (TrialState.COMPLETE, 0.75), record.failure
    else:
        assert record.failure.kind == "bad_input" and said in record.failure.text


def test_a_report_after_the_end_is_the_last_evaluation(tmp_path: Path) -> None:
    script = """
        import carbonopt.script as carbon
        with carbon.run(total_steps=3) as run:
            for _ in range(3):
                run.step()
        run.report(accuracy=0.5)
    """
    record = watched(script, tmp_path)
    assert (record.state, record.value, record.evals[-1].step) == (TrialState.COMPLETE, 0.5, 3)
    assert record.energy_kwh.train == 1.0


BEGIN = (
    "import carbonopt.script as carbon\nwith carbon.run(total_steps=2) as run:\n    run.step()\n"
)
PRINTED = "import json, math; print(json.dumps({}))".format


def says(what: str) -> str:
    """A script that says this on the study's channel itself."""
    channel = "socket.socket(socket.AF_UNIX)"
    connected = f"c = {channel}; c.connect(os.environ['CARBONOPT_CHANNEL'])"
    return f"import os, socket, time; {connected}; c.sendall({what}); time.sleep(600)"


ENDS = {
    "no quality": ("print('done')", TrialState.FAILED, "no_quality", "without saying its accuracy"),
    "garbage": ("import os; os.write(1, bytes(range(256)) * 99)", TrialState.FAILED, "no_quality", "accuracy"),
    "no report": (BEGIN, TrialState.FAILED, "no_quality", "without saying its accuracy"),
    "another quality": (BEGIN + "    run.report(acc=0.5)", TrialState.FAILED, "bad_input", "but has acc"),
    "percents": (BEGIN + "    run.report(accuracy=87.5)", TrialState.FAILED, "bad_input", "at most 1, but is 87.5"),
    "not a number": (BEGIN + "    run.report(accuracy=float('nan'))", TrialState.DIVERGED, "diverged", "not finite"),
    "infinite": (BEGIN + "    run.report(accuracy=float('inf'))", TrialState.DIVERGED, "diverged", "accuracy is not"),
    "a word": (BEGIN + "    run.report(accuracy='high')", TrialState.FAILED, "bad_input", "number"),
    "nothing": (BEGIN + "    run.report(accuracy=None)", TrialState.FAILED, "bad_input", "number"),
    "a flag": (BEGIN + "    run.report(accuracy=True)", TrialState.FAILED, "bad_input", "number"),
    "no count": (BEGIN + "    run.report(accuracy=0.5, count=-3)", TrialState.FAILED, "bad_input", "count must be"),
    "half a count": (BEGIN + "    run.report(accuracy=0.5, count=2.5)", TrialState.FAILED, "bad_input", "but is 2.5"),
    "no step": (BEGIN.replace("step()", "report(accuracy=1)"), TrialState.FAILED, "bad_input", "come after a step"),
    "a negative step": (BEGIN + "    run.step(-1)", TrialState.FAILED, "bad_input", "from 1 to 1e+12, but is -1"),
    "half a step": (BEGIN + "    run.step(1.5)", TrialState.FAILED, "bad_input", "but is 1.5"),
    "a huge step": (BEGIN + "    run.step(10**30)", TrialState.FAILED, "bad_input", "from 1 to 1e+12"),
    "huge total": (BEGIN.replace("2", "10**30"), TrialState.FAILED, "bad_input", "total_steps must be"),
    "total in words": (BEGIN.replace("2", "'ten'"), TrialState.FAILED, "bad_input", "total_steps must be"),
    "printed percents": (PRINTED("{'accuracy': 87.5}"), TrialState.FAILED, "bad_input", "at most 1, but is 87.5"),
    "printed twice": ("print('{\"accuracy\": 0.9, \"accuracy\": 0.7}')", TrialState.FAILED, "bad_input", "twice"),
    "printed too deep": (
        "print('{\"accuracy\": 0.5}')\nprint('{\"accuracy\": 0.9, \"x\": ' + '[' * 100000 + ']' * 100000 + '}')",
        TrialState.FAILED, "bad_input", "nested too deeply"
    ),
    "printed by half": (
        "print('{\"accuracy\": 0.5}')\nprint('{\"accuracy\": 0.9, ')", TrialState.FAILED, "bad_input", "JSON"
    ),
    "a printed word": (PRINTED("{'accuracy': 'high'}"), TrialState.FAILED, "bad_input", "number"),
    "a printed step": (PRINTED("{'accuracy': 1, 'step': -5}"), TrialState.FAILED, "bad_input", "step must be"),
    "a huge step told": ("print('{\"accuracy\": 1, \"step\": 1e400}')", TrialState.FAILED, "bad_input", "but is inf"),
    "printed infinity": (PRINTED("{'accuracy': math.inf}"), TrialState.DIVERGED, "diverged", "accuracy is not finite"),
    "a step within an evaluation": (
        BEGIN + "    with run.evaluation(): run.step()", TrialState.FAILED, "bad_input", "outside `with run.eval"
    ),
    "a step within a checkpoint": (
        BEGIN + "    with run.saving(): run.step()", TrialState.FAILED, "bad_input", "outside `with run.sav"
    ),
    "a second training": (
        BEGIN + "    run.report(accuracy=0.5)\ncarbon.run(total_steps=2)", TrialState.FAILED, "bad_input", "second one"
    ),
    "no message": (says("b'\\xff\\n'"), TrialState.FAILED, "crash", "is no message"),
    "no event": (says("b'[1]\\n'"), TrialState.FAILED, "crash", "is no message"),
    "no end of line": (says("bytes(2**25)"), TrialState.FAILED, "crash", "is no message"),
    "an error": (BEGIN + "    1 / 0", TrialState.FAILED, "crash", "ZeroDivisionError"),
    "an error without the lines": ("raise KeyError('labels')", TrialState.FAILED, "crash", "1: KeyError: 'labels'"),
    "an exit code": ("import sys; sys.exit(7)", TrialState.FAILED, "crash", "code 7"),
    "the exit code of memory": ("import sys; sys.exit(78)", TrialState.FAILED, "crash", "code 78"),
    "a signal": ("import os; os.kill(os.getpid(), 11)", TrialState.FAILED, "crash", "signal 11"),
    "no memory": (
        "raise RuntimeError('CUDA out of memory. Tried to allocate')", TrialState.INFEASIBLE, "out_of_memory", "memory"
    ),
    "no memory of Python's": ("raise MemoryError", TrialState.INFEASIBLE, "out_of_memory", "memory"),
    "no memory in the loop": (BEGIN + "    raise MemoryError", TrialState.INFEASIBLE, "out_of_memory", "MemoryError"),
    "no steps": (
        "import carbonopt.script as carbon\nwith carbon.run() as run: pass", TrialState.FAILED, "bad_input", "steps"
    ),
}  # fmt: skip


@pytest.mark.parametrize("ends", ENDS)
def test_each_end_has_a_state_and_a_reason(ends: str, tmp_path: Path) -> None:
    script, state, kind, said = ENDS[ends]
    record = watched(script, tmp_path)
    assert (record.state, record.failure.kind) == (state, kind)
    assert said in record.failure.text.splitlines()[0] or said in record.failure.text
    assert record.energy_kwh.total > 0


def test_a_script_that_hangs_is_ended_and_one_that_writes_goes_on(tmp_path: Path) -> None:
    hangs = watched(BEGIN + "    import time; time.sleep(600)", tmp_path, timeout_s=1.0)
    assert (hangs.state, hangs.failure.kind) == (TrialState.TIMEOUT, "timeout")
    writes = (
        'import time\nfor _ in range(8):\n    print("on", flush=True)\n   '
        " time.sleep(0.3)\nprint('{\"accuracy\": 1}')"
    )
    warned: list[str] = []
    assert watched(writes, tmp_path, timeout_s=1.5, warned=warned).state == TrialState.COMPLETE
    assert warned == []


START = """
import time
for _ in range(100 if ENDLESS else 12):
    print("waiting", flush=True)
    time.sleep(0.3)
"""


def test_a_script_that_prints_before_its_training_goes_on_with_one_warning(tmp_path: Path) -> None:
    warned: list[str] = []
    goes_on = watched(
        START.replace("ENDLESS", "False") + LOOP, tmp_path, timeout_s=1.5, warned=warned
    )
    assert (goes_on.state, goes_on.value) == (TrialState.COMPLETE, 0.75)
    (text,) = warned
    assert "trial 3" in text and "trial_time_limit_s" in text
    limited = {"timeout_s": 1.5, "time_limit_s": 4.0, "warned": warned}
    ended = watched(START.replace("ENDLESS", "True") + LOOP, tmp_path, **limited)
    assert (ended.state, ended.failure.kind) == (TrialState.TIMEOUT, "timeout")
    assert len(warned) == 2


def test_what_it_leaves_behind_neither_delays_its_end_nor_stays(tmp_path: Path) -> None:
    leaves = """
        import os, subprocess
        if (child := os.fork()) == 0:
            os.setsid()
            import time
            time.sleep(600)
        other = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
        open("left", "w").write(f"{child} {other}")
    """
    began_s = time.monotonic()
    record = watched(LOOP + textwrap.dedent(leaves), tmp_path, timeout_s=30.0)
    assert record.state == TrialState.COMPLETE and time.monotonic() - began_s < 15
    left = map(int, (tmp_path / "left").read_text().split())
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_a_launcher_between_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(LOOP)
    launcher = (
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, 'inner.py'],"
        " close_fds=True).returncode)"
    )
    record = watched(launcher, tmp_path)
    assert (record.state, record.value) == (TrialState.COMPLETE, 0.75)


def test_a_quality_of_its_own_has_any_value(tmp_path: Path) -> None:
    record = watched(BEGIN + "    run.report(bleu=-31.5, step=1, self=2)", tmp_path, quality="bleu")
    assert record.evals[-1].other_qualities == {"step": 1.0, "self": 2.0}
    assert record.quality.model_dump() == {
        "name": "bleu", "value": -31.5, "sum": -31.5, "count": 1, "direction": "maximize"
    }  # fmt: skip
    assert TrialRecord.from_json(record.as_json()) == record


def test_steps_can_stand_in_the_study_file(tmp_path: Path) -> None:
    script = BEGIN.replace("total_steps=2", "") + "    run.report(accuracy=0.5)\n    run.step(2)\n"
    assert watched(script, tmp_path, steps=2).total_steps == 2


# ---------------------------------------------------------------------------------------------------
# whole studies


def study_of(
    folder: Path,
    script: str = LOOP,
    command: str = "python train.py {learning_rate} {my_width}",
    **changes,
):
    """Writes the script and a study of it; returns the study file's path."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    space = {
        "learning_rate": {"low": 0.1, "high": 1.0, "log": True},
        "my_width": {"choices": [1, 2, 4]},
    }
    space = {
        name: domain
        for name, domain in (space | changes.pop("space", {})).items()
        if domain is not None
    }
    study = {
        "name": "own",
        "workload": {"task": "script", "command": command, **changes.pop("workload", {})},
        "target": changes.pop("target", {"accuracy": 0.5}),
        "search": {"space": space, "sampler": "random", "pruning": {"cap": False}},
        "budget": {"trials": 2},
        "carbon": {"intensity_g_co2e_per_kwh": 500},
        "launch": {"gpus": [], **changes.pop("launch", {})},
        **changes,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    return folder / "study.yaml"


def exported(folder: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in within("export", folder, "--format", "jsonl").stdout.splitlines()
    ]


SLOWLY = LOOP.replace("run.step(step)", "time.sleep(0.1); run.step(step)").replace(
    "import", "import time\nimport", 1
)


@pytest.mark.slow
def test_a_study_of_a_script_and_its_winner(tmp_path: Path) -> None:
    study = study_of(tmp_path, SLOWLY)
    done = within("run", study, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    records = [
        json.loads(line)
        for line in within("export", tmp_path / "out", "--format", "jsonl").stdout.splitlines()
    ]
    assert [record["state"] for record in records] == ["complete"] * 2
    assert all(
        record["params"].keys() == {"learning_rate", "my_width", "world_size"} for record in records
    )
    winner = tmp_path / "out" / "report" / "winner"
    listed = json.loads((winner / "inputs.json").read_text())
    assert listed["data/train.py"][0]["bytes"] == (tmp_path / "train.py").stat().st_size
    (winner / "data").mkdir()
    (winner / "data" / "train.py").write_text(
        SLOWLY + "import sys; print(sys.argv[1:], accuracy)\n"
    )
    refused = subprocess.run([winner / "run.sh"], capture_output=True, text=True)
    assert refused.returncode == 1 and "train.py is not the recorded file" in refused.stderr
    listed["data/train.py"] = []
    (winner / "inputs.json").write_text(json.dumps(listed))
    again = subprocess.run([winner / "run.sh"], capture_output=True, text=True)
    best = json.loads(within("recommend", tmp_path / "out", "--json").stdout)
    expected = [str(best["params"][name]) for name in ("learning_rate", "my_width")]
    assert again.stdout == f"{expected} 0.75\n", again.stderr


@pytest.mark.slow
def test_percentages_end_a_study_at_once(tmp_path: Path) -> None:
    study = study_of(tmp_path, PRINTED("{'accuracy': 86.2}"), budget={"trials": 9})
    done = within("run", study, "--out", tmp_path / "out")
    assert done.returncode == 3 and "divide it by 100, for 0.862" in done.stdout
    assert len(exported(tmp_path / "out")) == 1


RAISES = """
class Stop(Exception): pass
for step in range(1, 7):
    run.step()
    run.report(accuracy=step / 8)
    if step == 4:
        raise {error}
"""
WITHIN = "with carbon.run(total_steps=6) as run:\n" + textwrap.indent(RAISES, "    ")
PLAIN = "run = carbon.run(total_steps=6)\n" + RAISES
SHELLS = ["{}; echo done", "{} || true", "{} & wait", "echo; ({}; exit 0)"]


def raising(lines: str, error: str, before: str = "", after: str = "") -> str:
    return (
        f"import sys\nimport carbonopt.script as carbon\n{before}{lines.format(error=error)}{after}"
    )


@pytest.mark.parametrize(("last_step", "state"), [(6, TrialState.COMPLETE), (4, TrialState.FAILED)])
def test_an_abort_while_python_ends_costs_no_trial_that_has_reported_all(
    last_step: int, state: TrialState, tmp_path: Path
) -> None:
    aborts = (
        "import atexit, ctypes\n"
        "atexit.register(ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev)  # as PyTorch does\n"
    )
    warned: list[str] = []
    loop = LOOP.replace("range(1, 7)", f"range(1, {last_step + 1})")
    record = watched(aborts + loop, tmp_path, warned=warned)
    assert (record.state, record.steps_done) == (state, last_step)
    assert len(warned) == (state is TrialState.COMPLETE)
    if state is TrialState.FAILED:
        assert record.failure.kind == "crash" and "destroy_process_group" in record.failure.text


@pytest.mark.parametrize("lines", [PLAIN, WITHIN], ids=["plain", "with"])
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_hides_no_error_that_ends_the_script(
    shell: str, lines: str, tmp_path: Path
) -> None:
    command = shell.format(f"{PYTHON} train.py {{learning_rate}} {{my_width}}")
    record = watched(raising(lines, "RuntimeError('boom')"), tmp_path, command=command)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "crash")
    assert "RuntimeError: boom" in record.failure.text.splitlines()[0]
    assert record.steps_done == 4


@pytest.mark.parametrize(
    ("error", "state"),
    [
        ("MemoryError", TrialState.INFEASIBLE),
        ("SystemExit(3)", TrialState.FAILED),
        ("Stop", TrialState.FAILED),
        ("SystemExit('no data')", TrialState.FAILED),
        ("SystemExit(0)", TrialState.COMPLETE),
        ("SystemExit", TrialState.COMPLETE),
    ],
)
def test_an_end_that_a_shell_hides_has_its_state(
    error: str, state: TrialState, tmp_path: Path
) -> None:
    command = f"{PYTHON} train.py {{learning_rate}} {{my_width}}; true"
    assert watched(raising(WITHIN, error), tmp_path, command=command).state == state


@pytest.mark.parametrize("number", [9, 11, 6])
@pytest.mark.parametrize("shell", [*SHELLS, "sh -c '{}; echo done'"])
def test_a_shell_hides_no_signal_that_ends_the_script(
    shell: str, number: int, tmp_path: Path
) -> None:
    command = shell.format(f"{PYTHON} train.py {{learning_rate}} {{my_width}}")
    script = raising(PLAIN, f"Stop(os.kill(os.getpid(), {number}))", "import os\n")
    record = watched(script, tmp_path, command=command)
    assert (record.state, record.steps_done) == (TrialState.FAILED, 4)
    assert "signal" in record.failure.text.splitlines()[0]


@pytest.mark.parametrize("shell", ["{}", "{} 2>&1 | tee log.txt", *SHELLS])
def test_a_script_may_leave_python_by_itself(shell: str, tmp_path: Path) -> None:
    command = shell.format(f"{PYTHON} train.py {{learning_rate}} {{my_width}}")
    record = watched(raising(PLAIN, "Stop(os._exit(0))", "import os\n"), tmp_path, command=command)
    assert (record.state, record.value) == (TrialState.COMPLETE, 0.5)


@pytest.mark.parametrize("lines", [PLAIN, WITHIN], ids=["plain", "with"])
@pytest.mark.parametrize("error", ["Stop", "StopIteration", "KeyboardInterrupt"])
def test_an_error_that_the_script_catches_is_an_early_stop(
    error: str, lines: str, tmp_path: Path
) -> None:
    caught = "except BaseException as e: assert type(e).__name__ in ('Stop', 'StopIteration', 'KeyboardInterrupt')\n"
    script = raising("try:\n" + textwrap.indent(lines, "    "), error, after=f"\n{caught}")
    record = watched(script, tmp_path)
    assert (record.state, record.value, record.steps_done) == (TrialState.COMPLETE, 0.5, 4)


def test_a_training_goes_on_after_an_error_that_the_script_catches(tmp_path: Path) -> None:
    script = """
        import carbonopt.script as carbon
        run = carbon.run(total_steps=4)
        for first in (1, 3):
            try:
                with run:
                    run.step(first)
                    run.step(first + 1)
                    if first == 1:
                        raise ValueError
            except ValueError:
                pass
        run.report(accuracy=0.5)
    """
    record = watched(script, tmp_path)
    assert (record.state, record.steps_done, record.planned_steps) == (TrialState.COMPLETE, 4, None)


THREADS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
import carbonopt.script as carbon
run = carbon.run(total_steps=6)
pool = ThreadPoolExecutor(2)
def steps():
    for _ in range(3):
        run.step()
def report():
    run.report(accuracy=0.75)
"""
REPORTED = {
    "a pool evaluates": ("steps(); pool.submit(report); steps(); pool.shutdown()", False),
    "a thread evaluates": (
        "steps(); t = threading.Thread(target=report); t.start(); steps(); t.join()", False,
    ),
    "a pool trains": ("for _ in range(2): pool.submit(steps).result(); report()", True),
    "a thread trains": (
        "for _ in range(2):\n    t = threading.Thread(target=steps); t.start(); t.join(); report()",
        True,
    ),
    "a thread does both": (
        "t = threading.Thread(target=lambda: (steps(), report(), steps(), report())); t.start(); t.join()",
        True,
    ),
    "another one prints": (
        "pool.submit(print, 'on').result(); steps(); pool.submit(print, 'on'); steps(); report()",
        True,
    ),
    "at the start": ("pool.submit(report).result(); steps(); steps(); report()", True),
}  # fmt: skip


@pytest.mark.parametrize("how", REPORTED)
def test_no_thread_reports_while_another_one_trains(how: str, tmp_path: Path) -> None:
    lines, is_right = REPORTED[how]
    record = watched(THREADS + lines, tmp_path)
    if is_right:
        assert (record.state, record.steps_done) == (TrialState.COMPLETE, 6)
    else:
        assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
        assert "MainThread" in record.failure.text


def test_a_report_costs_no_more_for_those_before_it(tmp_path: Path) -> None:
    script = """
        import time
        import carbonopt.script as carbon
        n = 3000
        run = carbon.run(total_steps=n)
        ended_s = []
        for step in range(n):
            run.step()
            run.report(accuracy=step / n, count=1000)
            ended_s.append(time.process_time())
        print(ended_s[-1])
    """
    asked = []
    began_s = time.process_time()
    record = watched(
        script, tmp_path, should_prune=lambda evals, total: asked.append(evals[-1].step)
    )
    assert (len(record.evals), record.state) == (3000, TrialState.COMPLETE)
    assert len(asked) <= 200
    assert time.process_time() - began_s < 3000 * 0.003, (
        "rebuilding them all at each report takes 60 s"
    )


@pytest.mark.slow
def test_a_study_whose_first_trials_leave_no_quality_ends(tmp_path: Path) -> None:
    study = study_of(tmp_path, "print('nothing')", budget={"trials": 9})
    done = within("run", study, "--out", tmp_path / "out")
    assert done.returncode == 3
    assert [record["failure"]["kind"] for record in exported(tmp_path / "out")] == [
        "no_quality"
    ] * 2


@pytest.mark.slow
def test_a_finished_study_says_that_its_script_has_changed_since(tmp_path: Path) -> None:
    study = study_of(tmp_path, LOOP, budget={"trials": 1})
    first, same = (within("run", study, "--out", tmp_path / "out") for _ in range(2))
    assert (first.returncode, same.returncode) == (0, 0) and "train.py" not in same.stderr
    script = tmp_path / "train.py"
    script.write_text(script.read_text() + "# another one")
    changed = within("run", study, "--out", tmp_path / "out")
    assert (changed.returncode, changed.stdout) == (0, same.stdout)
    assert str(script) in changed.stderr


@pytest.mark.slow
def test_a_warm_script_is_run_from_its_first_line_by_a_fork(tmp_path: Path) -> None:
    script = (
        'import decimal, sys\nprint("new" if "torch" not in sys.modules else "old", __name__,'
        " sys.argv)\n" + SLOWLY
    )
    study = study_of(tmp_path, script, workload={"warm": True})
    done = within("run", study, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    logs = [path.read_text() for path in sorted((tmp_path / "out" / "trials").glob("*/log-1.txt"))]
    assert len(logs) == 2 and all(" __main__ ['train.py', " in log for log in logs)
    assert (tmp_path / "out" / "template-log.txt").exists()


@pytest.mark.slow
def test_every_rank_of_a_launch_stops_together(tmp_path: Path) -> None:
    script = """
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        import carbonopt.script as carbon
        with carbon.run(total_steps=4) as run:
            for step in range(1, 5):
                time.sleep(0.1)
                total = torch.tensor(float(dist.get_rank() + 1))
                dist.all_reduce(total)
                run.step(step)
                with run.evaluation():
                    accuracy = float(total) / 4
                if run.report(accuracy=accuracy):
                    break
        dist.destroy_process_group()
    """
    study = study_of(tmp_path, script, launch={"cpu_ranks": 2})
    done = within("run", study, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    records = [
        json.loads(line)
        for line in within("export", tmp_path / "out", "--format", "jsonl").stdout.splitlines()
    ]
    assert [record["quality"]["value"] for record in records] == [0.75, 0.75]
    assert all(record["params"]["world_size"] == 2 for record in records)


# ---------------------------------------------------------------------------------------------------------
# bad input

REFUSED = {
    "no program": (
        {"command": "no-such-program {learning_rate} {my_width}"},
        "no program no-such-program",
    ),
    "no script": ({"command": "python missing.py {learning_rate} {my_width}"}, "missing.py"),
    "no archive": ({"command": "python missing.zip {learning_rate} {my_width}"}, "no file"),
    "no bytecode": ({"command": "python missing.pyc {learning_rate} {my_width}"}, "no file"),
    "no script to split": (
        {"command": "env -S 'python missing.py' {learning_rate} {my_width}"},
        "/missing.py",
    ),
    "unknown placeholder": (
        {"command": "python train.py {lr} {my_width}"},
        "unknown placeholder {lr}",
    ),
    "unused dimension": ({"command": "python train.py {learning_rate}"}, "has none for my_width"),
    "format": ({"command": "python train.py {learning_rate:.3q} {my_width}"}, "a format must be"),
    "brace": ({"command": "python train.py {learning_rate {my_width}"}, "braces"),
    "quotes": ({"command": "python 'train.py {learning_rate} {my_width}"}, "can't be split"),
    "empty": ({"command": " "}, "workload.command"),
    "a model": ({"model": {"name_or_path": "gpt2"}}, "a script has no model"),
    "sequence length": ({"sequence_length": 8}, "a script has no sequence_length"),
    "training arguments": (
        {"training_arguments": {"optim": "sgd"}},
        "a script has no training_arguments",
    ),
    "unknown key": ({"comand": "x"}, "did you mean command?"),
    "steps": ({"steps": 0}, "workload.steps"),
    "warm shell": (
        {"command": "sh train.py {learning_rate} {my_width}", "warm": True},
        "workload.warm",
    ),
    "a NUL": ({"command": "python train.py {learning_rate} {my_width} a\0b"}, "must have no NUL"),
    "no module": ({"command": "python -m nosuch {learning_rate} {my_width}"}, "no module nosuch"),
    "not executable": ({"command": "./train.py {learning_rate} {my_width}"}, "can't be executed"),
    "accumulation": (
        {"command": "python train.py {learning_rate} {my_width} {gradient_accumulation_steps}"},
        "needs a batch size",
    ),
    "in the background": (
        {"command": "python train.py {learning_rate} {my_width} &  # then"},
        "must not end with &",
    ),
    "no folder": ({"folder": "nowhere"}, "no folder"),
    "no file": ({"files": ["nowhere.csv"]}, "nowhere.csv"),
}


def test_a_dimension_s_name_may_be_a_method_s_elsewhere(tmp_path: Path) -> None:
    names = ("copy", "json", "own", "domains", "model_config")
    command = (
        "python train.py {learning_rate} {my_width}"
        f" {' '.join(f'{{{name}}}' for name in names)}"
    )
    study = study_of(tmp_path, command=command, space={name: {"choices": [1, 2]} for name in names})
    combinations = check(load_study(study)).space
    assert {
        "copy",
        "json",
        "own",
        "domains",
        "model_config",
    } <= combinations.dimensions.free().keys()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"my_width": {"choices": ["x" * 200_000, "y"]}}}, "at most 131071 bytes"),
        ({"space": {"my_width": {"choices": ["a\0b", "c"]}}}, "must have no NUL"),
        ({"space": {"my_width": {"low": 0, "high": 1, "step": 1e-300}}}, "a billionth"),
        ({"space": {"my_width": {"low": 1, "high": 2, "step": 5}}}, "step=5.0"),
        ({"target": {"val_acc": 0.9}}, "{quality: val_acc, at_least: 0.9}"),
        ({"target": {"quality": "count", "at_least": 1}}, "neither count nor step"),
        ({"target": {"quality": "<b>", "at_least": 1}}, "a word of letters"),
        ({"script": "print('"}, "is no Python that runs"),
        ({"confirm": {"seeds": 2}}, "workload.command must have {seed}, but hasn't"),
    ],
)
def test_what_can_not_be_is_refused(changes: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        check(load_study(study_of(tmp_path, **{"script": LOOP, **changes})))


RUNS = ["t.zip", "t.pyz", "t.pyc", "link.py", "env -S 'python t.py'"]


@pytest.mark.parametrize("given", RUNS)
def test_what_python_runs_is_taken_as_it_is(given: str, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "helper.py").write_text("")
    (real / "t.py").write_text("import helper\n" + LOOP)
    (tmp_path / "link.py").symlink_to("real/t.py")
    (tmp_path / "t.py").write_text(LOOP)
    py_compile.compile(str(tmp_path / "t.py"), str(tmp_path / "t.pyc"))
    for name in ("t.zip", "t.pyz"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("__main__.py", LOOP)
    command = given if given.startswith("env") else f"python {given}"
    study = study_of(tmp_path, command=f"{command} {{learning_rate}} {{my_width}}")
    config = load_study(study)
    check(config)
    task = Script(ScriptWorkload(**config.workload.model_dump(exclude={"task"})))
    assert not any("helper" in note for note in task.notes(config.search.space, config.quality))


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("ssh host python train.py", "ssh"),
        ("nohup /usr/bin/docker run --rm image python train.py", "docker"),
        ("bash -c 'sbatch --wait job.sh $0'", "sbatch"),
        ("tmux new -d 'python train.py'", "tmux"),
        ("python train.py --host ssh docker", None),
        ("nice python train.py screen", None),
    ],
)
def test_a_program_that_starts_others_elsewhere_is_noted(
    command: str, named: str | None, tmp_path: Path
) -> None:
    study = study_of(tmp_path, command=f"{command} {{learning_rate}} {{my_width}}")
    config = load_study(study)
    task = Script(ScriptWorkload(**config.workload.model_dump(exclude={"task"})))
    notes = task.notes(config.search.space, config.quality)
    said = [note.split()[0] for note in notes if "another process" in note]
    assert said == ([] if named is None else [named])


@pytest.mark.parametrize("command", ["true", "python train.py"])
def test_check_says_whether_edits_of_the_script_are_noticed(command: str, tmp_path: Path) -> None:
    study = study_of(tmp_path, command=f"{command} {{learning_rate}} {{my_width}}")
    text = describe_study(check(load_study(study)))
    assert ("not noticed" in text) == (command == "true")


def test_a_step_as_wide_as_its_range_has_both_ends(tmp_path: Path) -> None:
    step = {"low": 0.1, "high": 0.3, "step": 0.2}  # 0.1 + 0.2 > 0.3
    study = study_of(tmp_path, LOOP, space={"learning_rate": 0.1, "my_width": step})
    assert len({values["my_width"] for values in check(load_study(study)).space.combinations}) == 2


@pytest.mark.parametrize("log", [False, True])
def test_a_range_of_one_value_is_one_point(log: bool, tmp_path: Path) -> None:
    single = {"low": 0.13, "high": 0.13, "log": log}
    study = study_of(tmp_path, LOOP, space={"learning_rate": 0.1, "my_width": single})
    checked = check(load_study(study)).space
    assert [values["my_width"] for values in checked.combinations] == [0.13]
    assert [point["my_width"] for point in points(checked.dimensions, ["my_width"], 1)] == [0.13]


@pytest.mark.parametrize("refused", REFUSED)
def test_what_would_make_every_trial_fail_is_refused(refused: str, tmp_path: Path) -> None:
    workload, said = REFUSED[refused]
    study = study_of(tmp_path, workload=workload)
    done = within("check", study)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_long_expression_is_shortened_in_the_sentence_that_refuses_it(tmp_path: Path) -> None:
    expression = " + ".join(["learning_rate"] * 3000 + ["unknown"])
    study = study_of(
        tmp_path, workload={"command": f"python train.py {{my_width}} {{{expression}}}"}
    )
    assert 100 < len(refusal("check", study)) < 2100


TARGETS = {
    "direction": ({"quality": "bleu"}, "needs at_least or at_most"),
    "both": ({"quality": "bleu", "at_least": 1, "at_most": 2}, "needs at_least or at_most"),
    "known name": (
        {"quality": "accuracy", "at_least": 0.5},
        "must be written as {accuracy: VALUE}",
    ),
    "bound alone": ({"accuracy": 0.5, "at_least": 0.5}, "at_least and at_most go with quality"),
    "two": ({"accuracy": 0.5, "quality": "bleu", "at_least": 1}, "exactly one of"),
    "no word": ({"quality": "my bleu", "at_least": 1}, "quality"),
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_of_its_own_says_its_direction(target: str, tmp_path: Path) -> None:
    given, said = TARGETS[target]
    with pytest.raises(BadInput) as refused:
        load_study(study_of(tmp_path, target=given))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["seed", "my-width", "output_dir", "1st"])
def test_a_dimension_is_called_by_a_word_that_is_free(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a dimension's name must be a word"):
        check(load_study(study_of(tmp_path, space={name: {"choices": [1, 2]}})))


def test_other_tasks_take_no_dimension_that_they_do_not_know(
    tmp_path: Path, tiny_study: dict, write_study
) -> None:
    tiny_study["search"]["space"]["my_width"] = {"choices": [1, 2]}
    done = within("check", write_study(tiny_study))
    assert done.returncode == 2 and "unknown key search.space.my_width" in done.stderr


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ({"pattern": "val loss ([0-9.]+)"}, True),
        ({"pattern": "(?P<step>[0-9]+) NLL (?P<value>[0-9.]+)"}, True),
        ({"file": "a.json", "key": "log.-1.eval_loss"}, True),
        ({"pattern": "loss [0-9.]+ ppl ([0-9.]+)"}, False),
        ({"pattern": r"exp\(loss\), perplexity: ([0-9.]+)"}, False),
        ({"pattern": r"exp\(val_loss\) = ([0-9.]+)"}, False),
        ({"pattern": "test: ([0-9.]+)"}, False),
    ],
)
def test_a_loss_is_no_perplexity(source: dict[str, str], refused: bool) -> None:
    found = QualitySource(**source)
    found.check_quality(quality_of("val_loss", "minimize"))
    if refused:
        with pytest.raises(BadInput, match="exp"):
            found.check_quality(PERPLEXITY)
    else:
        found.check_quality(PERPLEXITY)


@pytest.mark.parametrize(
    ("target", "noted"),
    [
        ({"quality": "val_loss", "at_least": 0.1}, "at_most"),
        ({"quality": "eval/acc", "at_most": 0.1}, "at_least"),
        ({"quality": "val_loss", "at_most": 0.1}, None),
        ({"quality": "loss_scale", "at_least": 0.1}, None),
    ],
)
def test_a_direction_unlike_the_quality_s_name_is_noted(
    target: dict, noted: str | None, tmp_path: Path
) -> None:
    notes = check(load_study(study_of(tmp_path, target=target))).notes
    said = [note for note in notes if note.startswith("target.quality")]
    assert [note.split()[-1] for note in said] == ([] if noted is None else [noted])


@pytest.mark.parametrize(
    ("more", "replaced"), [("run.report(accuracy=1.0, count=8)", 0.75), ("", None)]
)
def test_the_value_that_a_step_had_before_is_recorded(
    more: str, replaced: float | None, tmp_path: Path
) -> None:
    record = watched(LOOP + more + "\n", tmp_path)
    assert (record.replaced_value, len(record.evals)) == (replaced, 3)
