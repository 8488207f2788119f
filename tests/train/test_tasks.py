"""A task is one file and one line: one that is written here goes through all that asks for a task."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_studies import study

from carbonopt.core.dimensions import TrainingParams
from carbonopt.core.errors import BadInput
from carbonopt.export.copies import copies
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import TrainingSpec
from carbonopt.spec.workload_settings import Workload
from carbonopt.study_file.reader import parse_study
from carbonopt.train.prepare import PrepareSpec, prepare
from carbonopt.train.rank_main import run_trial
from carbonopt.train.tasks import task

FILE = '''
"""Counts words, and is judged by how many of them are long."""

from typing import Literal

from carbonopt.core.quality import QUALITIES
from carbonopt.core.evaluations import EvalPoint
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import Dataset, Workload
from carbonopt.train.tasks.task import Card, Trained, TrainingTask


class Words(Dataset, extra="forbid"):
    word_column: str = "word"


class CountsWorkload(Workload, extra="forbid"):
    task: Literal["counts"]
    dataset: Words
    longest: int = 7


class Counts(TrainingTask):
    settings = CountsWorkload
    qualities = (QUALITIES["accuracy"],)
    card = Card("other", "Other", "a counter")

    def prepare(self, space, folder, fingerprint):
        (folder.root / "words.txt").write_text(" ".join(self.workload.dataset.train_files))
        return Prepared(
            fingerprint=fingerprint, train_examples=64, eval_examples=1, train_tokens=64, eval_tokens=4,
            sequence_length=self.workload.sequence_length, vocab_size=2, model_parameters=1, versions={},
        )

    def train(self, run, speaker):
        words = (run.folder.root / "words.txt").read_text().split()
        total = float(sum(len(word) > self.workload.longest for word in words))
        tokens = run.total_steps * run.tokens_per_step
        last = EvalPoint.of(self.quality, total, len(words), step=run.total_steps, tokens=tokens)
        return Trained(last, lambda folder: None)
'''
WORKLOAD = {
    "task": "counts",
    "model": {"from_config": {"model_type": "gpt2"}},
    "dataset": {"train_files": ["short", "ordinary", "extraordinary"]},
    "sequence_length": 8,
}


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counts_task.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(task.TASKS, "counts", "counts_task:Counts")
    yield
    sys.modules.pop("counts_task", None)


def parsed(**changes) -> Workload:
    raw = study().config.model_dump(mode="json", exclude_none=True)
    return parse_study(
        {**raw, "target": {"accuracy": 0.5}, "workload": {**WORKLOAD, **changes}}, "study.yaml"
    ).workload


def test_the_study_file_has_the_task_s_own_keys_and_their_defaults(counts):
    workload = parsed()
    assert workload.model_dump()["longest"] == 7 and parsed(longest=3).model_dump()["longest"] == 3
    assert workload.dataset.model_dump()["word_column"] == "word"
    assert Workload.model_validate(workload.model_dump(mode="json")) == workload, (
        "as a stored study has it"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"longst": 3}, "study.yaml: unknown key workload.longst; did you mean longest?"),
        ({"longest": "x"}, "workload.longest: "),
        (
            {"dataset": {"train_files": ["a"], "text_column": "a"}},
            "unknown key workload.dataset.text_column; ",
        ),
        ({"task": "count"}, "workload.task must be a task, but got 'count'; did you mean counts?"),
        ({"task": 3}, "workload.task: "),
    ],
)
def test_what_the_task_does_not_know_is_refused(counts, changes, said):
    with pytest.raises(BadInput) as refused:
        parsed(**changes)
    assert said in str(refused.value)


@pytest.mark.slow
def test_it_prepares_and_trains(counts, tmp_path):
    workload, folder = parsed().model_dump(mode="json"), tmp_path / "prepared"
    space = Space.model_validate({"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 2})
    made = prepare(
        PrepareSpec(workload=workload, space=space, prepared_dir=str(folder), fingerprint="f")
    )
    params = TrainingParams(
        global_batch_size=8, micro_batch_size_per_gpu=8, learning_rate=1e-3, epochs=2
    )
    spec = TrainingSpec(
        number=0,
        attempt=1,
        seed=0,
        params=params,
        workload=workload,
        prepared_dir=str(folder),
        trial_dir=str(tmp_path),
    )
    last = run_trial(spec, None).last
    assert made.train_examples == 64 and last.value == 2 / 3
    assert (last.sum, last.count, last.step, last.tokens) == (2.0, 3, 16, 16 * 64)


def test_a_winner_carries_its_own_task_alone():
    assert "carbonopt/train/tasks/causal_lm.py" not in copies("carbonopt.train.rerun").files
    assert "carbonopt/train/tasks/causal_lm.py" in copies(task.task_module("causal_lm")).files


@pytest.mark.slow
def test_a_winner_has_what_a_task_without_a_trainer_needs(tmp_path):
    """Such a task imports none of the files that make the Trainer's and DeepSpeed's settings."""
    files = copies("carbonopt.train.imports", "carbonopt.train.tasks.task").files
    assert "carbonopt/train/training_loop.py" not in files
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = "from carbonopt.train import imports; imports.import_all(); print(imports.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(tmp_path)
