"""Find how much memory an optimizer's states and its step need, without a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from carbonopt.train.failures import refused
from carbonopt.train.models.live_memory import UNRUNNABLE, LiveMemory
from carbonopt.train.optim import muon

_ELEMENTS = 2**20  # size of the parameter on which an optimizer is tried


def optimizer_bytes(given: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes per parameter of the Trainer's optimizer: its states, and its step's extra.

    Raises:
        BadInput: The optimizer can't be made without a GPU.
    """
    chosen = {key: value for key, value in given.items() if key in ("optim", "optim_args")}
    name = chosen.get("optim", "adamw_torch_fused")
    sentence = f"the optimizer {name} can't be made without a GPU ({{}})"
    with refused(sentence, *UNRUNNABLE):
        kind, options = _optimizer(chosen)
        fused = options.pop("fused", False)
        weights = torch.nn.Parameter(torch.empty(_ELEMENTS, device="meta"))
        # On a GPU torch's own optimizers take all parameters at once by default, for which they
        # make copies; fused ones don't.
        together = (
            {"foreach": True} if kind.__module__.startswith("torch.optim") and not fused else {}
        )
        optimizer = kind([weights], **options, **together)
        weights.grad = torch.empty_like(weights)
        optimizer.step()
        states = [
            value for value in tree_leaves(dict(optimizer.state)) if isinstance(value, Tensor)
        ]
        live = LiveMemory()
        live.begin((weights, weights.grad, *states))
        with live:
            optimizer.step()
    return sum(state.nbytes for state in states) / _ELEMENTS, (
        0.0 if fused else live.peak_bytes / _ELEMENTS
    )


def _optimizer(chosen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class and the options of the Trainer's optimizer.

    Args:
        chosen: The training arguments that choose it.
    """
    if not chosen:  # adamw_torch_fused; importing the Trainer takes half a second
        return torch.optim.AdamW, {"fused": True}
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused",
        report_to="none",
        use_cpu=True,
        **{"optim": "adamw_torch_fused"} | chosen,
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return kind, options


def muon_step_bytes(matrices: list[Tensor]) -> int:
    """Return the bytes that a Muon step needs beside the matrices, their gradients and momenta."""
    gradients, momenta = ([torch.empty_like(matrix) for matrix in matrices] for _ in range(2))
    live = LiveMemory()
    live.begin((*matrices, *gradients, *momenta))
    with live:
        muon.step(matrices, gradients, momenta, torch.zeros((), device="meta"), weight_decay=0.1)
    return live.peak_bytes
