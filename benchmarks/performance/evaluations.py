"""From how many operations on evaluations should run compiled: see small_evaluations.py.

    python benchmarks/performance/evaluations.py [--sizes small medium] [--batch 64]

For each size of a GPT-2 with blocks compiled one by one, in bf16: what a process uses once to
compile its forward pass without gradients or to load it from the cache, and what a batch takes
eagerly and compiled. A trial's evaluations should be compiled if a batch then saves enough. Energy
is by the GPU's own counter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

SIZES = {  # layers, heads, width, length, vocabulary
    "tiny": (6, 6, 384, 256, 65),
    "small": (12, 12, 768, 512, 50257),
    "medium": (24, 16, 1024, 512, 50257),
}
MEASURED_S = 3.0
TICK_S = 0.1  # of the counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], options.one[1] == "compiled", options.batch)))
        return
    print("| parameters | operations a batch | | first batch (s) | (J) | a batch (ms) | (J) |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for size in options.sizes:
        rows = {}
        with tempfile.TemporaryDirectory() as cache:
            for how in ("eager", "compiled", "compiled", "eager", "compiled"):
                own = [sys.executable, __file__, "--batch", str(options.batch), "--one", size, how]
                caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
                done = subprocess.run(
                    own, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | caches
                )
                row = json.loads(done.stdout.splitlines()[-1])
                label = how if how == "eager" or how in rows else "compiled, nothing cached"
                rows[how] = row
                print(
                    f"| {row['parameters']:,} | {row['flop']:.3g} | {label} | {row['first_s']:.2f} |"
                    f" {row['first_j']:.0f} | {1000 * row['batch_s']:.2f} | {row['batch_j']:.2f} |",
                    flush=True,
                )
        load_j = rows["compiled"]["first_j"] - rows["eager"]["first_j"]
        saved_j = rows["eager"]["batch_j"] - rows["compiled"]["batch_j"]
        pays = f"{load_j / saved_j * row['flop']:.2g} operations" if saved_j > 0 else "nothing"
        print(f"\n{size}: loading costs {load_j:.0f} J, paid back after {pays}\n", flush=True)


def measured(size: str, compiled: bool, batch: int) -> dict[str, Any]:
    import pynvml
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from carbonopt.train.imports import load_compiler, practise_compiling
    from carbonopt.train.token_loss import TokenLoss

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    layers, heads, width, length, vocabulary = SIZES[size]
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": length}
    config = AutoConfig.for_model("gpt2", **sizes, vocab_size=vocabulary)
    device = torch.device("cuda")
    load_compiler()
    practise_compiling(device)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(vocabulary, (batch, length), device=device)
    with torch.no_grad():
        model(tokens[:1])  # loads the eager kernels
    if compiled:
        for block in model.transformer.h:
            block.compile()
    loss = TokenLoss(model, compiled)

    def evaluate() -> None:
        with torch.no_grad():
            loss.of_each(model(tokens).logits, tokens).double().sum().item()

    def spent(work: Callable[[], Any]) -> tuple[Any, float, float]:
        torch.cuda.synchronize()
        time.sleep(2 * TICK_S)
        began_s, began_j = time.monotonic(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        result = work()
        torch.cuda.synchronize()
        duration_s = time.monotonic() - began_s
        time.sleep(2 * TICK_S)
        idle_j = 2 * TICK_S * pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        used_j = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - began_j) / 1000 - idle_j
        return result, duration_s, used_j

    _, first_s, first_j = spent(evaluate)

    def repeatedly() -> int:
        count, until_s = 0, time.monotonic() + MEASURED_S
        while time.monotonic() < until_s:
            evaluate()
            count += 1
        return count

    count, duration_s, used_j = spent(repeatedly)
    parameters = sum(weights.numel() for weights in model.parameters())
    return {
        "parameters": parameters,
        "flop": 2.0 * parameters * tokens.numel(),
        "first_s": first_s,
        "first_j": first_j,
        "batch_s": duration_s / count,
        "batch_j": used_j / count,
    }


if __name__ == "__main__":
    main()
