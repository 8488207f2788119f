"""The search space: which combinations can exist."""

import itertools

import pytest

from carbonopt.core.dimensions import STABLE_DECAY, TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.search.inner_samplers import distributions
from carbonopt.space.search_space import SearchSpace, highest
from carbonopt.spec.space_settings import Choices, Range, Space


def space(*, world_size: int = 1, on_gpu: bool = True, **dimensions: object) -> SearchSpace:
    base = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
    return SearchSpace(Space.model_validate(base | dimensions), world_size, on_gpu)


def test_gradient_accumulation_is_derived_and_remainders_are_refused() -> None:
    params = TrialParams(
        global_batch_size=48, micro_batch_size_per_gpu=4, learning_rate=1e-3, epochs=1, world_size=3
    )
    assert params.gradient_accumulation_steps == 4
    with pytest.raises(BadInput, match=r"multiple of .* but got 48 and 5 × 4"):
        _ = params.model_copy(
            update={"micro_batch_size_per_gpu": 5, "world_size": 4}
        ).gradient_accumulation_steps


def test_combinations_are_exactly_those_that_can_exist() -> None:
    batches, micros, stages, offloads = (
        (4, 8, 12),
        (4, 8),
        (0, 1, 2, 3),
        ("none", "optimizer", "parameters"),
    )
    combinations = space(
        global_batch_size={"choices": list(batches)},
        micro_batch_size_per_gpu={"choices": list(micros)},
        zero_stage={"choices": list(stages)},
        offload={"choices": list(offloads)},
    ).combinations
    expected = [
        {"global_batch_size": b, "micro_batch_size_per_gpu": m, "zero_stage": z, "offload": o}
        for b, m, z, o in itertools.product(batches, micros, stages, offloads)
        if b % m == 0 and not (o == "parameters" and z != 3) and not (o == "optimizer" and z == 0)
    ]
    assert combinations is not None
    assert sorted(combinations, key=str) == sorted(expected, key=str)


SCHEDULES = {
    "lr_scheduler": {"choices": ["constant", "linear", STABLE_DECAY]},
    "warmup_ratio": {"choices": [0.1, 0.0]},
    "decay_ratio": {"choices": [0.2, 0.5]},
}


def test_configurations_that_train_alike_are_one() -> None:
    schedule = ("lr_scheduler", "warmup_ratio", "decay_ratio")
    combinations = space(**SCHEDULES).combinations
    assert combinations is not None
    assert sorted(tuple(values[name] for name in schedule) for values in combinations) == [
        ("constant", 0.0, 0.2),
        *(("linear", warmup, 0.2) for warmup in (0.0, 0.1)),
        *(
            (STABLE_DECAY, warmup, decay)
            for warmup, decay in itertools.product((0.0, 0.1), (0.2, 0.5))
        ),
    ]
    started = space(**SCHEDULES).start_values(
        {"lr_scheduler": "constant", "warmup_ratio": 0.1, "decay_ratio": 0.5}
    )
    assert started == {"lr_scheduler": "constant", "warmup_ratio": 0.0, "decay_ratio": 0.2}


def test_a_whole_run_may_be_warm_up_and_decay() -> None:
    shares = {"warmup_ratio": {"low": 0.1, "high": 0.3}, "decay_ratio": {"low": 0.1, "high": 0.7}}
    assert space(lr_scheduler={"choices": ["linear", STABLE_DECAY]}, **shares).combinations is None


def test_defaults_fill_what_the_space_leaves_out() -> None:
    params = space(world_size=2, global_batch_size={"choices": [8, 16]}).params(
        {"global_batch_size": 16}
    )
    assert (params.micro_batch_size_per_gpu, params.zero_stage, params.offload) == (8, 1, "none")
    assert params.gradient_accumulation_steps == 1


def test_a_range_without_steps_is_endless() -> None:
    assert space(learning_rate={"low": 1e-4, "high": 1e-2, "log": True}).combinations is None


FLOAT8 = {"float8": "tensorwise", "precision": "bf16", "torch_compile": True}


@pytest.mark.parametrize(
    ("dimensions", "words"),
    [
        ({"global_batch_size": 48, "micro_batch_size_per_gpu": 5}, ["48", "5 × 1", "multiple"]),
        (
            {
                "global_batch_size": {"choices": [8, 9]},
                "micro_batch_size_per_gpu": {"choices": [2, 4]},
            },
            ["9", "2, 4 × 1"],
        ),
        ({"global_batch_size": 9, "world_size": 2}, ["9", "world size"]),
        ({"zero_stage": {"choices": [0, 5]}}, ["search.space.zero_stage", "0, 1, 2, 3", "5"]),
        ({"zero_stage": True}, ["search.space.zero_stage", "True"]),
        ({"zero_stage": 0, "offload": "optimizer"}, ["offload: optimizer", "0"]),
        ({"zero_stage": 2, "offload": "parameters"}, ["offload: parameters", "3", "2"]),
        ({"optimizer": "muon"}, ["optimizer: muon needs zero_stage 0", "got 1"]),
        (
            {"weight_averaging": 0.1, "zero_stage": 3},
            ["weight_averaging needs zero_stage 0, 1 or 2", "got 3"],
        ),
        (
            {"optimizer": {"choices": ["adamw", "muon"]}},
            ["search.space.optimizer: muon goes with nothing", "got 1"],
        ),
        (
            {"zero_stage": 1, "offload": {"choices": ["none", "parameters"]}},
            ["parameters goes with nothing", "3"],
        ),
        (
            {"weight_averaging": {"choices": [0, 0.01]}, "zero_stage": 3},
            ["0.01 goes with nothing", "got 3"],
        ),
        ({"weight_averaging": 0.6}, ["search.space.weight_averaging", "at most 0.5", "0.6"]),
        (
            {"decay_ratio": 0.1},
            ["decay_ratio acts only with lr_scheduler warmup_stable_decay", "not in the space"],
        ),
        ({"decay_ratio": 0.1, "lr_scheduler": "linear"}, ["decay_ratio", "fixed at linear"]),
        (
            {"warmup_ratio": 0.1, "lr_scheduler": "constant"},
            ["warmup_ratio acts only with lr_scheduler", "fixed at constant"],
        ),
        (
            {"warmup_ratio": {"low": 0, "high": 0.9}, "lr_scheduler": STABLE_DECAY},
            ["at most 1", "0.9 + 0.2"],
        ),
        (
            {
                "warmup_ratio": 0.2,
                "decay_ratio": {"choices": [0.9, 0.1]},
                "lr_scheduler": STABLE_DECAY,
            },
            ["at most 1", "0.2 + 0.9"],
        ),
        ({"offload": "disk"}, ["search.space.offload", "disk"]),
        ({"precision": "fp16", "on_gpu": False}, ["fp16", "GPU"]),
        ({"output_layer": "fused_fp8", "on_gpu": False}, ["fused_fp8", "GPU"]),
        ({**FLOAT8, "on_gpu": False}, ["float8: tensorwise needs a GPU"]),
        ({**FLOAT8, "precision": "fp16"}, ["needs precision: bf16", "got fp16"]),
        ({**FLOAT8, "precision": None}, ["needs precision: bf16", "got none"]),
        ({**FLOAT8, "torch_compile": False}, ["needs torch_compile: true", "got False"]),
        ({**FLOAT8, "zero_stage": 3}, ["needs zero_stage 0, 1 or 2", "got 3"]),
        ({"learning_rate": 0}, ["search.space.learning_rate", "above 0"]),
        ({"learning_rate": {"choices": ["fast"]}}, ["search.space.learning_rate", "'fast'"]),
        ({"epochs": {"low": 0, "high": 3}}, ["search.space.epochs", "above 0"]),
        (
            {"global_batch_size": {"low": 1.5, "high": 4}},
            ["search.space.global_batch_size", "whole numbers"],
        ),
        (
            {"global_batch_size": -4},
            ["search.space.global_batch_size", "whole number from 1", "-4"],
        ),
        ({"warmup_ratio": 1.5}, ["search.space.warmup_ratio", "at most 1"]),
        ({"lr_scheduler": "cosin"}, ["search.space.lr_scheduler", "cosine"]),
        ({"lora_rank": 2.5}, ["search.space.lora_rank", "whole number"]),
    ],
)
def test_spaces_that_cannot_be_are_refused(dimensions: dict, words: list[str]) -> None:
    with pytest.raises(BadInput) as error:
        space(**dimensions)
    for word in words:
        assert word in str(error.value)


def test_a_start_must_lie_in_the_space() -> None:
    searched = space(
        global_batch_size={"choices": [8, 16]}, learning_rate={"low": 1e-4, "high": 1e-2}
    )
    assert searched.start_values({"global_batch_size": 8, "learning_rate": 1e-3}) == {
        "global_batch_size": 8,
        "learning_rate": 1e-3,
    }
    with pytest.raises(BadInput, match=r"search.start.global_batch_size: 32 is not in"):
        searched.start_values({"global_batch_size": 32, "learning_rate": 1e-3})
    with pytest.raises(BadInput, match="missing: learning_rate"):
        searched.start_values({"global_batch_size": 8})
    with pytest.raises(BadInput, match="unknown dimension batch"):
        searched.start_values({"batch": 8})


def test_a_trial_must_have_steps_that_can_be_counted() -> None:
    long = space(
        global_batch_size={"choices": [4, 8]}, epochs={"low": 1, "high": 1e12, "log": True}
    )
    with pytest.raises(
        BadInput, match=r"epochs must make at most 1,000,000,000 steps, but 1e\+12 make 2.5e\+13"
    ):
        long.check_fits(100)
    space(epochs=1e7).check_fits(800)
    with pytest.raises(BadInput, match="epochs"):
        space(epochs=1e7 + 1).check_fits(800)


def test_a_script_s_user_knows_what_goes_with_what() -> None:
    space = Space(
        optimizer=Choices(choices=("adamw", "muon")), decay_ratio=Range(low=0.1, high=0.5)
    )
    assert (
        SearchSpace(space, 1, False, own_dimensions=True).rule_broken(
            {"optimizer": "muon", "decay_ratio": 0.2}
        )
        is None
    )
    with pytest.raises(
        BadInput,
        match="allowed: adamw, muon, but got 'sgd'; under another name, such as own_optimizer",
    ):
        SearchSpace(
            Space(optimizer=Choices(choices=("sgd", "adamw"))), 1, False, own_dimensions=True
        )


def test_what_a_dimension_of_ones_own_affects_is_told_of_those_alone() -> None:
    own = {
        "watts": {"choices": [300, 400], "affects": "cost"},
        "momentum": {"low": 0.8, "high": 1.0},
    }
    assert Space(**own).affects() == {"watts": "cost"}
    with pytest.raises(
        ValueError, match="affects is for dimensions of your own: what epochs affects is known"
    ):
        Space(epochs={"choices": [1, 2], "affects": "cost"})
    with pytest.raises(ValueError, match="affects"):
        Space(watts={"choices": [300, 400], "affects": "memory"})


SCALED = {
    "global_batch_size": 8,
    "learning_rate": 1e-3,
    "epochs": 1,
    "world_size": {"choices": [1, 4]},
}


@pytest.mark.parametrize(
    ("scaling", "rate"), [(None, 1e-3), ("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)]
)
def test_the_learning_rate_is_scaled_with_the_ranks(scaling: str | None, rate: float) -> None:
    params = TrialParams(**SCALED | {"world_size": 4}, learning_rate_scaling=scaling)
    assert params.optimizer_learning_rate == pytest.approx(rate)
    assert params.arguments(10)["learning_rate"] == pytest.approx(rate)
    assert params.as_record()["learning_rate"] == 1e-3
    assert params.model_copy(update={"world_size": 1}).optimizer_learning_rate == 1e-3


def test_at_one_rank_all_scalings_of_the_rate_are_one() -> None:
    scaled = {**SCALED, "learning_rate_scaling": {"choices": ["none", "sqrt"]}}
    space = SearchSpace(Space.model_validate(scaled), world_size=4, on_gpu=False)
    assert (
        space.canonical({"world_size": 1, "learning_rate_scaling": "sqrt"})["learning_rate_scaling"]
        == "none"
    )
    assert (
        space.canonical({"world_size": 4, "learning_rate_scaling": "sqrt"})["learning_rate_scaling"]
        == "sqrt"
    )
    assert len(space.combinations) == 3


def own_space(**dimensions: object) -> SearchSpace:
    return SearchSpace(Space.model_validate(dimensions), 1, on_gpu=False, own_dimensions=True)


@pytest.mark.parametrize(
    ("low", "high", "step", "values"),
    [
        (0, 1, 0.3, [0.0, 0.3, 0.6, 0.9]),
        (0, 1, 0.33333333334, [0.0, 0.33333333334, 0.66666666668]),
        (0.1, 0.3, 0.1, [0.1, 0.2, 0.3]),
        (1, 10, 2, [1, 3, 5, 7, 9]),
    ],
)
def test_a_range_ends_at_its_last_step(
    low: float, high: float, step: float, values: list, recwarn: pytest.WarningsRecorder
) -> None:
    searched = own_space(h={"low": low, "high": high, "step": step})
    assert [each["h"] for each in searched.combinations] == values
    assert highest(searched.dimensions["h"]) == values[-1]
    assert distributions(searched)["h"].high == values[-1]
    assert not recwarn.list


@pytest.mark.parametrize("log", [False, True])
def test_a_range_of_one_value_is_one_choice(log: bool) -> None:
    single = {"low": 4, "high": 4, "log": log}
    assert own_space(h={"choices": [1]}, e=single).combinations == [{"h": 1, "e": 4.0}]
    assert own_space(h={"choices": [1, 2]}, e=single).combinations == [
        {"h": 1, "e": 4.0},
        {"h": 2, "e": 4.0},
    ]


def test_completions_count_for_a_range_of_generations_as_for_choices() -> None:
    for generations in (4, {"choices": [4, 8]}, {"low": 4, "high": 4}, {"low": 4, "high": 8}):
        space(num_generations=generations, global_batch_size=16).check_fits(4)


@pytest.mark.parametrize(
    ("domain", "value", "near"),
    [
        ({"low": 1, "high": 9, "step": 2}, 2.5, ["1", "3"]),
        ({"low": 1, "high": 9, "step": 2}, 2, ["1", "3"]),
        ({"low": 0, "high": 1, "step": 0.3}, 0.5, ["0.3", "0.6"]),
        ({"low": 0, "high": 1, "step": 0.3}, 1, ["0.9"]),
        ({"low": 1, "high": 9, "step": 2}, 11, []),
        ({"low": 1, "high": 9}, True, []),
        ({"choices": [1, 2]}, True, []),
    ],
)
def test_a_start_between_the_steps_is_refused(domain: dict, value: float, near: list[str]) -> None:
    with pytest.raises(BadInput) as refusal:
        own_space(h=domain).start_values({"h": value})
    assert f"search.start.h: {value!r}" in str(refusal.value)
    assert not near or f"; near it: {', '.join(near)}" in str(refusal.value)


def test_a_start_must_be_whole_where_the_dimension_is() -> None:
    with pytest.raises(BadInput, match=r"search.start.global_batch_size: 8.5 .* near it: 8, 9"):
        space(global_batch_size={"low": 4, "high": 16}).start_values({"global_batch_size": 8.5})


@pytest.mark.parametrize(
    ("domain", "given", "own"),
    [
        ({"choices": [1, 2]}, 1.0, 1),
        ({"choices": [1.0, 2.5]}, 1, 1.0),
        ({"choices": [False, 2]}, False, False),
        ({"low": 0, "high": 8}, 4, 4.0),
        ({"low": 1, "high": 9, "step": 2}, 3.0, 3),
        ({"low": 0.1, "high": 0.5, "step": 0.1}, 0.1 + 0.2, 0.3),
    ],
)
def test_a_start_has_the_spelling_of_the_space(domain: dict, given: float, own: float) -> None:
    assert repr(own_space(h=domain).start_values({"h": given})) == repr({"h": own})


@pytest.mark.parametrize(
    ("single", "value"),
    [
        ({"choices": [4]}, 4),
        ({"low": 4, "high": 4}, 4.0),
        ({"low": 4, "high": 4, "log": True}, 4.0),
        ({"low": 4, "high": 4, "step": 1}, 4),
    ],
)
def test_a_start_need_not_name_what_has_a_single_value(single: dict, value: float) -> None:
    searched = own_space(h={"choices": [1, 2]}, e=single)
    started = searched.start_values({"h": 2})
    assert repr(started) == repr({"h": 2, "e": value})
    with pytest.raises(BadInput, match=r"missing: h\."):
        searched.start_values({"e": 4})
    with pytest.raises(BadInput, match=r"search.start.e: 5 is not in search.space.e"):
        searched.start_values({"h": 2, "e": 5})
