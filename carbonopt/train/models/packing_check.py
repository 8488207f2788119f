"""Check whether a model keeps packed examples apart.

Packed examples stand in one row, and only their positions, which restart, tell them apart.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig

from carbonopt.core.errors import BadInput
from carbonopt.train import ranks
from carbonopt.train.failures import refused
from carbonopt.train.models.model import random_model
from carbonopt.train.models.model_check import cut_down, with_few_tokens
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.models.varlen_attention import VARLEN, sequence_ends

_LENGTHS = (5, 7)  # lengths of the two examples
_CLOSE = 1e-4  # tolerance of logits, in float32
# these look at positions only in batches of one row
_ONE_ROW_ALONE = ("flash_attention_2", "flash_attention_3")


def check_packing(
    kind: ModelKind, config: PreTrainedConfig, attention: str | None, trust_remote_code: bool
) -> None:
    """Raise BadInput if the model doesn't keep packed examples apart, or it can't be told.

    The model is made with few layers, at least one of each kind, and random weights, and two
    examples are packed. The logits of neither may depend on the other's inputs, and they must be
    those of the example alone.
    """
    if attention in _ONE_ROW_ALONE:
        rule = (
            f"packing: true can't go with attention_implementation: {attention}, which keeps"
            " examples apart"
        )
        raise BadInput(f"{rule} in batches of one row alone; use sdpa, or packing: false.")
    model_type, by = config.model_type, f" with {attention}" if attention else ""
    apart_by = "" if attention == VARLEN else f"attention_implementation: {VARLEN}, or "
    instead = "dropout: 0, sdpa, or packing: false" if attention == VARLEN else "packing: false"
    untold = (
        f"packing: whether {model_type}{by} keeps packed examples apart can't be told ({{}});"
        f" use {instead}."
    )
    unrunnable = (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        IndexError,
        AssertionError,
    )
    apart = True
    with refused(untold, *unrunnable), torch.random.fork_rng():
        for cut in cut_down(kind, config, trust_remote_code):
            small = with_few_tokens(cut)
            model = random_model(kind, small, attention, trust_remote_code).to(ranks.device())
            apart = apart and _apart(model)
    if not apart:
        raise BadInput(
            f"packing: {model_type}{by} lets an example read those before it in its row; use"
            f" {apart_by}packing: false."
        )


def _apart(model: Any) -> bool:
    first = _LENGTHS[0]
    tokens = (
        torch.arange(sum(_LENGTHS), device=model.device)[None]
        % model.get_input_embeddings().num_embeddings
    )
    positions = torch.cat([torch.arange(length, device=model.device) for length in _LENGTHS])[None]
    inputs = model.get_input_embeddings()(tokens).detach().requires_grad_()

    def logits(part: slice) -> torch.Tensor:
        return _logits(model, inputs[:, part], positions[:, part])

    with torch.no_grad():
        _logits(model.train(), inputs, positions)  # fails if the attention can't have its dropout
    model.eval()
    packed, parts = logits(slice(None)), (slice(None, first), slice(first, None))
    for own, other in (parts, parts[::-1]):
        # Logits are squared: where the layer before the output layer normalises, the sum of its
        # outputs can't change.
        (gradient,) = torch.autograd.grad(packed[:, own].square().sum(), inputs, retain_graph=True)
        if not gradient[:, own].any():
            raise RuntimeError("its logits don't depend on its inputs")
        if gradient[:, other].any() or not torch.allclose(
            packed[:, own], logits(own), rtol=_CLOSE, atol=_CLOSE
        ):
            return False
    return True


def _logits(model: Any, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits of one packed row, whose examples begin where the positions are 0."""
    arguments = {"inputs_embeds": inputs, "position_ids": positions, "use_cache": False}
    if model.config._attn_implementation == VARLEN:
        starts = (positions == 0).nonzero()[:, 1].to(torch.int32)[None]
        arguments["cu_seq_lens_q"] = sequence_ends(starts, positions.shape[1])
    logits: torch.Tensor = model(**arguments).logits
    return logits
