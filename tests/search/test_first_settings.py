"""The settings that come first by the estimate of memory: the cheapest that fit."""

import math
from functools import partial

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution

from carbonopt.analysis.gpu_memory import USABLE_SHARE, EstimatedNeeds, estimate
from carbonopt.core.dimensions import TrainingParams
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.values import Scalar
from carbonopt.search.first_settings import cheapest_that_fits
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.costs import chance_by_estimate
from carbonopt.search.observation import Observation
from carbonopt.search.probe_plan import cheapest
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.model_memory import PROFILED, Activations, MemoryProfile, ModelMemory, Moment
from carbonopt.spec.space_settings import Space

GIB = 2**30
CHOICES: dict[str, tuple[Scalar, ...]] = {
    "global_batch_size": (32, 64),
    "micro_batch_size_per_gpu": (2, 4, 8, 16),
    "zero_stage": (0, 1, 2, 3),
    "gradient_checkpointing": (False, True),
}
START = {
    "global_batch_size": 64,
    "micro_batch_size_per_gpu": 2,
    "zero_stage": 3,
    "gradient_checkpointing": True,
}


def memory() -> ModelMemory:
    """Of 6 · 2^30 parameters in bf16, whose activations take 2 GiB for a sequence, or half a GiB
    with checkpointing.
    """

    def profile(checkpointing: bool) -> MemoryProfile:
        each = GIB // 2 if checkpointing else 2 * GIB
        settings = {"precision": "bf16", "gradient_checkpointing": checkpointing}
        return MemoryProfile(
            settings=dict.fromkeys(PROFILED) | settings,
            parameters=6 * GIB,
            trained_parameters=6 * GIB,
            largest_parameter=2**27,
            buffer_bytes=0,
            activations=tuple(
                Activations(
                    micro_batch_size=size,
                    moments=(Moment(activation_bytes=size * each, gradient_elements=0),),
                    evaluation_bytes=GIB,
                )
                for size in (1, 16)
            ),
        )

    return ModelMemory(
        profiles=(profile(False), profile(True)),
        optimizer_bytes_per_parameter=8.0,
        optimizer_step_bytes_per_parameter=0.0,
    )


def space() -> SearchSpace:
    domains = {name: {"choices": values} for name, values in CHOICES.items()}
    fixed = {"learning_rate": 1e-4, "epochs": 1, "precision": "bf16"}
    return SearchSpace(Space.model_validate({**domains, **fixed}), 2, on_gpu=True)


def of_start(gpu_memory_gib: float) -> tuple[Scalar, ...]:
    chosen = cheapest_that_fits(space(), START, memory(), gpu_memory_gib)
    assert chosen["global_batch_size"] == 64
    assert chosen.keys() == START.keys()
    return tuple(
        chosen[name]
        for name in ("zero_stage", "micro_batch_size_per_gpu", "gradient_checkpointing")
    )


def need_gib(**settings: Scalar) -> float:
    values = {**START, **settings}
    need = EstimatedNeeds(memory())(space().params(values).model_dump(exclude_none=True))
    assert need is not None
    return need


@pytest.mark.parametrize(
    ("gpu_memory_gib", "expected"),
    [
        (1000, (0, 16, False)),  # all fits: nothing is traded for memory
        (141, (1, 16, False)),  # the states are 72 GiB, which two GPUs share
        (81, (2, 8, False)),  # a larger micro batch saves more than stage 2 costs
        (75, (3, 8, False)),
        (20, (3, 8, False)),  # nothing fits: what needs least, and costs least of that
    ],
)
def test_a_chosen_space_starts_with_the_cheapest_settings_that_fit(
    gpu_memory_gib: float, expected: tuple[Scalar, ...]
) -> None:
    """The order follows from the estimate and from what settings are expected to cost."""
    assert of_start(gpu_memory_gib) == expected
    stage, micro, checkpointing = expected
    need = need_gib(
        zero_stage=stage, micro_batch_size_per_gpu=micro, gradient_checkpointing=checkpointing
    )
    assert (need <= gpu_memory_gib) is (gpu_memory_gib > 20)


def test_a_need_has_the_margin_of_the_table_of_check() -> None:
    params = space().params({**START}).model_dump(exclude_none=True)
    found = estimate(TrainingParams(**params), memory())
    assert found is not None
    assert need_gib() == pytest.approx(found.peak_gib / USABLE_SHARE)


def test_without_an_estimate_the_start_stays() -> None:
    unknown = memory().model_copy(update={"profiles": ()})
    assert cheapest_that_fits(space(), START, unknown, 141.0) == START


def known(*observations: Observation, gpu_memory_gib: float = 141.0) -> Knowledge:
    distributions = {name: CategoricalDistribution(values) for name, values in CHOICES.items()}
    needs = EstimatedNeeds(memory())
    fixed = {"learning_rate": 1e-4, "epochs": 1, "precision": "bf16", "world_size": 2}
    return Knowledge(
        PERPLEXITY,
        distributions,
        observations,
        memory_gib=gpu_memory_gib,
        estimated_gib=lambda values: needs({**fixed, **values}),
    )


def settings(**changes: Scalar) -> dict[str, Scalar]:
    return {**START, **changes}


probe = partial(Observation, number=0, curve=(), total_steps=8, probe=True)


def test_the_first_probe_is_of_the_cheapest_settings_that_fit_by_the_estimate() -> None:
    alternatives = [
        settings(
            zero_stage=stage, micro_batch_size_per_gpu=micro, gradient_checkpointing=checkpointing
        )
        for stage in (0, 1, 2, 3)
        for micro in (2, 4, 8, 16)
        for checkpointing in (False, True)
    ]
    chosen = alternatives[cheapest(alternatives, known())]
    assert (chosen["zero_stage"], chosen["micro_batch_size_per_gpu"]) == (1, 16)
    assert not chosen["gradient_checkpointing"]
    chances = known().chances_to_fit(alternatives)
    for values, chance in zip(alternatives, chances, strict=True):
        assert bool(chance == 1.0) is (need_gib(**values) <= 141)


def test_what_a_trial_has_shown_counts_more_than_the_estimate() -> None:
    small, large = settings(zero_stage=0, micro_batch_size_per_gpu=2), settings(zero_stage=1)
    assert need_gib(**small) > 100
    fitted = known(probe(params=small, peak_memory_gib=90.0), gpu_memory_gib=100)
    (chance,) = fitted.chances_to_fit([small])
    assert chance > 0.9
    ran_out = known(probe(params=large, out_of_memory=True), gpu_memory_gib=141)
    assert need_gib(**large) < 141
    (chance,) = ran_out.chances_to_fit([large])
    assert chance < 0.5


def test_trials_correct_the_estimates_of_others() -> None:
    estimates = np.array([50.0, 90.0, 99.0, 120.0])
    before = chance_by_estimate(estimates, np.array([]), [], 100.0)
    assert before[:3].tolist() == [1, 1, 1] and before[3] < 1e-3
    lower = chance_by_estimate(estimates, np.array([50.0]), [40.0], 100.0)
    assert 0.4 < lower[3] < 0.5  # 120 · 0.8 is 96, and one standard deviation more is 101
    higher = chance_by_estimate(estimates, np.array([50.0]), [60.0], 100.0)
    assert higher[0] == 1 and higher[1] < 0.01
    ran_out = chance_by_estimate(estimates, np.array([90.0]), [None], 100.0)
    assert ran_out[0] == 1 and ran_out[1] < 0.2 and ran_out[2] < ran_out[1]
    assert math.isclose(ran_out[1], 0.1587, abs_tol=1e-3)  # one standard deviation
