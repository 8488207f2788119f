"""Tasks that train with Hugging Face's Trainer on DeepSpeed."""

from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.dimensions import LARGEST_INT, TrainingParams
from carbonopt.core.errors import BadInput
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.workload_settings import ModelWorkload
from carbonopt.train.client import Speaker
from carbonopt.train.failures import as_bad_input
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.tasks.task import Evaluation, Trained, TrainingTask, TrialRun

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

    from carbonopt.train.data.examples import Examples
    from carbonopt.train.training_loop import TrialTrainer

Part = Literal["train", "eval"]


class TrainerTask(TrainingTask):
    """A task that defines its model, its loss and its quality; all else in training is shared.

    Data and loss come from one method, `trainer`, since the trainer of another library (TRL) has
    both inside.
    """

    workload: ModelWorkload

    @property
    @abstractmethod
    def model_kind(self) -> ModelKind:
        """The kind of the task's model, a class attribute unless it depends on the workload."""

    def check_weights(self, keys: Collection[str]) -> str | None:
        """Check that folders of pretrained models hold weights for this task.

        Neither the data nor the values of weights are read.

        Args:
            keys: the workload's keys whose models are checked.

        Returns:
            A sentence on tensors that the model leaves unused; None if it uses all.

        Raises:
            BadInput: as `weights.check_weights` does.
        """
        from carbonopt.train.models import model, weights

        if "model" not in keys:
            return None
        with as_bad_input("model"):
            config = model.model_config(self.model_kind, self.workload, tokenizer=None)
            # A quantized model may be meant for GPUs that this machine does not have.
            if weights.is_quantized(config):
                return None
            return weights.check_weights(self.model_kind, self.workload.model, config)

    @abstractmethod
    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        """Return this rank's trainer, with its part of the training data.

        It is a `training_loop.TrialTrainer`, or behaves like one and knows its last loss.
        """

    def arguments_class(self) -> "type[TrainingArguments]":
        """Return the class of the trainer's arguments.

        A study may set these arguments as `workload.training_arguments`.
        """
        from transformers import TrainingArguments

        return TrainingArguments

    def arguments(self, params: TrainingParams) -> dict[str, Any]:
        """Return trainer arguments that this task adds to those that all tasks have."""
        return {}

    def before_training(self, run: TrialRun, trainer: "TrialTrainer") -> None:
        """Record what has to be known of the untrained model; this does not count as training.

        The engine exists already.
        """

    def before_steps(self, run: TrialRun, trainer: "TrialTrainer", speaker: Speaker | None) -> None:
        """Do what training needs once before its first step; it is measured as part of training.

        The engine exists already. `speaker` is as in `train`; a trial that reports no progress for
        long is ended.
        """

    @abstractmethod
    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> Evaluation:
        """Evaluate the model and leave it in training mode.

        Sums are first taken over all evaluation data and all ranks, so that the result depends
        neither on the batch size nor on the number of ranks.
        """

    def evaluation_tokens(self, examples: int) -> int | None:
        """Return the tokens of an evaluation of so many examples, padding included.

        None: it is not known, or the evaluation also generates texts.
        """
        length = self.workload.sequence_length
        return None if length is None else examples * length

    @abstractmethod
    def example_loss(self, model: "PreTrainedModel", folder: PreparedFolder) -> "torch.Tensor":
        """Return the loss of a micro batch of the right shape, whatever is in it.

        A process that waits for a trial computes it to load the kernels.
        """

    def eval_batch_size(
        self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT
    ) -> int | None:
        """Return the number of examples in a forward pass of an evaluation.

        Args:
            memory_bytes: the GPU's memory.
            examples: the number of examples in the whole evaluation.

        Returns:
            The number; None: as many as in a micro batch.
        """
        return None

    def eval_batch_size_here(self, config: "PreTrainedConfig", examples: int) -> int | None:
        """Return `eval_batch_size` for this process's GPU; None also without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return None
        return self.eval_batch_size(
            config, torch.cuda.get_device_properties(0).total_memory, examples
        )

    # The next four members serve the memory estimate (`train.models.memory_probe`); a task can do
    # without them.

    @property
    def masks_attention(self) -> bool:
        """True if attention needs a mask.

        It does if the rows of a micro batch differ in length or hold several examples.
        """
        return False

    def expected_config(self) -> "PreTrainedConfig":
        """Return the model's configuration as `prepare` makes it, as far as it is known before.

        A number of classes that only the data has can be any.

        Raises:
            BadInput: as `prepare` does, and if the model can't be known yet.
        """
        raise self._unestimated

    def largest_loss(
        self, model: Any, size: int, compiled: bool = False, folder: PreparedFolder | None = None
    ) -> "torch.Tensor":
        """Return the loss of a micro batch of `size` of the longest examples, whatever is in them.

        Args:
            model: the model, on whose device the loss is computed.
            size: the number of examples.
            compiled: True with torch_compile, where the trainer then compiles its loss.
            folder: the prepared folder whose longest examples are meant; without one, they are the
                longest that the workload allows.
        """
        raise self._unestimated

    def largest_evaluation(
        self, model: Any, size: int, folder: PreparedFolder | None = None
    ) -> Any:
        """Return what an evaluation computes for a batch of `size` of the longest examples.

        The arguments are as in `largest_loss`.
        """
        raise self._unestimated

    @property
    def _unestimated(self) -> BadInput:
        return BadInput(
            f"the task {self.workload.task} does not say what a micro batch is before its data is"
            " prepared"
        )

    def train(self, run: TrialRun, speaker: Speaker | None) -> Trained:
        from carbonopt.train.training_loop import train

        return train(self, run, speaker)


class ExampleTask(TrainerTask):
    """A task with independent examples, such as a text with its class, a pair of answers, an image.

    The task defines the contents of examples, their loss and what an evaluation sums up. This class
    handles their order, batches, ranks and scaling.
    """

    @abstractmethod
    def examples(self, folder: PreparedFolder, part: Part) -> "Examples":
        """Return the examples that `prepare` has written into the folder."""

    def begin(self, model: Any, compiled: bool) -> None:
        """Accept the model that the next calls of `loss_sum` and `sums` are for.

        Args:
            compiled: whether the loss is to be compiled.
        """

    @abstractmethod
    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the loss of a micro batch of `examples`, summed with the examples' weights."""

    @abstractmethod
    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the sums that `evaluation` needs, over one batch, float64 [any number].

        An example whose weight is 0 adds nothing. No shape may depend on the values of tensors,
        since those of the memory estimate have none.
        """

    @abstractmethod
    def evaluation(self, sums: list[float]) -> Evaluation:
        """Return the evaluation for `sums` that were added up over all data and all ranks."""

    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        from carbonopt.train.example_loss import ExampleTrainer

        self.begin(model, arguments.torch_compile)
        return ExampleTrainer(self, run, model, arguments)

    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> Evaluation:
        from carbonopt.train.example_loss import summed

        return self.evaluation(summed(self, run, trainer.model_wrapped))

    @abstractmethod
    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        """Return a batch as `Examples.batch` does, with `size` of the longest possible examples.

        Their length is the longest that a model of this configuration can get, and they hold zeros.
        The tensors are on torch's default device. The memory estimate uses them.
        """

    def largest_loss(
        self, model: Any, size: int, compiled: bool = False, folder: PreparedFolder | None = None
    ) -> "torch.Tensor":
        self.begin(model, compiled)
        return self.loss_sum(model, self._largest_batch(model, size, "train", folder))

    def largest_evaluation(
        self, model: Any, size: int, folder: PreparedFolder | None = None
    ) -> "torch.Tensor":
        self.begin(model, compiled=False)
        return self.sums(model, self._largest_batch(model, size, "eval", folder))

    def _largest_batch(
        self, model: Any, size: int, part: Part, folder: PreparedFolder | None
    ) -> dict[str, "torch.Tensor"]:
        if folder is None:
            with model.device:
                return self.largest_batch(model.config, size)
        examples = self.examples(folder, part)
        batch = examples.batch(examples.order[-1:].repeat(size))  # `order` ends with the longest
        return {name: tensor.to(model.device) for name, tensor in batch.items()}

    def example_loss(self, model: "PreTrainedModel", folder: PreparedFolder) -> "torch.Tensor":
        import numpy as np

        self.begin(model, compiled=False)
        batch = self.examples(folder, "train").batch(np.zeros(2, np.int64))
        return self.loss_sum(
            model, {name: tensor.to(model.device) for name, tensor in batch.items()}
        )
