"""The one table of dimensions against what reads it: TrialParams, the space, transformers and
DeepSpeed.
"""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from carbonopt.core.dimensions import (
    DIMENSION_NAMES,
    DIMENSIONS,
    LARGEST_INT,
    REQUIRED,
    TrainingParams,
    TrialParams,
    affecting,
)
from carbonopt.core.errors import BadInput
from carbonopt.core.values import Scalar
from carbonopt.spec.field_meanings import field_meanings
from carbonopt.spec.space_settings import Fixed, Space

EACH = pytest.mark.parametrize("name", DIMENSIONS)
NEEDED: dict[str, Any] = {
    "global_batch_size": 8,
    "micro_batch_size_per_gpu": 8,
    "learning_rate": 1e-3,
    "epochs": 1,
}
SPACE = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
WORDS = sorted(
    {str(choice) for dimension in DIMENSIONS.values() for choice in dimension.choices}
    | {"none of these"}
)
VALUES: tuple[Scalar, ...] = (
    *(True, False, -1, 0, 1, 2, 3, 4, LARGEST_INT, LARGEST_INT + 1, 10**12, 10**400),
    *(
        -1.0,
        -5e-324,
        0.0,
        5e-324,
        0.5,
        1.0,
        math.nextafter(1.0, 2.0),
        1.5,
        2.0,
        1e300,
        math.inf,
        -math.inf,
        math.nan,
    ),
    *WORDS,
)


def accepts(name: str, value: Scalar) -> bool:
    """Whether a trial takes it as what it is. pydantic would take "8" and True for the numbers 8
    and 1.
    """
    try:
        taken = getattr(TrialParams.model_validate({**NEEDED, name: value}, strict=True), name)
    except ValidationError:
        return False
    return type(taken) in (type(value), float)


def test_every_field_of_a_configuration_is_a_dimension_of_its_own() -> None:
    assert list(DIMENSIONS) == list(TrialParams.model_fields)
    assert set(DIMENSION_NAMES) == set(Space.model_fields) == set(DIMENSIONS)
    labels = [dimension.label for dimension in DIMENSIONS.values()]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_a_docstring_below_its_field_says_what_it_means(name: str) -> None:
    assert field_meanings(TrialParams).get(name), f"write one below {name} in core/dimensions.py"


@EACH
def test_what_it_refuses_no_trial_can_have(name: str) -> None:
    for value in VALUES:
        assert (DIMENSIONS[name].problem(value) is None) == accepts(name, value), value


OTHERS = st.one_of(st.integers(-(10**12), 10**12), st.floats(), st.booleans(), st.text(max_size=4))


@given(st.sampled_from(list(DIMENSIONS)), OTHERS)
@pytest.mark.slow
def test_nor_any_other_value(name: str, value: Scalar) -> None:
    assert (DIMENSIONS[name].problem(value) is None) == accepts(name, value)


def test_a_whole_number_too_large_to_be_a_float_is_refused_before_it_is_made_one() -> None:
    assert DIMENSIONS["learning_rate"].problem(10**400) == "must be below 1e12"
    assert (
        DIMENSIONS["global_batch_size"].problem(10**400) == "must be a whole number from 1 to 10^9"
    )


@EACH
def test_all_its_choices_are_allowed(name: str) -> None:
    assert all(accepts(name, choice) for choice in DIMENSIONS[name].choices)


@EACH
def test_a_default_is_allowed_and_the_same_everywhere(name: str) -> None:
    default, field = DIMENSIONS[name].default, TrialParams.model_fields[name]
    if default is not None:
        assert DIMENSIONS[name].problem(default) is None
        assert (field.default, Space(**SPACE)[name]) == (default, Fixed(value=default))
    elif name in Space.model_fields and name not in SPACE:
        assert Space(**SPACE)[name] is None
        # A micro batch follows from the global one, the ranks from the launch; of the rest the
        # libraries decide.
        assert field.default is None or name == "world_size"


def test_what_carbonopt_trains_needs_what_has_no_default() -> None:
    assert set(REQUIRED) == set(SPACE)
    values = {
        "global_batch_size": 8,
        "micro_batch_size_per_gpu": 8,
        "learning_rate": 1e-3,
        "epochs": 1,
    }
    for name in SPACE:
        with pytest.raises(ValidationError, match=f"(?s){name}.*Field required"):
            TrainingParams(**{key: value for key, value in values.items() if key != name})


@pytest.mark.parametrize(
    "name", [name for name, dimension in DIMENSIONS.items() if dimension.feature]
)
def test_a_feature_rises_with_its_values(name: str) -> None:
    dimension = DIMENSIONS[name]
    assert dimension.feature is not None
    allowed = sorted(
        value for value in VALUES if not isinstance(value, str) and dimension.problem(value) is None
    )
    features = [dimension.feature(value) for value in dict.fromkeys(map(float, allowed))]
    assert all(map(math.isfinite, features))
    assert (
        all(before <= after for before, after in itertools.pairwise(features))
        and features[0] < features[-1]
    )


# -----------------------------------------------------------------------------------------------------
# what it affects


def test_what_affects_the_quality_and_what_the_cost_of_a_step() -> None:
    quality, cost = set(affecting("quality")), set(affecting("cost"))
    learning = {
        "learning_rate",
        "epochs",
        "weight_decay",
        "warmup_ratio",
        "lr_scheduler",
        "decay_ratio",
        "learning_rate_scaling",
    }
    assert quality - cost == {*learning, "beta", "label_smoothing"}
    assert cost - quality == {
        "micro_batch_size_per_gpu", "zero_stage", "offload", "world_size", "gradient_checkpointing", "torch_compile",
        "attention_implementation",
    }  # fmt: skip
    completions = {"num_generations", "max_completion_length", "kl_coefficient"}
    both = {
        "global_batch_size",
        "precision",
        "output_layer",
        "float8",
        "lora_rank",
        "optimizer",
        "dropout",
        "weight_averaging",
    }
    assert quality & cost == {*both, *completions}
    at_once = cost - {"global_batch_size", "num_generations", "kl_coefficient", "dropout"}
    assert set(affecting("memory")) == at_once, "micro batches are what is in memory at once"


def test_what_a_compiled_run_compiles_anew_for() -> None:
    assert set(affecting("kernels")) == {
        "torch_compile", "output_layer", "micro_batch_size_per_gpu", "precision", "attention_implementation",
        "gradient_checkpointing", "zero_stage", "offload", "world_size", "lora_rank", "dropout", "float8",
    }  # fmt: skip


def test_a_dimension_that_the_table_lacks_affects_everything() -> None:
    names = ["kernel", "epochs", "zero_stage", "my_dropout"]
    assert affecting("quality", names) == ("kernel", "epochs", "my_dropout")
    assert affecting("cost", names) == ("kernel", "zero_stage", "my_dropout")
    assert affecting("memory", ()) == ()


# ------------------------------------------------------------------------------------------------
# what others call it


def test_transformers_has_the_arguments() -> None:
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    named = {
        name: dimension.argument for name, dimension in DIMENSIONS.items() if dimension.argument
    }
    assert {
        argument for dimension in DIMENSIONS.values() for argument in dimension.arguments
    } <= known
    assert len(set(named.values())) == len(named)
    assert named["epochs"] == "num_train_epochs" and "global_batch_size" not in named


def test_an_arguments_value_is_the_dimensions_own_but_for_the_warm_up() -> None:
    for name, dimension in DIMENSIONS.items():
        if name not in ("warmup_ratio", "optimizer"):
            assert dimension.to_argument(0.1, 101) == 0.1
    assert DIMENSIONS["warmup_ratio"].to_argument(0.1, 101) == 11, (
        "steps, as transformers rounds them"
    )
    assert DIMENSIONS["warmup_ratio"].to_argument(0.1, 1) == 0, (
        "else the only step would change nothing"
    )


DEEPSPEED: dict[str, Any] = {  # a value that DeepSpeed allows
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization.stage": 1,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.cpu_offload": False,
    "zero_optimization.cpu_offload_param": False,
    "bf16.enabled": True,
    "fp16.enabled": True,
}


def nested(key: str, value: Any) -> dict[str, Any]:
    """As a DeepSpeed configuration has it."""
    for part in reversed(key.split(".")):
        value = {part: value}
    configuration: dict[str, Any] = value
    return configuration


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name, dimension in DIMENSIONS.items() for key in dimension.deepspeed],
)
def test_a_deepspeed_key_is_known_there_and_left_to_the_space(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from carbonopt.train.optim import deepspeed_keys

    with pytest.raises(BadInput, match=rf"{key}.*use search\.space\.{name}"):
        deepspeed_keys.check_deepspeed_keys(nested(key, DEEPSPEED[key]))
    # Once it is nobody's, only what the installed DeepSpeed doesn't know is refused.
    monkeypatch.setattr(deepspeed_keys, "OWNED", {})
    deepspeed_keys.check_deepspeed_keys(nested(key, DEEPSPEED[key]))
    with pytest.raises(BadInput):
        deepspeed_keys.check_deepspeed_keys(nested(f"{key}_", DEEPSPEED[key]))
