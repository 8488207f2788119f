"""winner/run.sh and its train.py: in an environment without carbonopt they reach the recorded
perplexity.
"""

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
from PIL import Image
from transformers import AutoTokenizer

from carbonopt.analysis.recommend import recommend
from carbonopt.export.winner import winner_files
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.run_study import run_study
from carbonopt.study.session import Session
from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_checks import check

MODEL = {
    "from_config": {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "n_positions": 64,
    }
}
TOPICS = [topics[name] for name in sorted(topics)][:30]


class Silent:
    """A display that shows nothing, and a tracker that tracks nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class Rerun:
    """A study of one trial, and its winner/ run by itself."""

    def __init__(
        self,
        folder: Path,
        workload: dict,
        launch: dict | None = None,
        target: dict | None = None,
        **space,
    ) -> None:
        if workload.get("task", "causal_lm") in ("causal_lm", "sft"):
            workload = {"model": MODEL, "sequence_length": 64, **workload}
        workload = {"evaluations": 2, **workload}
        study = {
            "name": "one trial",
            "workload": workload,
            "target": target or {"perplexity": 1e6},
            "search": {
                "space": {"global_batch_size": 64, "learning_rate": 3e-3, "epochs": 0.1, **space}
            },
            "budget": {"trials": 1},
            "carbon": {"intensity_g_co2e_per_kwh": 500},
            "launch": {"kind": "local", "gpus": [], **(launch or {})},
        }
        (folder / "study.yaml").write_text(yaml.safe_dump(study))
        paths = StudyPaths(folder / "out")
        paths.root.mkdir()
        checked = check(load_study(folder / "study.yaml"))
        self.data = run_study(Session(checked, "", paths, Silent(), Silent(), lambda: False))
        self.record = self.data.records[0]
        assert self.record.value is not None, self.record.failure

        self.folder = folder / "it's $HOME; `winner`"
        self.folder.mkdir()
        given = {"ds_config.json": (paths.trial(0) / "ds_config.json").read_text()}
        self.files = winner_files(self.data, recommend(self.data), given)
        assert not [name for name, text in self.files.items() if str(folder) in text], (
            "no path of this machine"
        )
        for name, text in self.files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(text.encode())
        stub = folder / "stub" / "carbonopt" / "__init__.py"
        stub.parent.mkdir(parents=True)
        stub.write_text("raise ImportError('not here')\n")
        # where a system's ninja comes first
        path = f"{os.environ['PATH']}:{Path(sys.executable).parent}"
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(folder / "stub")}
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def started(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            cwd=self.elsewhere,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def run(self, *arguments: str, own_files: tuple[str, ...] = ()) -> None:
        """Runs run.sh; the quality is the recorded one, to the last digit: it is a CPU."""
        done = self.started("sh", f"{self.folder}/run.sh", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        value, last, name = self.record.value, self.record.evals[-1], self.record.quality.name
        assert json.loads((self.folder / "output" / "result.json").read_text()) == {
            "quality": {"name": name, "value": value, "sum": last.sum, "count": last.count},
            "steps": self.record.total_steps,
        }
        seed, reached = self.record.seed, f"{value:.6g}"
        assert (
            f"{name} {reached} with seed {seed}; recorded with seed {seed}: {reached} (+0"
            in done.stdout
        )
        own = {name.partition("/")[0] for name in self.files}
        assert {path.name for path in self.folder.iterdir()} == {*own, *own_files, "output"}
        assert not [
            path.name for path in (self.folder / "output").iterdir() if path.name.startswith(".")
        ]
        assert not list(self.elsewhere.iterdir())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Rerun:
    """ZeRO 1; weights drawn, with dropout; a fused output layer, tied to the embedding; the
    built-in text by bytes.
    """
    workload = {"tokenizer": {"kind": "byte"}, "dataset": {"builtin": "python-docs"}}
    rerun = Rerun(
        tmp_path_factory.mktemp("one"),
        workload,
        warmup_ratio=0.25,
        weight_decay=0.1,
        output_layer="fused",
    )
    rerun.run()
    return rerun


@pytest.mark.slow
def test_without_carbonopt_means_without(one_rank):
    assert "not here" in one_rank.started(sys.executable, "-c", "import carbonopt").stderr


@pytest.mark.slow
def test_deepspeed_settings_made_from_the_record_are_those_that_the_trial_had(one_rank):
    assert winner_files(one_rank.data, recommend(one_rank.data)) == one_rank.files


@pytest.mark.slow
def test_two_ranks_with_zero_3(tmp_path):
    """Accumulation, several epochs, JSON lines by characters, of which the evaluation has one that
    is unknown.
    """
    lines = tmp_path / "my $ data.jsonl"
    lines.write_text(
        "\n".join(json.dumps({"body": text, "n": 1}) for text in [*TOPICS, topics["lambda"] + "→"])
    )
    dataset = {"train_files": ["my $ data.jsonl"], "text_column": "body", "eval_fraction": 0.2}
    workload = {"tokenizer": {"kind": "char"}, "dataset": dataset}
    rerun = Rerun(
        tmp_path, workload, {"cpu_ranks": 2}, zero_stage=3, micro_batch_size_per_gpu=8, epochs=1.5
    )
    assert yaml.safe_load(rerun.files["workload.yaml"])["dataset"]["train_files"] == [
        "data/my $ data.jsonl"
    ]
    # The model's blocks are among DeepSpeed's settings, also where the trial's own file is gone.
    assert "GPT2Block" in rerun.files["ds_config.json"]
    assert winner_files(rerun.data, recommend(rerun.data)) == rerun.files

    done = rerun.started("sh", f"{rerun.folder}/run.sh")
    (sentence,) = done.stderr.splitlines()
    place, sha256 = (
        f"{rerun.folder}/data/{lines.name}",
        hashlib.sha256(lines.read_bytes()).hexdigest(),
    )
    assert sentence.startswith(
        f"{lines.name} ({lines.stat().st_size:,} bytes, sha256 {sha256}) is missing: "
    )
    assert done.returncode == 1 and f"; put it at {place}, or" in sentence

    Path(place).parent.mkdir()
    lines.rename(place)
    lines = Path(place)
    rerun.run(own_files=("data",))
    weights = safetensors.numpy.load_file(rerun.folder / "output" / "model.safetensors")
    assert (
        sum(weight.size for weight in weights.values()) == rerun.data.prepared.model_parameters
    ), "ZeRO 3 was gathered"
    tokenizer = AutoTokenizer.from_pretrained(rerun.folder / "output")
    assert tokenizer.decode(tokenizer("lambda x:\n")["input_ids"]) == "lambda x:\n"

    lines.write_text(lines.read_text() + "\n" + json.dumps({"body": "more"}))
    done = rerun.started(sys.executable, f"{rerun.folder}/train.py")
    assert done.returncode == 1 and f"{lines} is not the recorded file: it must have" in done.stderr
    (rerun.folder / "inputs.json").write_text("{}")
    done = rerun.started(sys.executable, f"{rerun.folder}/train.py")
    assert done.returncode == 1 and "the data set has changed" in done.stderr


@pytest.mark.slow
def test_a_classifier_of_an_image_folder_on_two_ranks(tmp_path):
    """The folder of the images is among what the winner needs; macro-F1 beside accuracy is in the
    record.
    """
    for label, image in zip(
        [*"aabb"] * 10, np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8), strict=True
    ):
        path = tmp_path / "images" / label / f"{len(list(tmp_path.rglob('*.png')))}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image // 2 + (label == "a") * 64).save(path)
    vit = {
        "model_type": "vit",
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "hidden_size": 16,
    }
    vit |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dataset = {
        "name_or_path": "./images",
        "eval_split": "train",
        "eval_fraction": 0.25,
        "image_column": "image",
    }
    workload = {"task": "classification", "model": {"from_config": vit}, "dataset": dataset}
    sizes = {"global_batch_size": 8, "micro_batch_size_per_gpu": 2, "zero_stage": 2, "epochs": 4}
    rerun = Rerun(tmp_path, workload, {"cpu_ranks": 2}, {"accuracy": 0.0}, **sizes)
    assert (
        rerun.record.evals[-1].count == 10 and "macro_f1" in rerun.record.evals[-1].other_qualities
    )
    (
        tmp_path / "brought along"
    ).mkdir()  # datasets would take $HOME in the winner's own path for a variable
    (tmp_path / "images").rename(tmp_path / "brought along" / "images")
    rerun.run("--data", "../brought along")
    assert json.loads((rerun.folder / "output" / "preprocessor_config.json").read_text())[
        "do_normalize"
    ]


@pytest.mark.slow
def test_a_trained_model_with_adapters_in_half_precision(one_rank, tmp_path):
    """The model and tokenizer that train.py wrote; Parquet; its own optimizer; compiled layer by
    layer.
    """
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


@pytest.mark.slow
def test_train_py_reads_its_copy_of_carbonopt_and_no_other(one_rank):
    """Each module of the copy can be imported with the copy alone, from the copy, and nothing heavy
    by its settings.
    """
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in one_rank.files
        if name.startswith("carbonopt/")
    ]
    script = "import sys, importlib; sys.path.insert(0, sys.argv[1])\n"
    script += "for name in sys.argv[2:]: print(importlib.import_module(name).__file__)"
    done = one_rank.started(sys.executable, "-c", script, str(one_rank.folder), *modules)
    assert done.returncode == 0, done.stderr
    files = [line for line in done.stdout.splitlines() if "carbonopt" in line]
    assert len(files) == len(modules) > 20 and all(
        file.startswith(str(one_rank.folder)) for file in files
    )
