"""Reward models on pairs of answers, judged by preference accuracy: a model with one score for a text learns to rate
the chosen answer above the rejected one, by the loss −log σ(chosen − rejected) (arXiv 2203.02155, equation 1)."""

from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.config import ModelWorkload, SequenceLength, Space, may_be_other_than
from carbonopt.core.dimensions import LARGEST_INT
from carbonopt.core.errors import BadInput
from carbonopt.core.files import PreparedFolder
from carbonopt.core.quality import PREFERENCE_ACCURACY
from carbonopt.core.trial import Prepared
from carbonopt.train.data.pairs import PairDataset, read_pairs
from carbonopt.train.failures import as_bad_input
from carbonopt.train.tasks.base import Card, Evaluation
from carbonopt.train.tasks.trainer_task import ExampleTask, ModelKind, Part

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from carbonopt.train.data.pair_rows import PairExamples


class RewardWorkload(ModelWorkload, extra="forbid"):
    task: Literal["reward"]
    dataset: PairDataset
    sequence_length: SequenceLength  # of a prompt with one of its answers

    def faults(self) -> dict[str, bool]:
        untokenized = self.tokenizer is None and self.model.name_or_path is None
        return {"a model from_config has no tokenizer: give workload.tokenizer, such as {train_bpe: 512}": untokenized}


class Reward(ExampleTask):
    settings = RewardWorkload
    workload: RewardWorkload
    qualities = (PREFERENCE_ACCURACY,)
    card = Card("text-classification", "Text Classification", "a reward model")
    model_kind = ModelKind(
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "SEQ_CLS",
        "sequence classification model",
    )
    masks_attention = True

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports, model
        from carbonopt.train.data import pair_rows, tokens

        if may_be_other_than(space["output_layer"], "standard"):
            raise BadInput("output_layer must be standard: a reward model has one score instead of a vocabulary's.")
        workload, kind, length = self.workload, self.model_kind, self.workload.sequence_length
        with as_bad_input("dataset"):
            pairs = read_pairs(workload.dataset)
        with as_bad_input("tokenizer"):
            encoder = tokens.make_encoder(workload, *map(pair_rows.plain_texts, pairs))
            pad = pair_rows.set_pad_token(encoder.tokenizer, can_grow=workload.model.from_config is not None)
            parts = {
                "train": pair_rows.tokenized(pairs.train, encoder, length, "training"),
                "eval": pair_rows.tokenized(pairs.evaluation, encoder, length, "evaluation"),
            }
        with as_bad_input("model"):
            config = model.model_config(kind, workload, encoder.tokenizer, num_labels=1, pad_token_id=pad)
            model.check_head(kind, workload.model, labels=1)
            model.fetch_weights(kind, workload.model)
            parameters = model.parameter_count(kind, config, workload.model.trust_remote_code)
        for part, pair_tokens in parts.items():
            pair_tokens.save(folder.root / part, len(encoder.tokenizer), pad)
        encoder.tokenizer.save_pretrained(folder.tokenizer)
        config.save_pretrained(folder.model_config)
        return Prepared(
            fingerprint=fingerprint,
            train_examples=len(parts["train"]),
            eval_examples=len(parts["eval"]),
            train_tokens=parts["train"].tokens,
            vocab_size=len(encoder.tokenizer),
            model_parameters=parameters,
            notes=tuple(note for part in parts.values() for note in part.notes),
            versions=imports.package_versions(),
            eval_batch_size_per_gpu=self.eval_batch_size_here(config, len(parts["eval"])),
        )

    def examples(self, folder: PreparedFolder, part: Part) -> "PairExamples":
        from carbonopt.train.data.pair_rows import PairExamples

        return PairExamples(folder.root / part)

    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        import torch.nn.functional as F

        return -(F.logsigmoid(margins(model, batch)) * batch["weights"]).sum()

    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Pairs rated right, pairs, and the sum of their margins."""
        import torch

        counts = batch["weights"] > 0
        margin = torch.where(counts, margins(model, batch).double(), 0.0)
        right = torch.where(margin.isnan(), margin, (margin > 0).double())  # a NaN is no wrong answer, but no answer
        return torch.stack([right.sum(), counts.double().sum(), margin.sum()])

    def eval_batch_size(self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT) -> int:
        from carbonopt.train.data import packing

        # Two rows a pair; one score a token, instead of a vocabulary's.
        return packing.batch_size_that_fits(memory_bytes, 1, 2 * self.workload.sequence_length, examples)

    def expected_config(self) -> "PreTrainedConfig":
        from carbonopt.train import model
        from carbonopt.train.data import pair_rows, tokens

        workload = self.workload
        tokenizer = tokens.expected_tokenizer(
            workload, lambda: map(pair_rows.plain_texts, read_pairs(workload.dataset))
        )
        pad = pair_rows.set_pad_token(tokenizer, can_grow=workload.model.from_config is not None)
        return model.model_config(self.model_kind, workload, tokenizer, num_labels=1, pad_token_id=pad)

    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        import torch

        rows = torch.zeros(2 * size, self.workload.sequence_length, dtype=torch.int64)
        return {"input_ids": rows, "attention_mask": torch.zeros_like(rows), "weights": torch.zeros(size)}

    def evaluation(self, sums: list[float]) -> Evaluation:
        right, pairs, margin = sums
        return Evaluation(right, round(pairs), {"mean_margin": margin / pairs})


def margins(model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
    """By how much the chosen answer's score is above the rejected one's, float32 [pairs]."""
    scores: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    chosen, rejected = scores.float().squeeze(-1).chunk(2)
    return chosen - rejected
