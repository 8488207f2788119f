"""Linear layers that train in float8, on a CPU, which has the same products."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from carbonopt.train.speed.float8_layers import Float8TrainedLinear, train_in_float8

LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 1152,  # the only layers of more than 1,024 outputs
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
TOKENS = torch.arange(64).view(2, 32)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**LLAMA, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_only_layers_that_gain_are_replaced_and_weights_keep_their_names() -> None:
    model = llama()
    names, weights = list(model.state_dict()), list(model.parameters())
    train_in_float8(model, "tensorwise")
    replaced = {name for name, part in model.named_modules() if type(part) is Float8TrainedLinear}
    assert replaced == {
        f"model.layers.{layer}.mlp.{name}" for layer in (0, 1) for name in ("gate_proj", "up_proj")
    }
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))


def test_it_is_evaluated_as_without_float8_and_trained_nearly_so() -> None:
    plain, model = llama(), llama()
    train_in_float8(model, "tensorwise")
    with torch.no_grad():
        assert torch.equal(plain.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
    losses = [each.train()(TOKENS, labels=TOKENS).loss for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert losses[0] != losses[1] and torch.allclose(*losses, rtol=2e-3)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        likeness = torch.cosine_similarity(
            mine.grad.float().flatten(), theirs.grad.float().flatten(), dim=0
        )
        assert likeness > 0.98, (name, likeness)


def test_the_weights_follow_the_model_to_another_precision() -> None:
    model = llama().float()
    train_in_float8(model, "tensorwise")
    model.bfloat16()
    layer = model.model.layers[0].mlp.up_proj
    assert layer._in_float8[0].weight is layer.weight and layer.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("scaling", "changes"),
    [("rowwise", {}), ("tensorwise", {"intermediate_size": 512})],
)
def test_a_model_without_a_layer_that_gains_is_refused(
    scaling: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"large enough to gain from {scaling} float8"):
        train_in_float8(llama(**changes), scaling)


def test_a_model_of_other_layers_than_torchs_is_refused_as_that() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=4096, n_layer=1, n_head=4, vocab_size=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"no torch\.nn\.Linear"):
        train_in_float8(model, "tensorwise")
