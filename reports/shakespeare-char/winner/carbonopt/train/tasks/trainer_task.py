"""Tasks that train with Hugging Face's Trainer on DeepSpeed."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from carbonopt.core.trial import Prepared
from carbonopt.train.client import Speaker
from carbonopt.train.tasks.base import Task, Trained, TrialRun

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TrainingArguments

    from carbonopt.train.loop import TrialTrainer


@dataclass(frozen=True)
class ModelKind:
    """Which models a task trains, by names alone: whoever reads a task loads none of the libraries that make them."""

    auto_class: str  # of transformers
    mapping: str  # transformers' table of the model types that this class makes
    peft_task_type: str
    name: str  # in a sentence: "causal language model"

    def auto(self) -> Any:
        import transformers

        return getattr(transformers, self.auto_class)

    def model_types(self) -> list[str]:
        from transformers.models.auto import modeling_auto

        return sorted(getattr(modeling_auto, self.mapping))


class TrainerTask(Task):
    """What a task says of its model, its loss and its quality; the rest of a training is the same for all. `trainer` is
    one method for data and loss, since a trainer of another library (TRL's) has both inside."""

    model_kind: ClassVar[ModelKind]

    @abstractmethod
    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        """This rank's, with its part of the training data: a `loop.TrialTrainer`, or what behaves as one and knows its
        last loss."""

    @abstractmethod
    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> tuple[float, int]:
        """The quality's sum and count over all evaluation data and all ranks: summed first, so that neither the size of
        a batch nor the number of ranks weighs anything. Leaves the model in training mode."""

    @abstractmethod
    def example_loss(self, model: "PreTrainedModel", prepared: Prepared) -> "torch.Tensor":
        """Of a micro batch of the right shape, whatever is in it: by it a waiting process loads the kernels."""

    def train(self, run: TrialRun, speaker: Speaker | None) -> Trained:
        from carbonopt.train.loop import train

        return train(self, run, speaker)
