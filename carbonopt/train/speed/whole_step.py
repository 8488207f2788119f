"""A trial's optimizer step in one piece: forward, backward, mean over ranks, clipping, optimizer.

It leaves out what a DeepSpeed engine does around these, and is one CUDA graph on a GPU. For a small
model the host otherwise takes longer to launch the kernels than they take to run.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import masking_utils

from carbonopt.core.dimensions import TrainingParams
from carbonopt.train import ranks

Inputs = dict[str, torch.Tensor]

# A step becomes a graph only if it takes at most 1/4 of the GPU's memory: the graph's activations
# stay there beside those of an evaluation.
_MEMORY_SHARE = 4


def whole_step(trainer: Any, params: TrainingParams) -> "WholeStep | None":
    """Return the step of a Trainer whose engine exists and has its `fast_step`, or None.

    None where a step is more than this: several micro batches, ZeRO, a scaled loss, a search for
    infinite gradients, or an optimizer that is neither torch's AdamW nor a subclass of it
    (carbonopt's Muon is one); and where the study has the engine watch its own steps.
    """
    engine = trainer.model_wrapped
    bf16 = engine._config.bfloat16_config
    optimizer = engine.optimizer.optimizer if bf16.enabled else engine.optimizer
    watched = (
        engine.flops_profiler_enabled()
        or engine.wall_clock_breakdown()
        or engine.memory_breakdown()
    )
    if watched or not params.allows_whole_step or not isinstance(optimizer, torch.optim.AdamW):
        return None
    return (
        None if bf16.enabled and bf16.check_grad_overflow else WholeStep(trainer, engine, optimizer)
    )


class WholeStep:
    """The steps of one training, each of which changes the model as the engine's own step does."""

    def __init__(self, trainer: Any, engine: Any, optimizer: torch.optim.AdamW) -> None:
        self._trainer, self._engine, self._optimizer = trainer, engine, optimizer
        self._model = _WithoutHooks(engine.module)
        self._average = (
            engine.buffered_allreduce_fallback if ranks.world_size() > 1 else lambda: None
        )
        # In bf16 DeepSpeed's optimizer clips the gradients.
        clips = engine.gradient_clipping() > 0 and not engine._config.bfloat16_config.enabled
        self._clip = engine.clip_fp32_gradients if clips else lambda: None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: Inputs = {}  # tensors that the graph reads
        self._loss: torch.Tensor | None = None  # tensor that the graph writes
        self._refused = not torch.cuda.is_available()
        if not self._refused:
            self._prepare_to_capture()

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Make a step on a micro batch on the model's device.

        Returns:
            The loss, which the next step may overwrite.
        """
        loss = self._replayed(inputs) if self._fits(inputs) else self._step(inputs)
        if self._engine.lr_scheduler is not None:  # otherwise the Trainer steps its own scheduler
            self._engine.lr_scheduler.step()
        # the first step has loaded and compiled all that a step needs
        if self._graph is None and not self._refused:
            self._graph, reason = self._captured(inputs)
            if self._graph is None:
                self._refused = True
                print(f"carbonopt: steps are made without a CUDA graph: {reason}.", file=sys.stderr)
        return loss

    def release(self) -> None:
        """Free the graph; later steps are made without one.

        While a graph holds NCCL's kernels, destroying the ranks' process group waits forever
        (torch 2.11 on two H200s).
        """
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
            self._graph, self._loss, self._refused = None, None, True

    def _step(self, inputs: Inputs) -> torch.Tensor:
        # Call the module without the hooks of DeepSpeed's engine, one of which waits for the GPU.
        with masks_by_shape(inputs):
            loss: torch.Tensor = self._trainer.compute_loss(self._model, dict(inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        self._average()
        self._clip()
        self._engine.optimizer.step()
        self._engine.zero_grad()
        return loss.detach()

    def _prepare_to_capture(self) -> None:
        """Change the stream, and move the learning rate to the GPU.

        A graph can't be captured on the stream that all others wait for. It keeps numbers of the
        host as it finds them, so the learning rate must be on the GPU.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        for group in self._optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=ranks.device())
            group["capturable"] = True

    def _captured(self, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph | None, str]:
        """Return the graph, or None and the reason why there is none."""
        total = torch.cuda.get_device_properties(ranks.device()).total_memory
        if torch.cuda.max_memory_allocated() > total / _MEMORY_SHARE:
            return None, f"a step takes more than 1/{_MEMORY_SHARE} of the GPU's memory"
        self._given = {name: tensor.clone() for name, tensor in inputs.items()}
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state, drawn = generator.get_state(), _host_generators()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._loss = self._step(self._given)
            finally:
                graph.capture_end()
        # raised for a model that reads a number from the GPU, for example
        except RuntimeError as error:
            # After a failed capture the generator behaves as if it went on, and no number can be
            # drawn.
            generator.graphsafe_set_state(torch.Generator(generator.device).set_state(state))
            self._engine.zero_grad()
            return None, str(error.__context__ or error).splitlines()[0].rstrip(".")
        return (
            (graph, "")
            if drawn == _host_generators()
            else (None, "the model draws numbers on the host")
        )

    def _fits(self, inputs: Inputs) -> bool:
        return self._graph is not None and all(
            tensor.shape == self._given[name].shape and tensor.dtype == self._given[name].dtype
            for name, tensor in inputs.items()
        )

    def _replayed(self, inputs: Inputs) -> torch.Tensor:
        assert self._graph is not None and self._loss is not None
        for name, tensor in inputs.items():
            self._given[name].copy_(tensor, non_blocking=True)
        self._graph.replay()
        self._trainer.last_loss = self._loss
        return self._loss


class _WithoutHooks:
    """A module that is called without its hooks and otherwise behaves as itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def masks_by_shape(inputs: Inputs) -> Iterator[None]:
    """Let a model choose its attention masks by shapes alone within this context.

    It applies where inputs are tokens without padding and positions. Otherwise transformers checks
    at each step, waiting for the GPU, whether the model's own positions have gaps. It can't read
    them in a capture, and then makes a mask that no step before had.
    """
    if "attention_mask" in inputs or "position_ids" in inputs:
        yield
        return
    decided = {
        "find_packed_sequence_indices": lambda positions: None,
        "is_tracing": lambda tensor=None: False,
    }
    theirs = {name: getattr(masking_utils, name) for name in decided}
    for name, function in decided.items():
        setattr(masking_utils, name, function)
    try:
        yield
    finally:
        for name, function in theirs.items():
            setattr(masking_utils, name, function)


def _host_generators() -> list[bytes]:
    """Return the states of the host's random generators.

    If a step changes them, its graph would repeat forever what these numbers decided.
    """
    return [
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        repr(np.random.get_state()).encode(),
    ]
