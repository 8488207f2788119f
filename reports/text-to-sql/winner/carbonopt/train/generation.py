"""What a model answers to evaluation examples, on whatever number of ranks."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from carbonopt.train import ranks
from carbonopt.train.data.examples import Examples
from carbonopt.train.data.packing import Indices, batches_of_rank
from carbonopt.train.loop import TrialTrainer
from carbonopt.train.tasks.base import TrialRun


@torch.no_grad()
def generated_texts(
    run: TrialRun, trainer: TrialTrainer, examples: Examples, indices: Indices, max_tokens: int
) -> dict[int, str]:
    """Of this rank's part of the examples at `indices`: by index the text that greedy decoding makes, of at most
    `max_tokens` tokens. To be called on every rank; leaves the model in training mode."""
    tokenizer, device = _tokenizer(run.folder.tokenizer), ranks.device()
    engine: Any = trainer.model_wrapped
    texts: dict[int, str] = {}
    engine.eval()
    # Each rank has as many batches. Under ZeRO-3 transformers also has each make as many tokens as the slowest.
    for places in batches_of_rank(len(indices), run.eval_batch_size_per_gpu, ranks.rank(), ranks.world_size()):
        rows = indices[places]
        rows[places < 0] = -1
        batch = examples.batch(rows)
        generated = engine.module.generate(
            input_ids=batch["input_ids"].to(device),
            attention_mask=batch["attention_mask"].to(device),
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_tokens,
            use_cache=True,  # which gradient checkpointing switches off
        )
        decoded = tokenizer.batch_decode(generated, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        texts |= {int(row): text for row, text in zip(rows, decoded, strict=True) if row >= 0}
    engine.train()
    return texts


@cache
def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)
