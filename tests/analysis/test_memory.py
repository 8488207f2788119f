"""The estimate of memory: its arithmetic, on a model of round numbers."""

import pytest
from small_studies import study, trial

from carbonopt.analysis.gpu_memory import (
    MemoryNeed,
    estimate,
    measured_memory,
    needs,
    needs_by_gpus,
)
from carbonopt.core.dimensions import TrainingParams
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.model_memory import PROFILED, Activations, MemoryProfile, ModelMemory, Moment
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import Prepared

GIB = 2**30
WORKSPACE_GIB = 2 / 32


def model(precision: str | None = "bf16", **changes) -> ModelMemory:
    """2^30 parameters, the largest of 2^20. A micro batch of 1 keeps 1 GiB before the first
    gradient, and a quarter of it when half of them are there; a micro batch of 5 five times as
    much.
    """
    profile = MemoryProfile(
        settings=dict.fromkeys(PROFILED) | {"precision": precision},
        parameters=GIB,
        trained_parameters=GIB,
        largest_parameter=2**20,
        hidden_parameters=3 * GIB // 4,
        muon_step_bytes=3 * GIB,
        buffer_bytes=0,
        activations=tuple(
            Activations(
                micro_batch_size=size,
                moments=(
                    Moment(activation_bytes=size * GIB, gradient_elements=0),
                    Moment(activation_bytes=size * GIB // 4, gradient_elements=GIB // 2),
                ),
                evaluation_bytes=GIB // 8,
            )
            for size in (1, 5)
        ),
    )
    values = {"optimizer_bytes_per_parameter": 8.0, "optimizer_step_bytes_per_parameter": 0.0}
    return ModelMemory(
        profiles=(profile,),
        reduce_bucket_elements=2**28,
        live_parameters=GIB,
        **{**values, **changes},
    )


def params(**changes) -> TrainingParams:
    values = {
        "micro_batch_size_per_gpu": 1,
        "learning_rate": 1e-3,
        "epochs": 1,
        "precision": "bf16",
        "zero_stage": 0,
    }
    values |= changes
    per_step = values["micro_batch_size_per_gpu"] * values.get("world_size", 1)
    return TrainingParams(**{"global_batch_size": per_step, **values})


def peak_gib(**changes) -> float:
    """Without what matrix products need, on two streams where a whole step has one of its own."""
    memory, settings = model(precision=changes.get("precision", "bf16")), params(**changes)
    return estimate(settings, memory).peak_gib - WORKSPACE_GIB * (
        2 if settings.allows_whole_step else 1
    )


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        # Weights, masters, Adam, gradients, gradients in float32: all there in the optimizer's
        # step.
        ({}, 2 + 4 + 8 + 2 + 4),
        ({"precision": "fp32"}, 4 + 8 + 4),
        ({"weight_averaging": 0.1}, 2 + 4 + 8 + 2 + 4 + 4),  # averages in float32
        ({"weight_averaging": 0.0}, 2 + 4 + 8 + 2 + 4),
        # Of three quarters momenta instead of Adam's two states; its step needs 3 GiB beside them.
        ({"optimizer": "muon"}, 2 + 4 + (8 / 4 + 4 * 3 / 4) + 2 + 4 + 3),
        ({"optimizer": "adamw"}, 2 + 4 + 8 + 2 + 4),
        # Weights; masters and Adam divided; in the step the gradients twice in half precision and
        # once in float32.
        (
            {"zero_stage": 1, "world_size": 4},
            2 + (4 + 8) / 4 + (0.5 + 2 + 0.5 + 0.5),
        ),  # at the backward pass' end
        ({"zero_stage": 2, "world_size": 4}, 2 + (4 + 8) / 4 + (0.5 + 0.5 + 4 / 4)),
        ({"zero_stage": 3, "world_size": 1}, 2 + 4 + 8 + 0.5 + 2 + (2 + 4)),
        (
            {"zero_stage": 3, "world_size": 4},
            2 / 4 + (4 + 8) / 4 + (0.5 + 0.5) + max(2 + 1, 0.5 + 1),
        ),
        # Of the optimizer nothing stays; a buffer as large as the largest parameter is for what
        # goes to the host.
        ({"zero_stage": 2, "offload": "optimizer"}, 2 + 2 / 1024 + 1),
        ({"zero_stage": 3, "offload": "parameters"}, 2 + 0.5 + 1),
        # Activations alone decide.
        ({"micro_batch_size_per_gpu": 30}, 2 + 4 + 8 + 30),
        ({"micro_batch_size_per_gpu": 40, "zero_stage": 2, "world_size": 4}, 2 + 12 / 4 + 40),
    ],
)
def test_the_peak_is_the_sum_of_what_is_there_at_once(settings: dict, gib: float) -> None:
    assert peak_gib(**settings) == pytest.approx(gib)


def test_what_zero_divides_adds_up_over_gpus_to_the_whole() -> None:
    for stage in (1, 2, 3):
        whole = estimate(params(zero_stage=stage), model())
        for gpus in (2, 8):
            part = estimate(params(zero_stage=stage, world_size=gpus), model())
            assert (
                part.optimizer_gib * gpus == pytest.approx(whole.optimizer_gib) == pytest.approx(12)
            )
    assert estimate(params(world_size=8), model()).optimizer_gib == 12


def test_earlier_micro_batches_gradients_wait_for_the_others() -> None:
    settings = {"micro_batch_size_per_gpu": 30, "global_batch_size": 60}
    assert peak_gib(**settings) - peak_gib(micro_batch_size_per_gpu=30) == pytest.approx(
        2 + 2 / 1024
    )
    settings |= {"zero_stage": 2, "world_size": 2, "global_batch_size": 120}
    less = peak_gib(micro_batch_size_per_gpu=30, zero_stage=2, world_size=2)
    assert peak_gib(**settings) - less == pytest.approx(2 / 2)  # this rank's alone


def test_between_two_micro_batches_lies_a_line() -> None:
    activations = [
        estimate(params(micro_batch_size_per_gpu=size), model()).activations_gib
        for size in (1, 2, 3, 5, 10)
    ]
    assert activations == pytest.approx([1, 2, 3, 5, 10])


def test_no_estimate_of_settings_that_were_not_looked_at() -> None:
    assert estimate(params(precision="fp16"), model()) is None
    assert estimate(params(lora_rank=8), model()) is None


def space(**domains) -> SearchSpace:
    given = {
        "global_batch_size": 8,
        "learning_rate": {"low": 1e-5, "high": 1e-3},
        "epochs": 1,
        "precision": "bf16",
    }
    return SearchSpace(Space(**given | domains), world_size=1, on_gpu=True)


def test_needs_are_those_of_the_space_that_can_exist() -> None:
    stages, offloads = {"choices": [0, 1, 3]}, {"choices": ["none", "optimizer", "parameters"]}
    micro_batches = {"choices": [1, 2, 3, 8]}  # 3 does not divide 8
    found = needs(
        space(zero_stage=stages, offload=offloads, micro_batch_size_per_gpu=micro_batches), model()
    )
    assert len(found) == (1 + 2 + 3) * 3
    assert {need.params.micro_batch_size_per_gpu for need in found} == {1, 2, 8}
    smallest = min(need.estimate.peak_gib for need in found)
    fitting = {need.estimate.peak_gib for need in found if need.fits(smallest / 0.9 + 1e-9)}
    assert fitting == {smallest} and not any(need.fits(smallest) for need in found)


def test_averaged_weights_need_as_much_however_far_they_reach() -> None:
    for reach in ({"low": 0.0, "high": 0.5}, {"choices": [0.0, 0.01, 0.1]}):
        found = needs(
            space(zero_stage=0, micro_batch_size_per_gpu=1, weight_averaging=reach), model()
        )
        without, averaging = (need.estimate for need in found)
        assert averaging.optimizer_gib == without.optimizer_gib + 4
        assert averaging.peak_gib == without.peak_gib + 4


def test_an_evaluation_of_averaged_weights_lays_the_models_own_aside() -> None:
    """Where it needs most of all: many examples at once."""
    profile = model().profiles[0]
    step = profile.activations[0].model_copy(update={"evaluation_bytes": 100 * GIB})
    memory = model().model_copy(
        update={"profiles": (profile.model_copy(update={"activations": (step,)}),)}
    )
    peaks = [estimate(params(weight_averaging=reach), memory).peak_gib for reach in (0.0, 0.1)]
    assert peaks[1] == peaks[0] + 4 + 2


def test_more_gpus_need_less_each_only_with_zero() -> None:
    by_gpus = needs_by_gpus(
        space(zero_stage={"choices": [0, 2]}, micro_batch_size_per_gpu=1, global_batch_size=128),
        model(),
    )
    assert list(by_gpus) == [1, 2, 4, 8, 16, 32, 64]

    def peaks(stage: int) -> list[float]:
        return [
            need.estimate.peak_gib
            for needs in by_gpus.values()
            for need in needs
            if need.params.zero_stage == stage
        ]

    assert len(set(peaks(0))) == 1
    assert peaks(2) == sorted(peaks(2), reverse=True) and len(set(peaks(2))) == 7
    assert all(isinstance(need, MemoryNeed) for needs in by_gpus.values() for need in needs)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (
            {"global_batch_size": 64, "micro_batch_size_per_gpu": 16},
            {1: {(16, 4)}, 2: {(16, 2)}, 4: {(16, 1)}},
        ),
        # Without a micro batch, each GPU has its part of the global batch.
        (
            {"global_batch_size": {"choices": [4, 8, 64]}},
            {
                1: {(4, 1), (8, 1), (64, 1)},
                2: {(2, 1), (4, 1), (32, 1)},
                4: {(1, 1), (2, 1), (16, 1)},
                8: {(1, 1), (8, 1)},
                16: {(4, 1)},
                32: {(2, 1)},
                64: {(1, 1)},
            },
        ),
        # Neither end of the range is a multiple of 16.
        (
            {"global_batch_size": {"low": 8, "high": 72}, "micro_batch_size_per_gpu": 16},
            {1: {(16, 1), (16, 2)}, 2: {(16, 1), (16, 2)}, 4: {(16, 1)}},
        ),
        (
            {"global_batch_size": 64, "micro_batch_size_per_gpu": {"low": 3, "high": 40}},
            {
                1: {(4, 16), (32, 2)},
                2: {(4, 8), (16, 2), (32, 1)},
                4: {(4, 4), (8, 2), (16, 1)},
                8: {(4, 2), (8, 1)},
                16: {(4, 1)},
            },
        ),
    ],
    ids=["both-fixed", "no-micro-batch", "range-of-global", "range-of-micro"],
)
def test_each_number_of_gpus_has_the_batches_that_exist_there(
    batches: dict, expected: dict[int, set[tuple[int, int]]]
) -> None:
    by_gpus = needs_by_gpus(space(zero_stage=2, **batches), model())
    found = {
        gpus: {
            (need.params.micro_batch_size_per_gpu, need.params.gradient_accumulation_steps)
            for need in needs
        }
        for gpus, needs in by_gpus.items()
        if needs
    }
    assert found == expected
    assert all(need.params.world_size == gpus for gpus, each in by_gpus.items() for need in each)


def test_completions_of_a_prompt_divide_the_global_batch() -> None:
    batches = {"global_batch_size": {"choices": [6, 8]}, "num_generations": {"choices": [5, 4]}}
    (need,) = needs(space(zero_stage=2, **batches), model())
    assert (need.params.global_batch_size, need.params.num_generations) == (8, 4)


def test_measured_peaks_of_each_rank_stand_beside_the_estimate() -> None:
    settings = {
        "precision": "bf16",
        "zero_stage": 2,
        "world_size": 2,
        "micro_batch_size_per_gpu": 1,
    }
    settings["global_batch_size"] = 2
    peaks = [(20.0, 21.0), (22.0, 20.5), ()]
    records = [trial(n, params=settings, rank_peak_memory_gib=gib) for n, gib in enumerate(peaks)]
    other = trial(3, params={**settings, "zero_stage": 0}, rank_peak_memory_gib=(19.0, 19.0))
    prepared = Prepared(
        fingerprint="f", train_examples=9, eval_examples=9, versions={}, memory=model()
    )
    data = study(
        *records, other, prepared=prepared, raw={"launch": {"kind": "local", "gpus": [0, 1]}}
    )
    by_stage = {row.params.zero_stage: row for row in measured_memory(data)}
    assert by_stage[2].trials == (0, 1) and by_stage[2].measured_gib == (22.0, 21.0)
    expected = estimate(TrainingParams.of(records[0].params), model()).peak_gib
    assert by_stage[2].estimate.peak_gib == expected and by_stage[2].ratio == expected / 22
    assert by_stage[0].trials == (3,)


def test_a_cpus_memory_is_not_compared() -> None:
    prepared = Prepared(
        fingerprint="f", train_examples=9, eval_examples=9, versions={}, memory=model()
    )
    record = trial(0, params={"precision": "bf16"}, rank_peak_memory_gib=(3.0,))
    on_cpu = {"launch": {"kind": "local", "gpus": []}}
    assert measured_memory(study(record, prepared=prepared, raw=on_cpu)) is None
    assert measured_memory(study(record)) is None
