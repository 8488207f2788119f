"""Energy of a token in a plain PyTorch loop with FSDP2, for comparison with ZeRO-3.

    torchrun --nproc-per-node=N benchmarks/performance/fsdp2.py WEIGHTS_FOLDER MICRO_BATCH LENGTH

The blocks and the whole are sharded by `fully_shard`, in bf16 with float32 master weights, fused
AdamW; each block is compiled. Energy is by the GPUs' own counters, over whole steps after the first
five, for ten seconds.
"""

import json
import os
import sys
import time

import pynvml
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

FIRST_STEPS, MEASURED_S = 5, 10.0


def main(folder: str, micro_batch: int, length: int) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.02)
    rotary = type(model.model.rotary_emb)(config).cuda()
    model.model.rotary_emb = rotary
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(256, (16, micro_batch, length + 1), device="cuda")

    def step(index: int) -> None:
        batch = tokens[index % len(tokens)]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for index in range(FIRST_STEPS):
        step(index)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(rank)
    torch.cuda.synchronize()
    dist.barrier()
    began_mj, began_s, made = (
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        time.monotonic(),
        0,
    )
    ends = torch.zeros(1, device="cuda")
    while not ends:
        step(made)
        made += 1
        if made % 4 == 0:
            ends.fill_(float(time.monotonic() - began_s > MEASURED_S))
            dist.broadcast(ends, 0)
    torch.cuda.synchronize()
    second = time.monotonic() - began_s
    energy_j = torch.tensor(
        [(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - began_mj) / 1000], device="cuda"
    )
    dist.all_reduce(energy_j)
    count = made * micro_batch * length * dist.get_world_size()
    result = {
        "tokens_per_s": count / second,
        "mj_per_token": float(energy_j) / count * 1000,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
