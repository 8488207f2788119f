"""Which settings are measured by a few steps before a trial, and what that finds."""

import math
from collections.abc import Callable

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import (
    Durations,
    Energy,
    Failure,
    Kernels,
    QualityResult,
    Stage,
    StageCost,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.search.candidates import Candidates
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.observation import Observation, of_probe
from carbonopt.search.probe_plan import Probing, cheapest, failed_by, worth_probing
from carbonopt.search.sampler import CarbonSampler

SPACE = {
    "global_batch_size": CategoricalDistribution((16, 32, 64)),
    "micro_batch_size_per_gpu": CategoricalDistribution((2, 4, 8, 16, 32, 64)),
    "learning_rate": FloatDistribution(1e-4, 1e-2, log=True),
    "epochs": CategoricalDistribution((1, 2, 4)),
    "zero_stage": CategoricalDistribution((0, 1, 2, 3)),
    "offload": CategoricalDistribution(("none", "optimizer")),
    "gradient_checkpointing": CategoricalDistribution((False, True)),
}
CHOSEN = {
    "global_batch_size": 64, "micro_batch_size_per_gpu": 8, "learning_rate": 1.1e-3, "epochs": 2, "zero_stage": 1,
    "offload": "none", "gradient_checkpointing": False,
}  # fmt: skip
SEQUENCES = 12_800


def valid(values: dict) -> bool:
    fits = values["global_batch_size"] % values["micro_batch_size_per_gpu"] == 0
    return fits and not (values["offload"] == "optimizer" and values["zero_stage"] == 0)


def step_kwh(values: dict) -> float:
    """A large micro batch is cheap, partitioning, offload and checkpointing are dear: as is
    expected.
    """
    dear = (1, 1.15, 1.2, 1.5)[values["zero_stage"]] * (
        1.6 if values["offload"] == "optimizer" else 1.0
    )
    dear *= 1.3 if values["gradient_checkpointing"] else 1.0
    return (
        1e-6 * values["global_batch_size"] * (0.5 + 2.0 / values["micro_batch_size_per_gpu"]) * dear
    )


def contrary_kwh(values: dict) -> float:
    """Nothing is as expected."""
    return 1e-12 / step_kwh(values)


def memory_gib(values: dict) -> float:
    return 4.0 + 1.0 * values["micro_batch_size_per_gpu"] / (
        3.0 if values["gradient_checkpointing"] else 1.0
    )


def probed(
    number: int, values: dict, capacity_gib: float, kwh: Callable[[dict], float]
) -> Observation:
    fits = memory_gib(values) <= capacity_gib
    return Observation(
        number,
        values,
        (),
        SEQUENCES * 2 // values["global_batch_size"],
        cost_per_step=kwh(values) if fits else None,
        first_cost=0.0 if fits else None,
        out_of_memory=not fits,
        peak_memory_gib=memory_gib(values) if fits else None,
        probe=True,
    )


SAME = Candidates(SPACE, valid).alike(CHOSEN, ())


def searched(
    probing: Probing,
    chance: float = 1.0,
    capacity_gib: float | None = None,
    seed: int = 0,
    kwh: Callable[[dict], float] = step_kwh,
) -> tuple[list[dict], dict]:
    """What was probed, one after the other, and the settings that were chosen then."""
    known: list[Observation] = []
    while True:
        knowledge = Knowledge(PERPLEXITY, SPACE, known, capacity_gib)
        cost = probing.cost if known else None
        rng = np.random.default_rng([seed, len(known)])
        index = worth_probing(SAME, knowledge, Probing(probing.reuses, cost), chance, rng)
        if index is None:
            return [trial.params for trial in known], SAME[cheapest(SAME, knowledge)]
        assert SAME[index] not in [trial.params for trial in known]
        known.append(probed(len(known), SAME[index], capacity_gib or math.inf, kwh))


def test_alike_are_those_whose_quality_is_the_same() -> None:
    assert SAME[0] == CHOSEN and len(SAME) == 6 * (1 + 2 * 3) * 2
    assert {
        (values["global_batch_size"], values["learning_rate"], values["epochs"]) for values in SAME
    } == {(64, 1.1e-3, 2)}
    tried = tuple(SAME[5].values())
    assert SAME[5] not in Candidates(SPACE, valid).alike(CHOSEN, (tried,))


EXPECTED = {
    **CHOSEN,
    "micro_batch_size_per_gpu": 64,
    "zero_stage": 0,
}  # to be the cheapest, before anything is known


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kwh", "most"), [(step_kwh, 6), (contrary_kwh, 15)])
def test_a_few_probes_find_settings_close_to_the_cheapest(
    kwh: Callable[[dict], float], most: int, seed: int
) -> None:
    run_kwh = SEQUENCES * 2 / 64 * kwh(CHOSEN)
    probes, settings = searched(Probing(10, run_kwh / 20), seed=seed, kwh=kwh)
    assert probes[0] == EXPECTED
    assert kwh(settings) <= 1.05 * min(map(kwh, SAME))
    assert len(probes) <= most, "of 84"
    saved = 11 * (kwh(CHOSEN) - kwh(settings)) * SEQUENCES * 2 / 64
    assert saved > 2 * len(probes) * run_kwh / 20


def test_where_probes_cost_more_than_they_can_save_none_is_made_but_the_first() -> None:
    run_kwh = SEQUENCES * 2 / 64 * step_kwh(CHOSEN)
    assert searched(Probing(0, run_kwh)) == ([EXPECTED], EXPECTED)
    assert searched(Probing(100, run_kwh), chance=0.0) == (
        [EXPECTED],
        EXPECTED,
    ), "it won't be run again"


def test_what_does_not_fit_is_found_out_by_probes_and_not_chosen() -> None:
    probes, settings = searched(Probing(100, 1e-7), capacity_gib=22.0)
    assert memory_gib(settings) <= 22.0
    fitting = [values for values in SAME if memory_gib(values) <= 22.0]
    assert step_kwh(settings) <= 1.02 * min(map(step_kwh, fitting))
    assert sum(memory_gib(values) > 22.0 for values in probes) <= 4


def record(**changes: object) -> TrialRecord:
    values = {
        "trial": 2,
        "state": TrialState.PRUNED,
        "stop_reason": StopReason.PROBE,
        "seed": 0,
        "params": TrialParams(**CHOSEN),
        "quality": QualityResult.named(PERPLEXITY),
        "energy_kwh": Energy(train=5.0, setup=1.0, eval=0.0, total=6.0),
        "duration_s": Durations(train=5, setup=1, eval=0, total=6),
        "stages": {
            Stage.COMPILE: StageCost(duration_s=1, energy_kwh=1.0),
            Stage.STEPS: StageCost(duration_s=3, energy_kwh=3.0),
            Stage.GENERATION: StageCost(duration_s=1, energy_kwh=1.0),
        },
        "kernels": Kernels.LOADED,
        "steps_done": 21,
        "total_steps": 400,
        "peak_memory_gib": 9.0,
    }
    return TrialRecord(**{**values, **changes})


def test_a_probe_tells_steps_first_step_and_memory() -> None:
    taught = of_probe(record())
    assert (taught.cost_per_step, taught.first_cost, taught.peak_memory_gib) == (0.2, 0.8, 9.0)
    assert taught.cost is None and taught.overhead_cost is None and not taught.broken
    out = of_probe(
        record(state=TrialState.INFEASIBLE, stop_reason=None, stages=None, steps_done=None)
    )
    assert out.out_of_memory and not out.broken and out.cost_per_step is None


def test_a_probe_of_one_step_tells_what_compiling_took_and_nothing_of_the_others() -> None:
    stages = {Stage.COMPILE: StageCost(duration_s=1, energy_kwh=5.0), Stage.STEPS: StageCost()}
    taught = of_probe(record(steps_done=1, stages=stages, kernels=Kernels.COMPILED))
    assert (taught.cost_per_step, taught.first_cost, taught.peak_memory_gib) == (None, 5.0, 9.0)
    whole = record(steps_done=1, stages=stages, state=TrialState.COMPLETE, stop_reason=None)
    assert whole.first_step_excess_kwh is None, "a training of one step is no compiling alone"


def test_settings_whose_probe_failed_are_left_out_and_an_interrupted_one_says_nothing() -> None:
    failure = Failure(kind="crash", text="no such kernel")
    failed = of_probe(record(state=TrialState.FAILED, stop_reason=None, failure=failure))
    assert failed_by(CHOSEN, [failed])
    assert failed_by({**CHOSEN, "learning_rate": 5e-3, "epochs": 4}, [failed])
    assert not failed_by({**CHOSEN, "zero_stage": 2}, [failed])
    for ended in (
        {"state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED, "steps_done": 1},
        {"stop_reason": StopReason.BUDGET},
        {"state": TrialState.RUNNING, "stop_reason": None},
    ):
        assert of_probe(record(**ended)) is None, "it is made again"


def test_a_run_pays_for_loading_kernels_and_the_study_for_compiling_them() -> None:
    space = {**SPACE, "torch_compile": CategoricalDistribution((False, True))}
    plain, compiled = {**CHOSEN, "torch_compile": False}, {**CHOSEN, "torch_compile": True}
    cold = Observation(
        0,
        compiled,
        (),
        400,
        cost_per_step=1.0,
        first_cost=90.0,
        kernels=Kernels.COMPILED,
        probe=True,
    )
    warm = Observation(
        1, compiled, (), 400, cost_per_step=1.0, first_cost=7.0, kernels=Kernels.LOADED
    )
    eager = Observation(2, plain, (), 400, cost_per_step=2.0, first_cost=0.5)
    other = {**compiled, "micro_batch_size_per_gpu": 16}
    knowledge = Knowledge(PERPLEXITY, space, [cold, warm, eager])
    np.testing.assert_allclose(
        knowledge.run_costs([plain, compiled, other], np.array([2.0, 1.0, 1.0])),
        [800.5, 407.0, 407.0],
    )
    np.testing.assert_allclose(knowledge.compile_costs([plain, compiled, other]), [0.0, 0.0, 90.0])
    draws = np.array([[2.0, 3.0], [1.0, 1.5]])
    np.testing.assert_allclose(
        knowledge.run_costs([plain, compiled], draws), [[800.5, 1200.5], [407.0, 607.0]]
    )


def test_a_probe_is_not_taken_for_the_trial_of_its_number() -> None:
    """It would be the best trial, at the cost of the candidate that it was made for, and end the
    search.
    """
    space = {
        "global_batch_size": CategoricalDistribution((16, 64)),
        "epochs": CategoricalDistribution((1, 4)),
    }
    sampler = CarbonSampler("perplexity", 10.0, search_space=space)
    study = optuna.create_study(directions=["minimize", "minimize"])
    study.add_trial(
        optuna.create_trial(
            params={"global_batch_size": 64, "epochs": 4},
            distributions=space,
            values=[1.0, 5.0],
            user_attrs={"total_steps": 400},
        )
    )
    cheap = {"global_batch_size": 64, "epochs": 1}
    probe = Observation(0, cheap, (), 100, cost_per_step=1 / 400, first_cost=0.0, probe=True)
    plan = sampler.plan(study.trials, space, 1, probes=[probe])
    assert plan.meeting == {0} and plan.values == cheap
