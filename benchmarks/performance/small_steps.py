"""Time and energy of a step of a small model: trials of a study beside a bare loop of the same
shape, in one run.

    python benchmarks/performance/small_steps.py STUDY.yaml FOLDER [--batches 16 32 64 128]
        [--epochs 6] [--device cpu]

The study's model has to be a GPT-2 from its configuration, as in studies/shakespeare-char.yaml. A
trial of each batch runs with ZeRO 0 and in bf16, with `torch_compile` and without; the bare loop is
a transformer of the same sizes in plain PyTorch, its layers compiled, bf16, and forward pass,
backward pass, clipping and fused AdamW in one CUDA graph, on random tokens that lie on the GPU
already. Of both, the steps after the first ones count; energy is by the GPUs' own counters, of bare
loops the first GPU's. On the CPU (--device cpu) the loop has no graph and no energy: that shows
only that it runs.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

J_PER_KWH = 3.6e6
MEASURED_S, WARM_UP_STEPS = 5.0, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=common.at_least(1), nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--epochs", type=float, default=6.0, help="of each trial")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bare", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare is not None:
        print(json.dumps(bare_loop(**options.bare)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    raw = common.read(options.study)
    trials = of_trials(raw, options)
    model, length = raw["workload"]["model"]["from_config"], raw["workload"]["sequence_length"]
    print(
        "| batch | | ms a step | of the bare loop's | J a step | of the bare loop's | first step"
        " (s) |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for batch, records in trials.items():
        sizes = {
            "layers": model["n_layer"],
            "heads": model["n_head"],
            "width": model["n_embd"],
            "length": length,
        }
        given = sizes | {
            "batch": batch,
            "dropout": model.get("resid_pdrop", 0.1),
            "device": options.device,
        }
        command = [
            sys.executable,
            __file__,
            str(options.study),
            str(options.folder),
            "--bare",
            json.dumps(given),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        bare = json.loads(done.stdout.splitlines()[-1])
        print(row(batch, "bare loop", bare, bare))
        for record in records:
            print(
                row(
                    batch,
                    "trial, compiled" if record["params"]["torch_compile"] else "trial",
                    of(record),
                    bare,
                )
            )


def of_trials(raw: dict[str, Any], options: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    """Of each batch, the records of one trial with torch_compile and one without."""
    space: dict[str, Any] = {
        **{
            name: value
            for name, value in raw["search"]["space"].items()
            if not isinstance(value, dict)
        },
        "global_batch_size": {"choices": options.batches},
        "learning_rate": 1e-3,
        "epochs": options.epochs,
        "zero_stage": 0,
        "torch_compile": {"choices": [False, True]},
    }
    if options.device == "cuda":
        space["precision"] = "bf16"
    search = {"space": space, "sampler": "grid", "pruning": {"target": False, "cap": False}}
    budget = {"trials": 2 * len(options.batches)}
    made = {
        **raw,
        "search": search,
        "budget": budget,
        "workload": {**raw["workload"], "evaluations": 1},
    }
    made.pop("confirm", None)
    made["launch"] = {"gpus": [0] if options.device == "cuda" else []}
    if options.device == "cuda":
        made["carbon"] = {**raw["carbon"], "objective": "gpu"}
    common.run(made, options.study, options.folder / "trials", quiet=True)
    records = common.records(options.folder / "trials")
    return {
        batch: [r for r in records if r["params"]["global_batch_size"] == batch]
        for batch in options.batches
    }


def of(record: dict[str, Any]) -> dict[str, float | None]:
    if record["failure"]:
        raise SystemExit(record["failure"]["text"])
    steps, others = record["stages"]["steps"], record["steps_done"] - 1
    joules = steps["energy_kwh"] * J_PER_KWH / others if record["gpu_energy_kwh"] else None
    first_s = record["stages"]["compile"]["duration_s"]
    return {"ms": 1e3 * steps["duration_s"] / others, "joules": joules, "first_s": first_s}


def row(batch: int, name: str, measured: dict[str, Any], bare: dict[str, Any]) -> str:
    joules, ratio = measured["joules"], None
    if joules is not None and bare["joules"]:
        ratio = joules / bare["joules"]
    texts = [f"{measured['ms']:.2f}", f"{measured['ms'] / bare['ms']:.2f}"]
    texts += ["–" if joules is None else f"{joules:.3f}", "–" if ratio is None else f"{ratio:.2f}"]
    return f"| {batch} | {name} | {' | '.join(texts)} | {measured['first_s']:.1f} |"


def bare_loop(
    layers: int, heads: int, width: int, length: int, batch: int, dropout: float, device: str
) -> dict[str, float | None]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, heads, width // heads)
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True
            )
            x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), dropout)
            return x + F.dropout(
                self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh")), dropout
            )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
            self.blocks, self.norm = (
                nn.ModuleList(Block() for _ in range(layers)),
                nn.LayerNorm(width),
            )

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = F.dropout(self.tokens(inputs) + self.places.weight, dropout)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(
                F.linear(self.norm(x), self.tokens.weight).flatten(0, 1).float(), targets.flatten()
            )

    torch.manual_seed(0)
    on_gpu = device == "cuda"
    model = Model().to(device)
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, betas=(0.9, 0.99), fused=True, capturable=on_gpu
    )
    batches = torch.randint(VOCABULARY, (64, batch, length + 1), device=device)
    given = batches[0].clone()

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model(given[:, :-1], given[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    began = time.monotonic()
    if on_gpu:
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_STEPS):
                step()
            wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=aside):
                step()
        run = graph.replay
    else:
        step()
        run = step
    wait()
    first_s, count = time.monotonic() - began, 0
    before, began = _millijoules(on_gpu), time.monotonic()
    while time.monotonic() - began < MEASURED_S:
        for _ in range(20):
            given.copy_(batches[count % len(batches)])
            run()
            count += 1
        wait()
    took_s = time.monotonic() - began
    joules = None if before is None else (_millijoules(on_gpu) - before) / 1e3 / count
    return {"ms": 1e3 * took_s / count, "joules": joules, "first_s": first_s}


VOCABULARY = 65  # of Tiny Shakespeare's characters


def _millijoules(on_gpu: bool) -> Any:
    if not on_gpu:
        return None
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))


if __name__ == "__main__":
    main()
