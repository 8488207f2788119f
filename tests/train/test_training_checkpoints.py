"""Trials that go on from a checkpoint: the same digits as without it, or from the start and said.

One attempt saves itself after every step and runs to its end. A later one goes on from a step in
its middle, as if the first had been cut off there.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from trial_processes import Run, start

from carbonopt.core.channel import FINISHED_EXIT
from carbonopt.core.events import Continued, Progress, Remarked, Saved
from carbonopt.core.files import write_json
from carbonopt.core.trial import Phase
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.trial_spec import TrialCheckpoints, checkpoint_name
from carbonopt.train.checkpoints import Checkpoints, _Clock
from carbonopt.train.data.packing import open_tokens

LENGTH, STEPS, CUT = 32, 10, 6
WORKLOAD = {
    "model": {  # with dropout, whose random numbers have to go on, too
        "from_config": {
            "model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": LENGTH,
        }
    },
    "tokenizer": {"kind": "byte"},
    "dataset": {"builtin": "python-docs"},
    "sequence_length": LENGTH,
    "evaluations": 5,
}  # fmt: skip
PARAMS = {
    "global_batch_size": 8,
    "micro_batch_size_per_gpu": 4,
    "learning_rate": 3e-3,
    "epochs": 1,
    "lr_scheduler": "cosine",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    spec = {
        "workload": WORKLOAD,
        "space": {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1},
        "prepared_dir": str(folder / "prepared"),
        "fingerprint": "f",
    }
    assert start("prepare", spec, folder).exit_code == FINISHED_EXIT
    made = PreparedFolder(folder / "prepared")
    _cut(made.train, STEPS * 8 * LENGTH + 1)
    _cut(made.evaluation, 8 * LENGTH + 1)
    changed = {"train_examples": STEPS * 8, "eval_tokens": 8 * LENGTH, "eval_examples": 8}
    write_json(made.summary, made.read_summary().model_copy(update=changed).model_dump())
    return made.root


def _cut(path: Path, tokens: int) -> None:
    np.save(path, open_tokens(path)[:tokens].copy(), allow_pickle=False)


@pytest.fixture
def trial(prepared: Path, tmp_path: Path):
    def run(continue_from: int | None = None, every_s: float = 1e-9, saves=True, **changes) -> Run:
        seed = changes.pop("seed", 0)
        params = {**PARAMS, **changes}
        folder = tmp_path / f"from-{continue_from}-{saves}-{seed}-{params['learning_rate']}"
        checkpoints = {
            "folder": str(tmp_path / "checkpoints"),
            "every_s": every_s,
            "continue_from": continue_from,
        }
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": WORKLOAD,
            "prepared_dir": str(prepared), "trial_dir": str(folder),
            "checkpoints": checkpoints if saves else None, "saves_model": True,
        }  # fmt: skip
        return start("rank_main", spec, folder, params.get("world_size", 1))

    return run


def model_bytes(run: Run) -> dict[str, bytes]:
    model = run.folder / "model"
    return {path.name: path.read_bytes() for path in sorted(model.glob("*.safetensors"))}


def steps_of(run: Run, kind) -> list[int]:
    return [event.step for event in run.events if isinstance(event, kind)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 0},
        {"zero_stage": 0, "micro_batch_size_per_gpu": 8},  # a step in one piece
        {"zero_stage": 1},
        {"zero_stage": 2, "offload": "optimizer"},
        {"zero_stage": 3},
        {"zero_stage": 3, "offload": "parameters"},
        {"zero_stage": 0, "world_size": 2},
        {"zero_stage": 1, "world_size": 2},
        {"zero_stage": 3, "world_size": 2},
        {"zero_stage": 0, "optimizer": "muon"},
        {"zero_stage": 1, "weight_averaging": 0.1},
        {"zero_stage": 0, "weight_averaging": 0.3, "precision": "bf16"},
        {"zero_stage": 2, "precision": "bf16", "world_size": 2},
        {"zero_stage": 1, "lora_rank": 2},
        {"zero_stage": 3, "lora_rank": 2},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_continued_training_has_the_same_digits(changes: dict, trial) -> None:
    whole = trial(**changes)
    assert whole.exit_code == FINISHED_EXIT
    assert steps_of(whole, Saved) == list(range(1, STEPS))
    assert [event for event in whole.events if isinstance(event, Remarked | Continued)] == []

    rest = trial(CUT, every_s=3600.0, **changes)
    assert rest.exit_code == FINISHED_EXIT
    assert steps_of(rest, Continued) == [CUT] and steps_of(rest, Saved) == []
    assert steps_of(rest, Progress)[0] == CUT + 1
    assert [point.step for point in whole.points] == [2, 4, 6, 8, 10]
    assert rest.points == whole.points[3:], "to the last digit"
    assert model_bytes(rest) == model_bytes(whole) != {}


def pairs(count: int) -> str:
    rows = (
        {"prompt": "say: ", "chosen": "a" * (i % 7 + 1), "rejected": "b" * (i % 5 + 2)}
        for i in range(count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.slow
def test_preferences_go_on_against_the_weights_of_the_beginning(tmp_path: Path) -> None:
    """DPO's reference is the model with which training began, not the one of the checkpoint."""
    for name, count in (("train.jsonl", 48), ("eval.jsonl", 9)):
        (tmp_path / name).write_text(pairs(count))
    workload = {
        "task": "dpo",
        "model": WORKLOAD["model"],
        "tokenizer": {"kind": "byte"},
        "dataset": {
            "train_files": [str(tmp_path / "train.jsonl")],
            "eval_files": [str(tmp_path / "eval.jsonl")],
        },
        "sequence_length": LENGTH,
        "evaluations": 3,
    }
    space = {"global_batch_size": 8, "learning_rate": 1e-2, "epochs": 1}
    folder = str(tmp_path / "prepared")
    made = {"workload": workload, "space": space, "prepared_dir": folder, "fingerprint": "f"}
    assert start("prepare", made, tmp_path).exit_code == FINISHED_EXIT

    def run(name: str, every_s: float, continue_from: int | None = None) -> Run:
        checkpoints = {
            "folder": str(tmp_path / "saved"), "every_s": every_s, "continue_from": continue_from,
        }  # fmt: skip
        spec = {
            "number": 0, "attempt": 1, "seed": 0, "params": {**space, "micro_batch_size_per_gpu": 8},
            "workload": workload, "prepared_dir": folder, "trial_dir": str(tmp_path / name),
            "checkpoints": checkpoints, "saves_model": True,
        }  # fmt: skip
        return start("rank_main", spec, tmp_path / name)

    whole, rest = run("whole", 1e-9), run("rest", 3600.0, 3)
    assert steps_of(rest, Continued) == [3]
    assert [point.step for point in whole.points] == [2, 4, 6]
    assert rest.points == whole.points[1:] and model_bytes(rest) == model_bytes(whole) != {}


@pytest.mark.slow
def test_saving_changes_nothing(trial) -> None:
    saving, plain = trial(), trial(saves=False)
    assert plain.points == saving.points and model_bytes(plain) == model_bytes(saving)
    assert plain.shape == [Phase.TRAIN, *([Phase.EVAL, "Evaluated", Phase.TRAIN] * 5)[:-1],
                           "Finished"]  # fmt: skip


@pytest.mark.slow
def test_checkpoint_of_another_training_is_not_used(trial, tmp_path: Path) -> None:
    """Each is refused for a reason that names what differs, and the trial has its own digits."""
    first = trial()
    saved = tmp_path / "checkpoints" / checkpoint_name(CUT)
    manifest = saved / "checkpoint.json"
    written = manifest.read_text()

    def refused(named: str, **changes) -> None:
        again = trial(CUT, every_s=3600.0, **changes)
        (remark,) = [event.text for event in again.events if isinstance(event, Remarked)]
        assert named in remark and f"step {CUT}" in remark
        assert steps_of(again, Continued) == [] and steps_of(again, Progress)[0] == 1
        if not changes:
            assert again.points == first.points

    refused("learning_rate", learning_rate=1e-3)
    refused("seed", seed=1)
    refused("ranks", world_size=2)
    manifest.write_text(written.replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    refused("torch")
    manifest.write_text(written[: len(written) // 2])
    refused(f"step {CUT}")
    manifest.write_text(written)
    whole = (saved / "shared.pt").read_bytes()
    (saved / "shared.pt").write_bytes(whole[:-1])
    refused("shared.pt")
    (saved / "shared.pt").write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    refused("shared.pt")
    shutil.rmtree(saved)
    refused(checkpoint_name(CUT))


class _Program:
    """An object whose unpickling would run a program."""

    def __reduce__(self):
        return (open, ("/nowhere/that/is",))


@pytest.mark.slow
def test_checkpoint_that_holds_a_program_is_not_run(trial, tmp_path: Path) -> None:
    """Even with a manifest that fits."""
    import hashlib

    trial()
    saved = tmp_path / "checkpoints" / checkpoint_name(CUT)
    torch.save({"tensors": {}, "steps": _Program()}, saved / "shared.pt")
    manifest = json.loads((saved / "checkpoint.json").read_text())
    digest = hashlib.sha256((saved / "shared.pt").read_bytes()).hexdigest()
    manifest["files"]["shared.pt"] = digest
    write_json(saved / "checkpoint.json", manifest)
    again = trial(CUT, every_s=3600.0)
    (remark,) = [event.text for event in again.events if isinstance(event, Remarked)]
    assert "could run a program" in remark
    assert again.exit_code == FINISHED_EXIT and steps_of(again, Continued) == []


@pytest.mark.slow
def test_checkpoint_that_cannot_be_written_stops_nothing(trial, tmp_path: Path) -> None:
    """A file is where the folder should be; that is said once."""
    (tmp_path / "checkpoints").write_text("")
    run = trial()
    assert run.exit_code == FINISHED_EXIT and steps_of(run, Saved) == []
    remarks = [event.text for event in run.events if isinstance(event, Remarked)]
    assert len(remarks) == 1 and str(tmp_path / "checkpoints") in remarks[0]
    assert run.points == trial(saves=False).points


class _StateOnAFullDisk:
    """A training's state whose file is on a disk that is full, for as long as `is_full`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.is_full = folder, 0, True

    def taken(self) -> tuple[dict, dict]:
        if self.is_full:
            file = self.folder / f".{checkpoint_name(self.step)}.part" / "rank-0.pt"
            file.symlink_to("/dev/full")
        return {}, {"weights": torch.zeros(1000)}


def test_full_disk_is_said_once_until_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, said = _StateOnAFullDisk(tmp_path), []
    settings = TrialCheckpoints(folder=str(tmp_path), every_s=1.0)
    checkpoints = Checkpoints(settings, None, state, None)
    monkeypatch.setattr(checkpoints, "remark", said.append)
    monkeypatch.setattr(checkpoints, "_identity", dict)
    for state.step in (1, 2, 3):
        checkpoints.save(state.step)
    assert len(said) == 1 and "step 1" in said[0]
    assert f"the disk of {tmp_path} is full" in said[0]
    assert "inline_container" not in said[0] and "Errno" not in said[0]
    state.is_full = False
    checkpoints.save(4)
    assert (tmp_path / checkpoint_name(4)).is_dir() and len(said) == 1
    state.is_full = True
    for state.step in (5, 6):
        checkpoints.save(state.step)
    assert len(said) == 2 and "step 5" in said[1]
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(4)]


def test_clock_looks_seldom_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, looks = 0.0, 0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        return now_s

    monkeypatch.setattr("carbonopt.train.checkpoints.time.monotonic", monotonic)
    clock = _Clock(1800.0)
    clock.begin(0)
    looks, due, step = 0, [], 0
    for step in range(1, 100_001):
        now_s += 0.1 if step > 1 else 30.0  # the first step compiles
        if clock.is_due(step):
            due.append(now_s)
            clock.begin(step)
    assert len(due) == 5
    gaps_s = np.diff([0.0, *due])
    assert (gaps_s >= 1800.0).all() and (gaps_s < 1830.0).all()
    assert looks < 500
