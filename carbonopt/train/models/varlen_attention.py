"""An attention for packed rows, which computes nothing between different examples of a row.

transformers keeps packed examples apart by a mask, which sdpa multiplies out in full; and some
models, such as OPT, make no such mask. This attention gets the places where examples begin instead
(`cu_seq_lens_q`, which transformers' models hand down to their layers). On a GPU it calls
FlashAttention's kernel for sequences of varying length in `torch.nn.attention.varlen`, on the CPU
and in float32 sdpa with a mask.
"""

from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

VARLEN = "varlen"
_HALF = (torch.float16, torch.bfloat16)  # what FlashAttention computes in
# what some models' attention adds to the scores or the softmax
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def register() -> None:
    """Make the attention known to transformers as `varlen`.

    transformers makes no mask for an attention that is registered without a kind of mask.
    """
    AttentionInterface.register(VARLEN, varlen_attention)


def sequence_ends(example_starts: torch.Tensor, row_length: int) -> torch.Tensor:
    """Return where the sequences of a batch begin, and the last one's end, as the kernel wants it.

    Args:
        example_starts: int32 [batch, most], where the examples of each row begin, filled up with
            the row's length. The fillers become sequences without tokens.
        row_length: the tokens of each row.

    Returns:
        int32 [batch × most + 1], rising, over all rows one after the other.
    """
    rows = torch.arange(len(example_starts), device=example_starts.device, dtype=torch.int32)
    starts = (example_starts + rows[:, None] * row_length).flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=len(example_starts) * row_length)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one layer, [batch, length, heads, width], and no weights.

    Without `cu_seq_lens_q`, as in evaluations, each row is one sequence.

    Args:
        query: [batch, heads, length, width]; `key` and `value` may have fewer heads.
        cu_seq_lens_q: see `sequence_ends`.

    Raises:
        ValueError: the model's attention needs what this one can't do.
    """
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if dropout and cu_seq_lens_q is not None:
        unsupported.append(f"attention dropout of {dropout:g}")
    if unsupported:
        raise ValueError(f"varlen has no {', '.join(unsupported)}")
    batch, _, length, _ = query.shape
    if cu_seq_lens_q is None and sliding_window is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout
        )
    if cu_seq_lens_q is None:
        cu_seq_lens_q = length * torch.arange(batch + 1, device=query.device, dtype=torch.int32)
    if query.device.type == "cpu" or query.dtype not in _HALF:
        mask = _mask(cu_seq_lens_q, batch, length, sliding_window)
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout
        )
    groups = query.shape[1] // key.shape[1]
    attended = varlen_attn(
        _joined(query),
        _joined(repeat_kv(key, groups)),
        _joined(repeat_kv(value, groups)),
        cu_seq_lens_q,
        cu_seq_lens_q,
        length,
        length,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # 0: causal
    )
    assert isinstance(attended, torch.Tensor)
    return attended.unflatten(0, (batch, length)), None


def _joined(heads: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, width] as [batch × length, heads, width]."""
    return heads.transpose(1, 2).flatten(0, 1)


def _mask(
    cu_seq_lens: torch.Tensor, batch: int, length: int, sliding_window: int | None
) -> torch.Tensor:
    """Return which keys each query may read, bool [batch, 1, length, length]."""
    places = torch.arange(batch * length, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    sequence = torch.searchsorted(cu_seq_lens, places, right=True).view(batch, length)
    place = torch.arange(length, device=cu_seq_lens.device)
    distance = place[:, None] - place[None, :]
    readable = distance >= 0
    if sliding_window is not None:
        readable &= distance < sliding_window
    return (readable & (sequence[:, :, None] == sequence[:, None, :]))[:, None]
