"""Energy of a token in a plain PyTorch loop, for comparison: the same model, compiled, bf16
autocast, fused AdamW.

    python benchmarks/performance/plain.py CONFIG_FOLDER MICRO_BATCH SEQUENCE_LENGTH OUT.json

Prints and writes the energy by the first GPU's own counter over whole steps after the first five,
for ten seconds.
"""

import argparse
import json
import time
from pathlib import Path

import pynvml
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

MEASURED_S = 10.0
BETAS, WEIGHT_DECAY, LEARNING_RATE = (0.9, 0.999), 0.0, 1e-4
FIRST_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config_folder", type=Path, help="of a model's config.json")
    parser.add_argument("micro_batch", type=int, help="sequences")
    parser.add_argument("sequence_length", type=int, help="tokens")
    parser.add_argument("out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    result = measure(options.config_folder, options.micro_batch, options.sequence_length)
    print(json.dumps(result))
    options.out.write_text(json.dumps(result) + "\n")


def measure(config_folder: Path, micro_batch: int, sequence_length: int) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = AutoConfig.from_pretrained(config_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    tokens = torch.randint(config.vocab_size, (16, micro_batch, sequence_length + 1), device="cuda")

    @torch.compile
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            model(input_ids=inputs).logits.float().flatten(0, 1), targets.flatten()
        )

    def step(index: int) -> None:
        batch = tokens[index % len(tokens)]
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.monotonic()
    for index in range(FIRST_STEPS):
        step(index)
    torch.cuda.synchronize()
    first_steps_s = time.monotonic() - began

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before_mj, began, steps = (
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        time.monotonic(),
        0,
    )
    while time.monotonic() - began < MEASURED_S:
        step(steps)
        steps += 1
        torch.cuda.synchronize()
    lasted_s = time.monotonic() - began
    used_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before_mj
    seen = steps * micro_batch * sequence_length
    return {
        "mj_per_token": used_mj / seen,
        "tokens_per_s": seen / lasted_s,
        "power_w": used_mj / 1000 / lasted_s,
        "first_steps_s": first_steps_s,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


if __name__ == "__main__":
    main()
