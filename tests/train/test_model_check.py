"""Models that no trial could train are found before the first one."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from carbonopt.core.errors import BadInput
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import Prepared
from carbonopt.train.models import model_check
from carbonopt.train.models.model import (
    empty_model,
    has_experts,
    parameter_count,
    with_dropout,
)
from carbonopt.train.prepare import PrepareSpec, prepare
from carbonopt.train.tasks.causal_lm import CausalLM
from carbonopt.train.tasks.task import task_for

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
WIDTHS = {
    "bert": {"intermediate_size": 16},
    "roberta": {"intermediate_size": 16},
    "electra": {"embedding_size": 16},
}
BERT = {
    "model_type": "bert",
    **SMALL,
    **WIDTHS["bert"],
    "vocab_size": 256,
    "max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
MAMBA = {"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 16}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


CLASSIFICATION = {
    "task": "classification",
    "model": {"from_config": BERT},
    "tokenizer": {"kind": "byte"},
    "dataset": {"train_files": ["rows.jsonl"]},
    "sequence_length": 24,
}


def preparing(task: str, model: dict, folder: Path, **space) -> Prepared:
    """Of rows that each of the tasks can read."""
    row = {
        "text": "What is it?",
        "prompt": "What",
        "response": " is it?",
        "chosen": " is it?",
        "rejected": " was it?",
    }
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    workload = {
        "task": task,
        "model": {"from_config": model},
        "tokenizer": {"kind": "byte"},
        "dataset": {"train_files": [str(folder / "rows.jsonl")]},
        "sequence_length": 24,
    }
    whole = Space.model_validate(
        {"global_batch_size": 4, "learning_rate": 1e-3, "epochs": 1, **space}
    )
    return prepare(
        PrepareSpec(
            workload=workload, space=whole, prepared_dir=str(folder / "prepared"), fingerprint="f"
        )
    )


@pytest.mark.parametrize("task", ["causal_lm", "sft"])
def test_a_language_model_that_looks_ahead_is_refused(task, tmp_path):
    with pytest.raises(
        BadInput,
        match="bert of this configuration looks ahead; give its configuration is_decoder: tr",
    ):
        preparing(task, BERT, tmp_path)
    assert not (tmp_path / "prepared").exists()
    preparing(task, {**BERT, "is_decoder": True}, tmp_path)


def looks_ahead(config: PreTrainedConfig) -> bool:
    try:
        model_check.check_causality(CausalLM.model_kind, config, trust_remote_code=False)
    except BadInput:
        return True
    return False


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("decodes", [False, True])
def test_which_models_look_ahead(model_type, decodes):
    config = CONFIG_MAPPING[model_type](**SMALL, **WIDTHS[model_type], is_decoder=decodes)
    assert looks_ahead(config) is not decodes
    assert config.num_hidden_layers == 2 and config.vocab_size == 96, (
        "the configuration itself isn't cut down"
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pad", [0, 2, 95])
def test_the_padding_token_hides_no_look_ahead(causal, pad):
    config = CONFIG_MAPPING["xlm"](
        emb_dim=16, n_layers=1, n_heads=2, vocab_size=96, pad_token_id=pad, causal=causal
    )
    assert looks_ahead(config) is not causal


@pytest.mark.parametrize(
    "model_type", ["gpt_neo", "llama", "gemma2", "mamba", "rwkv", "qwen2", "opt", "olmo2", "bloom"]
)
def test_causal_models_are_let_through(model_type):
    own = {
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
        "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
        "gemma2": {"num_key_value_heads": 1},
        "qwen2": {"num_key_value_heads": 1},
    }
    config = CONFIG_MAPPING[model_type](**{**SMALL, **own.get(model_type, {})})
    small = model_check.with_few_tokens(config)
    model = CausalLM.model_kind.auto().from_config(small, dtype=torch.float32)
    assert model_check._looks_ahead(model) is False


def test_dropout_is_set_wherever_a_model_has_it_but_in_heads_and_whole_layers():
    names = {"gpt2": 3, "bert": 2, "t5": 1, "opt": 2, "vit": 2, "llama": 1}
    for model_type, count in names.items():
        config = CONFIG_MAPPING[model_type]()
        changed = with_dropout(config, 0.375).to_dict()
        others = {key: value for key, value in changed.items() if value != config.to_dict()[key]}
        assert len(others) == count and set(others.values()) == {0.375}
    assert with_dropout(config, None) is config


def test_dropout_is_set_in_a_part_of_a_configuration_or_refused():
    dbrx = with_dropout(CONFIG_MAPPING["dbrx"](), 0.375)
    assert dbrx.attn_config.attn_pdrop == dbrx.resid_pdrop == dbrx.emb_pdrop == 0.375
    git = with_dropout(CONFIG_MAPPING["git"](), 0.375)
    assert git.hidden_dropout_prob == 0.375 and git.vision_config.attention_dropout == 0.0, (
        "another model's"
    )
    with pytest.raises(BadInput, match=r"dropout: mpt can't have it: .*attn_pdrop.*; leave it out"):
        with_dropout(CONFIG_MAPPING["mpt"](), 0.1)  # transformers takes whole numbers alone there


@pytest.mark.parametrize(
    ("searched", "says"),
    [
        (
            {"weight_averaging": 0.01},
            "weight_averaging: resnet can't have it: its batch normalization has",
        ),
        (
            {"optimizer": {"choices": ["adamw", "muon"]}, "zero_stage": 0},
            (
                "optimizer: muon needs hidden linear layers to train, but resnet has none here;"
                " leave it out"
            ),
        ),
        (
            {"float8": "tensorwise"},
            "float8: resnet can't have tensorwise: none of its linear layers is large enough",
        ),
    ],
)
def test_what_convolutions_and_batch_normalization_can_not_have(searched, says, tmp_path):
    model = {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8],
        "depths": [1],
        "layer_type": "basic",
    }
    workload = {
        "task": "classification",
        "model": {"from_config": model},
        "dataset": {"builtin": "digits"},
    }
    space = {"global_batch_size": 4, "learning_rate": 1e-3, "epochs": 1, **searched}
    given = PrepareSpec(
        workload=workload, space=space, prepared_dir=str(tmp_path / "prepared"), fingerprint="f"
    )
    with pytest.raises(BadInput, match=says):
        prepare(given)


@pytest.mark.parametrize(
    ("task", "model", "space", "said"),
    [
        ("reward", T5, {}, "t5 of this configuration can't be trained on these data: AttributeError: "),
        ("sft", MAMBA, {"lora_rank": {"choices": [0, 4]}}, "lora_rank: PEFT can't adapt mamba: "),
        ("sft", {**MAMBA, "model_type": "rwkv"}, {}, "rwkv .*: ZeroDivisionError: division by zero; use another"),
        ("sft", GPT2, {"attention_implementation": {"choices": ["sdpa", "flash_attention_2"]}},
         "attention_implementation: gpt2 can't have flash_attention_2 here: "),
        ("sft", MAMBA, {"attention_implementation": "sdpa"}, "attention_implementation: mamba can't have sdpa here: "),
        ("sft", GPT2, {"lora_rank": 4, "attention_implementation": {"choices": ["sdpa", "eager"]}}, None),
        ("sft", MAMBA, {"dropout": {"choices": [0.0, 0.1]}}, "dropout: mamba has none in its configuration"),
        ("sft", {**GPT2, "n_layer": 0}, {}, r"from_config.n_layer must be at least 1, but got 0\.$"),
        ("sft", {**LLAMA, "num_attention_heads": 0}, {}, r"num_attention_heads must be at least 1, but got 0\.$"),
        ("sft", {**LLAMA, "num_attention_heads": 5}, {}, r"model can't be used: The hidden size \(16\)"),
        ("sft", {**LLAMA, "hidden_size": "16"}, {}, r"model can't be used: Field 'hidden_size' expected int"),
        ("sft", {**MAMBA, "num_hidden_layers": -1}, {}, r"num_hidden_layers must be at least 1, but got -1"),
        ("reward", {**T5, "num_decoder_layers": 0}, {}, r"from_config.num_decoder_layers must be at least 1"),
        ("causal_lm", {**GPT2, "n_head": 3}, {}, r"divisible by .*\(got `embed_dim`: 16 and `num_heads`: 3\)\.$"),
        ("sft", {**GPT2, "activation_function": "nosuch"}, {}, "gpt2 configuration: KeyError: 'nosuch'"),
    ],
)  # fmt: skip
def test_what_every_trial_would_fail_on(task, model, space, said, tmp_path):
    if said is None:
        preparing(task, model, tmp_path, **space)
        return
    if "flash_attention_2" in said and torch.cuda.is_available():
        pytest.skip("may be there")
    with pytest.raises(BadInput, match=said) as refused:
        preparing(task, model, tmp_path, **space)
    assert str(refused.value).endswith(".") and not str(refused.value).endswith("..")


def test_where_only_the_cut_fails_the_model_is_believed(tmp_path, monkeypatch):
    """Few layers may be what a model can't have: the error counts where the whole one has it, too."""
    model = {"model_type": "rwkv", "num_hidden_layers": 3, "hidden_size": 8}
    config = CONFIG_MAPPING["rwkv"](num_hidden_layers=1, hidden_size=8, vocab_size=256)
    parameters = parameter_count(CausalLM.model_kind, config, trust_remote_code=False)
    monkeypatch.setattr(model_check, "_LAYERS", 1)
    monkeypatch.setattr(model_check, "MOST_RUN", parameters)
    preparing("sft", model, tmp_path)


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mixtral", {"num_local_experts": 2}, True),
        (
            "granitemoehybrid",
            {"num_local_experts": 2, "layer_types": ["attention"], "mamba_n_heads": 4},
            True,
        ),
        (
            "granitemoehybrid",
            {"num_local_experts": 0, "layer_types": ["attention"], "mamba_n_heads": 4},
            False,
        ),
        ("jetmoe", {"num_local_experts": 2}, True),
        ("doge", {"is_moe": True, "num_experts": 4}, True),
        ("doge", {"is_moe": False}, False),
        ("qwen3_moe", {"num_experts": 2, "mlp_only_layers": [0]}, False),
        ("llama", {}, False),
    ],
)
def test_models_with_experts_are_told_from_others(model_type, fields, expected):
    config = CONFIG_MAPPING[model_type](
        hidden_size=16, num_hidden_layers=1, vocab_size=64, **HEADS, **fields
    )
    model = empty_model(CausalLM.model_kind, config, trust_remote_code=False)
    assert has_experts(model) is expected


@pytest.mark.parametrize(
    ("model_type", "reads"),
    [
        *(("canine", True), ("convbert", True), ("nystromformer", True), ("yoso", True)),
        *(("bert", False), ("distilbert", False), ("roberta", False), ("gpt2", False)),
        *(("deberta", False), ("bart", False), ("llama", False)),
    ],
)
def test_a_classifier_whose_logits_depend_on_padding_is_noted(model_type, reads):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields = {"vocab_size": 96, "intermediate_size": 16, "dim": 16, "hidden_dim": 16, "d_model": 16}
    known = CONFIG_MAPPING[model_type]()
    config = CONFIG_MAPPING[model_type](
        **{name: value for name, value in (sizes | fields).items() if hasattr(known, name)},
        pad_token_id=1,
    )
    kind = task_for(CLASSIFICATION).model_kind
    note = model_check.padding_note(kind, config, trust_remote_code=False)
    assert (note is not None) == reads and (note is None or model_type in note)


def test_the_note_on_padding_is_the_preparations(tmp_path):
    model = {**SMALL, **WIDTHS["bert"], "vocab_size": 300, "max_position_embeddings": 32}
    made = preparing("reward", {"model_type": "convbert", **model, "embedding_size": 16}, tmp_path)
    assert any("convbert" in note and "padding" in note for note in made.notes)
