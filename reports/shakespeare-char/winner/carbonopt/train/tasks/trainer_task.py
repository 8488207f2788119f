"""Tasks that train with Hugging Face's Trainer on DeepSpeed."""

import functools
import os
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from carbonopt.core.files import PreparedFolder, write_json
from carbonopt.core.trial import Prepared, Stage
from carbonopt.train.client import Speaker
from carbonopt.train.tasks.base import Task, Trained, TrialRun

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TrainingArguments

    from carbonopt.train.loop import TrialTrainer

OptimizerClass = tuple[type, dict[str, Any]]


@dataclass(frozen=True)
class ModelKind:
    """Which models a task trains, by names alone: whoever reads a task loads none of the libraries that make them."""

    auto_class: str  # of transformers
    mapping: str  # transformers' table of the model types that this class makes
    peft_task_type: str
    name: str  # in a sentence: "causal language model"

    def auto(self) -> Any:
        """The class."""
        import transformers

        return getattr(transformers, self.auto_class)

    def model_types(self) -> Collection[str]:
        """Those that the class makes."""
        from transformers.models.auto import modeling_auto

        model_types: Collection[str] = getattr(modeling_auto, self.mapping).keys()
        return model_types


class TrainerTask(Task):
    """What a task says of its model, its loss and its quality; the rest of a training is the same for all. `trainer` is
    one method for data and loss, since a trainer of another library (TRL's) has both inside."""

    model_kind: ClassVar[ModelKind]

    @abstractmethod
    def trainer(
        self, run: TrialRun, model: Any, arguments: "TrainingArguments", optimizer: OptimizerClass | None
    ) -> "TrialTrainer":
        """This rank's, with its part of the training data: a `loop.TrialTrainer`, or what behaves as one and knows its
        last loss. `optimizer`: its class and arguments, where it is not `arguments.optim`."""

    @abstractmethod
    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> tuple[float, int]:
        """The quality's sum and count over all evaluation data and all ranks: summed first, so that neither the size of
        a batch nor the number of ranks weighs anything. Leaves the model in training mode."""

    @abstractmethod
    def example_loss(self, model: "PreTrainedModel", prepared: Prepared) -> "torch.Tensor":
        """The loss of a micro batch of the right shape, whatever is in it: a process that waits for its trial loads
        the kernels by it."""

    def train(self, run: TrialRun, speaker: Speaker | None) -> Trained:
        from carbonopt.train.loop import Evaluations

        if speaker is not None:
            speaker.stage(Stage.MODEL)
        arguments, model = self._arguments_and_model(run)
        if speaker is not None:
            speaker.stage(Stage.ENGINE)
        trainer = self.trainer(run, model, arguments, _offloaded_optimizer(run, arguments))
        evaluations = Evaluations(self, run, trainer, speaker)
        trainer.add_callback(evaluations)
        trainer.train()
        assert evaluations.last is not None  # there is one at the last step, and none is stopped elsewhere
        return Trained(evaluations.last, functools.partial(_save_model, trainer, run.folder))

    def _arguments_and_model(self, run: TrialRun) -> "tuple[TrainingArguments, Any]":
        """In the order that each kind of model needs (see `random_model` and `pretrained_model`)."""
        import torch
        from transformers import AutoConfig, set_seed

        from carbonopt.train import model as models
        from carbonopt.train import ranks
        from carbonopt.train.arguments import max_grad_norm, training_arguments
        from carbonopt.train.deepspeed_config import deepspeed_config
        from carbonopt.train.prefetch import take_prefetched_model

        spec, params, workload, kind = run.spec, run.spec.params, run.workload, self.model_kind
        on_gpu, attention = torch.cuda.is_available(), params.attention_implementation
        settings = deepspeed_config(params, workload, on_gpu, max_grad_norm(workload))
        if ranks.rank() == 0:
            write_json(Path(spec.trial_dir) / "ds_config.json", settings)
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # The kernels stay as Hugging Face has them, deterministic or not: slower ones would change the energy that is
        # measured. On a CPU they are deterministic anyway; training_arguments.full_determinism asks for it on a GPU.
        set_seed(spec.seed)
        model: Any = None
        if workload.model.from_config is not None and (model := take_prefetched_model(spec)) is None:
            config = AutoConfig.from_pretrained(run.folder.model_config)
            model = models.random_model(kind, config, attention, workload.model.trust_remote_code)
        arguments = training_arguments(params, workload, run.total_steps, spec.seed, on_gpu, spec.trial_dir, settings)
        if model is None:
            model = models.pretrained_model(kind, workload.model, attention)
        if params.has_fused_output_layer:
            models.fuse_output_layer(model, str(params.output_layer), compiled=on_gpu or arguments.torch_compile)
        if params.lora_rank:
            set_seed(spec.seed)
            model = models.with_lora(kind, model, params.lora_rank, bool(arguments.gradient_checkpointing))
        return arguments, model


def _offloaded_optimizer(run: TrialRun, arguments: "TrainingArguments") -> OptimizerClass | None:
    """DeepSpeed's CPU AdamW where optimizer states leave a GPU, unless the study chose an optimizer: torch's steps
    several times slower there. Given to the Trainer, not to DeepSpeed, it gets the same parameter groups as torch's, so
    that offload changes no weight decay. On a host without GPU torch's AdamW needs no compiler."""
    import torch

    chosen = "optim" in run.workload.training_arguments
    if run.spec.params.offload == "none" or not torch.cuda.is_available() or chosen:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return DeepSpeedCPUAdam, {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}


def _save_model(trainer: "TrialTrainer", folder: PreparedFolder, target: Path) -> None:
    from transformers import AutoTokenizer

    from carbonopt.train import ranks

    trainer.save_model(str(target))  # on every rank: ZeRO-3 gathers
    if ranks.rank() == 0:
        (target / "training_args.bin").unlink()  # a pickle, which nobody should have to trust
        AutoTokenizer.from_pretrained(folder.tokenizer).save_pretrained(target)
