"""Studies that are chained: what a file may say, and two of them on real training."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import within
from running_studies import read
from study.test_resume import training_in

from carbonopt.core.errors import BadInput
from carbonopt.core.trial import StopReason
from carbonopt.spec.pipeline_file import Pipeline
from carbonopt.study_file.reader import PipelineFile

ROOT = Path(__file__).parents[2]
STEPS = [
    {"step": "sft", "study": "sft.yaml"},
    {"step": "reward", "study": "reward.yaml", "needs": {"model": "sft"}},
]

OTHERS = {
    "reward": {"carbon": {"country": "USA", "region": "california", "pue": 1.5}},
    "rlhf": {"launch": {"kind": "local", "gpus": [0]}},
}


def written(folder: Path, steps: list, **more: object) -> Path:
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump({"name": "chain", "pipeline": steps, **more}))
    return path


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        ([], {}, "pipeline: must have 1 or more entries, but has 0"),
        ([STEPS[0], {**STEPS[0]}], {}, "steps must differ in their names, but are sft, sft"),
        ([STEPS[1]], {}, "pipeline.0.needs.model must be an earlier step, but is 'sft'"),
        (
            [STEPS[0], {**STEPS[1], "needs": {"model": "reward"}}],
            {},
            "must be an earlier step, but is 'reward'",
        ),
        ([STEPS[0], {**STEPS[1], "needs": {"data": "sft"}}], {}, "pipeline"),
        ([{**STEPS[0], "step": "../x"}], {}, "pipeline.0.step"),
        ([{**STEPS[0], "step": "report"}], {}, "no step can be called report"),
        (
            [{**STEPS[0], "step": "Pipeline.json"}],
            {},
            "or pipeline.json, which are the pipeline's own",
        ),
        ({"step": "sft"}, {}, "pipeline: must be a list, but got {'step': 'sft'}"),
        (
            [STEPS[0], {**STEPS[0], "step": "SFT"}],
            {},
            "steps must differ in their names, but are sft, SFT",
        ),
        (
            [{**STEPS[0], "carry": 2}],
            {},
            "pipeline.0.carry must be 1 where no later step needs sft, but is 2",
        ),
        ([{**STEPS[0], "carry": 0}, STEPS[1]], {}, "pipeline.0.carry"),
        (
            [
                {**STEPS[0], "carry": 9},
                {**STEPS[1], "carry": 8},
                {"step": "last", "study": "c.yaml", "needs": {"model": STEPS[1]["step"]}},
            ],
            {},
            "carry may make 64 ways through all steps at most, but makes 72",
        ),
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


def test_a_home_that_nobody_has_is_refused(tmp_path):
    done = within("check", written(tmp_path, [{"step": "sft", "study": "~nobody-here/sft.yaml"}]))
    assert done.returncode == 2 and "sft: a path can't be used" in done.stderr


def test_each_study_is_checked():
    done = within("check", ROOT / "studies" / "chat-small.yaml")
    assert done.returncode == 0 and done.stdout.count("is valid") == 3


@pytest.mark.slow
def test_check_names_a_gpu_of_all_steps_once_that_is_not_there(tmp_path):
    shutil.copytree(ROOT / "studies" / "chat-small", tmp_path / "chat-small")
    study = tmp_path / "chat-small" / "sft.yaml"
    study.write_text(study.read_text().replace("gpus: []", "gpus: [97]"))
    done = within("check", written(tmp_path, [{"step": "sft", "study": "chat-small/sft.yaml"}]))
    assert done.returncode == 0 and done.stdout.count("not here") == 1


def test_what_does_not_fit_together_is_refused_before_anything_is_started(tmp_path):
    shutil.copytree(ROOT / "studies" / "chat-small", tmp_path / "chat-small")
    shutil.copy(ROOT / "studies" / "vowels.py", tmp_path)
    for name in ("reward", "rlhf"):
        study = yaml.safe_load((tmp_path / "chat-small" / f"{name}.yaml").read_text())
        (tmp_path / "chat-small" / f"two-{name}.yaml").write_text(
            yaml.safe_dump({**study, **OTHERS[name]})
        )
    sft = {"step": "sft", "study": "chat-small/sft.yaml"}

    def refused(*steps: dict) -> str:
        done = within("run", written(tmp_path, [sft, *steps]), "--out", tmp_path / "out")
        assert done.returncode == 2 and not (tmp_path / "out").exists()
        return done.stderr

    reward = {"step": "reward", "study": "chat-small/reward.yaml", "needs": {"model": "sft"}}
    rlhf = {
        "step": "rlhf",
        "study": "chat-small/rlhf.yaml",
        "needs": {"model": "sft", "reward": "sft"},
    }
    assert "pipeline.1.needs.reward: 'sft' must be of the task reward, but is sft" in refused(rlhf)
    rlhf["needs"] = {"model": "reward"}
    assert "pipeline.2.needs.model: 'reward' hands on a sequence classification model" in refused(
        reward, rlhf
    )
    assert "to the task rlhf alone" in refused(
        reward, {**reward, "step": "again", "needs": {"reward": "reward"}}
    )
    other = {**reward, "study": "chat-small/two-reward.yaml"}
    assert "carbon.pue must be the same in all steps" in refused(other) and "1.5" in refused(other)
    other = {"step": "rlhf", "study": "chat-small/two-rlhf.yaml", "needs": {"model": "sft"}}
    assert "launch.gpus must be the same in all steps" in refused(other)
    script = {"step": "script", "study": str(ROOT / "studies" / "own-script.yaml")}
    assert "is a script" in refused(script)
    long = yaml.safe_load((tmp_path / "chat-small" / "rlhf.yaml").read_text())
    long["workload"]["sequence_length"] = 120
    (tmp_path / "chat-small" / "long.yaml").write_text(yaml.safe_dump(long))
    long = {"step": "rlhf", "study": "chat-small/long.yaml", "needs": {"model": "sft"}}
    assert "up to 144 tokens, but the model that it gets has 128 positions" in refused(long)
    replay = {"step": "replay", "study": str(ROOT / "docs" / "examples" / "replay.yaml")}
    assert "is a replay" in refused(replay)


def test_each_study_has_a_folder_by_what_it_begins_with():
    steps = [
        {"step": "sft", "study": "a", "carry": 2},
        {"step": "reward", "study": "b", "needs": {"model": "sft"}, "carry": 2},
        {"step": "other", "study": "c"},
        {"step": "rlhf", "study": "d", "needs": {"reward": "reward", "model": "other"}},
    ]
    pipeline = Pipeline(name="chain", pipeline=steps)
    of_rlhf = ["rlhf", "rlhf@reward-2", "rlhf@sft-2", "rlhf@sft-2@reward-2"]
    assert pipeline.folders() == ["sft", "reward", "reward@sft-2", "other", *of_rlhf]
    assert [step.step for step in pipeline.before(pipeline.pipeline[3])] == [
        "sft",
        "reward",
        "other",
    ]
    assert [pipeline.hands_on(step) for step in pipeline.pipeline] == [2, 2, 1, 0]
    assert len(list(pipeline.paths())) == 4


def sessions_of(out: Path) -> list[dict]:
    return (
        json.loads((out / "pipeline.json").read_text())["sessions"]
        if (out / "pipeline.json").exists()
        else []
    )


def killed_in(chain: Path, out: Path, study: str, trial: int) -> None:
    """Kill the pipeline's command once the trial trains and was charged for it.

    Raises:
        AssertionError: The trial had ended before.
    """
    command = [sys.executable, "-m", "carbonopt", "run", str(chain), "--out", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as run:
        deadline = time.monotonic() + 200
        while not training_in(out / study, trial):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.1)
        os.kill(run.pid, signal.SIGKILL)
    assert read(out / study).records[trial].stop_reason is StopReason.INTERRUPTED


@pytest.mark.slow
def test_a_chain_that_is_killed_in_each_step_goes_on_to_what_was_configured_and_all_is_charged(
    tmp_path,
):
    shutil.copytree(ROOT / "studies" / "chat-small", tmp_path / "chat-small")
    for name, trials in (("sft", 2), ("reward", 1)):
        path = tmp_path / "chat-small" / f"{name}.yaml"
        study = yaml.safe_load(path.read_text())
        study["budget"]["trials"] = trials
        study["target"] = {key: 1000 if key == "perplexity" else 0.3 for key in study["target"]}
        # long enough that a trial still trains when it is read that it does
        study["search"]["space"]["epochs"] = study["search"]["start"]["epochs"] = 6
        study["search"]["pruning"] = {"cap": False}
        path.write_text(yaml.safe_dump(study))
    steps = [{**step, "study": f"chat-small/{step['study']}"} for step in STEPS]
    steps[0]["carry"] = 2
    chain, out = written(tmp_path, steps), tmp_path / "out"
    killed_in(chain, out, "sft", 2)  # a repeat, for its weights
    killed_in(chain, out, "reward", 0)
    done = within("run", chain, "--out", out)
    assert done.returncode == 0, done.stderr

    exported = {
        name: within("export", out / name).stdout for name in ("sft", "reward", "reward@sft-2")
    }
    records = {name: list(map(json.loads, text.splitlines())) for name, text in exported.items()}
    assert all(
        record["state"] == "complete" for of_study in records.values() for record in of_study
    )
    assert sorted(record["repeat_of"] for record in records["sft"][2:]) == [0, 1]
    assert [record["trial"] for record in records["reward"]] == [
        record["trial"] for record in records["reward@sft-2"]
    ]
    for study, trial in (("sft", 2), ("reward", 0)):
        assert (
            records[study][trial]["attempt"] == 2
            and records[study][trial]["earlier_attempts_energy_kwh"] > 0
        )
    kept = {out / "sft" / "trials" / f"{trial:04d}" / "model" for trial in (2, 3)}
    assert set(out.glob("*/trials/*/model")) == kept, "the last step's weights are nobody's"
    begun = {
        name: json.loads((out / name / "prepared" / "workload.json").read_text())["model"][
            "name_or_path"
        ]
        for name in ("reward", "reward@sft-2")
    }
    assert set(begun.values()) == {str(path.resolve()) for path in kept}

    sessions = sessions_of(out)
    assert [session["outer_kwh"] is None for session in sessions] == [True, True, False]
    summary = json.loads(within("recommend", out, "--json").stdout)
    parts = [study["energy_kwh"] for study in summary["spent"]]
    between_kwh = sum(session["between_kwh"] for session in sessions)
    assert summary["energy_kwh"] == pytest.approx(sum(parts) + between_kwh) and between_kwh > 0
    assert len(summary["paths"]) == 2 and summary["closure"] is None
    assert "call_killed" in {caveat["key"] for caveat in summary["caveats"]}

    again = within("run", chain, "--out", out)
    assert again.returncode == 0 and sessions_of(out) == sessions, (
        "nothing was left to do, and nothing was spent"
    )
    assert within("report", out, "--out", tmp_path / "page").returncode == 0
    written_again = json.loads((tmp_path / "page" / "data" / "pipeline.json").read_text())
    assert written_again["energy_kwh"] == summary["energy_kwh"]
    assert "give the folder of one: sft, reward" in within("export", out).stderr
    assert within("recommend", out, "--target", 3).returncode == 2


@pytest.mark.slow
def test_the_three_steps_raise_the_gold_reward_and_add_up_to_one_reading(tmp_path):
    """The CPU example with one trial a step, whose last is run with three seeds."""
    shutil.copytree(ROOT / "studies", tmp_path / "studies", ignore=shutil.ignore_patterns("data"))
    for path in (tmp_path / "studies" / "chat-small").glob("*.yaml"):
        study = yaml.safe_load(path.read_text())
        study["budget"]["trials"] = 1
        path.write_text(yaml.safe_dump(study))
    out = tmp_path / "out"
    done = within("run", tmp_path / "studies" / "chat-small.yaml", "--out", out)
    assert done.returncode == 0, done.stderr

    summary = json.loads(within("recommend", out, "--json").stdout)
    assert [run["step"] for run in summary["paths"][0]["steps"]] == ["sft", "reward", "rlhf"]
    assert summary["closure"] == pytest.approx(1, abs=0.005)
    assert 0 < summary["between_kwh"] < summary["energy_kwh"] / 2
    assert summary["duration_s"] > sum(study["duration_s"] for study in summary["spent"])

    records = list(map(json.loads, within("export", out / "rlhf").stdout.splitlines()))
    last = [record["evals"][-1]["other_qualities"] for record in records]
    assert len({record["seed"] for record in records}) == 3
    (start,) = {others["start_gold_reward"] for others in last}
    gold = [others["gold_reward"] for others in last]
    assert statistics.fmean(gold) - start > 2 * statistics.stdev(gold)
