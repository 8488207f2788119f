"""Studies that are chained: what a file may say, and two of them on real training."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import carbonopt, within

from carbonopt.core.errors import BadInput
from carbonopt.study.pipeline import PipelineFile

ROOT = Path(__file__).parents[2]
STEPS = [{"step": "sft", "study": "sft.yaml"}, {"step": "reward", "study": "reward.yaml", "needs": {"model": "sft"}}]


def written(folder: Path, steps: list, **more: object) -> Path:
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump({"name": "chain", "pipeline": steps, **more}))
    return path


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        ([], {}, "pipeline"),
        ([STEPS[0], {**STEPS[0]}], {}, "steps must differ in their names, but are sft, sft"),
        ([STEPS[1]], {}, "pipeline.0.needs.model must be an earlier step, but is 'sft'"),
        ([STEPS[0], {**STEPS[1], "needs": {"model": "reward"}}], {}, "must be an earlier step, but is 'reward'"),
        ([STEPS[0], {**STEPS[1], "needs": {"data": "sft"}}], {}, "pipeline"),
        ([{**STEPS[0], "step": "../x"}], {}, "pipeline.0.step"),
        ([STEPS[0]], {"target": {"perplexity": 3}}, "target"),
    ],
)
def test_a_file_that_can_not_be_is_refused(steps, more, said, tmp_path):
    with pytest.raises(BadInput) as refused:
        PipelineFile.load(written(tmp_path, steps, **more))
    assert said in str(refused.value)


def test_what_is_wrong_is_said_before_anything_is_started(tmp_path):
    done = within("run", written(tmp_path, STEPS), "--out", tmp_path / "out")
    assert done.returncode == 2 and "sft.yaml" in done.stderr
    assert not (tmp_path / "out").exists()
    done = within("run", written(tmp_path, STEPS), "--trials", 3)
    assert done.returncode == 2 and "--trials is for one study" in done.stderr


def test_each_study_is_checked():
    done = within("check", ROOT / "studies" / "chat-small.yaml")
    assert done.returncode == 0 and done.stdout.count("is valid") == 3


@pytest.mark.slow
def test_a_chain_that_was_killed_goes_on_and_its_steps_train_what_was_recommended(tmp_path):
    """Killed in its second step: all that was configured is run, and nothing twice."""
    shutil.copytree(ROOT / "studies" / "chat-small", tmp_path / "chat-small")
    for name in ("sft", "reward"):
        path = tmp_path / "chat-small" / f"{name}.yaml"
        study = yaml.safe_load(path.read_text())
        study["budget"]["trials"] = 1
        study["target"] = {key: 1000 if key == "perplexity" else 0.3 for key in study["target"]}
        study["search"]["start"]["epochs"] = 2
        path.write_text(yaml.safe_dump(study))
    steps = [{**step, "study": f"chat-small/{step['study']}"} for step in STEPS]
    chain, out = written(tmp_path, steps), tmp_path / "out"
    command = [sys.executable, "-m", "carbonopt", "run", str(chain), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as run:
        deadline = time.monotonic() + 200
        while not (out / "reward" / "trials" / "0000").is_dir():
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.1)
        os.kill(run.pid, signal.SIGKILL)
    done = carbonopt("run", chain, "--out", out)
    assert done.returncode == 0, done.stderr
    for name in ("sft", "reward"):
        records = list(map(json.loads, carbonopt("export", out / name).stdout.splitlines()))
        assert [(record["state"], record["repeat_of"]) for record in records] == [("complete", None), ("complete", 0)]
        assert (out / name / "trials" / "0001" / "model" / "config.json").is_file()
    prepared = json.loads((out / "reward" / "prepared" / "workload.json").read_text())
    assert prepared["model"]["name_or_path"] == str((out / "sft" / "trials" / "0001" / "model").resolve())
    assert carbonopt("run", chain, "--out", out).returncode == 0
