"""The task of training a reward model on pairs of answers, judged by preference accuracy.

The model gives a text one score. It learns to rate the chosen answer above the rejected one by the
loss −log σ(chosen − rejected) (arXiv 2203.02155, equation 1).
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from carbonopt.core.dimensions import LARGEST_INT
from carbonopt.core.errors import BadInput
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.tasks.pair_task import PairTask, PairWorkload
from carbonopt.train.tasks.task import Card
from carbonopt.train.tasks.trainer_task import Part

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from carbonopt.train.data.pair_rows import PairExamples


class RewardWorkload(PairWorkload, extra="forbid"):
    task: Literal["reward"]


class Reward(PairTask):
    settings = RewardWorkload
    card = Card("text-classification", "Text Classification", "a reward model")
    model_kind = ModelKind(
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "SEQ_CLS",
        "sequence classification model",
    )
    standard_output_layer = "a reward model has one score instead of a vocabulary's"

    head: ClassVar[dict[str, Any]] = {"num_labels": 1}

    def complete(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Give the tokenizer of a new model a padding token of its own if it has none."""
        from carbonopt.train.data.pair_rows import PAD

        if tokenizer.pad_token_id is None and self.workload.model.from_config is not None:
            tokenizer.add_special_tokens({"pad_token": PAD})

    def set_padding(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: "PreTrainedConfig",
        used: Collection[int] = (),
    ) -> int:
        """Set the id that decoders use to find a row's last token, whose score is the text's."""
        from carbonopt.train.data.tokens import padding_id

        if "pad_token_id" in (self.workload.model.from_config or {}):
            raise BadInput(
                "workload.model.from_config can't have pad_token_id: the data says it; leave it"
                " out."
            )
        padding = padding_id(tokenizer, config, used)
        config.get_text_config().pad_token_id = padding
        return padding

    def examples(self, folder: PreparedFolder, part: Part) -> "PairExamples":
        from carbonopt.train.data.pair_rows import PairExamples

        return PairExamples(folder.root / part)

    def margins(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        scores: torch.Tensor = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        chosen, rejected = scores.float().squeeze(-1).chunk(2)
        return chosen - rejected

    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        import torch.nn.functional as F

        return -(F.logsigmoid(self.margins(model, batch)) * batch["weights"]).sum()

    def eval_batch_size(
        self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT
    ) -> int:
        from carbonopt.train.data import packing

        # A pair has two rows, and a token one score instead of a vocabulary's logits.

        return packing.batch_size_that_fits(
            memory_bytes, 1, 2 * self.workload.sequence_length, examples
        )
