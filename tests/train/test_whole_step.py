"""What a CUDA graph of a whole step must not change, as far as a machine without a GPU can show it."""

import pytest
import torch
from transformers import GPT2Config, masking_utils

from carbonopt.train.speed.whole_step import masks_by_shape

CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=8, attn_implementation="sdpa")
TOKENS = torch.zeros(2, 6, dtype=torch.int64)


def mask(positions: torch.Tensor) -> torch.Tensor | None:
    return masking_utils.create_causal_mask(CONFIG, torch.zeros(2, 6, 8), None, None, positions)


@pytest.mark.parametrize("captured", [False, True])
def test_a_captured_step_has_the_masks_of_the_others(captured, monkeypatch):
    """None, by which attention takes its causal kernel. Alone, transformers makes one while a graph
    is captured.
    """
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    positions = torch.arange(6)[None]
    with masks_by_shape({"input_ids": TOKENS, "labels": TOKENS}):
        assert mask(positions) is None
    assert (mask(positions) is None) != captured


def test_packed_sequences_keep_their_masks():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    expected = mask(positions)
    assert expected is not None and not expected[0, 0, 3, 2]
    with masks_by_shape({"input_ids": TOKENS, "position_ids": positions}):
        assert torch.equal(mask(positions), expected)
