"""Muon's steps against torch's own, and which parameters take them."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from carbonopt.core.errors import BadInput
from carbonopt.train.optim.muon import Muon, groups_of, orthogonalized

SHAPES = [(24, 40), (40, 24), (24, 40), (16, 16)]
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}


def gpt2(kind: type = AutoModelForCausalLM, **more: object) -> nn.Module:
    torch.manual_seed(0)
    return kind.from_config(AutoConfig.for_model("gpt2", **GPT2, **more))


def test_steps_are_those_of_torchs_own_muon_and_adamw() -> None:
    """torch computes in bf16, here in float32: the two are as far apart as torch's is from itself
    in float32.
    """
    torch.manual_seed(0)
    starts = [*(torch.randn(shape) for shape in SHAPES), torch.randn(7)]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    groups = [
        {"params": ours[:4], "orthogonal": True, "weight_decay": 0.1},
        {"params": ours[4:], "orthogonal": False, "weight_decay": 0.0},
    ]
    mine = Muon(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    reference = torch.optim.Muon(
        theirs[:4], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    beside = torch.optim.AdamW(theirs[4:], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(6):
        gradients = [torch.randn_like(start) * (step + 1) for start in starts]
        for each in (ours, theirs):
            for weights, gradient in zip(each, gradients, strict=True):
                weights.grad = gradient.clone()
        mine.step()
        reference.step()
        beside.step()
    torch.testing.assert_close(ours[4], theirs[4])
    for start, mine_now, theirs_now in zip(starts[:4], ours[:4], theirs[:4], strict=True):
        moved = (theirs_now - start).detach().norm()
        assert float((mine_now - theirs_now).detach().norm() / moved) < 0.02
        assert float(moved) > 0.1


def test_a_rate_in_a_tensor_is_the_same_as_a_number() -> None:
    """As a CUDA graph reads it."""
    ends = []
    for rate in (0.02, torch.tensor(0.02)):
        torch.manual_seed(0)
        weights = nn.Parameter(torch.randn(8, 12))
        optimizer = Muon([{"params": [weights], "orthogonal": True, "weight_decay": 0.1}], lr=0.02)
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(3):
            weights.grad = torch.randn(8, 12)
            optimizer.step()
        ends.append(weights.detach())
    torch.testing.assert_close(*ends)


def test_singular_values_become_about_one_whatever_they_were() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 20, 50) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    values = torch.linalg.svdvals(orthogonalized(matrices))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_an_update_is_as_large_as_adamws() -> None:
    """Root mean square of the elements: 0.2 of the rate, whatever the shape."""
    for shape in ((64, 64), (32, 256), (256, 32)):
        torch.manual_seed(0)
        weights = nn.Parameter(torch.zeros(shape))
        weights.grad = torch.randn(shape)
        Muon([{"params": [weights], "orthogonal": True, "weight_decay": 0.0}], lr=1.0).step()
        assert float(weights.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


def names_of(model: nn.Module, orthogonal: bool, decayed: list[str]) -> set[str]:
    groups = groups_of(model, decayed, 0.1)
    chosen = {
        id(each)
        for group in groups
        if group["orthogonal"] == orthogonal
        for each in group["params"]
    }
    return {name for name, each in model.named_parameters() if id(each) in chosen}


def test_hidden_matrices_are_neither_embeddings_nor_outputs() -> None:
    model = gpt2(tie_word_embeddings=False)
    decayed = [name for name, each in model.named_parameters() if each.ndim > 1]
    hidden = names_of(model, True, decayed)
    assert len(hidden) == 2 * 4 and all(".attn." in name or ".mlp." in name for name in hidden)
    rest = names_of(model, False, decayed)
    assert {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"} <= rest
    assert hidden | rest == {name for name, _ in model.named_parameters()}
    by_decay = {
        bool(group["weight_decay"])
        for group in groups_of(model, decayed, 0.1)
        if not group["orthogonal"]
    }
    assert by_decay == {True, False}


def test_a_classifiers_head_is_no_hidden_matrix_and_frozen_weights_are_none_at_all() -> None:
    model = gpt2(AutoModelForSequenceClassification)
    assert "score.weight" in names_of(model, False, [])
    for name, each in model.named_parameters():
        each.requires_grad = "mlp" in name
    assert names_of(model, True, []) == {
        name for name, each in model.named_parameters() if "mlp" in name and each.ndim > 1
    }


def test_adapters_are_hidden_matrices() -> None:
    from carbonopt.train.models.model import with_lora
    from carbonopt.train.models.model_kind import CAUSAL_LM

    model = with_lora(CAUSAL_LM, gpt2(), 4, inputs_need_gradients=False)
    hidden = names_of(model, True, [])
    assert hidden and all("lora_" in name for name in hidden)


def test_a_model_without_linear_layers_is_refused() -> None:
    model = gpt2()
    for name, each in model.named_parameters():
        each.requires_grad = "wte" in name
    with pytest.raises(
        BadInput,
        match="optimizer: muon needs hidden linear layers to train, but gpt2 has none here",
    ):
        groups_of(model, [], 0.1)
