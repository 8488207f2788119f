"""Generate a model's answers to evaluation examples, on any number of ranks."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from carbonopt.train import ranks
from carbonopt.train.data.examples import Examples
from carbonopt.train.data.packing import Indices, batches_of_rank
from carbonopt.train.models.generation_check import GREEDY
from carbonopt.train.tasks.task import TrialRun
from carbonopt.train.training_loop import TrialTrainer


@torch.no_grad()
def generated_texts(
    run: TrialRun, trainer: TrialTrainer, examples: Examples, indices: Indices, max_tokens: int
) -> dict[int, str]:
    """Return the texts that greedy decoding generates for this rank's part of the examples.

    It must be called on every rank, and leaves the model in training mode.

    Args:
        run: The trial.
        trainer: The trainer of the model.
        examples: The evaluation examples.
        indices: The indices of the examples to answer, on all ranks.
        max_tokens: The most tokens of a text.

    Returns:
        The texts by the index of their example.
    """
    source = run.workload.model
    assert source is not None  # a task that generates trains a model
    tokenizer, device = _tokenizer(run.folder.tokenizer, source.trust_remote_code), ranks.device()
    engine: Any = trainer.model_wrapped
    texts: dict[int, str] = {}
    engine.eval()
    # All ranks have equally many batches. Under ZeRO-3 transformers also makes each generate as
    # many tokens as the slowest.
    with _whole_weights(engine):
        for places in batches_of_rank(
            len(indices), run.eval_batch_size_per_gpu, ranks.rank(), ranks.world_size()
        ):
            rows = indices[places]
            rows[places < 0] = -1
            batch = examples.batch(rows)
            generated = engine.module.generate(
                input_ids=batch["input_ids"].to(device),
                attention_mask=batch["attention_mask"].to(device),
                max_new_tokens=max_tokens,
                tokenizer=tokenizer,
                **GREEDY,
            )
            decoded = tokenizer.batch_decode(
                generated, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            texts |= {int(row): text for row, text in zip(rows, decoded, strict=True) if row >= 0}
    engine.train()
    return texts


def _whole_weights(engine: Any) -> AbstractContextManager[Any]:
    """Return a context in which ZeRO-3's weights are gathered once, instead of for each token.

    A GPU has room for them if they add no more to what is there than training has needed at its
    peak: so the trial's peak stays what it was.
    """
    parameters = list(engine.parameters())
    if not any(hasattr(parameter, "ds_numel") for parameter in parameters):
        return nullcontext()
    if torch.cuda.is_available():
        whole = sum(parameter.ds_numel * parameter.element_size() for parameter in parameters)
        room = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        if ranks.largest(float(whole > room)):
            return nullcontext()
    from deepspeed import zero

    gathered: AbstractContextManager[Any] = zero.unwrap_model_for_generation(engine)
    return gathered


@cache
def _tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
