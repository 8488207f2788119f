"""winner/run.sh and its train.py: in an environment without carbonopt they reach the recorded perplexity."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
import yaml
from transformers import AutoTokenizer

from carbonopt.analysis.recommend import recommend
from carbonopt.core.config import Dataset, Workload
from carbonopt.export.winner import winner_files
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.check import check
from carbonopt.study.file import load_study
from carbonopt.study.loop import run_study
from carbonopt.train import fast_step as steps
from carbonopt.train import output_layer, standalone
from carbonopt.train.data import packing
from carbonopt.train.data import prefetch as batches
from carbonopt.train.data.text import read_text
from carbonopt.train.data.tokens import make_encoder

MODEL = {"from_config": {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}}
TOPICS = [topics[name] for name in sorted(topics)][:30]
DOCUMENTS = ["The quick brown fox jumps over it.\n", "Größe, naïve, 日本, \r\n\ttab", "", "a" * 700, "Zoë said: “no”."]


class Silent:
    """A display that shows nothing, and a tracker that tracks nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class Rerun:
    """A study of one trial, and its winner/ run by itself."""

    def __init__(self, folder: Path, workload: dict, launch: dict | None = None, **space) -> None:
        workload = {"model": MODEL, "sequence_length": 64, "evaluations": 2, **workload}
        study = {
            "name": "one trial",
            "workload": workload,
            "target": {"perplexity": 1e6},
            "search": {"space": {"global_batch_size": 64, "learning_rate": 3e-3, "epochs": 0.1, **space}},
            "budget": {"trials": 1},
            "carbon": {"intensity_g_co2e_per_kwh": 500},
            "launch": {"kind": "local", "gpus": [], **(launch or {})},
        }
        (folder / "study.yaml").write_text(yaml.safe_dump(study))
        paths = StudyPaths(folder / "out")
        paths.root.mkdir()
        checked = check(load_study(folder / "study.yaml"))
        self.data = run_study(checked, "", paths, None, Silent(), Silent(), lambda: False)
        self.record = self.data.records[0]
        assert self.record.perplexity is not None, self.record.failure

        self.folder = folder / "it's $HOME; `winner`"
        self.folder.mkdir()
        given = {"ds_config.json": (paths.trial(0) / "ds_config.json").read_text()}
        self.files = winner_files(self.data, recommend(self.data), self.folder, given)
        assert not [name for name, text in self.files.items() if str(folder) in text], "no path of this machine"
        for name, text in self.files.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        stub = folder / "stub" / "carbonopt" / "__init__.py"
        stub.parent.mkdir(parents=True)
        stub.write_text("raise ImportError('not here')\n")
        path = f"{os.environ['PATH']}:{Path(sys.executable).parent}"  # where a system's ninja comes first
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(folder / "stub")}
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def started(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, cwd=self.elsewhere, env=self.environment, capture_output=True, text=True, timeout=300
        )

    def run(self, *arguments: str, beside: tuple[str, ...] = ()) -> None:
        """Runs run.sh; the perplexity is the recorded one, to the last digit: it is a CPU."""
        done = self.started("sh", f"{self.folder}/run.sh", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        last = self.record.evals[-1]
        assert json.loads((self.folder / "output" / "result.json").read_text()) == {
            "perplexity": self.record.perplexity,
            "nll_sum": last.nll_sum,
            "eval_tokens": last.eval_tokens,
            "steps": self.record.total_steps,
        }
        seed, perplexity = self.record.seed, f"{self.record.perplexity:.6g}"
        assert f"perplexity {perplexity} with seed {seed}; recorded with seed {seed}: {perplexity} (+0" in done.stdout
        assert sorted(path.name for path in self.folder.iterdir()) == sorted([*self.files, *beside, "output"])
        assert not list(self.elsewhere.iterdir())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Rerun:
    """ZeRO 1; weights drawn, with dropout; a fused output layer, tied to the embedding; the built-in text by bytes."""
    workload = {"tokenizer": {"kind": "byte"}, "dataset": {"builtin": "python-docs"}}
    rerun = Rerun(tmp_path_factory.mktemp("one"), workload, warmup_ratio=0.25, weight_decay=0.1, output_layer="fused")
    rerun.run()
    return rerun


def test_without_carbonopt_means_without(one_rank):
    assert "not here" in one_rank.started(sys.executable, "-c", "import carbonopt").stderr


def test_deepspeed_settings_made_from_the_record_are_those_that_the_trial_had(one_rank):
    assert winner_files(one_rank.data, recommend(one_rank.data), one_rank.folder) == one_rank.files


def test_two_ranks_with_zero_3(tmp_path):
    """Accumulation, several epochs, JSON lines by characters, of which the evaluation has one that is unknown."""
    lines = tmp_path / "my $ data.jsonl"
    lines.write_text("\n".join(json.dumps({"body": text, "n": 1}) for text in [*TOPICS, topics["lambda"] + "→"]))
    dataset = {"train_files": ["my $ data.jsonl"], "text_column": "body", "eval_fraction": 0.2}
    workload = {"tokenizer": {"kind": "char"}, "dataset": dataset}
    rerun = Rerun(tmp_path, workload, {"cpu_ranks": 2}, zero_stage=3, micro_batch_size_per_gpu=8, epochs=1.5)
    assert yaml.safe_load(rerun.files["workload.yaml"])["dataset"]["train_files"] == ["data/my $ data.jsonl"]

    done = rerun.started("sh", f"{rerun.folder}/run.sh")
    (sentence,) = done.stderr.splitlines()
    place, sha256 = f"{rerun.folder}/data/{lines.name}", hashlib.sha256(lines.read_bytes()).hexdigest()
    assert sentence.startswith(f"{lines.name} ({lines.stat().st_size:,} bytes, sha256 {sha256}) is missing: ")
    assert done.returncode == 1 and f"; put it at {place}, or" in sentence

    Path(place).parent.mkdir()
    lines.rename(place)
    lines = Path(place)
    rerun.run(overhead_cost=("data",))
    weights = safetensors.numpy.load_file(rerun.folder / "output" / "model.safetensors")
    assert sum(one.size for one in weights.values()) == rerun.data.prepared.model_parameters, "ZeRO 3 was gathered"
    tokenizer = AutoTokenizer.from_pretrained(rerun.folder / "output")
    assert tokenizer.decode(tokenizer("lambda x:\n")["input_ids"]) == "lambda x:\n"

    lines.write_text(lines.read_text() + "\n" + json.dumps({"body": "more"}))
    done = rerun.started(sys.executable, f"{rerun.folder}/train.py")
    assert done.returncode == 1 and f"{lines} is not the recorded file: it must have" in done.stderr
    (rerun.folder / "inputs.json").write_text("{}")
    done = rerun.started(sys.executable, f"{rerun.folder}/train.py")
    assert done.returncode == 1 and "the data set has changed" in done.stderr


def test_a_trained_model_with_adapters_in_half_precision(one_rank, tmp_path):
    """The model and tokenizer that train.py wrote; Parquet; its own optimizer; compiled layer by layer."""
    pyarrow.parquet.write_table(pyarrow.table({"text": TOPICS}), tmp_path / "text.parquet")
    workload = {
        "model": {"name_or_path": str(one_rank.folder / "output")},
        "dataset": {"train_files": ["text.parquet"]},
        "training_arguments": {"adam_beta2": 0.95, "lr_scheduler_type": "cosine"},
    }
    space = {
        "lora_rank": 4, "precision": "bf16", "torch_compile": True, "output_layer": "fused",
        "micro_batch_size_per_gpu": 16,
    }  # fmt: skip
    rerun = Rerun(tmp_path, workload, **space)
    data = tmp_path / "brought along"
    data.mkdir()
    (tmp_path / "text.parquet").rename(data / "text.parquet")
    (data / "output").symlink_to(one_rank.folder / "output")
    rerun.run("--data", f"../{data.name}")

    (rerun.folder / "data").symlink_to(data)
    again = load_study(rerun.folder / "rerun.yaml").workload
    assert Path(again.dataset.train_files[0]).is_file() and Path(again.model.name_or_path).is_dir()
    assert again.model.name_or_path == f"{rerun.folder}/data/output"


# ------------------------------------------------------------------------- part by part, against what trials train with


def write_documents(folder: Path) -> dict[str, dict]:
    """The same documents in each kind of file, and the data sets of them."""
    rows = [{"text": text} for text in DOCUMENTS]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": [*DOCUMENTS, None]}), folder / "a.parquet")
    quoted = "".join('"' + text.replace('"', '""') + '",1\n' for text in DOCUMENTS)
    (folder / "a.csv").write_bytes(f"\ufefftext,n\n{quoted}".encode())
    (folder / "a.txt").write_bytes("".join(DOCUMENTS).encode())
    files = {kind: str(folder / f"a.{kind}") for kind in ("jsonl", "parquet", "csv", "txt")}
    sets = {kind: {"train_files": [file]} for kind, file in files.items()}
    return sets | {
        "builtin": {"builtin": "python-docs", "eval_fraction": 0.01},
        "several": {"train_files": [files["txt"], files["jsonl"]], "eval_files": [files["csv"]]},
        "hub": {"name_or_path": str(folder / "hub")},
    }


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "txt", "builtin", "several", "hub"])
def test_text_is_read_as_trials_read_it(kind, tmp_path):
    (tmp_path / "hub").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "hub" / f"{split}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS))
    dataset = Dataset(**write_documents(tmp_path)[kind])
    train, evaluation = standalone.read_text(dataset.model_dump(mode="json", exclude_none=True))
    assert (train, evaluation) == tuple(read_text(dataset)) and train and evaluation


@pytest.mark.parametrize("tokenizer", [{"kind": "char"}, {"kind": "byte"}, {"train_bpe": 300}])
@pytest.mark.parametrize("evaluation", [["Zoë says: 日本!"], ["quick", "naïve"]])
def test_tokens_are_those_of_trials(tokenizer, evaluation):
    train = [text for text in DOCUMENTS if text] + TOPICS[:3]
    raw = {"model": MODEL, "tokenizer": tokenizer, "dataset": {"builtin": "python-docs"}, "sequence_length": 8}
    encoder = make_encoder(Workload(**raw), train, evaluation)
    made, to_ids = standalone.make_tokenizer(raw, train, evaluation)
    assert made.get_vocab() == encoder.tokenizer.get_vocab() and len(made) == encoder.vocab_size
    assert made.special_tokens_map == encoder.tokenizer.special_tokens_map
    for documents in (train, evaluation):
        np.testing.assert_array_equal(
            standalone.encode(documents, to_ids, made.eos_token_id), encoder.encode(documents)
        )


@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_are_those_of_trials(world_size, monkeypatch):
    tokens, length, batch, micro = np.arange(5000, dtype=np.uint16) % 251, 7, 24, 4
    monkeypatch.setattr(standalone, "WORLD_SIZE", world_size)
    accumulation = batch // micro // world_size
    given = {
        "seed": 5,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2.4,
    }
    for rank in range(world_size):
        monkeypatch.setattr(standalone, "RANK", rank)
        mine = standalone.MicroBatches(tokens, length, given, batch)
        steps = packing.total_steps((len(tokens) - 1) // length, batch, 2.4)
        trials = packing.MicroBatches(tokens, length, batch, micro, steps, 5, rank, world_size)
        assert len(mine) == len(trials) > 2 * accumulation * (len(tokens) - 1) // length // batch
        for index in range(len(trials)):
            assert all((mine[index][key] == trials[index][key]).all() for key in ("input_ids", "labels"))


@pytest.mark.parametrize("module", [standalone, output_layer, batches, steps])
def test_train_py_imports_nothing_of_carbonopt(module):
    assert "carbonopt" not in "".join(
        line for line in Path(module.__file__).read_text().splitlines() if "import" in line
    )
