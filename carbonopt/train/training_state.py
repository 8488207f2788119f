"""All that a training changes from step to step, as tensors and plain values.

DeepSpeed's own checkpoints are pickles, which could run a program while they are read. What is
taken here is read by torch's `weights_only`, which builds nothing but tensors and plain values. A
trial goes on with as many ranks, so each rank's own part of a state is enough.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from carbonopt.train import ranks
from carbonopt.train.optim.averaging import WeightAverage

# a counter of DeepSpeed's engine each; schedules of its own go by them
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# settings of DeepSpeed's ZeRO, with the values without which a rank has more state than what is
# taken here
_SIMPLE = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zeropp_loco_param": None,
    "zenflow": None,
}
_PLAIN = (bool, int, float, str, type(None))


class UnknownState(Exception):
    """The training has a state that can't be taken; the message says which one."""


class TrainingState:
    """The state of one rank's training between two steps.

    Its two parts are `shared`, which is the same on all ranks, and `own`, which is the rank's.

    Args:
        trainer: The trainer, whose engine exists and has its `fast_step`.
        average: The averaged weights, where there are some.

    Raises:
        UnknownState: If the engine is not one of those whose state is known.
    """

    def __init__(self, trainer: Any, average: WeightAverage | None) -> None:
        self._trainer, self._engine = trainer, trainer.model_wrapped
        self._averages = [] if average is None else average.averages
        self._base, self._masters, self._has_parts = _optimizer_of(self._engine)
        self._is_partitioned = self._engine.zero_optimization_stage() == 3

    def taken(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts `shared` and `own`, whose tensors are the training's own, not copies.

        Raises:
            UnknownState: If a part of the optimizer's state is neither a tensor nor plain.
        """
        optimizer = [dict(self._base.state.get(master, {})) for master in self._masters]
        stepped = {
            "optimizer": optimizer,
            "devices": [
                {name: value.device.type for name, value in state.items() if _is_tensor(value)}
                for state in optimizer
            ],
        }
        shared: dict[str, Any] = {"tensors": dict(self._tensors(shared=True))}
        own: dict[str, Any] = {
            "tensors": dict(self._tensors(shared=False)),
            "groups": [_settings(group) for group in self._base.param_groups],
            "schedule": {} if self._schedule is None else self._schedule.state_dict(),
            "scale": _plain_of(self._scale),
            "counters": {name: getattr(self._engine, name) for name in _COUNTERS},
            "random": _random_state(),
        }
        (own if self._has_parts else shared)["steps"] = stepped
        _check_plain("the training's state", [stepped, own["groups"], own["schedule"]])
        return shared, own

    def check_fits(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Check that a state is that of a training like this one.

        Raises:
            ValueError: If it is not; the message says where they differ first.
        """
        for part, is_shared in ((shared, True), (own, False)):
            here = {
                name: (tuple(tensor.shape), tensor.dtype)
                for name, tensor in self._tensors(shared=is_shared)
            }
            there = {
                name: (tuple(tensor.shape), tensor.dtype)
                for name, tensor in part["tensors"].items()
            }
            for name in here.keys() | there.keys():
                if here.get(name) != there.get(name):
                    raise ValueError(
                        f"{name} is {here.get(name)} here, but {there.get(name)} in it"
                    )
        stepped = (own if self._has_parts else shared)["steps"]
        for what, count, saved in (
            ("weights", len(self._masters), stepped["optimizer"]),
            ("parameter groups", len(self._base.param_groups), own["groups"]),
        ):
            if count != len(saved):
                raise ValueError(f"the optimizer has {count} {what} here, but {len(saved)} in it")

    @torch.no_grad()
    def restore(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Give the training this state, in place: nothing that a CUDA graph reads moves.

        The random numbers are left to `restore_random`.

        Raises:
            RuntimeError: If ZeRO 3 has gathered weights that it would not gather again.
        """
        self._release_gathered()
        for part, is_shared in ((shared, True), (own, False)):
            for name, tensor in self._tensors(shared=is_shared):
                tensor.copy_(part["tensors"][name])
        self._gather_again()
        stepped = (own if self._has_parts else shared)["steps"]
        for master, state, devices in zip(
            self._masters, stepped["optimizer"], stepped["devices"], strict=True
        ):
            _restore_values(self._base.state[master], state, devices)
        for group, saved in zip(self._base.param_groups, own["groups"], strict=True):
            _restore_values(group, saved, {})
        if self._schedule is not None:
            self._schedule.load_state_dict(own["schedule"])
        vars(self._scale).update(own["scale"])
        for name, value in own["counters"].items():
            setattr(self._engine, name, value)

    @staticmethod
    def restore_random(own: dict[str, Any]) -> None:
        """Let the training draw the random numbers that come next."""
        _set_random_state(own["random"])

    def _tensors(self, *, shared: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a part, by names that a later attempt gives them, too."""
        module = self._engine.module
        if shared != self._is_partitioned:
            for name, weight in module.named_parameters():
                if weight.requires_grad:
                    held = weight.ds_tensor if self._is_partitioned else weight
                    yield f"weight {name}", held.detach()
        if shared:
            for place, average in enumerate(self._averages):
                yield f"average {place}", average
        else:  # a rank's own batches may have changed them
            yield from ((f"buffer {name}", buffer) for name, buffer in module.named_buffers())
        if shared != self._has_parts:
            for place, master in enumerate(self._masters):
                yield f"master {place}", master.detach()

    @property
    def _schedule(self) -> Any:
        scheduler = self._engine.lr_scheduler or self._trainer.lr_scheduler
        return getattr(scheduler, "scheduler", scheduler)

    @property
    def _scale(self) -> Any:
        """The object that has the scale of fp16's loss; one without fields if nothing has."""
        optimizer = self._engine.optimizer
        for name in ("loss_scaler", "loss_scale_config"):
            if (scale := getattr(optimizer, name, None)) is not None:
                return scale
        return _NoScale()

    def _release_gathered(self) -> None:
        if not self._is_partitioned:
            return
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if persistent := self._engine.optimizer.persistent_parameters:
            persistent[0].partition(persistent)
        gathered = [
            name
            for name, weight in self._engine.module.named_parameters()
            if weight.ds_status is not ZeroParamStatus.NOT_AVAILABLE
        ]
        if gathered:
            raise RuntimeError(f"ZeRO 3 has gathered {gathered[0]}, which would keep old weights")

    def _gather_again(self) -> None:
        if self._is_partitioned and (weights := self._engine.optimizer.persistent_parameters):
            weights[0].all_gather(weights)


class _NoScale: ...


def _optimizer_of(engine: Any) -> tuple[Any, list[torch.Tensor], bool]:
    """Return torch's optimizer, the weights that it steps, and whether each rank has a part."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer, zero = engine.optimizer, engine._config.zero_config
    offloads = [getattr(zero, f"offload_{part}", None) for part in ("optimizer", "param")]
    if any(offload is not None and "nvme" in str(offload.device) for offload in offloads):
        raise UnknownState("DeepSpeed offloads to NVMe")
    for name, simple in _SIMPLE.items():
        if getattr(zero, name, simple) != simple:
            raise UnknownState(f"workload.deepspeed sets zero_optimization.{name}")
    kind = type(optimizer)
    if kind is FP16_UnfusedOptimizer:  # DeepSpeed uses it for bf16, too
        masters = [weight for group in optimizer.fp32_groups for weight in group]
        return optimizer.optimizer, masters, False
    if kind is DeepSpeedZeroOptimizer:
        return optimizer.optimizer, list(optimizer.single_partition_of_fp32_groups), True
    if kind is DeepSpeedZeroOptimizer_Stage3:
        return optimizer.optimizer, list(optimizer.fp32_partitioned_groups_flat), True
    if isinstance(optimizer, torch.optim.Optimizer):
        masters = [weight for group in optimizer.param_groups for weight in group["params"]]
        return optimizer, masters, False
    raise UnknownState(f"DeepSpeed trains with its {kind.__name__}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings; a rate that a CUDA graph reads becomes a number."""
    return {
        name: value.item() if _is_tensor(value) else value
        for name, value in group.items()
        if name not in ("params", "capturable")
    }


def _restore_values(values: dict[str, Any], saved: dict[str, Any], devices: dict[str, str]) -> None:
    """Give a mapping its saved values, in place where it has such a tensor already."""
    for name, value in saved.items():
        here: Any = values.get(name)
        if _is_tensor(here) and not _is_tensor(value):
            here.fill_(value)
        elif _is_tensor(here) and here.shape == value.shape:
            here.copy_(value)
        elif _is_tensor(value):
            device = ranks.device() if devices[name] == "cuda" else torch.device(devices[name])
            values[name] = value.to(device, copy=True)
        else:
            values[name] = value


def _plain_of(value: Any) -> dict[str, Any]:
    return {name: own for name, own in vars(value).items() if isinstance(own, _PLAIN)}


def _check_plain(where: str, value: Any) -> None:
    """Raise UnknownState if a value holds anything but tensors and plain values."""
    if isinstance(value, dict):
        for name, own in value.items():
            _check_plain(f"{where}, {name}", own)
    elif isinstance(value, list | tuple):
        for own in value:
            _check_plain(where, own)
    elif not isinstance(value, (*_PLAIN, torch.Tensor)):
        raise UnknownState(f"{where} holds a {type(value).__name__}")


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
