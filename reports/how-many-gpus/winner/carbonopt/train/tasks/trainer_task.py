"""Tasks that train with Hugging Face's Trainer on DeepSpeed."""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.config import ModelWorkload
from carbonopt.core.dimensions import LARGEST_INT, TrainingParams
from carbonopt.core.errors import BadInput
from carbonopt.core.files import PreparedFolder
from carbonopt.train.client import Speaker
from carbonopt.train.failures import as_bad_input
from carbonopt.train.tasks.base import Evaluation, Trained, TrainingTask, TrialRun

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

    from carbonopt.train.data.examples import Examples
    from carbonopt.train.loop import TrialTrainer

Part = Literal["train", "eval"]


@dataclass(frozen=True)
class ModelKind:
    """Which models a task trains, by names alone: whoever reads a task loads none of the libraries that make them."""

    auto_class: str  # of transformers
    mapping: str  # transformers' table of the model types that this class makes
    peft_task_type: str | None  # None: PEFT has none for it
    name: str  # in a sentence: "causal language model"

    def auto(self) -> Any:
        import transformers

        return getattr(transformers, self.auto_class)

    def model_types(self) -> list[str]:
        from transformers.models.auto import modeling_auto

        return sorted(getattr(modeling_auto, self.mapping))


CAUSAL_LM = ModelKind("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "CAUSAL_LM", "causal language model")


class TrainerTask(TrainingTask):
    """What a task says of its model, its loss and its quality; the rest of a training is the same for all. `trainer` is
    one method for data and loss, since a trainer of another library (TRL's) has both inside."""

    workload: ModelWorkload

    @property
    @abstractmethod
    def model_kind(self) -> ModelKind:
        """A class attribute, unless it depends on the workload."""

    def check_weights(self, keys: Collection[str]) -> None:
        """Of the models that the workload has under these keys, in folders. Reads no data and no numbers. Raises
        BadInput as `weights.check_weights`."""
        from carbonopt.train import model, weights

        if "model" not in keys:
            return
        with as_bad_input("model"):
            config = model.model_config(self.model_kind, self.workload, tokenizer=None)
            if not weights.is_quantized(config):  # it may be for GPUs that this machine hasn't
                weights.check_weights(self.model_kind, self.workload.model, config)

    @abstractmethod
    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        """This rank's, with its part of the training data: a `loop.TrialTrainer`, or what behaves as one and knows its
        last loss."""

    def arguments_class(self) -> "type[TrainingArguments]":
        """Of its trainer's arguments, which a study may give as `workload.training_arguments`."""
        from transformers import TrainingArguments

        return TrainingArguments

    def arguments(self, params: TrainingParams) -> dict[str, Any]:
        """Its trainer's arguments that no other task has."""
        return {}

    def before_training(self, run: TrialRun, trainer: "TrialTrainer") -> None:
        """What is to be known of the model as it begins, and is no part of its training. The engine is there."""

    def before_steps(self, run: TrialRun, trainer: "TrialTrainer", speaker: Speaker | None) -> None:
        """What training does once before its first step, and is measured with it. The engine is there. `speaker` is as
        `train` has it; a long while without a word of progress would end the trial."""

    @abstractmethod
    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> Evaluation:
        """Summed over all evaluation data and all ranks first, so that neither the size of a batch nor the number of
        ranks weighs anything. Leaves the model in training mode."""

    @abstractmethod
    def example_loss(self, model: "PreTrainedModel", folder: PreparedFolder) -> "torch.Tensor":
        """Of a micro batch of the right shape, whatever is in it: by it a waiting process loads the kernels."""

    def eval_batch_size(self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT) -> int | None:
        """Examples in a forward pass of an evaluation, of `examples`, on a GPU of this memory. None: as many as in a
        micro batch."""
        return None

    def eval_batch_size_here(self, config: "PreTrainedConfig", examples: int) -> int | None:
        """As `eval_batch_size`, on this process's GPU; None also where it has none."""
        import torch

        if not torch.cuda.is_available():
            return None
        return self.eval_batch_size(config, torch.cuda.get_device_properties(0).total_memory, examples)

    # The next four are for the estimate of memory (`train.memory`), which a task can do without.

    @property
    def masks_attention(self) -> bool:
        """Whether attention needs a mask, since rows of a micro batch differ in length or hold several examples."""
        return False

    def expected_config(self) -> "PreTrainedConfig":
        """The model's configuration as `prepare` makes it, as far as it is known before: a number of classes that only
        the data has can be any. Raises BadInput as `prepare`, and where the model can't be known yet."""
        raise self._unestimated

    def largest_loss(
        self, model: Any, size: int, compiled: bool = False, folder: PreparedFolder | None = None
    ) -> "torch.Tensor":
        """The loss of a micro batch of so many of the longest examples, on the model's device, whatever is in them: of
        the longest in the prepared folder, or, without one, of the longest that the workload allows. `compiled`: with
        torch_compile, where the trainer then compiles its loss."""
        raise self._unestimated

    def largest_evaluation(self, model: Any, size: int, folder: PreparedFolder | None = None) -> Any:
        """What an evaluation computes of a batch of so many of the longest examples, likewise."""
        raise self._unestimated

    @property
    def _unestimated(self) -> BadInput:
        return BadInput(f"the task {self.workload.task} does not say what a micro batch is before its data is prepared")

    def train(self, run: TrialRun, speaker: Speaker | None) -> Trained:
        from carbonopt.train.loop import train

        return train(self, run, speaker)


class ExampleTask(TrainerTask):
    """A task whose examples stand for themselves: a row of text with its class, a pair of answers, an image. It says
    what is in them, what their loss is and what an evaluation adds up; order, batches, ranks and scales are here."""

    @abstractmethod
    def examples(self, folder: PreparedFolder, part: Part) -> "Examples":
        """Those that `prepare` has written into the folder."""

    def begin(self, model: Any, compiled: bool) -> None:
        """Is told the model whose batches `loss_sum` and `sums` get then, and whether the loss is to be compiled."""

    @abstractmethod
    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """The loss of a micro batch of `examples`, summed over what their weights count."""

    @abstractmethod
    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """What `evaluation` is made of, float64 [any number], summed over a batch: of an example whose weight is 0,
        nothing. No shape may depend on numbers, which tensors of the estimate of memory have not."""

    @abstractmethod
    def evaluation(self, sums: list[float]) -> Evaluation:
        """Of those sums over all evaluation data and all ranks."""

    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        from carbonopt.train.example_loss import ExampleTrainer

        self.begin(model, arguments.torch_compile)
        return ExampleTrainer(self, run, model, arguments)

    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> Evaluation:
        from carbonopt.train.example_loss import summed

        return self.evaluation(summed(self, run, trainer.model_wrapped))

    @abstractmethod
    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        """As `Examples.batch`, of so many of the longest examples that a model of this configuration can get, with
        zeros in them, on torch's default device; for the estimate of memory."""

    def largest_loss(
        self, model: Any, size: int, compiled: bool = False, folder: PreparedFolder | None = None
    ) -> "torch.Tensor":
        self.begin(model, compiled)
        return self.loss_sum(model, self._largest_batch(model, size, "train", folder))

    def largest_evaluation(self, model: Any, size: int, folder: PreparedFolder | None = None) -> "torch.Tensor":
        self.begin(model, compiled=False)
        return self.sums(model, self._largest_batch(model, size, "eval", folder))

    def _largest_batch(
        self, model: Any, size: int, part: Part, folder: PreparedFolder | None
    ) -> dict[str, "torch.Tensor"]:
        if folder is None:
            with model.device:
                return self.largest_batch(model.config, size)
        examples = self.examples(folder, part)
        batch = examples.batch(examples.order[-1:].repeat(size))  # the longest is the last
        return {name: tensor.to(model.device) for name, tensor in batch.items()}

    def example_loss(self, model: "PreTrainedModel", folder: PreparedFolder) -> "torch.Tensor":
        import numpy as np

        self.begin(model, compiled=False)
        batch = self.examples(folder, "train").batch(np.zeros(2, np.int64))
        return self.loss_sum(model, {name: tensor.to(model.device) for name, tensor in batch.items()})
