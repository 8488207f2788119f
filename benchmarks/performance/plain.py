"""Energy of a token in a plain PyTorch loop, for comparison: the same model, compiled, bf16 autocast, fused AdamW.

    python benchmarks/performance/plain.py CONFIG_FOLDER MICRO_BATCH SEQUENCE_LENGTH OUT.json

Prints and writes the energy by the first GPU's own counter over whole steps after the first five, for ten seconds.
"""

import json
import sys
import time
from pathlib import Path

import pynvml
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

MEASURED_S = 10.0
BETAS, WEIGHT_DECAY, LEARNING_RATE = (0.9, 0.999), 0.0, 1e-4
FIRST_STEPS = 5


def main(config_folder: str, micro_batch: int, sequence_length: int, out: str) -> None:
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
        return F.cross_entropy(model(input_ids=inputs).logits.float().flatten(0, 1), targets.flatten())

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
    before_mj, began, steps = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.monotonic(), 0
    while time.monotonic() - began < MEASURED_S:
        step(steps)
        steps += 1
        torch.cuda.synchronize()
    lasted_s = time.monotonic() - began
    used_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before_mj
    seen = steps * micro_batch * sequence_length
    result = {
        "mj_per_token": used_mj / seen,
        "tokens_per_s": seen / lasted_s,
        "power_w": used_mj / 1000 / lasted_s,
        "first_steps_s": first_steps_s,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print(json.dumps(result))
    Path(out).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
