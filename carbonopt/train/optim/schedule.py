"""Schedules of the learning rate under DeepSpeed."""

from typing import Any

from transformers import Trainer


class ScheduledTrainer(Trainer):
    """A Trainer whose learning rate schedules work under DeepSpeed.

    DeepSpeed's wrappers of an optimizer lack attributes that some schedules read (polynomial, and
    those with a lowest rate).
    """

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = self.optimizer if optimizer is None else optimizer
        inner: Any = optimizer
        while not hasattr(inner, "defaults"):
            inner = inner.optimizer
        if optimizer is not None and inner is not optimizer:
            optimizer.defaults = inner.defaults
        return super().create_scheduler(num_training_steps, optimizer=optimizer)
