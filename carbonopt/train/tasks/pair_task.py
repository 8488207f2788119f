"""Tasks that learn from pairs of answers, one chosen, one rejected, and are judged by preference accuracy."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from carbonopt.core.config import ModelWorkload, SequenceLength, Space, may_be_other_than
from carbonopt.core.errors import BadInput
from carbonopt.core.files import PreparedFolder
from carbonopt.core.quality import PREFERENCE_ACCURACY
from carbonopt.core.trial import Prepared
from carbonopt.train.data.pairs import PairDataset, read_pairs
from carbonopt.train.failures import as_bad_input
from carbonopt.train.tasks.base import Evaluation
from carbonopt.train.tasks.trainer_task import ExampleTask

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class PairWorkload(ModelWorkload, extra="forbid"):
    dataset: PairDataset
    sequence_length: SequenceLength  # of a prompt with one of its answers

    def faults(self) -> dict[str, bool]:
        untokenized = self.tokenizer is None and self.model.name_or_path is None
        return {"a model from_config has no tokenizer: give workload.tokenizer, such as {train_bpe: 512}": untokenized}


class PairTask(ExampleTask):
    """What all of these do with pairs; how a model rates an answer is each one's own."""

    workload: PairWorkload
    qualities = (PREFERENCE_ACCURACY,)
    masks_attention = True
    standard_output_layer: str  # why it has no other, as the end of a sentence
    rows_end = False  # whether rows end with the end-of-text token also where that fills up the shorter ones

    @abstractmethod
    def pad_token(self, tokenizer: "PreTrainedTokenizerBase") -> int:
        """The id that fills up the shorter rows of a batch; the tokenizer can get a token for it."""

    @abstractmethod
    def head(self, pad: int) -> dict[str, Any]:
        """Fields that the model's configuration has to have."""

    @abstractmethod
    def margins(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """By how much the chosen answer is rated above the rejected one, float [pairs]."""

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports, model, weights
        from carbonopt.train.data import pair_rows, tokens

        if may_be_other_than(space["output_layer"], "standard"):
            raise BadInput(f"output_layer must be standard: {self.standard_output_layer}.")
        workload, kind, length = self.workload, self.model_kind, self.workload.sequence_length
        with as_bad_input("dataset"):
            pairs = read_pairs(workload.dataset)
        with as_bad_input("tokenizer"):
            encoder = tokens.make_encoder(workload, *map(pair_rows.plain_texts, pairs))
            pad = self.pad_token(encoder.tokenizer)
            parts = {
                "train": pair_rows.tokenized(pairs.train, encoder, length, "training", self.rows_end),
                "eval": pair_rows.tokenized(pairs.evaluation, encoder, length, "evaluation", self.rows_end),
            }
        with as_bad_input("model"):
            head = self.head(pad)
            config = model.model_config(kind, workload, encoder.tokenizer, **head)
            if (outputs := head.get("num_labels")) is not None:
                model.check_head(kind, workload.model, outputs)
            weights.check_weights(kind, workload.model, config)
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

    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Pairs rated right, pairs, and the sum of their margins."""
        import torch

        counts = batch["weights"] > 0
        margin = torch.where(counts, self.margins(model, batch).double(), 0.0)
        right = torch.where(margin.isnan(), margin, (margin > 0).double())  # a NaN is no wrong answer, but no answer
        return torch.stack([right.sum(), counts.double().sum(), margin.sum()])

    def evaluation(self, sums: list[float]) -> Evaluation:
        right, pairs, margin = sums
        return Evaluation(right, round(pairs), {"mean_margin": margin / pairs})

    def expected_config(self) -> "PreTrainedConfig":
        from carbonopt.train import model
        from carbonopt.train.data import pair_rows, tokens

        workload = self.workload
        tokenizer = tokens.expected_tokenizer(
            workload, lambda: map(pair_rows.plain_texts, read_pairs(workload.dataset))
        )
        return model.model_config(self.model_kind, workload, tokenizer, **self.head(self.pad_token(tokenizer)))

    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        import torch

        rows = torch.zeros(2 * size, self.workload.sequence_length, dtype=torch.int64)
        return {"input_ids": rows, "attention_mask": torch.zeros_like(rows), "weights": torch.zeros(size)}
