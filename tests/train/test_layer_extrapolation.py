"""The memory of a model by three and five of its layers, beside that of the whole model."""

import pytest
from transformers import AutoConfig, PreTrainedConfig

from carbonopt.spec.model_memory import Activations, Moment
from carbonopt.spec.space_settings import Space
from carbonopt.train.models import memory_probe
from carbonopt.train.models.layer_extrapolation import (
    by_layers,
    extended,
    few_and_more,
    with_layers,
)
from carbonopt.train.models.memory_shares import Share
from carbonopt.train.tasks.task import task_for

# Each test takes seconds of real time.
pytestmark = pytest.mark.slow

LAYERS = 9
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
}


@pytest.mark.parametrize("model", [LLAMA, OPT], ids=lambda model: model["model_type"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"lora_rank": 4},
        {"precision": "bf16", "output_layer": "fused"},
        {"precision": "bf16", "torch_compile": True},
    ],
    ids=str,
)
def test_the_memory_is_that_of_the_whole_model_to_the_byte(model: dict, settings: dict) -> None:
    task = task_for(
        {
            "task": "causal_lm",
            "model": {"from_config": model},
            "tokenizer": {"kind": "byte"},
            "dataset": {"builtin": "python-docs"},
            "sequence_length": 64,
        }
    )
    config = task.expected_config()
    space = Space(
        global_batch_size=8, micro_batch_size_per_gpu=2, learning_rate=1e-3, epochs=1, **settings
    )
    (chosen,) = memory_probe._settings(space)
    (expected,) = memory_probe.model_memory(task, config, space, 1, 8, eval_tokens=None).profiles
    probe = memory_probe.Probe(task, config)

    def passes(config: PreTrainedConfig) -> tuple[int, list[Activations]]:
        taken = probe.measure(Share(chosen, (2,), (8,)), [config]).passes[0]
        return taken.trained, taken.activations({2: 8})

    few, more = map(passes, few_and_more(config))
    trained, whole = passes(config)
    assert by_layers(config, trained, few, more) == whole == list(expected.activations)
    assert by_layers(config, trained + 1, few, more) is None, "layers that are not all alike"


def layers_of(config: PreTrainedConfig) -> PreTrainedConfig | None:
    return with_layers(config, 3)


def test_models_whose_layers_differ_have_no_shortcut() -> None:
    of_two_kinds = AutoConfig.for_model("gemma3_text", num_hidden_layers=LAYERS)
    assert len(set(of_two_kinds.layer_types)) == 2 and layers_of(of_two_kinds) is None
    assert layers_of(AutoConfig.for_model("t5", num_layers=LAYERS)) is None
    assert layers_of(AutoConfig.for_model("llama", num_hidden_layers=8)) is None
    assert layers_of(AutoConfig.for_model("llama", num_hidden_layers=9)).num_hidden_layers == 3


def memory(*points: tuple[int, int]) -> Activations:
    return Activations(
        micro_batch_size=1,
        moments=tuple(
            Moment(activation_bytes=size, gradient_elements=gradients) for size, gradients in points
        ),
        evaluation_bytes=10,
    )


def test_what_follows_no_rule_is_not_extended() -> None:
    few = memory((140, 0), (100, 5), (60, 10), (20, 15))
    more = memory((220, 0), (180, 5), (140, 10), (100, 15), (60, 20), (20, 25))
    of_all = extended(few, more, 7)
    assert of_all is not None
    assert [(moment.activation_bytes, moment.gradient_elements) for moment in of_all.moments] == [
        (300, 0), (260, 5), (220, 10), (180, 15), (140, 20), (100, 25), (60, 30), (20, 35),
    ]  # fmt: skip
    one_byte_off = memory((220, 0), (180, 5), (141, 10), (100, 15), (60, 20), (20, 25))
    assert extended(few, one_byte_off, 7) is None
    assert extended(few, few, 7) is None
