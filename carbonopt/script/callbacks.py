"""The study's lines for trainers that call back: what they have where a loop of one's own has `with` and `if`."""

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from carbonopt.core.trial import Phase
from carbonopt.script.run import Run

if TYPE_CHECKING:
    import lightning
    from transformers import TrainerCallback


def callback(metric: str) -> "TrainerCallback":
    """For Hugging Face's Trainer, and what derives from it: `Trainer(..., callbacks=[callback("eval_accuracy")])`.

    Args:
        metric: among those of `Trainer.evaluate`; without "eval_" its name is that of the target's quality.
    """
    from transformers import TrainerCallback

    class StudyCallback(TrainerCallback):
        run: Run | None = None
        other_metrics: tuple[str, ...] = ()  # of the last evaluation that had none of that name

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.run = Run(state.max_steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.run is not None
            self.run.step(state.global_step)
            self.before_evaluation(control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.before_evaluation(control)

        def before_evaluation(self, control: Any) -> None:
            """The Trainer has no hook where an evaluation begins; that one will is decided here already."""
            if control.should_evaluate and self.run is not None:
                self.run.enter(Phase.EVAL)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            metrics: dict[str, float] = kwargs["metrics"]
            if self.run is None or not self.run.steps:  # before the training
                return
            if metric not in metrics:
                self.other_metrics = tuple(metrics)
            else:
                evaluated = getattr(kwargs.get("eval_dataloader"), "dataset", None)
                count = len(evaluated) if isinstance(evaluated, Sized) else None
                quality = {metric.removeprefix("eval_"): metrics[metric]}
                control.should_training_stop |= self.run.report(count=count, **quality)
            if not control.should_training_stop:
                self.run.resume()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.run is not None
            if self.other_metrics and not self.run.has_reported:
                must = "carbonopt.script.callback must be given a metric that trainer.evaluate() returns"
                has = f"{metric!r} is none of {', '.join(self.other_metrics)}"
                self.run.refuse(f"{must}, but {has}; give one of them, or let compute_metrics make it.")
            self.run.end()

    return StudyCallback()


def lightning_callback(metric: str) -> "lightning.Callback":
    """For Lightning: `Trainer(..., callbacks=[lightning_callback("val_accuracy")])`.

    Args:
        metric: that a validation logs; without "val_" its name is that of the target's quality.
    """
    import lightning

    class StudyCallback(lightning.Callback):
        run: Run | None = None  # None: in the check of the validation that comes before the training

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.run = Run(int(trainer.estimated_stepping_batches))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if self.run is not None and trainer.global_step > self.run.steps:
                self.run.step(trainer.global_step)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if self.run is not None:
                self.run.enter(Phase.EVAL)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if self.run is None:
                return
            if (value := trainer.callback_metrics.get(metric)) is not None:
                quality: Any = {metric.removeprefix("val_"): float(value)}
                trainer.should_stop |= self.run.report(**quality)
            if not trainer.should_stop:
                self.run.resume()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            assert self.run is not None
            self.run.end()

    return StudyCallback()
