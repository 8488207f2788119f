"""What a training of the task dpo takes beside TRL's DPOTrainer: the same pairs, model and
settings, in turn.

python benchmarks/dpo/compare.py FOLDER [--gpu] [--runs 3]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from carbonopt.spec.workload_settings import Model, Tokenizer
from carbonopt.train.data import pair_rows, tokens
from carbonopt.train.data.pairs import PairDataset, read_pairs
from carbonopt.train.tasks.dpo import DPOWorkload

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--gpu", action="store_true")
parser.add_argument("--runs", type=int, default=3)
given = parser.parse_args()
folder: Path = given.folder.resolve()
folder.mkdir(parents=True, exist_ok=True)

WIDTH, LAYERS, PAIRS = (768, 12, 4000) if given.gpu else (64, 2, 400)
BATCH, RATE, LENGTH = 32 if given.gpu else 8, 1e-4, 128


def write_inputs() -> None:
    """The pairs that carbonopt has built in, and a model with random weights and its tokenizer."""
    dataset = PairDataset(builtin="python-docs")
    pairs = read_pairs(dataset).train[:PAIRS]
    rows = [
        {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {
        "model_type": "gpt2",
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": WIDTH // 32,
        "n_positions": LENGTH,
    }
    workload = DPOWorkload(
        task="dpo",
        model=Model(from_config=model),
        tokenizer=Tokenizer(train_bpe=8192),
        dataset=dataset,
        sequence_length=LENGTH,
    )
    tokenizer = tokens.make_encoder(workload, pair_rows.plain_texts(pairs), []).tokenizer
    tokenizer.save_pretrained(folder / "base")
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(**model, vocab_size=len(tokenizer), **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")


def study(
    name: str, workload: dict[str, Any], target: dict[str, Any], space: dict[str, Any]
) -> Path:
    raw = {
        "name": name,
        "workload": workload,
        "target": target,
        "search": {"space": space, "pruning": {"target": False, "cap": False}},
        "budget": {"trials": 1},
        "carbon": {"intensity_g_co2e_per_kwh": 100},
        "launch": {"gpus": [0] if given.gpu else []},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def studies() -> dict[str, Path]:
    """By name; each has one trial."""
    script = Path(__file__).with_name("trl_dpo.py").resolve()
    command = (
        f"{sys.executable} {script} --base base --rows rows.jsonl --batch {{global_batch_size}}"
        " --seed {seed}"
    )
    command += f" --lr {{learning_rate}} --bf16 {int(given.gpu)}"
    own = {
        "task": "dpo",
        "model": {"name_or_path": "./base"},
        "sequence_length": LENGTH,
        "evaluations": 1,
    }
    own["dataset"] = {"train_files": ["rows.jsonl"], "eval_fraction": 0.1}
    rates = {"global_batch_size": BATCH, "learning_rate": RATE}
    made = {
        "own": study(
            "own", own, {"preference_accuracy": 0.01},
            {**rates, "epochs": 1, "zero_stage": 1, "precision": "bf16" if given.gpu else "fp32"},
        )
    }  # fmt: skip
    for name, precomputes in (("trl", 0), ("trl-precomputed", 1)):
        workload = {"task": "script", "command": f"{command} --precompute {precomputes}"}
        made[name] = study(name, workload, {"quality": "loss", "at_most": 10.0}, rates)
    return made


def trial(name: str, path: Path, number: int) -> dict[str, Any]:
    """The record of one."""
    out = folder / "runs" / f"{name}-{number}"
    command = [sys.executable, "-m", "carbonopt"]
    subprocess.run(
        [*command, "run", path, "--out", out, "--seed", str(number)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    exported = subprocess.run(
        [*command, "export", out], check=True, capture_output=True, text=True
    ).stdout
    record: dict[str, Any] = json.loads(exported)
    assert record["state"] == "complete", record
    return record


write_inputs()
records: dict[str, list[dict[str, Any]]] = {}
for number in range(given.runs):
    for name, path in studies().items():
        records.setdefault(name, []).append(trial(name, path, number))
for name, runs in records.items():
    joules = [3.6e6 * record["energy_kwh"]["train"] for record in runs]
    seconds = [record["duration_s"]["train"] for record in runs]
    setup = [record["duration_s"]["setup"] for record in runs]
    spread = stdev(joules) if len(joules) > 1 else 0.0
    line = {"name": name, "runs": len(runs), "train_j": mean(joules), "train_j_deviation": spread}
    line |= {
        "train_s": mean(seconds),
        "setup_s": mean(setup),
        "peak_memory_gib": runs[0]["peak_memory_gib"],
    }
    print(json.dumps(line))
