"""The common part of tasks that learn from pairs of answers, one chosen and one rejected.

They are judged by preference accuracy.
"""

from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PREFERENCE_ACCURACY
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, may_be_other_than
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import ModelWorkload, SequenceLength
from carbonopt.train.data.pairs import PairDataset, read_pairs
from carbonopt.train.failures import as_bad_input
from carbonopt.train.tasks.task import Evaluation
from carbonopt.train.tasks.trainer_task import ExampleTask

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class PairWorkload(ModelWorkload, extra="forbid"):
    dataset: PairDataset
    sequence_length: SequenceLength
    """The most tokens of a prompt with one of its answers."""

    def violations(self) -> dict[str, bool]:
        untokenized = self.tokenizer is None and self.model.name_or_path is None
        return {
            "a model from_config has no tokenizer: give workload.tokenizer, such as"
            " {train_bpe: 512}": untokenized
        }


class PairTask(ExampleTask):
    """A task on pairs of answers; each subclass defines how a model rates an answer."""

    workload: PairWorkload
    qualities = (PREFERENCE_ACCURACY,)
    masks_attention = True
    standard_output_layer: str  # the reason why no other output layer works, to end a sentence
    # True if rows end with the end-of-text token even where that token also pads shorter rows.
    rows_end = False

    # fields that the model's configuration must have
    head: ClassVar[dict[str, Any]] = {}

    def complete(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Give the tokenizer the tokens that the task needs before it reads the texts."""

    def set_padding(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: "PreTrainedConfig",
        used: Collection[int] = (),
    ) -> int:
        """Return the id that pads the shorter rows of a batch; set it where the model needs it.

        Args:
            tokenizer: The tokenizer, from `complete`.
            config: The model's configuration.
            used: The ids in the rows.
        """
        # Any known id will do where the attention mask marks the padding.
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        return next((int(token) for token in known if token is not None), 0)

    @abstractmethod
    def margins(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return how much higher chosen answers are rated than rejected ones, float [pairs]."""

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports
        from carbonopt.train.data import pair_rows, templates, tokens
        from carbonopt.train.models import model, pretrained_head, weights

        if may_be_other_than(space["output_layer"], "standard"):
            raise BadInput(f"output_layer must be standard: {self.standard_output_layer}.")
        workload, kind, length = self.workload, self.model_kind, self.workload.sequence_length
        with as_bad_input("dataset"):
            pairs = read_pairs(workload.dataset)
        with as_bad_input("tokenizer"):
            encoder = tokens.make_encoder(workload, *map(pair_rows.plain_texts, pairs))
            self.complete(encoder.tokenizer)
            parts = {
                "train": pair_rows.tokenized(
                    pairs.train, encoder, length, "training", self.rows_end
                ),
                "eval": pair_rows.tokenized(
                    pairs.evaluation, encoder, length, "evaluation", self.rows_end
                ),
            }
        with as_bad_input("model"):
            config = model.model_config(kind, workload, encoder.tokenizer, **self.head)
            used = {token for part in parts.values() for row in part.rows for token in row.tolist()}
            pad = self.set_padding(encoder.tokenizer, config, used)
            if (outputs := self.head.get("num_labels")) is not None:
                pretrained_head.check_outputs(kind, workload.model, outputs)
            weights.check_weights(kind, workload.model, config)
            parameters = model.parameter_count(kind, config, workload.model.trust_remote_code)
        for part, pair_tokens in parts.items():
            pair_tokens.save(folder.root / part, pad)
        tokens.save_tokenizer(encoder.tokenizer, workload, folder)
        model.save_config(config, folder, workload.model)
        dated = (
            templates.note(encoder.tokenizer)
            if any(pair.are_messages for pair in pairs.train)
            else ""
        )
        return Prepared(
            fingerprint=fingerprint,
            train_examples=len(parts["train"]),
            eval_examples=len(parts["eval"]),
            train_tokens=parts["train"].tokens,
            vocab_size=len(encoder.tokenizer),
            model_parameters=parameters,
            notes=(
                *(note for part in parts.values() for note in part.notes),
                *filter(None, (dated,)),
            ),
            versions=imports.package_versions(),
            eval_batch_size_per_gpu=self.eval_batch_size_here(config, len(parts["eval"])),
        )

    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the number of pairs rated right, the number of pairs, and the sum of margins."""
        import torch

        counts = batch["weights"] > 0
        margin = torch.where(counts, self.margins(model, batch).double(), 0.0)
        # A margin that is NaN gives no answer, rather than a wrong one, so the sum becomes NaN.
        right = torch.where(margin.isnan(), margin, (margin > 0).double())
        return torch.stack([right.sum(), counts.double().sum(), margin.sum()])

    def evaluation(self, sums: list[float]) -> Evaluation:
        right, pairs, margin = sums
        return Evaluation(right, round(pairs), {"mean_margin": margin / pairs})

    def expected_config(self) -> "PreTrainedConfig":
        from carbonopt.train.data import pair_rows, tokens
        from carbonopt.train.models import model

        workload = self.workload
        tokenizer = tokens.expected_tokenizer(
            workload, lambda: map(pair_rows.plain_texts, read_pairs(workload.dataset))
        )
        self.complete(tokenizer)
        config = model.model_config(self.model_kind, workload, tokenizer, **self.head)
        self.set_padding(tokenizer, config)
        return config

    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        import torch

        rows = torch.zeros(2 * size, self.workload.sequence_length, dtype=torch.int64)
        return {
            "input_ids": rows,
            "attention_mask": torch.zeros_like(rows),
            "weights": torch.zeros(size),
        }
