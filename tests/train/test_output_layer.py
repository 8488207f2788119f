"""The fused output layer against torch's own cross entropy, and which models can have one."""

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from carbonopt.core.errors import BadInput
from carbonopt.train.data.packing import IGNORED
from carbonopt.train.models.model import fuse_output_layer
from carbonopt.train.models.model_check import check_output_layer
from carbonopt.train.speed import output_layer
from carbonopt.train.speed.output_layer import FusedOutputLayer
from carbonopt.train.tasks.causal_lm import CausalLM

KIND = CausalLM.model_kind

HIDDEN = 32


def example(
    vocab_size: int, dtype: torch.dtype
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(HIDDEN, vocab_size, bias=False, dtype=dtype)
    hidden = torch.randn(3, 23, HIDDEN, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab_size, (3, 23))
    targets[0, 5] = targets[2] = IGNORED
    return layer, hidden, targets


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [gradient.float() for gradient in torch.autograd.grad(loss * 0.37, tensors)]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "vocab_size", [96, 101, 1536], ids=["a multiple of 16", "not one", "several pieces"]
)
@pytest.mark.parametrize(
    "at_once", [2**29, 2_000, 1], ids=["whole", "in parts", "the smallest parts"]
)
@pytest.mark.parametrize(
    ("dtype", "float8", "of_sum", "of_gradients"),
    [
        (torch.float32, False, 1e-6, 1e-6),
        (torch.bfloat16, False, 1e-3, 1e-2),
        (torch.float32, True, 1e-2, 5e-2),
        (torch.bfloat16, True, 1e-2, 5e-2),
    ],
    ids=["float32", "bfloat16", "float8 of float32", "float8 of bfloat16"],
)
def test_sum_and_gradients_are_those_of_cross_entropy(
    vocab_size, at_once, dtype, float8, of_sum, of_gradients, monkeypatch
):
    monkeypatch.setattr(output_layer, "_LOGITS_AT_ONCE", at_once)
    layer, hidden, targets = example(vocab_size, dtype)
    fused = FusedOutputLayer(layer, float8, compiled=False)
    fused.targets = targets
    nll_sum = fused(hidden)
    expected = F.cross_entropy(
        layer(hidden).float().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    assert nll_sum.dtype == torch.float32 and nll_sum.item() == pytest.approx(
        expected.item(), rel=of_sum
    )
    pairs = zip(
        gradients(nll_sum, hidden, fused.weight),
        gradients(expected, hidden, layer.weight),
        strict=True,
    )
    for gradient, wanted in pairs:
        assert difference(gradient, wanted) < of_gradients
    assert not gradients(fused(hidden), hidden)[0][2].any(), "nothing from what is not counted"


@pytest.mark.slow
@pytest.mark.parametrize("float8", [False, True])
def test_compiled_it_gives_the_same(float8):
    layer, hidden, targets = example(101, torch.float32)
    plain, compiled = (
        FusedOutputLayer(layer, float8, compiled=compiled) for compiled in (False, True)
    )
    plain.targets = compiled.targets = targets
    expected, compiled_nll_sum = plain(hidden), compiled(hidden)
    assert compiled_nll_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient, other in zip(
        gradients(compiled_nll_sum, hidden, layer.weight),
        gradients(expected, hidden, layer.weight),
        strict=True,
    ):
        assert difference(gradient, other) < 1e-2  # where a rounding to float8 falls the other way


def test_in_evaluation_it_is_the_layer_that_it_replaces():
    layer, hidden, _ = example(101, torch.bfloat16)
    fused = FusedOutputLayer(layer, float8=True, compiled=False).eval()
    assert fused.weight is layer.weight
    assert torch.equal(fused(hidden), layer(hidden))


def test_frozen_weights_get_no_gradient():
    layer, hidden, targets = example(96, torch.float32)
    layer.weight.requires_grad_(False)
    fused = FusedOutputLayer(layer, float8=False, compiled=False)
    fused.targets = targets
    fused(hidden).backward()
    assert layer.weight.grad is None and hidden.grad is not None


def test_weights_of_zero_have_a_scale_too():
    layer, hidden, targets = example(96, torch.float32)
    torch.nn.init.zeros_(layer.weight)
    fused = FusedOutputLayer(layer, float8=True, compiled=False)
    fused.targets = targets
    counted = int((targets != IGNORED).sum())
    assert fused(hidden).item() == pytest.approx(
        counted * torch.log(torch.tensor(96.0)).item(), rel=1e-4
    )


SMALL_AND_STEADY = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "qwen2": {"num_key_value_heads": 2},
    "llama": {"use_cache": False},  # as a Trainer saves it
    "gpt_neox": {},
}


def tiny(model_type: str, **fields):
    return CONFIG_MAPPING[model_type](
        vocab_size=96,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        **fields,
    )


@pytest.mark.parametrize("model_type", SMALL_AND_STEADY)
@pytest.mark.parametrize("kind", ["fused", "fused_fp8"])
def test_models_that_can_have_one(model_type, kind):
    config = tiny(model_type, **SMALL_AND_STEADY[model_type])
    check_output_layer(KIND, config, kind, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    fuse_output_layer(model, kind, compiled=False)
    fused = model.get_output_embeddings()
    assert model.get_output_embeddings() is fused
    assert (fused.weight is embedding) == tied
    ids = torch.randint(96, (2, 8))
    fused.targets = ids
    expected = F.cross_entropy(
        model.eval()(input_ids=ids).logits.flatten(0, 1), ids.flatten(), reduction="sum"
    )
    model.train()
    rel = 1e-5 if kind == "fused" else 1e-2
    assert model(input_ids=ids).logits.item() == pytest.approx(expected.item(), rel=rel)


@pytest.mark.parametrize(
    ("config", "kind", "because"),
    [
        (tiny("gemma2", head_dim=16, num_key_value_heads=2), "fused", "gemma2 can't have a fused one: it scales"),
        (tiny("granite"), "fused_fp8", "granite can't have a fused one: it scales or caps"),
        (tiny("phi"), "fused", "that of phi must have no bias, but has one; use standard"),
        (CONFIG_MAPPING["llama"](vocab_size=96, hidden_size=24, num_attention_heads=2), "fused_fp8",
         "that of llama must have a multiple of 16 inputs, but has 24; use standard"),
    ],
    ids=["caps its logits", "scales them", "has a bias", "too odd for float8"],
)  # fmt: skip
def test_models_that_cannot(config, kind, because):
    check_output_layer(KIND, config, "standard", trust_remote_code=False)
    with pytest.raises(BadInput, match=because):
        check_output_layer(KIND, config, kind, trust_remote_code=False)
