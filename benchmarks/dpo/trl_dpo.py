"""TRL's DPOTrainer, as `task: script` measures it: on DeepSpeed, with the settings of the task dpo
beside it.
"""

import argparse
import json
import os
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import carbonopt.script as carbon

parser = argparse.ArgumentParser()
parser.add_argument("--base", required=True)
parser.add_argument("--rows", type=Path, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--bf16", type=int, required=True)
parser.add_argument("--precompute", type=int, required=True)
given = parser.parse_args()

alone = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29512",
}
os.environ.update(alone)  # DeepSpeed would look for MPI

rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
held_back = round(len(rows) / 10)
train, evaluation = Dataset.from_list(rows[:-held_back]), Dataset.from_list(rows[-held_back:])
steps = len(train) // given.batch
arguments = DPOConfig(
    output_dir="unused",
    max_steps=steps,
    per_device_train_batch_size=given.batch,
    per_device_eval_batch_size=given.batch,
    learning_rate=given.lr,
    lr_scheduler_type="linear",
    optim="adamw_torch_fused",
    bf16=bool(given.bf16),
    use_cpu=not given.bf16,
    gradient_checkpointing=False,
    max_length=None,
    precompute_ref_log_probs=bool(given.precompute),
    eval_strategy="steps",
    eval_steps=steps,
    report_to="none",
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
    seed=given.seed,
    deepspeed={
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": bool(given.bf16)},
        "train_micro_batch_size_per_gpu": given.batch,
        "gradient_accumulation_steps": 1,
    },
)
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained(given.base),
    ref_model=None if given.precompute else AutoModelForCausalLM.from_pretrained(given.base),
    args=arguments,
    train_dataset=train,
    eval_dataset=evaluation,
    processing_class=AutoTokenizer.from_pretrained(given.base),
    callbacks=[carbon.callback("eval_loss")],
)
trainer.train()
