"""What a user writes for a script works: a command with arithmetic, a shell's signs, flags, a
configuration file, and a quality that is read where the script leaves it.
"""

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from commands import within
from test_script import PYTHON, exported, study_of, watched

from carbonopt.cli.check_text import describe_study
from carbonopt.core import channel
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import quality_of
from carbonopt.core.trial import TrialState
from carbonopt.script.callbacks import _quality_name
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_checks import CheckedStudy, check
from carbonopt.train.tasks.script import Script, ScriptWorkload

PRINTS = (
    "import json, sys; print(json.dumps({'accuracy': 0.5})); print(sys.argv[1:], file=open('seen',"
    " 'w'))"
)


def seen(folder: Path) -> list[str]:
    """Return the arguments that the script has got."""
    return eval((folder / "seen").read_text())


def params(**values: object) -> TrialParams:
    return TrialParams(**{"zero_stage": None, "offload": None, "learning_rate": 0.5, **values})


def checked(
    folder: Path, command: str, space: dict, script: str = PRINTS, **changes: object
) -> CheckedStudy:
    """Check a study of this command; `space` is all of its space."""
    space = {"learning_rate": None, "my_width": None, **space}
    return check(load_study(study_of(folder, script, command, space=space, **changes)))


# ---------------------------------------------------------------------------------------------------------
# the words

WORDS = {
    "arithmetic": (
        "{learning_rate / 10} {learning_rate*global_batch_size/256}",
        ["0.05", "0.03125"],
    ),
    "a function": ("{int(learning_rate * 10)} {max(1, 2)} {sqrt(16)}", ["5", "2", "4.0"]),
    "a format": ("{learning_rate:.2e} {learning_rate/3:.3f}", ["5.00e-01", "0.167"]),
    "whole numbers": ("{global_batch_size/4} {global_batch_size // 3}", ["4", "5"]),
    "a flag that is set": ("{shuffle}", ["--shuffle"]),
    "a flag that is not set": ("{nothing}", []),
    "an option without a value": ("--x={nothing}", ["--x="]),
    "a boolean": ("--x {flag}", ["--x", "true"]),
    "an empty word of its own": ("''", [""]),
    "JSON": ("'{{\"lr\": {learning_rate}}}'", ['{"lr": 0.5}']),
    "lines with a backslash": ("\\\n  --lr {learning_rate} \\\n  --x", ["--lr", "0.5", "--x"]),
    "lines without": ("\n  --lr {learning_rate}\n  --x", ["--lr", "0.5", "--x"]),
}


@pytest.mark.parametrize("words", WORDS)
def test_words_are_as_they_are_written(words: str, tmp_path: Path) -> None:
    command, expected = WORDS[words]
    configuration = params(global_batch_size=16, shuffle="--shuffle", nothing="", flag=True)
    record = watched(PRINTS, tmp_path, command=f"{PYTHON} train.py {command}", params=configuration)
    assert (record.state, seen(tmp_path)) == (TrialState.COMPLETE, expected)


BAD_TEXT = 'it\'s "$HOME" `id` \\ $(touch injected); touch injected & * {x}'
SHELL = {
    "a redirection": ("{me} {learning_rate} 2>&1", ["0.5"]),
    "a pipe": ("{me} {learning_rate} | tee log.txt", ["0.5"]),
    "a variable before it": ("X=1 {me} {learning_rate}", ["0.5"]),
    "several commands": ("true && cd . && {me} {learning_rate}", ["0.5"]),
    "a variable of the shell": ("X=one; {me} $X ${{X}} '$X'", ["one", "one", "$X"]),
    "a pattern of files": ("{me} *.py", ["train.py"]),
    "a pattern of files by brackets": (
        "{me} trai[m-n].py data[0-9].csv",
        ["train.py", "data[0-9].csv"],
    ),
    "lists": ("{me} +a=[1,2] [t,n].py=x [1,2]", ["+a=[1,2]", "[t,n].py=x", "[1,2]"]),
    "a document": ("{me} {learning_rate} - <<'EOF'\nit is '{my_width}'\nEOF", ["0.5", "-"]),
    "a home": ("HOME=/my; {me} ~/data", ["/my/data"]),
    "text without quotes": ("true; {me} {text}", [BAD_TEXT]),
    "text in double quotes": ('true; {me} "--t={text}"', [f"--t={BAD_TEXT}"]),
    "text in single quotes": ("true; {me} '--t={text}'", [f"--t={BAD_TEXT}"]),
    "text without a shell": ("{me} --t={text}", [f"--t={BAD_TEXT}"]),
    "a flag that is not set": ("true; {me} {nothing} {learning_rate}", ["0.5"]),
}


@pytest.mark.parametrize("line", SHELL)
def test_a_shell_s_signs_work_and_values_are_quoted(line: str, tmp_path: Path) -> None:
    command, expected = SHELL[line]
    written = command.replace("{me}", f"{PYTHON} train.py").replace("${{X}}", "${X}")
    record = watched(
        PRINTS, tmp_path, command=written, params=params(text=BAD_TEXT, nothing="", my_width=3)
    )
    assert (record.state, seen(tmp_path)) == (TrialState.COMPLETE, expected)
    assert not (tmp_path / "injected").exists()


def test_a_failure_in_a_pipe_is_the_trial_s(tmp_path: Path) -> None:
    record = watched(
        "raise SystemExit(7)", tmp_path, command=f"{PYTHON} train.py {{learning_rate}} | cat"
    )
    assert (record.state, record.failure.kind) == (
        TrialState.FAILED,
        "crash",
    ) and "code 7" in record.failure.text


def test_what_a_shell_has_started_ends_with_the_trial(tmp_path: Path) -> None:
    script = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    record = watched(
        script, tmp_path, command=f"{PYTHON} train.py {{learning_rate}} | cat", timeout_s=1.0
    )
    assert record.state == TrialState.TIMEOUT
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


# ------------------------------------------------------------------------------------------------ a
# configuration file

READS = (
    "import json, sys, yaml; c = yaml.safe_load(open(sys.argv[1])); print(json.dumps({'accuracy':"
    " c['lr'], **c}))"
)
TEMPLATES = {
    "config.template.yaml": (
        "lr: {learning_rate}\nother: {{ my_width }}\nkept: '{unknown}'\nflow: {a: 1}\n"
    ),
    "config.json": (
        '{"lr": {learning_rate}, "other": {my_width}, "kept": "{unknown}", "flow": {"a": 1}}'
    ),
    "config.yaml.j2": (
        "lr: {{ learning_rate / 10 * 10 }}\nother: {my_width}\nkept: '{unknown}'\nflow: {a: 1}\n"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_trial_has_a_copy_of_the_configuration_file(name: str, tmp_path: Path) -> None:
    template = {"name": name, "text": TEMPLATES[name]}
    record = watched(
        READS,
        tmp_path,
        command=f"{PYTHON} train.py {{config}}",
        workload={"config_template": template},
    )
    assert (record.state, record.value) == (TrialState.COMPLETE, 0.5)
    said = json.loads((tmp_path / "log.txt").read_text())
    assert (said["other"], said["kept"], said["flow"]) == (3, "{unknown}", {"a": 1})


def test_small_numbers_are_numbers_in_yaml(tmp_path: Path) -> None:
    template = {"name": "c.yaml", "text": "lr: {learning_rate}\n"}
    small = params(learning_rate=1e-05)
    record = watched(
        READS,
        tmp_path,
        command=f"{PYTHON} train.py {{config}}",
        params=small,
        workload={"config_template": template},
    )
    assert record.value == 1e-05


@pytest.mark.slow
def test_a_study_with_a_configuration_file_and_its_winner(tmp_path: Path) -> None:
    script = """
        import json, pathlib, sys, time, yaml
        config = yaml.safe_load(open(sys.argv[1]))
        time.sleep(0.3)
        pathlib.Path(config["out"]).mkdir(parents=True, exist_ok=True)
        pathlib.Path(config["out"], "result").write_text(str(config["lr"]))
        print(json.dumps({"accuracy": config["lr"], "lr": config["lr"]}))
    """
    (tmp_path / "c.yaml").write_text("lr: {learning_rate}\nout: {output_dir}\n")
    study = study_of(
        tmp_path,
        script,
        "python train.py {config} > /dev/stdout",
        space={"my_width": None, "learning_rate": {"choices": [0.5, 0.9]}},
        workload={"config_template": "c.yaml"},
    )
    done = within("run", study, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(record["quality"]["value"] for record in exported(tmp_path / "out")) == [0.5, 0.9]
    winner = tmp_path / "out" / "report" / "winner"
    (tmp_path / "c.yaml").unlink()  # the study has it
    assert within("report", tmp_path / "out").returncode == 0
    again = subprocess.run([winner / "run.sh", "--data", tmp_path], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    best = json.loads(within("recommend", tmp_path / "out", "--json").stdout)["params"][
        "learning_rate"
    ]
    assert json.loads(again.stdout)["lr"] == best
    assert (winner / "output" / "result").read_text() == str(best)
    kept = [
        path.parent.parent.name for path in (tmp_path / "out" / "trials").glob("*/output*/result")
    ]
    assert kept == [
        f"{json.loads(within('recommend', tmp_path / 'out', '--json').stdout)['trial']:04d}"
    ]


# ------------------------------------------------------------------------------------------------------
# the batch sizes

BATCHES = {
    "both": (
        {"global_batch_size": 16, "micro_batch_size_per_gpu": 4},
        "{micro_batch_size_per_gpu} {gradient_accumulation_steps}",
        ["4", "4"],
    ),
    "the global batch alone": (
        {"global_batch_size": 16},
        "{micro_batch_size_per_gpu} {gradient_accumulation_steps}",
        ["16", "1"],
    ),
    "the micro batch alone": (
        {"micro_batch_size_per_gpu": 8},
        "{micro_batch_size_per_gpu} {gradient_accumulation_steps} {global_batch_size}",
        ["8", "1", "8"],
    ),
    "two ranks": (
        {"global_batch_size": 16, "world_size": 2},
        "{micro_batch_size_per_gpu} {gradient_accumulation_steps} {world_size}",
        ["8", "1", "2"],
    ),
}


@pytest.mark.parametrize("sizes", BATCHES)
def test_batch_sizes_follow_from_each_other(sizes: str, tmp_path: Path) -> None:
    given, words, expected = BATCHES[sizes]
    watched(PRINTS, tmp_path, command=f"{PYTHON} train.py {words}", params=params(**given))
    assert seen(tmp_path) == expected
    space = {
        name: {"choices": [value, 2 * value]}
        for name, value in given.items()
        if name != "world_size"
    }
    checked(tmp_path, f"python train.py {words.replace('{world_size}', '')}", space)


@pytest.mark.parametrize(
    ("command", "space", "launch", "said"),
    [
        ("{gradient_accumulation_steps}", {}, {}, "needs a batch size"),
        (
            "{micro_batch_size_per_gpu}",
            {"global_batch_size": 8, "micro_batch_size_per_gpu": 4},
            {},
            "global_batch_size",
        ),
        (
            "{global_batch_size}",
            {"global_batch_size": 8, "micro_batch_size_per_gpu": 4},
            {},
            "micro_batch_size_per_gpu",
        ),
        (
            "{micro_batch_size_per_gpu}",
            {"global_batch_size": 9},
            {"cpu_ranks": 2},
            "but got 9 and 2",
        ),
        ("{my}", {"my": 1, "gradient_accumulation_steps": 2}, {}, "derived from the batch sizes"),
    ],
)
def test_batch_sizes_that_can_not_be_are_refused(
    command: str, space: dict, launch: dict, said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        checked(tmp_path, f"python train.py {command}", space, launch=launch)


# ----------------------------------------------------------------------------------------------------------
# the quality

LOG = "step 10: val acc 0.25\\nstep 20: val acc 0.75\\nbye"
SOURCES = {
    "the last match": ({"pattern": "val acc ([0-9.]+)"}, f"print('{LOG}')", [(1, 0.75)]),
    "a group of its name": ({"pattern": "(val) acc (?P<value>[0-9.]+)"}, f"print('{LOG}')", [(1, 0.75)]),
    "steps and a value": (
        {"pattern": "step (?P<step>[0-9]+).*acc (?P<value>[0-9.]+)"}, f"print('{LOG}')", [(10, 0.25), (20, 0.75)],
    ),
    "a progress bar": ({"pattern": "acc=([0-9.]+)"}, "print('1/2 acc=0.1\\r2/2 acc=0.5')", [(1, 0.5)]),
    "percents": ({"pattern": "acc ([0-9.]+)%", "scale": 0.01}, "print('acc 86.2%')", [(1, 0.862)]),
    "a JSON file": (
        {"file": "{output_dir}/all.json", "key": "eval_accuracy"}, {"all.json": {"eval_accuracy": 0.5, "step": 9}},
        [(1, 0.5)],
    ),
    "a nested key": (
        {"file": "{output_dir}/a.json", "key": "a.b.0.c"}, {"a.json": {"a": {"b": [{"c": 1}]}}}, [(1, 1.0)],
    ),
    "a key with many dots": (  # which could be divided in 2 ** 40 ways
        {"file": "{output_dir}/a.jsonl", "key": ".".join("a" * 40)},
        {"a.jsonl": [{"a": 0.1}, {".".join("a" * 40): 0.5}]}, [(1, 0.5)],
    ),
    "a key with signs": (
        {"file": "{output_dir}/a.json", "key": "valid/acc.1"}, {"a.json": {"valid/acc.1": 1}}, [(1, 1.0)],
    ),
    "a log of the Trainer": (
        {"file": "{output_dir}/a.json", "key": "log_history.-1.eval_acc"},
        {"a.json": {"log_history": [{"eval_acc": 0.1}, {"eval_acc": 0.5}]}}, [(1, 0.5)],
    ),
    "JSON lines": (
        {"file": "{output_dir}/a.jsonl", "key": "acc"},
        {"a.jsonl": [{"step": 5, "acc": 0.1}, {"x": 1}, {"step": 9, "acc": 0.5}]},
        [(5, 0.1), (9, 0.5)],
    ),
    "a step that is evaluated again": (
        {"pattern": "step (?P<step>[0-9]+) acc (?P<value>[0-9.]+)"},
        "print('step 10 acc 0.1\\nstep 20 acc 0.2\\nstep 20 acc 0.5')", [(10, 0.1), (20, 0.5)],
    ),
    "a last step that is printed twice": (
        {"pattern": "step (?P<step>[0-9]+) acc (?P<value>[0-9.]+)"},
        "print('step 0 acc 0.1\\nstep 20 acc 0.5\\nstep 20 acc 0.5')", [(0, 0.1), (20, 0.5)],
    ),
    "JSON lines without steps": (
        {"file": "{output_dir}/a.jsonl", "key": "acc"}, {"a.jsonl": [{"acc": 0.1}, {"acc": 0.5}]}, [(1, 0.5)],
    ),
    "a text file": (
        {"file": "own.log", "pattern": "acc ([0-9.]+)"}, "open('own.log', 'w').write('acc 0.5')", [(1, 0.5)],
    ),
}  # fmt: skip


# Of these, several lines have other values for one evaluation.
WITH_SEVERAL_LINES = {
    "the last match",
    "a group of its name",
    "a step that is evaluated again",
    "JSON lines without steps",
}


def writing(files: dict) -> str:
    """A script that writes these files of JSON into the folder that it is given."""
    lines = ["import json, os, sys", "os.makedirs(sys.argv[1])"]
    for name, content in files.items():
        texts = [json.dumps(each) for each in (content if isinstance(content, list) else [content])]
        lines.append(
            f"open(os.path.join(sys.argv[1], {name!r}), 'w').write({chr(10).join(texts)!r})"
        )
    return "\n".join(lines)


@pytest.mark.parametrize("source", SOURCES)
def test_the_quality_is_read_where_the_script_leaves_it(source: str, tmp_path: Path) -> None:
    quality_from, script, expected = SOURCES[source]
    text = writing(script) if isinstance(script, dict) else script
    record = watched(
        text,
        tmp_path,
        command=f"{PYTHON} train.py {{output_dir}}",
        workload={"quality_from": quality_from},
    )
    assert record.state == TrialState.COMPLETE, record.failure
    assert [(point.step, point.value) for point in record.evals] == [
        (s, pytest.approx(v)) for s, v in expected
    ]
    several = record.quality_lines is not None
    assert several == (source in WITH_SEVERAL_LINES)


FAILURES = {
    "no match": ({"pattern": "acc ([0-9.]+)"}, "print('nothing')", "no_quality", "acc ("),
    "no file": ({"file": "{output_dir}/a.json", "key": "a"}, "pass", "no_quality", "a.json"),
    "no key": (
        {"file": "{output_dir}/a.json", "key": "b"},
        writing({"a.json": {"acc": 1}}),
        "no_quality",
        "acc",
    ),
    "no JSON": ({"file": "train.py", "key": "b"}, "pass", "bad_input", "must be JSON"),
    "no number": ({"pattern": "acc (.*)"}, "print('acc high')", "bad_input", "'high'"),
    "a flag": (
        {"file": "{output_dir}/a.json", "key": "a"},
        writing({"a.json": {"a": True}}),
        "bad_input",
        "True",
    ),
    "too much": ({"pattern": "acc (.*)"}, "print('acc 86.2')", "bad_input", "at most 1"),
    "not a number": ({"pattern": "acc (.*)"}, "print('acc nan')", "diverged", "not finite"),
    "steps of each epoch": (
        {"pattern": "step (?P<step>[0-9]+) acc (?P<value>[0-9.]+)"},
        "print('step 50 acc 0.1\\nstep 100 acc 0.2\\nstep 50 acc 0.3\\nstep 100 acc 0.4')",
        "bad_input",
        "step 50 comes after step 100",
    ),
    "the last step of each epoch": (
        {"pattern": "step (?P<step>[0-9]+)/100 acc (?P<value>[0-9.]+)"},
        "print('step 0/100 acc 0.1\\nstep 100/100 acc 0.2\\nstep 100/100 acc 0.3')",
        "bad_input",
        "step 100 comes with",
    ),
    "JSON lines of each epoch": (
        {"file": "{output_dir}/a.jsonl", "key": "acc"},
        writing({"a.jsonl": [{"epoch": each, "step": 100, "acc": each / 10} for each in range(4)]}),
        "bad_input",
        "step 100 comes with",
    ),
    "a file that each trial adds to": (
        {"file": "all.jsonl", "key": "acc"},
        """open('all.jsonl', 'w').write('{"step": 9, "acc": 0.9}\\n{"step": 5, "acc": 0.1}')""",
        "bad_input",
        "step 5 comes after step 9",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_quality_that_can_not_be_read_is_a_failure_of_a_kind(
    failure: str, tmp_path: Path
) -> None:
    quality_from, script, kind, said = FAILURES[failure]
    record = watched(
        script,
        tmp_path,
        command=f"{PYTHON} train.py {{output_dir}}",
        workload={"quality_from": quality_from},
    )
    assert record.failure.kind == kind and said in record.failure.text


def test_an_expression_that_takes_forever_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carbonopt.spec.quality_source._MATCHING_LIMIT_S", 1.0)
    workload = {"quality_from": {"pattern": "^(?:a+)+(b)$"}}
    record = watched(
        "print('a' * 60)",
        tmp_path,
        command=f"{PYTHON} train.py {{learning_rate}}",
        workload=workload,
    )
    assert (record.failure.kind, record.state) == ("bad_input", TrialState.FAILED)


@pytest.mark.parametrize(
    ("quality_from", "said"),
    [
        ({"pattern": "acc ([0-9"}, "must be a regular expression"),
        ({"pattern": "acc"}, "one group"),
        ({"pattern": "(a)(b)"}, "one group"),
        ({"file": "a.json"}, "needs key"),
        ({"key": "a"}, "needs pattern"),
        ({"file": "a.json", "key": "a", "pattern": "(a)"}, "both pattern and key"),
        ({"pattern": "(a)", "scale": 0}, "scale"),
        ({"patern": "(a)"}, "did you mean pattern"),
    ],
)
def test_a_source_of_the_quality_that_can_not_be_is_refused(
    quality_from: dict, said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        load_study(study_of(tmp_path, workload={"quality_from": quality_from}))


@pytest.mark.parametrize("name", ["eval_rewards/accuracies", "valid/acc", "val-loss", "eval.f1@5"])
def test_a_quality_may_be_called_as_trainers_call_it(name: str, tmp_path: Path) -> None:
    record = watched(f"print('{{\"{name}\": 0.5}}')", tmp_path, quality=name)
    assert (record.state, record.value) == (TrialState.COMPLETE, 0.5)
    assert (
        load_study(study_of(tmp_path, target={"quality": name, "at_least": 0.5})).quality.name
        == name
    )


def test_a_callback_reports_by_the_target_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for quality, expected in (
        ("eval_rewards/accuracies", "eval_rewards/accuracies"),
        ("accuracy", "rewards/accuracies"),
    ):
        monkeypatch.setenv(channel.QUALITY, quality)
        assert _quality_name("eval_rewards/accuracies", "eval_") == expected


# ------------------------------------------------------------------------------------------------------
# time and ranks


def test_a_trial_that_takes_longer_than_its_limit_is_ended(tmp_path: Path) -> None:
    script = "import time\nfor _ in range(600):\n    print('on', flush=True)\n    time.sleep(0.1)"
    record = watched(script, tmp_path, time_limit_s=1.5)
    assert (record.state, record.failure.kind) == (TrialState.TIMEOUT, "timeout")
    assert "trial_time_limit_s" in record.failure.text


@pytest.mark.parametrize(
    ("given", "seconds"), [(90, 90), (1.5, 1.5), ("00:02:30", 150), ("48:00:00", 172_800)]
)
def test_a_limit_of_time_is_seconds_or_a_clock_s(
    given: object, seconds: float, tmp_path: Path
) -> None:
    assert (
        load_study(
            study_of(tmp_path, launch={"trial_time_limit_s": given})
        ).launch.trial_time_limit_s
        == seconds
    )


@pytest.mark.parametrize("given", [0, -1, "90", "1:99:00", "soon", True])
def test_what_is_no_limit_of_time_is_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="trial_time_limit_s"):
        load_study(study_of(tmp_path, launch={"trial_time_limit_s": given}))


@pytest.mark.parametrize(
    ("script", "words", "needs"),
    [
        ("import deepspeed", "{learning_rate}", True),
        ("def later():\n    from deepspeed.ops.adam import CPUAdam", "{learning_rate}", True),
        ("import torch", "--deepspeed ds.json {learning_rate}", True),
        ("TrainingArguments(output, deepspeed='ds.json')", "{learning_rate}", True),
        ("TrainingArguments(output, deepspeed=None)", "{learning_rate}", False),
        ("import torch", "{learning_rate}", False),
    ],
)
def test_deepspeed_is_told_its_rank_where_it_is_alone(
    script: str, words: str, needs: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    task = Script(ScriptWorkload(command=f"python train.py {words}", folder=str(tmp_path)))
    spec = TrialSpec(
        number=0,
        attempt=1,
        seed=0,
        params=params(),
        workload={},
        prepared_dir="",
        trial_dir=str(tmp_path),
    )
    assert task.program(spec, quality_of("accuracy", None)).uses_deepspeed is needs


@pytest.mark.slow
def test_one_rank_of_deepspeed_finds_its_variables(tmp_path: Path) -> None:
    script = """
        import json, os, sys, time
        sys.modules["deepspeed"] = json  # the import says what it needs, and takes seconds
        import deepspeed
        time.sleep(0.3)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        print(json.dumps({"accuracy": float(all(name in os.environ for name in names))}))
    """
    study = study_of(tmp_path, script, "python train.py {learning_rate}", space={"my_width": None})
    done = within("run", study, "--out", tmp_path / "out", "--trials", "1")
    assert exported(tmp_path / "out")[0]["quality"]["value"] == 1.0, done.stderr


# -------------------------------------------------------------------------------------------------------------
# `check`

TYPE_BOOL = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--shuffle', type=bool)\n"
)
ON_OFF = {"shuffle": {"choices": [True, False]}}
LR = {"learning_rate": {"choices": [0.1, 0.5]}}
REFUSED = {
    "division by zero": ("{1 / (learning_rate - 0.5)}", LR, {}, "division by zero"),
    "a logarithm of nothing": ("{log(x)}", {"x": {"low": 0, "high": 1}}, {}, "can't be computed for x 0"),
    "text in arithmetic": ("{x * 2}", {"x": {"choices": ["a", "b"]}}, {}, "no number"),
    "a call": ("{x} {open('a')}", {"x": 1}, {}, "not allowed"),
    "an attribute": ("{x} {x.real}", {"x": 1}, {}, "not allowed"),
    "an endless power": ("{x ** 10 ** 10}", {"x": 3}, {}, "exponent"),
    "a shell's variable for a dimension": ("${x}", {"x": 1}, {}, "write {x}"),
    "options in one value": ("{x}", {"x": {"choices": ["--a 1", ""]}}, {}, "one word"),
    "type=bool": ("--shuffle {shuffle}", ON_OFF, {"script": TYPE_BOOL + PRINTS}, "type=bool"),
    "type=bool with =": ("--shuffle={shuffle}", ON_OFF, {"script": TYPE_BOOL + PRINTS}, "type=bool"),
    "type=bool with numbers": (
        "--shuffle {shuffle}", {"shuffle": {"choices": [0, 1]}}, {"script": TYPE_BOOL + PRINTS}, "type=bool",
    ),
    "type=bool with words": (
        "--shuffle {shuffle}", {"shuffle": {"choices": ["True", "False"]}}, {"script": TYPE_BOOL + PRINTS}, "type=bool",
    ),
    **{
        f"{how}, {words}": (words, ON_OFF, {"script": TYPE_BOOL.replace("'--shuffle', type=bool", how) + PRINTS}, said)
        for how, words, said in (
            ("'-s', type=bool", "-s {shuffle}", r'-s has .*true, .false. .*\["-s", ""\]'),
            ("'-s', type=bool", "-s{shuffle}", r'\["-s", ""\]'),
            ("'-s', '--shuffle', type=bool", "-s {int(shuffle)}", r"true, '0' .*\[--shuffle, --no-shuffle\]"),
            ("'--shuffle', type=lambda s: bool(s)", "--shuffle {shuffle}", "--no-shuffle"),
            ("'--shuffle', type=builtins.bool", "--shuf {shuffle}", r"\[--shuffle, --no-shuffle\]"),
        )
    },
    "a function for bool": (
        "--shuffle {shuffle}", ON_OFF,
        {"script": "def true(s): return bool(s)\n" + TYPE_BOOL.replace("type=bool", "type=true") + PRINTS}, "type=bool",
    ),
    "type=bool in bash -c": (
        "; bash -c 'python train.py --shuffle {shuffle}'", ON_OFF, {"script": TYPE_BOOL + PRINTS}, "type=bool",
    ),
    "JSON": ("--config '{\"lr\": 1}' {x}", {"x": 1}, {}, "write {{ and }}"),
    "a program of awk": ("{x} | awk '{print $1}'", {"x": 1}, {}, "write {{ and }}"),
    "fire": ("--shuffle={shuffle}", ON_OFF, {"script": "import fire\n" + PRINTS}, "fire"),
    "output to a file": ("{x} > log.txt 2>&1", {"x": 1}, {}, "tee log.txt"),
    "output to a file, with &>": ("{x} &> log.txt", {"x": 1}, {}, "tee log.txt"),
    "output added to a file": ("{x} >> log.txt", {"x": 1}, {}, "tee log.txt"),
    **{
        f"output to a file by {command}": ("; " + command, {"x": 1}, {"before": "echo {x}; "}, f"{file}, so that")
        for command, file in (
            ("exec >> all.txt; python train.py", "all.txt"), ("(python train.py; ls) > all.txt", "all.txt"),
            ("bash -c 'python train.py > all.txt'", "all.txt"), ("sh -ec 'exec &> all.txt; python train.py'", "all.txt"),
            ("bash <<EOF\npython train.py > all.txt\nEOF", "all.txt"), ("bash run.sh", "run.sh's output goes to all.txt"),
            ("nice ./run.sh", "run.sh's output goes to all.txt"), ("python train.py | tee a.txt > /dev/null", "/dev/null"),
        )
    },
    "a template without its key": ("--config c.yaml", LR, {}, "config_template"),
    "a template without its place": ("{x}", {"x": 1}, {"workload": {"config_template": "c.yaml"}}, "go together"),
    "a template that is none": (
        "{config}", LR, {"workload": {"config_template": "broken.json"}}, "is no json",
    ),
    "a text that breaks the template": (
        "{config}", {"learning_rate": 0.5, "x": {"choices": ["a", 'b"']}}, {"workload": {"config_template": "x.json"}}, "is no json",
    ),
    "a word that YAML reads as false": (
        "{config}", {"x": {"choices": ["SE", "NO"]}}, {"workload": {"config_template": "x.yaml"}}, "YAML reads NO",
    ),
    "no template": ("{config}", LR, {"workload": {"config_template": "nowhere.yaml"}}, "nowhere.yaml"),
    "GPUs in the command": ("{x}", {"x": 1}, {"before": "CUDA_VISIBLE_DEVICES=1 "}, "CUDA_VISIBLE_DEVICES"),
    **{
        f"GPUs by {before}": ("{x}", {"x": 1}, {"before": before}, "CUDA_VISIBLE_DEVICES")
        for before in (
            "export CUDA_VISIBLE_DEVICES=1; ", "/usr/bin/env CUDA_VISIBLE_DEVICES=1 ", "time CUDA_VISIBLE_DEVICES=1 ",
            "nice -n 5 env CUDA_VISIBLE_DEVICES=1 ", "env -u CUDA_VISIBLE_DEVICES ", "unset CUDA_VISIBLE_DEVICES && ",
            "bash -c 'CUDA_VISIBLE_DEVICES=0 exec python train.py' && ",
        )
    },
    "choices that a format makes alike": ("{x:.0e}", {"x": {"choices": [1e-4, 1.2e-4]}}, {}, "0.00012 are written alike"),
    "choices that arithmetic makes alike": ("{x // 100}", {"x": {"choices": [64, 128, 80]}}, {}, "64 and 80"),
    "a range that a format makes alike": ("{x:.1f}", {"x": {"low": 0.001, "high": 0.01}}, {}, "0.01 are written alike"),
    "a folder that is not there": ("{x}", {"x": 1}, {"before": "cd nowhere && "}, "no folder"),
    **{
        f"no folder by {before}": ("{x}", {"x": 1}, {"before": before}, "no folder")
        for before in ("cd -P -- nowhere && ", "pushd nowhere && ", "env --chdir nowhere ", "nice env -Csub --chdir=nowhere ", "(cd sub && ls); cd nowhere; ")
    },
    "a file that is not in the folder": ("", {"x": 1}, {"before": "env -C sub python other.py {x}; "}, "no file .*sub/other.py"),
    "conda": ("{x}", {"x": 1}, {"before": "conda activate me && "}, "conda run"),
    "a condition": ("{x}; fi", {"x": 1}, {"before": "if true; then "}, "bash run.sh"),
    "a loop": ("{x} --seed $s; done", {"x": 1}, {"before": "for s in 1 2; do "}, "bash run.sh"),
    "a placeholder in a comment": ("{x} # --y {y}", {"x": 1, "y": {"choices": [1, 2]}}, {}, "none for y"),
    "lines of a shell": ("{x} | cat\n  --y 1", {"x": 1}, {}, "^workload.command: .*backslash"),
    "a line of input alone": ("{x}\n  < c.yaml", {"x": 1}, {}, "^workload.command: .*a program"),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED)
def test_what_can_not_work_is_refused(refused: str, tmp_path: Path) -> None:
    words, space, changes, said = REFUSED[refused]
    (tmp_path / "sub").mkdir()
    (tmp_path / "run.sh").write_text("#!/bin/bash\n# it's mine\npython train.py \\\n  > all.txt\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "c.yaml").write_text("lr: {learning_rate}\n")
    (tmp_path / "x.json").write_text('{"lr": {learning_rate}, "x": "{x}"}')
    (tmp_path / "x.yaml").write_text("of: '{x}'\nin: {x}  # the country\n")
    (tmp_path / "broken.json").write_text('{"lr": {learning_rate},}')
    changes = dict(changes)
    with pytest.raises(BadInput, match=said):
        checked(tmp_path, f"{changes.pop('before', '')}python train.py {words}", space, **changes)


@pytest.mark.parametrize(
    ("reads", "is_refused"),
    [
        ("bool(os.environ['SHUF'])", True),
        ("bool(os.environ.get('SHUF', ''))", True),
        ("bool(os.getenv('SHUF'))", True),
        ("bool(int(os.getenv('SHUF')))", False),
        ("os.getenv('SHUF') == 'true'", False),
        ("bool(os.getenv('OTHER'))", False),
    ],
)
def test_a_variable_that_is_read_as_true_whatever_it_says_is_refused(
    reads: str, is_refused: bool, tmp_path: Path
) -> None:
    script = f"import os\nshuffle = {reads}\n{PRINTS}"
    command = "SHUF={shuffle} python train.py"
    with pytest.raises(BadInput, match="SHUF") if is_refused else contextlib.nullcontext():
        checked(tmp_path, command, ON_OFF, script=script)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 4 train.py {x}",
        "torchrun --nproc-per-node=4 train.py {x}",
        "accelerate launch --num_processes 4 train.py {x}",
        "python -m torch.distributed.run --nproc_per_node 4 train.py {x}",
        "OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 train.py {x}",
        "accelerate launch --num-processes=4 train.py {x}",
        "python -u -m torch.distributed.run --nproc_per_node 4 train.py {x}",
        "nice -n 10 torchrun --nproc_per_node 4 train.py {x}",
        "env -u A OMP_NUM_THREADS=1 accelerate launch -n 4 train.py {x}",
        "time torchrun --nproc_per_node 4 train.py {x}",
        "timeout 3600 stdbuf -oL torchrun --nproc_per_node 4 train.py {x}",
        "bash -lc 'exec torchrun --nproc_per_node 4 train.py {x}'",
    ],
)
def test_a_launcher_starts_the_ranks_of_the_launch(command: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="but is 4"):
        checked(tmp_path, command, {"x": 1}, launch={"cpu_ranks": 2})
    checked(tmp_path, command, {"x": 1}, launch={"cpu_ranks": 4})
    task = checked(
        tmp_path, command.replace("4", "{world_size}"), {"x": 1}, launch={"cpu_ranks": 2}
    )
    assert Script(task.config.workload).starts_ranks


@pytest.mark.parametrize(
    ("end", "advised"), [("> a.txt", True), ("| tee a.txt > /dev/null", False)]
)
def test_a_copy_is_advised_where_there_is_none(end: str, advised: bool, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        checked(tmp_path, f"python train.py {{x}} {end}", {"x": 1})
    assert ("`2>&1 | tee a.txt`" in str(refused.value)) == advised
    assert "tee /dev/null" not in str(refused.value)


RUNS = {
    "a script with lines may redirect its output": ("{x} > log.txt", {"script": "import carbonopt.script\n" + PRINTS}),
    "the quality is in a file": (
        "{x} > log.txt", {"workload": {"quality_from": {"file": "log.txt", "pattern": "acc ([0-9.]+)"}}}
    ),
    "choices that differ with others alone": (
        "{x * y} {z:.2f}", {"space": {"x": {"choices": [1, 2]}, "y": {"choices": [0, 1]}, "z": {"low": 0.001, "high": 0.01}}}
    ),
    "a variable of its own": ("CUDA_VISIBLE_DEVICES={x}", {"before": "nice "}),
    "a path by env": ("{x}", {"before": "env PYTHONPATH=. "}),
    "another option is of type bool": ("--other {x}", {"script": TYPE_BOOL + PRINTS}),
    "another option begins alike": (
        "--shuffle {shuffle} --shuf 1", {"space": ON_OFF, "script": TYPE_BOOL.replace("--shuffle", "--shuffle_all") + "p.add_argument('--shuffle', type=int)\n" + PRINTS}
    ),
    "numbers for fire": ("--shuffle={int(shuffle)}", {"space": ON_OFF, "script": "import fire\n" + PRINTS}),
    "a flag of argparse's": ("{shuffle}", {"space": {"shuffle": {"choices": ["--shuffle", "--no-shuffle"]}}}),
    "the output is copied": ("{x} 2>&1 | tee log.txt", {}),
    **{
        before: ("{x}", {"before": before})
        for before in (
            "cd . && ", "cd -P -- sub && cd .. && ", "pushd sub && popd && ", "(cd sub && ls) && ", "(ls; (cd sub); ",
            "env -C . ", "cd sub; env -C .. ", "uv run --directory ../{x} ",
        )
    },
    **{
        f"{before}from another folder": ("../train.py {x}", {"before": before})
        for before in (
            "env -C sub ", "env --chdir=sub ", "env --chdir sub ", "env -Csub ", "pushd sub && ", "cd -L sub && ", "(cd sub && ",
            "cd . && nice -n 5 env -C sub ",
        )
    },
    **{
        command: (f"; {command}", {"before": "echo {x}; "})
        for command in (
            "python train.py > a.txt; cat a.txt", "python train.py && date > end.txt", "exec > a.txt; exec > /dev/stdout; python train.py", "bash run.sh",
            "exec > >(tee a.txt) 2>&1; python train.py", "(exec > a.txt; ls); python train.py", "python train.py 2>&1",
            "exec 3> a.txt; python train.py >&1", "bash -c 'python train.py | tee a.txt'", "(python train.py)",
            "bash -c 'python train.py; pip freeze > a.txt'", "bash -c 'python train.py; kill $P > /dev/null'",
            "pushd . > /dev/null; python train.py; popd > /dev/null", "bash -c 'python train.py; [[ 3 > 2 ]]'",
        )
    },
    "a comment before": ("{x}", {"before": "# it's mine\n"}),
    **{
        f"an option of {read}": (
            "--shuffle {int(shuffle)}",
            {
                "space": {"shuffle": {"choices": [False, True]}},
                "script": TYPE_BOOL.replace("type=bool", f"type={read}") + PRINTS,
            },
        )
        for read in ("lambda s: bool(int(s))", "lambda s: bool(strtobool(s))")
    },
}  # fmt: skip


@pytest.mark.parametrize("runs", RUNS)
def test_what_works_is_not_refused(runs: str, tmp_path: Path) -> None:
    words, given = RUNS[runs]
    changes = dict(given)
    (tmp_path / "sub").mkdir()
    (tmp_path / "run.sh").write_text("python train.py > a.txt 2>&1\ngrep accuracy a.txt\n")
    space = changes.pop("space", {"x": {"choices": [1, 2]}})
    before = changes.pop("before", "")
    end = ")" if before.startswith("(") and before.count("(") > before.count(")") else ""
    script = "" if words.startswith("../") else "train.py "
    checked(tmp_path, f"{before}python {script}{words}{end}", space, **changes)


def test_a_comment_hides_no_line(tmp_path: Path) -> None:
    command = "# it's mine\npython train.py  # --z 1\n  --x {x}"
    workload = checked(tmp_path, command, {"x": 1}).config.workload
    script = Script(ScriptWorkload(command=workload.command, folder=str(tmp_path)))
    assert script.command.argv({"x": 1}) == ["python", "train.py", "--x", "1"]


NOTES = {
    "a folder of all trials": ("{x} --output_dir out", PRINTS, "--output_dir"),
    "no lines": ("{x}", PRINTS, "no lines of carbonopt"),
    **{
        line: ("{x}", f"import os\n{line}\n", "has CUDA_VISIBLE_DEVICES")
        for line in (
            'os.environ["CUDA_VISIBLE_DEVICES"] = "1"',
            "os.environ['CUDA_VISIBLE_DEVICES']=str(1)",
            'os.environ.pop("CUDA_VISIBLE_DEVICES")',
            'os.environ.update({"CUDA_VISIBLE_DEVICES": "1"})',
            "os.environ.update(CUDA_VISIBLE_DEVICES='1')",
            'os.system("CUDA_VISIBLE_DEVICES=1 python other.py")',
        )
    },
    "a module that is missing": (
        "{x}",
        "import carbonopt.script\nimport no_such_module\n",
        "no_such_module",
    ),
}


@pytest.mark.parametrize(
    ("words", "is_noted"),
    [
        ("--out results", True),
        ("--out=results/run", True),
        ("--ckpt last.pt --x 1", True),
        ("--ckpt {checkpoint_dir}", False),
        ("--out out/run-{trial}", False),
        ("--out=results/x{x}", False),
        ("--save", False),
        ("--save --x 1", False),
        ("--log info", False),
        ("--log wandb", False),
        ("--log-dir logs", True),
        ("--save steps", False),
        ("--checkpoint bert-base-uncased", False),
        ("--output json", False),
        ("--checkpoint pretrained.npz", False),
    ],
)
def test_only_a_path_that_trials_share_is_said_to_be_shared(
    words: str, is_noted: bool, tmp_path: Path
) -> None:
    (tmp_path / "pretrained.npz").touch()
    notes = checked(tmp_path, f"python train.py {{x}} {words}", {"x": 1}).notes
    assert any("same folder" in note for note in notes) is is_noted


@pytest.mark.parametrize("head", ["f() {{", "function f() {{", "function f () {{"])
def test_a_shell_s_function_is_refused_by_its_rule(head: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="functions"):
        checked(tmp_path, f'{head} python train.py "$@"; }}}}; f {{x}}', {"x": 1})


@pytest.mark.parametrize("note", NOTES)
def test_check_says_what_may_be_another_thing_than_was_meant(note: str, tmp_path: Path) -> None:
    words, script, said = NOTES[note]
    assert any(
        said in each
        for each in checked(tmp_path, f"python train.py {words}", {"x": 1}, script).notes
    )
    done = within("check", tmp_path / "study.yaml")
    assert done.returncode == 0 and said in done.stdout


@pytest.mark.parametrize(
    ("form", "rounds"), [(".0e", True), (".0f", True), (".1e", True), (".3e", False), ("g", False)]
)
def test_a_format_that_writes_other_values_than_the_record_has_is_said(
    form: str, rounds: bool, tmp_path: Path
) -> None:
    space = {"x": {"low": 1.0, "high": 90.0}}
    noted = checked(tmp_path, f"python train.py {{x:{form}}}", space).notes
    assert any(f"{{x:{form}}} writes" in note for note in noted) is rounds


def test_what_a_template_keeps_is_said(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: {learning_rate}\nname: '{nme}'\n")
    notes = checked(
        tmp_path, "python train.py {config}", LR, workload={"config_template": "c.yaml"}
    ).notes
    assert any("{nme}" in note for note in notes)


def test_a_python_template_s_own_names_are_not_said(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("LR = {learning_rate}\nprint(f'{LR} {nme}')\n")
    found = checked(tmp_path, "python {config}", LR, workload={"config_template": "t.py"})
    (note,) = (note for note in found.notes if "kept" in note)
    assert "{nme}" in note and "{LR}" not in note
    text = describe_study(found)
    assert "edits of the script" not in text and "files that it imports" in text


@pytest.mark.parametrize(("step", "is_said"), [(None, True), (0.5, True), (1, False)])
def test_fractions_are_said_where_the_range_has_some(step, is_said: bool, tmp_path: Path) -> None:
    domain = {"low": 1, "high": 3} | ({} if step is None else {"step": step})
    text = describe_study(checked(tmp_path, "python train.py {epochs}", {"epochs": domain}))
    assert ("fractions" in text) is is_said


def test_the_winner_of_a_command_that_reads_no_file_runs(tmp_path: Path) -> None:
    command = 'python -c "import json; print(json.dumps(dict(accuracy=0.9, width={my_width})))"'
    study = {
        "name": "no file",
        "workload": {"task": "script", "command": command},
        "target": {"accuracy": 0.5},
        "search": {"space": {"my_width": 3}},
        "budget": {"trials": 1},
        "carbon": {"country": "USA"},
        "launch": {"gpus": []},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    assert within("run", tmp_path / "study.yaml", "--out", tmp_path / "out").returncode == 0
    shutil.copytree(tmp_path / "out" / "report" / "winner", tmp_path / "elsewhere")
    again = subprocess.run([tmp_path / "elsewhere" / "run.sh"], capture_output=True, text=True)
    assert (json.loads(again.stdout), again.returncode) == (
        {"accuracy": 0.9, "width": 3},
        0,
    ), again.stderr


def test_the_study_file_of_the_winner_has_the_template(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: {learning_rate}\n")
    study = study_of(
        tmp_path,
        PRINTS,
        "python train.py {config}",
        workload={"config_template": "c.yaml"},
        space={"my_width": None},
    )
    stored = load_study(study).model_dump(mode="json")["workload"]["config_template"]
    assert stored == {"name": "c.yaml", "text": "lr: {learning_rate}\n"}
    again = yaml.safe_load(study.read_text())
    again["workload"]["config_template"] = stored
    study.write_text(yaml.safe_dump(again))
    assert load_study(study).model_dump(mode="json")["workload"]["config_template"] == stored


@pytest.mark.slow
def test_a_file_that_no_trial_has_written_is_no_quality(tmp_path: Path) -> None:
    """It was there before the study; a trial that writes it anew, alike or not, is judged by it."""
    study = study_of(
        tmp_path,
        "import sys; sys.argv[1] == '0.2' and open('r.json', 'w').write('{\"acc\": 0.95}')",
        f"{PYTHON} train.py {{learning_rate}}",
        workload={"quality_from": {"file": "r.json", "key": "acc"}},
        space={"learning_rate": {"choices": [0.1, 0.2]}, "my_width": None},
    )
    (tmp_path / "r.json").write_text('{"acc": 0.95}')
    done = within("run", study, "--out", tmp_path / "out")
    records = [
        json.loads(line) for line in within("export", tmp_path / "out").stdout.split("\n")[:-1]
    ]
    by_rate = {record["params"]["learning_rate"]: record for record in records}
    assert by_rate[0.2]["state"] == "complete", done.stdout
    assert by_rate[0.1]["failure"]["kind"] == "no_quality"
    assert "was there before the trial" in by_rate[0.1]["failure"]["text"]
