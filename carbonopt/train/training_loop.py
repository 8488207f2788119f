"""Train one trial: Hugging Face's Trainer on DeepSpeed, and the trial's evaluations."""

import functools
import math
import os
import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.files import write_json
from carbonopt.core.trial import Kernels, Phase, Stage
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.train import ranks
from carbonopt.train.checkpoints import Checkpoints, SavedTraining
from carbonopt.train.client import Speaker
from carbonopt.train.cpu_wait import CpuWait, SpinThrottle
from carbonopt.train.data.packing import PrefetchLoader, evaluation_steps
from carbonopt.train.failures import Diverged
from carbonopt.train.imports import load_compiler
from carbonopt.train.models import model as models
from carbonopt.train.models import weights
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.optim.arguments import chosen_optimizer, training_arguments
from carbonopt.train.optim.averaging import WeightAverage
from carbonopt.train.optim.deepspeed_config import deepspeed_config
from carbonopt.train.optim.schedule import ScheduledTrainer
from carbonopt.train.speed.fast_step import install_fast_step
from carbonopt.train.speed.float8_layers import train_in_float8
from carbonopt.train.speed.small_evaluations import evaluation_stance
from carbonopt.train.speed.whole_step import WholeStep, whole_step
from carbonopt.train.tasks.task import Trained, TrialRun
from carbonopt.train.training_state import TrainingState, UnknownState

if TYPE_CHECKING:
    from carbonopt.train.tasks.trainer_task import TrainerTask

# The step at which a probe first looks at the clock, which waits for the GPU; the next check is at
# twice as many steps.
_PROBE_CHECK = 2
# Reading the loss waits for the GPU; between two evaluations this often is enough.
_LOSS_CHECK_STEPS = 50


class TrialTrainer(ScheduledTrainer):
    """A Trainer whose data set yields this rank's finished batches, in the trial's own order."""

    # loss of this rank's last micro batch, still on its device
    last_loss: torch.Tensor | None = None
    whole_step: WholeStep | None = None  # a step that replaces DeepSpeed's, where there can be one

    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.whole_step is None:
            return super().training_step(model, inputs, *args, **kwargs)
        return self.whole_step(self._prepare_inputs(inputs))

    # The Trainer reads these three at each step for a log that nobody keeps; to read a norm it
    # waits for the GPU.

    def _clip_grad_norm(self, model: Any) -> None:
        """Do nothing: DeepSpeed clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None: ...

    def _get_learning_rate(self) -> float:
        """Return 0 for a log that nobody keeps; the optimizer has its own rate."""
        return 0.0

    def get_train_dataloader(self) -> DataLoader[Any]:
        data: Any = self.train_dataset
        options: Any = {
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self.args.dataloader_pin_memory,
        }
        # On a CPU a prefetching thread would take a core from those that compute.
        loader = PrefetchLoader if ranks.device().type == "cuda" else DataLoader
        return loader(data, batch_size=None, **options)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # To count them, the Trainer looks through the model's parameters at every micro batch.
        return 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        self.last_loss = loss.detach()
        return loss


def _kernels() -> Kernels | None:
    """Return whether torch's compiler compiled in this process or found everything in its cache.

    None means that it did neither. The compiler's own counters say it.
    """
    if (utils := sys.modules.get("torch._dynamo.utils")) is None:  # importing it takes a second
        return None
    counted = utils.counters["inductor"]
    if counted["fxgraph_cache_miss"] or counted["fxgraph_cache_bypass"]:
        return Kernels.COMPILED
    return Kernels.LOADED if counted["fxgraph_cache_hit"] else None


class TrialCallback(TrainerCallback):
    """The work between a trial's steps: evaluations, progress, probes, averaging, checkpoints.

    It stops all ranks if the study says so.
    """

    def __init__(
        self, task: "TrainerTask", run: TrialRun, trainer: TrialTrainer, speaker: Speaker | None
    ) -> None:
        # The trainer's engine exists only once training begins; only rank 0 has a speaker.
        self._task, self._run, self._trainer, self._speaker = task, run, trainer, speaker
        # A repeat is never stopped for its quality, so that only its last evaluation is needed.
        # Each evaluation costs energy, and blurs that of the training, whose boundaries lie between
        # two readings of a GPU's counter.
        evaluations = run.workload.evaluations if run.spec.repeat_of is None else 1
        self._evaluation_steps = evaluation_steps(run.total_steps, evaluations)
        self._probe_check = _PROBE_CHECK if run.spec.probe_s else 1
        self._first_step_at = math.inf
        self._cores, self._spin_throttle = CpuWait(), SpinThrottle()
        self._average: WeightAverage | None = None
        self._checkpoints: Checkpoints | None = None
        self._first_step = 1  # the first step that this attempt makes
        # the checkpoint whose random numbers the first step has to draw
        self._draws_as: SavedTraining | None = None
        self.last: EvalPoint | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the steps; model, engine and optimizer are ready, and no step was made yet."""
        install_fast_step(self._trainer.model_wrapped, ranks.world_size())
        if isinstance(self._trainer, TrialTrainer):
            self._trainer.whole_step = whole_step(self._trainer, self._run.spec.params)
        if reach := self._run.spec.params.weight_averaging:
            self._average = WeightAverage(self._trainer.model_wrapped, reach)
        if ranks.device().type == "cpu":
            self._spin_throttle.start()
        self._task.before_training(self._run, self._trainer)
        self._checkpoints = self._prepared_checkpoints()
        saved = None if self._checkpoints is None else self._checkpoints.read()
        if saved is None:
            self._enter(Phase.TRAIN)
            self._task.before_steps(self._run, self._trainer, self._speaker)
            step = 0
        else:
            # done a second time, with the weights of the beginning: counted as training only once
            self._task.before_steps(self._run, self._trainer, self._speaker)
            self._restore(saved)
            self._enter(Phase.TRAIN)
            step = saved.step
        self._first_step = step + 1
        if self._checkpoints is not None:
            self._checkpoints.begin(step)

    def _prepared_checkpoints(self) -> Checkpoints | None:
        if (settings := self._run.spec.checkpoints) is None:
            return None
        state = None
        try:
            state = TrainingState(self._trainer, self._average)
        except UnknownState as error:
            unknown = str(error)
        checkpoints = Checkpoints(settings, self._run, state, self._speaker)
        if state is None:
            checkpoints.remark(f"no checkpoints can be written: {unknown}")
        return checkpoints

    def _restore(self, saved: SavedTraining) -> None:
        assert self._checkpoints is not None
        data: Any = self._trainer.train_dataset
        data.begin_after(saved.step)
        self._trainer.state.global_step = saved.step
        self._checkpoints.restore(saved)
        self._draws_as = saved

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        # Not before the first step: the data loader draws a number when it begins.
        if self._draws_as is not None and self._checkpoints is not None:
            self._checkpoints.restore_random(self._draws_as)
            self._draws_as = None

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        if self._average is not None:
            self._average.update(step)
        if step == self._first_step:
            self._first_step_ended()
        if self._run.spec.probe_s is not None:
            control.should_training_stop |= self._probed(step, self._run.spec.probe_s)
            return control
        if self._speaker is not None:
            # Evaluations report the CPU wait of all ranks, but a trial can be stopped before the
            # first one.
            evaluations_report_it = step >= self._evaluation_steps[0]
            self._speaker.progress(
                step, self._run.total_steps, None if evaluations_report_it else self._cores.end
            )
        evaluates = step in self._evaluation_steps
        if evaluates or step % _LOSS_CHECK_STEPS == 0:
            loss = self._trainer.last_loss
            if ranks.largest(float(loss is None or not math.isfinite(loss))):
                raise Diverged(
                    f"the training loss was not finite at step {step} of {self._run.total_steps}."
                )
        if evaluates:
            control.should_training_stop |= self._evaluated(step)
        if step < self._run.total_steps and not control.should_training_stop:
            self._save_if_due(step)
        return control

    def _save_if_due(self, step: int) -> None:
        if self._checkpoints is None or not self._checkpoints.is_due(step):
            return
        self._enter(Phase.SETUP, Stage.SAVING)
        self._checkpoints.save(step)
        self._enter(Phase.TRAIN)

    def _first_step_ended(self) -> None:
        # otherwise work begun by the first step would be counted with the others
        ranks.wait_for_device()
        self._first_step_at = time.monotonic()
        if self._speaker is not None:
            self._speaker.stage(Stage.STEPS, _kernels())

    def _probed(self, step: int, seconds: float) -> bool:
        """Return whether the probe is finished, and report it to the study if so.

        It is finished when the slowest rank has made steps for this many seconds, or when there are
        no steps left.
        """
        total_steps = self._run.total_steps
        if step not in (self._probe_check, total_steps):
            if self._speaker is not None:
                self._speaker.progress(step, total_steps)
            return False
        ranks.wait_for_device()
        if step < total_steps and ranks.largest(time.monotonic() - self._first_step_at) < seconds:
            self._probe_check *= 2
            return False
        ranks.together()
        waited = self._cores.end()
        peaks_gib = ranks.of_each(ranks.peak_memory_gib())
        if self._speaker is not None:
            peaks = {"peak_memory_gib": max(peaks_gib), "rank_peak_memory_gib": peaks_gib}
            self._speaker.probed(
                step=step, total_steps=total_steps, cpu_wait_fraction=waited, **peaks
            )
        return True

    @property
    def judged_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has the weights that are evaluated and saved."""
        return nullcontext() if self._average is None else self._average.applied()

    @property
    def _evaluation_stance(self) -> AbstractContextManager[None]:
        """A context in which the trial evaluates, with the compiler or without."""
        run = self._run
        if not self._trainer.args.torch_compile:
            return nullcontext()
        return evaluation_stance(
            run.prepared.model_parameters,
            self._task.evaluation_tokens(run.prepared.eval_examples),
            run.workload.evaluations,
            run.spec.params.attention_implementation,
        )

    def end(self) -> None:
        """Undo what `on_train_begin` did to this process, however training ended."""
        self._spin_throttle.end()
        if isinstance(self._trainer, TrialTrainer) and self._trainer.whole_step is not None:
            self._trainer.whole_step.release()

    def _enter(self, phase: Phase, stage: Stage | None = None) -> None:
        """Change the phase.

        Every rank's device is idle when the study is told, and until the study lets the trial go
        on.
        """
        ranks.together()
        if phase is Phase.TRAIN:
            self._cores.begin()
        if self._speaker is not None:
            self._speaker.phase(phase, stage)
        if phase is not Phase.TRAIN:
            self._cores.end()
        ranks.together()

    def _evaluated(self, step: int) -> bool:
        """Evaluate, report to the study, and return whether to stop."""
        total_steps, stop = self._run.total_steps, False
        self._enter(Phase.EVAL)
        with self.judged_weights, self._evaluation_stance:
            evaluation = self._task.evaluate(self._run, self._trainer)
        ranks.together()
        peaks_gib = ranks.of_each(ranks.peak_memory_gib())
        measured: dict[str, Any] = {
            "peak_memory_gib": max(peaks_gib),
            "rank_peak_memory_gib": tuple(peaks_gib),
        }
        if (share := self._cores.share) is not None:  # if one rank's kernel reports it, all do
            measured["cpu_wait_fraction"] = ranks.largest(share)
        tokens = None if (per_step := self._run.tokens_per_step) is None else step * per_step
        total, count, others = evaluation.sum, evaluation.count, evaluation.others
        self.last = EvalPoint.of(
            self._task.quality, total, count, step=step, tokens=tokens, **others
        )
        if self._speaker is not None:
            evaluated = {
                "point": self.last,
                "total_steps": total_steps,
                "predictions": evaluation.predictions,
            }
            stop = bool(self._speaker.evaluated(**evaluated, **measured))
        stop = bool(ranks.largest(float(stop)))
        if self.last.value is None:
            raise Diverged(f"the evaluation loss was not finite at step {step} of {total_steps}.")
        if not stop and step < total_steps:
            self._enter(Phase.TRAIN)
        return stop


def train(task: "TrainerTask", run: TrialRun, speaker: Speaker | None) -> Trained:
    """Train a trial on this rank; see `TrainingTask.train`.

    The order of the calls below is the one that each kind of model needs (see `random_model` and
    `pretrained_model`).
    """
    spec, params, workload, kind = run.spec, run.spec.params, task.workload, task.model_kind
    on_gpu, attention = torch.cuda.is_available(), params.attention_implementation
    if speaker is not None:
        speaker.stage(Stage.MODEL)
    deepspeed = deepspeed_config(params, workload, on_gpu, run.prepared.zero_leaves)
    if ranks.rank() == 0:
        write_json(Path(spec.trial_dir) / "ds_config.json", deepspeed)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Kernels stay as Hugging Face has them, deterministic or not: slower ones would change the
    # measured energy. On a CPU with two threads 3 of about 300 trials differed, in the last digit
    # of their first step's activations. On a GPU training_arguments.full_determinism makes them
    # deterministic.
    set_seed(spec.seed)
    model: Any = None
    config = models.with_dropout(
        models.saved_config(run.folder, workload.model.trust_remote_code), params.dropout
    )
    if (
        workload.model.from_config is not None
        and (model := models.take_prefetched_model(spec)) is None
    ):
        model = models.random_model(kind, config, attention, workload.model.trust_remote_code)
    of_task = task.arguments_class(), task.arguments(params)
    arguments = training_arguments(
        params, workload, run.total_steps, spec.seed, on_gpu, spec.trial_dir, deepspeed, *of_task
    )
    if arguments.torch_compile or (on_gpu and params.has_fused_output_layer):
        load_compiler()  # a fork has done so already
    if model is None:
        model = weights.pretrained_model(kind, workload.model, config, attention, spec.seed)
    model = _adapted(model, kind, run, arguments, compiled=on_gpu or arguments.torch_compile)
    if speaker is not None:
        speaker.stage(Stage.ENGINE)
    trainer = task.trainer(run, model, arguments)
    trainer.optimizer_cls_and_kwargs = chosen_optimizer(params, workload, trainer)
    callback = TrialCallback(task, run, trainer, speaker)
    trainer.add_callback(callback)
    try:
        trainer.train()
    finally:
        callback.end()
    # The last step has an evaluation. A trial, unlike a probe, stops itself only at evaluations;
    # cap, budget and interruption kill it from outside.
    assert callback.last is not None or spec.probe_s is not None
    return Trained(callback.last, functools.partial(_save_model, trainer, callback, run.folder))


def _adapted(
    model: Any, kind: ModelKind, run: TrialRun, arguments: TrainingArguments, *, compiled: bool
) -> Any:
    """Return the model with the output layer, the float8 products and the adapters of a trial.

    Args:
        compiled: Whether a fused output layer is compiled.
    """
    params = run.spec.params
    if params.has_fused_output_layer:
        models.fuse_output_layer(model, str(params.output_layer), compiled=compiled)
    if params.trains_in_float8:
        train_in_float8(model, str(params.float8))
    if params.lora_rank:
        set_seed(run.spec.seed)
        model = models.with_lora(
            kind,
            model,
            params.lora_rank,
            inputs_need_gradients=bool(arguments.gradient_checkpointing) or params.zero_stage == 3,
        )
    return model


def _save_model(
    trainer: TrialTrainer, callback: TrialCallback, folder: PreparedFolder, target: Path
) -> None:
    with callback.judged_weights:
        trainer.save_model(str(target))  # on every rank: ZeRO-3 gathers
    if ranks.rank() == 0:
        (target / "training_args.bin").unlink()  # a pickle, which nobody should have to trust
        # files that make the model's inputs; some tasks have both
        for inputs in (folder.tokenizer, folder.image_processor):
            if inputs.is_dir():
                shutil.copytree(inputs, target, dirs_exist_ok=True)
        models.copy_code(folder.model_config, target)
