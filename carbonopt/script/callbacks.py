"""Callbacks that report a training to the study, for Hugging Face's and Lightning's trainers.

They do what `with` and `if` do in a training loop of one's own.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sized
from types import FrameType
from typing import TYPE_CHECKING, Any

from carbonopt.core import channel
from carbonopt.core.states import Phase, Stage
from carbonopt.script.run import Run

if TYPE_CHECKING:
    import lightning
    from transformers import TrainerCallback


_MISSING = object()


def _quality_name(metric: str, prefix: str) -> str:
    """Return the name under which a metric is reported: without its prefix.

    A metric whose whole name is the target's quality keeps it.
    """
    return metric if os.environ.get(channel.QUALITY) == metric else metric.removeprefix(prefix)


class _TrainerHooks:
    """The hooks of a callback of Hugging Face's Trainer."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.quality = _quality_name(metric, "eval_")

    run: Run | None = None
    # True while Trainer.train runs, which may still evaluate and save after its last step
    is_in_train = False
    other_metrics: tuple[str, ...] = ()  # metrics of the last evaluation that lacked `metric`
    other_data = False  # True after an evaluation of other data that was not reported

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run is not None and self.is_in_train:
            self.run.refuse(
                "a trial must train with the batch size of its configuration, but the Trainer ran"
                " out of memory and began again with a smaller one; leave auto_find_batch_size"
                " out."
            )
        self.run = Run(state.max_steps, getattr(args, "world_size", None))
        self.run.check_metric(self.metric, self.quality)
        self.run.check_begin(getattr(state, "global_step", 0) + 1)
        self.is_in_train = True
        if getattr(args, "eval_on_start", False):
            self.run.enter(Phase.EVAL, Stage.EVALUATION)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step, before a callback that comes earlier can evaluate when the step ends."""
        assert self.run is not None
        self.run.step(state.global_step + 1)  # the Trainer counts it after this

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.run is not None
        if state.global_step > self.run.steps:  # a trainer or a version without the hook above
            self.run.step(state.global_step)
        self.before_pause(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before_pause(control)

    def before_pause(self, control: Any) -> None:
        """Enter the phase of an evaluation or a checkpoint that was decided to come next.

        The Trainer has no hook where one begins.
        """
        if self.run is None:
            return
        if control.should_evaluate:
            self.run.enter(Phase.EVAL, Stage.EVALUATION)
        elif getattr(control, "should_save", False):
            self.run.enter(Phase.SETUP, Stage.SAVING)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Enter the phase of an evaluation that was not announced.

        It may be on a further data set, or made by another callback.
        """
        if self.run is not None and self.is_in_train:
            self.run.enter(Phase.EVAL, Stage.EVALUATION, since_step=self.run.is_training)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics: dict[str, float] = kwargs["metrics"]
        # Skip an evaluation before the training, or after one that has reported its quality, such
        # as a test on other data.
        if self.run is None or (self.run.has_reported and not self.is_in_train):
            return
        if self.is_in_train and _is_of_other_data():
            self.other_data = True
        elif self.metric not in metrics:
            self.other_metrics = tuple(metrics)
        else:
            evaluated = getattr(kwargs.get("eval_dataloader"), "dataset", None)
            count = len(evaluated) if isinstance(evaluated, Sized) else None
            control.should_training_stop |= self.run.report(
                count=count, **{self.quality: metrics[self.metric]}
            )
        if control.should_training_stop:
            self.run.end()
        if self.run.has_ended and getattr(control, "should_save", False):  # a checkpoint comes next
            self.run.enter(Phase.SETUP, Stage.SAVING)
        else:
            self.run.resume()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        if self.run is not None and self.is_in_train:
            self.run.resume()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run is None or not self.is_in_train:
            return
        # With save_strategy="best" it is known only after the evaluation that a checkpoint is
        # saved.
        if self.run.is_training:
            self.run.enter(Phase.SETUP, Stage.SAVING, since_step=True)
        self.run.resume()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.run is not None
        if self.other_metrics and not self.run.has_reported:
            must = (
                "carbonopt.script.callback must be given a metric that trainer.evaluate() returns"
            )
            has = f"{self.metric!r} is none of {', '.join(self.other_metrics)}"
            self.run.refuse(
                f"{must}, but {has}; give one of them, or let compute_metrics make it. A callback"
                " that evaluates other data takes the place of the Trainer's own evaluation, unless"
                " it returns a copy of control made before."
            )
        if self.other_data and not self.run.has_reported:
            self.run.refuse(
                "the quality must be that of the Trainer's eval_dataset, but only other data were"
                " evaluated while it trained; a callback that evaluates them takes the place of the"
                " Trainer's own evaluation, unless it returns a copy of control made before."
            )
        self.run.end()
        self.is_in_train = False


# The methods by which the Trainer itself evaluates while it trains.
_OWN_EVALUATION = ("_evaluate", "_maybe_log_save_evaluate")


def _is_of_other_data() -> bool:
    """Return True if a Trainer evaluates other data than its own under its own metrics' names.

    The Trainer doesn't tell its callbacks which data it has evaluated, and makes new objects of
    data sets, so this looks for what its method `evaluate` was given. Data whose metrics have
    another prefix can be told by the metric, and a Trainer without `eval_dataset` has no others.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get("self"), "callback_handler"):
        frame = frame.f_back
    if frame is None:
        return False
    trainer: Any = frame.f_locals["self"]
    data = trainer.eval_dataset
    own: dict[Any, Any] = {"eval": data}  # by the prefixes of their metrics
    if isinstance(data, dict):
        own = {f"eval_{name}": part for name, part in data.items()}
    part = own.get(frame.f_locals.get("metric_key_prefix"))
    if part is None:
        return False
    # A class of the user's own may make data of what it was given, and pass these on.
    while frame is not None and frame.f_locals.get("self") is trainer:
        if frame.f_code.co_name in _OWN_EVALUATION:  # whatever the class evaluates then
            return False
        given = frame.f_locals.get("eval_dataset", _MISSING)
        # A part of several is given by its name.
        if given is None or isinstance(given, str) or given is part or given is data:
            return False
        frame = frame.f_back
    return True


class _LightningHooks:
    """The hooks of a callback of Lightning's Trainer."""

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric = metric
        self.quality = _quality_name(metric, "val_")

    run: Run | None = None  # None: during the check of the validation before the training
    optimizer_steps = 0  # sum over all optimizers
    other_metrics: tuple[str, ...] = ()  # metrics of the last validation that lacked `metric`

    def on_train_start(self, trainer: Any, module: Any) -> None:
        # Infinite or -1 where a time limit or the data's end decides: then the study file has it.
        total = trainer.estimated_stepping_batches
        self.run = Run(int(total) if 0 < total < math.inf else None, trainer.world_size)
        self.run.check_metric(self.metric, self.quality)
        self.optimizer_steps = trainer.global_step
        begun = self.optimizer_steps // len(trainer.optimizers) if self.optimizer_steps else 0
        self.run.check_begin(begun + 1)
        trainer.save_checkpoint = self.as_saving(trainer.save_checkpoint)

    def as_saving(self, save: Any) -> Any:
        """Wrap the saving of a checkpoint, so that its energy is not training's.

        Lightning has no hook where a checkpoint has been saved.
        """

        def saved(*args: Any, **kwargs: Any) -> Any:
            assert self.run is not None
            with self.run.saving():
                return save(*args, **kwargs)

        return saved

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        # Lightning's global_step counts the steps of each optimizer, but its total those of one.
        # With two optimizers, as GANs have, a batch is one step here.
        if self.run is not None and trainer.global_step > self.optimizer_steps:
            self.optimizer_steps = trainer.global_step
            self.run.step()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if self.run is not None and not self.run.has_ended:
            self.run.enter(Phase.EVAL, Stage.EVALUATION)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        # Skip a validation after the training that has reported its quality, such as one of another
        # checkpoint.
        if self.run is None or (self.run.has_ended and self.run.has_reported):
            return
        if (value := trainer.callback_metrics.get(self.metric)) is not None:
            quality: Any = {self.quality: float(value)}
            trainer.should_stop |= self.run.report(**quality)
        else:
            self.other_metrics = tuple(trainer.callback_metrics)
        self.run.resume()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert self.run is not None
        if self.other_metrics and not self.run.has_reported:
            must = "carbonopt.script.lightning_callback must be given a metric of the validation"
            has = f"{self.metric!r} is none of {', '.join(self.other_metrics)}"
            self.run.refuse(f"{must}, but {has}; give one of them, or log it.")
        self.run.end()


def callback(metric: str) -> TrainerCallback:
    """Return a callback for Hugging Face's Trainer and the trainers that derive from it.

    It is used as `Trainer(..., callbacks=[callback("eval_accuracy")])`.

    Args:
        metric: one of the metrics that `Trainer.evaluate` returns. Without "eval_" its name has to
            be that of the target's quality.

    Raises:
        ImportError: if transformers is not installed.
        BadInput: later, when the Trainer trains, if the metric is not the target's or no evaluation
            has it, or for a reason that `Run`, `Run.step` or `Run.report` names.
    """
    from transformers import TrainerCallback

    class TrainerStudyCallback(_TrainerHooks, TrainerCallback):
        pass

    return TrainerStudyCallback(metric)


def lightning_callback(metric: str) -> lightning.Callback:
    """Return a callback for Lightning's Trainer.

    It is used as `Trainer(..., callbacks=[lightning_callback("val_accuracy")])`.

    Args:
        metric: a metric that the validation logs. Without "val_" its name has to be that of the
            target's quality.

    Raises:
        ImportError: if lightning is not installed.
        BadInput: later, when the Trainer trains, if the metric is not the target's, or for a reason
            that `Run`, `Run.step` or `Run.report` names.
    """
    import lightning

    class LightningStudyCallback(_LightningHooks, lightning.Callback):
        pass

    return LightningStudyCallback(metric)
