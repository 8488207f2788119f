"""One trial's training: Hugging Face's Trainer on DeepSpeed, the study's data order, loss and evaluations."""

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from carbonopt.core.events import Evaluated
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import EvalPoint, Kernels, Phase, Stage
from carbonopt.train import ranks
from carbonopt.train.client import Speaker
from carbonopt.train.cpu_wait import CpuWait, MakesRoom
from carbonopt.train.data.packing import Tokens
from carbonopt.train.data.prefetch import BatchesAhead
from carbonopt.train.evaluation import evaluate, token_nll
from carbonopt.train.failures import Diverged
from carbonopt.train.fast_step import install_fast_step
from carbonopt.train.output_layer import FusedOutputLayer

_LOSS_CHECK_STEPS = 50  # reading the loss waits for the GPU; between two evaluations this often is enough


class TokenLoss:
    """Cross entropy summed over a micro batch's targets and divided by the target tokens of a whole global batch.

    DeepSpeed averages gradients over ranks, so each rank's sum counts world-size-fold. Divided by a constant that
    neither micro batch nor accumulation enters, gradients need no averaging later (transformers #45305 is about
    averaging twice or not at all). All of a training sequence's targets count: packing drops the ragged tail.
    """

    def __init__(
        self, global_batch_tokens: int, world_size: int, compiled: bool, output_layer: FusedOutputLayer | None
    ) -> None:
        self._scale = world_size / global_batch_tokens
        self._output_layer = output_layer  # gives the sum itself, in place of the logits
        self.nll = token_nll(compiled)
        self.last: torch.Tensor | None = None  # of this rank's last micro batch, still on its device

    def announce(self, targets: torch.Tensor) -> None:
        """Must be called before the model's forward pass."""
        if self._output_layer is not None:
            self._output_layer.targets = targets

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"]
        nll_sum = self.nll(logits, labels, "sum") if self._output_layer is None else logits
        loss = nll_sum * self._scale
        self.last = loss.detach()
        return loss


class TrialTrainer(Trainer):
    """The Trainer with the trial's own order of data, which already is this rank's part, batch by batch."""

    compute_loss_func: TokenLoss

    def get_train_dataloader(self) -> DataLoader:
        data: Any = self.train_dataset
        options: Any = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        if ranks.device().type == "cuda":
            return BatchesAhead(data, ranks.device(), **options)
        return DataLoader(data, batch_size=None, **options)  # a thread would take a core from those that compute

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # to count them the Trainer looks through the model's parameters at every micro batch

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.compute_loss_func.announce(inputs["labels"])
        return super().compute_loss(model, inputs, *args, **kwargs)


@dataclass(frozen=True)
class EvaluationSchedule:
    """When a trial is evaluated and on what."""

    total_steps: int
    evaluation_steps: tuple[int, ...]
    eval_tokens: Tokens
    eval_batch_size: int
    sequence_length: int
    tokens_per_step: int  # over all ranks


def _kernels() -> Kernels | None:
    """Whether torch's compiler has compiled in this process or found all in its cache, as it counts; None: neither."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is None:  # importing it takes a second
        return None
    counted = utils.counters["inductor"]
    if counted["fxgraph_cache_miss"] or counted["fxgraph_cache_bypass"]:
        return Kernels.COMPILED
    return Kernels.LOADED if counted["fxgraph_cache_hit"] else None


class Evaluations(TrainerCallback):
    """Evaluates at the planned steps, tells the study, and stops on all ranks when the study says so."""

    def __init__(self, plan: EvaluationSchedule, loss: TokenLoss, speaker: Speaker | None) -> None:
        self._plan = plan
        self._loss = loss
        self._speaker = speaker  # rank 0's
        self._cores = CpuWait()
        self._room = MakesRoom()
        self.trainer: Trainer | None = None  # set once it exists; its engine exists when training begins

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # model, engine and optimizer are ready here, and no step was made yet
        install_fast_step(self.trainer.model_wrapped, ranks.world_size())  # type: ignore[union-attr]
        if ranks.device().type == "cpu":
            self._room.start()
        self._enter(Phase.TRAIN)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        if self._speaker is not None:
            if step == 1:
                ranks.wait_for_device()  # or what the first step has begun would be counted with the others
                self._speaker.stage(Stage.STEPS, _kernels())
            # The evaluations say it of all ranks; but a trial can be stopped before the first.
            told_later = step >= self._plan.evaluation_steps[0]
            self._speaker.progress(step, self._plan.total_steps, None if told_later else self._cores.so_far)
        if step in self._plan.evaluation_steps:
            self._check_loss(step)
            control.should_training_stop |= self._evaluate(step)
        elif step % _LOSS_CHECK_STEPS == 0:
            self._check_loss(step)
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._room.end()

    def _enter(self, phase: Phase) -> None:
        """Changes the phase: every rank's device is idle when the study is told and until it says go on."""
        ranks.together()
        if phase is Phase.TRAIN:
            self._cores.begin()
        if self._speaker is not None:
            self._speaker.phase(phase)
        if phase is Phase.EVAL:
            self._cores.end()
        ranks.together()

    def _check_loss(self, step: int) -> None:
        last = math.nan if self._loss.last is None else float(self._loss.last)
        if ranks.largest(float(not math.isfinite(last))):
            raise Diverged(f"the training loss was not finite at step {step} of {self._plan.total_steps}.")

    def _evaluate(self, step: int) -> bool:
        """Returns whether to stop."""
        plan = self._plan
        self._enter(Phase.EVAL)
        engine = self.trainer.model_wrapped  # type: ignore[union-attr]
        nll_sum, eval_tokens = evaluate(
            engine, plan.eval_tokens, plan.sequence_length, plan.eval_batch_size, self._loss.nll
        )
        ranks.together()
        finite = math.isfinite(nll_sum)
        peak_memory_gib = ranks.largest(ranks.peak_memory_gib())
        cpu_wait_fraction = self._cores.share  # where one rank's kernel tells it, all do
        cpu_wait_fraction = None if cpu_wait_fraction is None else ranks.largest(cpu_wait_fraction)
        stop = False
        if self._speaker is not None:
            tokens = step * plan.tokens_per_step
            point = EvalPoint.of(PERPLEXITY, nll_sum, eval_tokens, step=step, tokens=tokens)
            told = Evaluated(
                point=point,
                total_steps=plan.total_steps,
                peak_memory_gib=peak_memory_gib,
                cpu_wait_fraction=cpu_wait_fraction,
            )
            stop = self._speaker.evaluated(told) is not None
        stop = bool(ranks.from_rank_0(int(stop)))
        if not finite:
            raise Diverged(f"the evaluation loss was not finite at step {step} of {plan.total_steps}.")
        if not stop and step < plan.total_steps:
            self._enter(Phase.TRAIN)
        return stop
