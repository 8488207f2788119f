"""Schedules of the learning rate under DeepSpeed."""

from typing import Any

from transformers import Trainer


class ScheduledTrainer(Trainer):
    """A Trainer under DeepSpeed, whose wrappers around an optimizer lack what some schedules (polynomial, those with a
    lowest rate) read of it."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = self.optimizer if optimizer is None else optimizer
        inner: Any = optimizer
        while not hasattr(inner, "defaults"):
            inner = inner.optimizer
        if optimizer is not None and inner is not optimizer:
            optimizer.defaults = inner.defaults
        return super().create_scheduler(num_training_steps, optimizer=optimizer)
