"""Training and evaluation by tokens, independent of how they are divided among ranks."""

from typing import Any

import torch
from transformers import TrainingArguments

from carbonopt.train import ranks
from carbonopt.train.data.packing import (
    IGNORED,
    TextMicroBatches,
    batches_of_rank,
    open_tokens,
    sequence_count,
    sequences,
)
from carbonopt.train.tasks.task import TrialRun
from carbonopt.train.token_loss import TokenLoss
from carbonopt.train.training_loop import TrialTrainer


class TokenTrainer(TrialTrainer):
    """A Trainer whose loss is a micro batch's summed cross entropy per token of the global batch.

    The sum over a micro batch's targets is divided by the target tokens of a whole global batch.
    DeepSpeed averages gradients over ranks, so each rank's sum is multiplied by the world size.
    Because the divisor is constant, gradients need no averaging later (transformers #45305 is about
    averaging twice or not at all). All of a training sequence's targets count, because packing
    drops the ragged tail.
    """

    def __init__(self, run: TrialRun, model: Any, arguments: TrainingArguments) -> None:
        length = run.sequence_length
        batches = TextMicroBatches(open_tokens(run.folder.train), length, run.division)
        self._loss_scale = run.spec.params.world_size / (run.spec.params.global_batch_size * length)
        self.token_loss = TokenLoss(model, arguments.torch_compile)
        super().__init__(
            model, arguments, train_dataset=batches, compute_loss_func=self._scaled_nll_sum
        )

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.token_loss.expect(inputs["labels"])
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _scaled_nll_sum(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any
    ) -> torch.Tensor:
        return self.token_loss.sum(outputs["logits"], labels) * self._loss_scale


@torch.no_grad()
def evaluate(run: TrialRun, trainer: Any) -> tuple[float, int]:
    """Return the total negative log-likelihood in nats and the number of target tokens.

    Both are over all ranks, and each token counts once, in float64. The model of `trainer`, a
    TokenTrainer, is left in training mode.
    """
    tokens, length, model = (
        open_tokens(run.folder.evaluation),
        run.sequence_length,
        trainer.model_wrapped,
    )
    count, device = sequence_count(len(tokens), length, keep_tail=True), ranks.device()
    nll_sum = torch.zeros((), dtype=torch.float64, device=device)
    target_count = 0
    model.eval()
    for indices in batches_of_rank(
        count, run.eval_batch_size_per_gpu, ranks.rank(), ranks.world_size()
    ):
        inputs, targets = sequences(tokens, indices, length)
        target_count += int((targets != IGNORED).sum())
        logits = model(input_ids=inputs.to(device)).logits
        nll_sum += trainer.token_loss.of_each(logits, targets.to(device)).double().sum()
    model.train()
    total_nll, total_targets = ranks.summed([float(nll_sum), float(target_count)])
    return total_nll, round(total_targets)
