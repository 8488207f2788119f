"""The blocks that ZeRO-3 gathers and reduces as one, for models of several kinds."""

import copy

import pytest
import torch
from transformers import AutoConfig

from carbonopt.core.errors import BadInput
from carbonopt.spec.space_settings import Choices
from carbonopt.spec.trial_spec import ZeroLeaves
from carbonopt.train.models.zero_leaves import zero_leaves
from carbonopt.train.tasks.task import task_for

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 3000,
}
LLAMA = {"model_type": "llama", **SMALL}
LLAMA_BLOCK = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"


def leaves(
    model: dict, task: str = "causal_lm", ranks: tuple[int, ...] = (), **zero: object
) -> ZeroLeaves | None:
    lengths = {"max_target_length": 8} if task == "seq2seq" else {}
    chosen = task_for(
        {
            "task": task,
            "model": {"from_config": model},
            "tokenizer": {"kind": "byte"},
            "dataset": {"train_files": ["unread.jsonl"]},
            "sequence_length": 16,
            "deepspeed": {"zero_optimization": zero} if zero else {},
            **lengths,
        }
    )
    fields = dict(model)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return zero_leaves(chosen, config, None, Choices(choices=ranks) if ranks else None)


@pytest.mark.parametrize(
    ("model", "task", "classes"),
    [
        (LLAMA, "causal_lm", [LLAMA_BLOCK]),
        (
            {"model_type": "opt", **SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
            "causal_lm",
            ["transformers.models.opt.modeling_opt.OPTDecoderLayer"],
        ),
        (
            {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 300},
            "causal_lm",
            ["transformers.models.gpt2.modeling_gpt2.GPT2Block"],
        ),
        (
            {
                "model_type": "t5",
                "d_model": 32,
                "d_ff": 64,
                "num_layers": 3,
                "num_heads": 4,
                "vocab_size": 3000,
                "decoder_start_token_id": 0,
            },
            "seq2seq",
            ["transformers.models.t5.modeling_t5.T5Block"],
        ),
    ],
)
def test_the_blocks_of_a_model_are_found(model: dict, task: str, classes: list[str]) -> None:
    found = leaves(model, task)
    assert found is not None and list(found.classes) == classes


def test_the_largest_block_counts_its_parameters() -> None:
    # Attention, three products of the feed-forward layer, two norms.
    block = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    found = leaves(LLAMA)
    assert found.largest_parameters == block
    assert found.model_parameters == 3 * block + 2 * 3000 * 32 + 32


@pytest.mark.parametrize(
    "zero",
    [
        # Parents are tested before their children: this takes the whole model.
        {"stage3_module_granularity_threshold": 10_000_000},
        {"leaf_module": {"classes": ["LlamaModel"]}},
        {"leaf_module": {"names": ["model"]}},
    ],
)
def test_leaves_that_deepspeed_would_not_train_are_refused(zero: dict) -> None:
    with pytest.raises(BadInput, match=r"would not train Llama(ForCausalLM|Model)\b"):
        leaves(LLAMA, **copy.deepcopy(zero))


@pytest.mark.parametrize(
    "zero",
    [
        {"stage3_module_granularity_threshold": 1200},
        {"leaf_module": {"classes": ["LlamaDecoderLayer"]}},
        {"leaf_module": {"classes": ["LlamaMLP"]}},
    ],
)
def test_leaves_that_deepspeed_trains_stay_as_the_study_chose_them(zero: dict) -> None:
    found = leaves(LLAMA, **copy.deepcopy(zero))
    assert found.classes == () and found.model_parameters == leaves(LLAMA).model_parameters
    assert 32 * 64 < found.largest_parameters <= leaves(LLAMA).largest_parameters


@pytest.mark.parametrize(
    "zero",
    [
        {"leaf_module": {"classes": ["LlamaMLP", "NoSuchLayer"]}},
        {"leaf_module": {"names": ["model.layers.9"]}},
        {"leaf_module": {"name_suffixes": ["nowhere"]}},
        {"stage3_module_granularity_threshold": 1},
        {"stage3_module_granularity_threshold": -5},
    ],
)
def test_leaves_that_the_model_lacks_are_refused(zero: dict) -> None:
    (key, value), *_ = zero.items()
    refused = next(iter(value.values()))[-1] if isinstance(value, dict) else value
    with pytest.raises(BadInput, match=rf"{key}.*{refused}"):
        leaves(LLAMA, **copy.deepcopy(zero))


@pytest.mark.parametrize(
    ("chosen", "ranks", "lacking"),
    [
        ({"names": ["model.layers.0"]}, (0,), None),
        ({"names": ["model.layers.0"]}, (4, 8), "with adapters"),
        ({"names": ["base_model.model.model.layers.0"]}, (4, 8), None),
        ({"names": ["base_model.model.model.layers.0"]}, (0, 8), "without adapters"),
        ({"names": ["model.layers.0"]}, (0, 8), "with adapters"),
        ({"name_suffixes": ["layers.0"]}, (0, 8), None),
        ({"classes": ["LlamaDecoderLayer"]}, (0, 8), None),
    ],
)
def test_leaves_are_named_as_each_model_of_the_space_names_them(chosen, ranks, lacking) -> None:
    if lacking is None:
        found = leaves(LLAMA, ranks=ranks, leaf_module=chosen)
        assert (found.model_parameters > leaves(LLAMA).model_parameters) is any(ranks)
        return
    (name,) = chosen["names"]
    with pytest.raises(BadInput, match=f"CausalLM {lacking} .*{name}"):
        leaves(LLAMA, ranks=ranks, leaf_module=chosen)


MIXTRAL = {"model_type": "mixtral", **SMALL, "num_key_value_heads": 2, "num_local_experts": 4}


@pytest.mark.parametrize("ranks", [(0,), (4,), (0, 4)])
@pytest.mark.parametrize("name", ["MixtralSparseMoeBlock", "MixtralExperts"])
def test_experts_can_be_leaves(name, ranks) -> None:
    found = leaves(MIXTRAL, ranks=ranks, leaf_module={"classes": [name]})
    assert 4 * 3 * 32 * 64 <= found.largest_parameters < found.model_parameters


def test_looking_for_leaves_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    leaves(LLAMA)
    assert torch.equal(before, torch.get_rng_state())
