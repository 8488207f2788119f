"""The loss of tokens, independent of how they are divided into micro batches and ranks."""

from typing import Any

import torch
import torch.nn.functional as F
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
from carbonopt.train.speed.output_layer import FusedOutputLayer
from carbonopt.train.tasks.task import TrialRun
from carbonopt.train.training_loop import TrialTrainer


def token_nll(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the negative log-likelihood of target tokens in nats, in float32.

    Args:
        logits: [batch, length, vocabulary].
        targets: [batch, length].
        reduction: "sum", or "none" for that of each target (0 where it is IGNORED).
    """
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), reduction=reduction, ignore_index=IGNORED)


class TokenLoss:
    """The negative log-likelihood of target tokens, which the output layer may itself compute.

    Compiled, it never writes the logits in float32, which for a vocabulary of 50,304 are six times
    the model's activations.
    """

    def __init__(self, model: Any, compiled: bool) -> None:
        self._output_layer = model.get_output_embeddings()
        self._fused = isinstance(self._output_layer, FusedOutputLayer)
        self._token_nll = torch.compile(token_nll) if compiled else token_nll

    def expect(self, targets: torch.Tensor) -> None:
        """Set the targets of a training step, before its forward pass."""
        if self._fused:
            self._output_layer.targets = targets

    def sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum in nats for a training step's forward pass.

        With a fused output layer the logits are the sum itself.
        """
        return logits if self._fused else self._token_nll(logits, targets, "sum")

    def of_each(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each target's loss in an evaluation, in nats: float32 [targets].

        It is 0 where a target is IGNORED.
        """
        nll: torch.Tensor = self._token_nll(logits, targets, "none")
        return nll


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
        self._loss_scale = run.params.world_size / (run.params.global_batch_size * length)
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
