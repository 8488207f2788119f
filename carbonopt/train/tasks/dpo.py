"""The task of direct preference optimization, DPO (arXiv 2305.18290).

A language model learns to find the chosen answers likelier than the rejected ones, relative to how
likely it found them before training.

The loss of a pair is −log σ(margin). The margin is β times the amount by which the log-likelihood
of the chosen answer has risen above that of the rejected one since the start (equation 7). The
model at the start is the reference model: it computes its own log-likelihoods of all pairs once,
before its first step. So no second model has to be kept, loaded or partitioned, whatever the ZeRO
stage, and the same holds with adapters and for random weights.
"""

from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.dimensions import LARGEST_INT
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.train.client import Speaker
from carbonopt.train.models.model_kind import CAUSAL_LM
from carbonopt.train.tasks.pair_task import PairTask, PairWorkload
from carbonopt.train.tasks.task import Card, TrialRun
from carbonopt.train.tasks.trainer_task import Part

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, TrainingArguments

    from carbonopt.train.data.pair_rows import PreferenceExamples
    from carbonopt.train.token_loss import TokenLoss
    from carbonopt.train.training_loop import TrialTrainer

# The default of TRL's DPOConfig; the paper uses 0.1 and, for summaries, 0.5.
DEFAULT_BETA = 0.1


class DPOWorkload(PairWorkload, extra="forbid"):
    task: Literal["dpo"]


class DPO(PairTask):
    settings = DPOWorkload
    card = Card(
        "text-generation", "Text Generation", "a language model that has learnt preferences"
    )
    model_kind = CAUSAL_LM
    standard_output_layer = "a fused one adds up all tokens, and DPO needs each answer's"
    rows_end = True
    _loss: "TokenLoss"  # the loss for the model that `begin` was given
    _beta, _label_smoothing = DEFAULT_BETA, 0.0
    # The reference model's log ratio of each pair; None: the model isn't being trained.
    _reference: "torch.Tensor | None" = None

    def examples(self, folder: PreparedFolder, part: Part) -> "PreferenceExamples":
        from carbonopt.train.data.pair_rows import PairExamples, PreferenceExamples

        first = 0 if part == "train" else len(PairExamples(folder.root / "train"))
        return PreferenceExamples(folder.root / part, first)

    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        beta, smoothing = run.spec.params.beta, run.spec.params.label_smoothing
        self._beta, self._label_smoothing = beta or DEFAULT_BETA, smoothing or 0.0
        return super().trainer(run, model, arguments)

    def begin(self, model: Any, compiled: bool) -> None:
        import torch

        from carbonopt.train.token_loss import TokenLoss

        self._loss, self._reference = TokenLoss(model, compiled), None
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # likelihoods are compared with those of a model without dropout

    def before_steps(self, run: TrialRun, trainer: "TrialTrainer", speaker: Speaker | None) -> None:
        from carbonopt.train.reference_log_ratios import reference_log_ratios

        self._reference = reference_log_ratios(self, run, trainer.model_wrapped, speaker)

    def log_ratios(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the chosen answer's log-likelihood minus the rejected one's.

        The result is in nats, float32 [pairs].
        """
        targets = batch["targets"]
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
        chosen, rejected = self._loss.of_each(logits, targets).view_as(targets).sum(dim=1).chunk(2)
        return rejected - chosen  # both are negative log-likelihoods

    def margins(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        log_ratios = self.log_ratios(model, batch)
        return self._beta * (
            log_ratios if self._reference is None else log_ratios - self._reference[batch["pair"]]
        )

    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        import torch.nn.functional as F

        margins, smoothing = self.margins(model, batch), self._label_smoothing
        # The label smoothing of arXiv 2305.18290's conservative variant: a share of the labels is
        # taken to be wrong.
        loss = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
        return (loss * batch["weights"]).sum()

    def eval_batch_size(
        self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT
    ) -> int:
        from carbonopt.train.data import packing

        # A pair has two rows.
        vocab_size, length = (
            config.get_text_config().vocab_size,
            2 * self.workload.sequence_length,
        )
        return packing.batch_size_that_fits(memory_bytes, vocab_size, length, examples)

    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        import torch

        batch = super().largest_batch(config, size)
        return {**batch, "targets": torch.zeros_like(batch["input_ids"])}
