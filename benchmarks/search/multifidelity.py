"""Rivals of `foreign.py` that stop or pause trainings by losses at a part of their steps.

`smac` needs `pip install "smac>=2.4"`, `mobster` the last Syne Tune that has it: `pip install
autograd dill sortedcontainers`, then `pip install --no-deps syne-tune==0.13.0` (it asks for a numpy
below 1.27, but runs with later ones).

Both minimize a single number, and choose among the table's runs themselves: they propose nothing
that was not recorded, and don't know what a run will cost. What they are told of a run is

- its energy as a share of the dearest run's, where its loss meets the target;
- otherwise 1 + the nats by which it misses the target, which is more than any energy;
- where it diverged, the worst miss that they were told before;
- where the cap has ended it, its energy alone, the least that it can have cost.

Their resource is a run's steps, in ninths; an evaluation stands for the last rung that it has
passed, as for `asha`. What has been trained is kept: a run that goes on is charged for its further
steps.
"""

import contextlib
import io
import logging
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from listed import START, Curve, Run, Step, Table, Trial, played
from optuna.distributions import CategoricalDistribution
from threadpoolctl import threadpool_limits

REDUCTION = 3
RUNGS = (1, 3, 9)  # ninths of a run's steps
FIRST_WORST = 2.0  # told of a run that diverged while nothing else is known: a nat above the target


class Told:
    """What a library is told of a table's runs."""

    def __init__(self, table: Table, target_nll: float) -> None:
        self._target_nll = target_nll
        self._dearest_j = max(run.energy_j for run in table.runs)
        self.worst = 0.0  # of the misses

    def energy(self, run: Run) -> float:
        return run.energy_j / self._dearest_j

    def cost(self, run: Run, nll: float) -> float:
        """Positive, by the loss that a run has come to."""
        if not math.isfinite(nll):
            return self.worst or FIRST_WORST
        missing = nll - self._target_nll
        if missing <= 0:
            return self.energy(run)
        self.worst = max(self.worst, 1 + missing)
        return 1 + missing


def rung(run: Run, curve: Curve) -> int:
    """The last one that a run has passed; 0: none."""
    return max((at for at in RUNGS if at * run.total_steps <= RUNGS[-1] * curve[-1][0]), default=0)


def smac(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """SMAC3's MultiFidelityFacade (Lindauer et al. 2022, arXiv 2109.09831): the expected
    improvement by a random forest, in brackets of Hyperband, each of which pauses its runs at a
    rung until all of them have come there. Its settings are its own, but for three: it takes the
    best of the runs that are left, instead of searching around the best ones; its random proposals
    are of them, too; and it begins with random runs, as many as its first bracket has, or START. A
    table whose losses are all final has brackets of one whole run. What is left where no bracket
    can be filled is run in random order.

    Of a run that the cap has ended, its energy is told at the last rung alone, whose runs the
    forest learns from. At a lower one it would win for its energy; there it is told as timed out,
    which loses.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _smac(table, target_nll, seed, folder)


def _smac(table: Table, target_nll: float, seed: int, folder: str) -> Iterator[Step]:
    from smac.main.exceptions import ConfigurationSpaceExhaustedException
    from smac.runhistory import StatusType, TrialValue

    facade, runs = _facade(table, seed, folder)
    told = Told(table, target_nll)
    begun: dict[int, Trial] = {}  # by the run's id, how far it has come
    paused: dict[int, Trial] = {}
    resumed = False
    cap_j = math.inf
    while True:
        began = time.perf_counter()
        try:
            info = facade.ask()
        except ConfigurationSpaceExhaustedException:
            break
        seconds = time.perf_counter() - began
        run, goal = runs[info.config], round(info.budget)
        before = begun.get(id(run))
        if before is None and resumed:  # the bracket is over, with all that it has paused
            yield from _dropped(paused)
        resumed = before is not None
        trial = before
        if before is None or (before.state == "paused" and rung(run, before.curve) < goal):
            paused.pop(id(run), None)
            trial = _played_to(run, goal, cap_j)
            begun[id(run)] = trial
            paid_j = before.spent_j if before else 0.0
            cap_j = min(cap_j, trial.feasible_j(target_nll))
            if trial.state == "paused":
                paused[id(run)] = trial
            yield replace(trial, spent_j=max(trial.spent_j - paid_j, 0.0)), seconds
        assert trial is not None
        if trial.state == "cap" and goal == RUNGS[-1]:
            value = TrialValue(cost=told.energy(run))
        elif trial.state == "cap":
            value = TrialValue(cost=FIRST_WORST + told.worst, status=StatusType.TIMEOUT)
        else:
            value = TrialValue(cost=told.cost(run, trial.curve[-1][1]))
        facade.tell(info, value, save=False)
    yield from _dropped(paused)
    rest = [run for run in table.runs if id(run) not in begun]
    for index in np.random.default_rng(seed).permutation(len(rest)):
        trial = _played_to(rest[index], RUNGS[-1], cap_j)
        cap_j = min(cap_j, trial.feasible_j(target_nll))
        yield trial, 0.0


def _dropped(paused: dict[int, Trial]) -> Iterator[Step]:
    for trial in paused.values():
        yield replace(trial, spent_j=0.0, state="target"), 0.0
    paused.clear()


def _played_to(run: Run, goal: int, cap_j: float) -> Trial:
    """A run until its first evaluation at a rung or after it."""
    trial = played(run, cap_j, lambda curve: rung(run, curve) >= goal)
    return replace(trial, state="paused") if trial.state == "target" else trial


def _facade(table: Table, seed: int, folder: str) -> tuple[Any, dict[Any, Run]]:
    """SMAC's optimizer, and the run of each of its configurations."""
    import ConfigSpace
    from smac import MultiFidelityFacade, Scenario
    from smac.acquisition.maximizer import AbstractAcquisitionMaximizer
    from smac.main.exceptions import ConfigurationSpaceExhaustedException

    threadpool_limits(1)
    logging.getLogger("smac").setLevel(logging.ERROR)
    space = ConfigSpace.ConfigurationSpace(seed=seed)
    for name, distribution in table.distributions.items():
        if isinstance(distribution, CategoricalDistribution):
            space.add(ConfigSpace.CategoricalHyperparameter(name, distribution.choices))
        else:
            space.add(ConfigSpace.UniformFloatHyperparameter(name, 0.0, 1.0))
    runs = {
        ConfigSpace.Configuration(space, values=table.scaled(run.params)): run for run in table.runs
    }
    assert len(runs) == len(table.runs)
    in_parts = any(rung(run, run.curve[:1]) < RUNGS[-1] for run in table.runs)
    first = max(START, REDUCTION ** (len(RUNGS) - 1)) if in_parts else START
    chance = np.random.default_rng(seed)
    order = chance.permutation(len(runs))
    configurations = list(runs)
    left = {configurations[index]: None for index in order[first:]}  # a set that keeps its order

    class OfTheLeft(AbstractAcquisitionMaximizer):
        """The runs that are left, the best first, with random ones as often as SMAC wants."""

        def maximize(
            self, previous_configs: Any, n_points: Any = None, random_design: Any = None
        ) -> Iterator[Any]:
            ranked = iter([config for _, config in self._maximize([], 0)] if left else [])
            for iteration in range(1, len(left) + 1):
                if random_design is not None and random_design.check(iteration):
                    config = list(left)[int(chance.integers(len(left)))]
                else:
                    config = next(config for config in ranked if config in left)
                del left[config]
                yield config
            raise ConfigurationSpaceExhaustedException  # or SMAC would draw unrecorded ones

        def _maximize(self, previous_configs: Any, n_points: int) -> list[tuple[float, Any]]:
            return self._sort_by_acquisition_value(list(left))

    scenario = Scenario(
        space,
        output_directory=folder,
        deterministic=True,
        n_trials=len(RUNGS) * len(runs),
        min_budget=RUNGS[0] if in_parts else RUNGS[-1],
        max_budget=RUNGS[-1],
        seed=seed,
    )
    facade = MultiFidelityFacade(
        scenario,
        acquisition_maximizer=OfTheLeft(space, seed=seed),
        initial_design=MultiFidelityFacade.get_initial_design(
            scenario,
            n_configs=0,
            additional_configs=[configurations[index] for index in order[:first]],
        ),
        intensifier=MultiFidelityFacade.get_intensifier(scenario, eta=REDUCTION),
        logging_level=False,
        overwrite=True,
    )
    return facade, runs


def mobster(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """MOBSTER (Klein et al. 2020, arXiv 2003.10865) by Syne Tune: asynchronous successive halving,
    whose runs are proposed by the expected improvement by a Gaussian process of all rungs. Stopping
    variant, one bracket, as `asha`. Its settings are its own, but for three: it takes the best of
    all the runs that are left, instead of searching around the best of 250; its random runs are
    START; and it is told logarithms, so that energies count as for TPE.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what else could be installed
        from syne_tune.backend.trial_status import Trial as Training
        from syne_tune.optimizer.scheduler import SchedulerDecision

    scheduler = _scheduler(table, seed)
    told = Told(table, target_nll)
    runs = {_key(table.scaled(run.params)): run for run in table.runs}
    cap_j = math.inf
    for number in range(len(table.runs)):
        began = time.perf_counter()
        suggestion = scheduler.suggest(number)
        seconds = time.perf_counter() - began
        run = runs[_key({name: suggestion.config[name] for name in table.distributions})]
        training = Training(number, suggestion.config, None)
        scheduler.on_trial_add(training)
        reached = [0]

        def report(
            at: int, cost: float, training: Any = training, reached: list[int] = reached
        ) -> bool:
            reached.append(at)
            result = {"log_cost": math.log(cost), "rung": at}
            return bool(scheduler.on_trial_result(training, result) == SchedulerDecision.STOP)

        def prunes(curve: Curve, run: Run = run, reached: list[int] = reached) -> bool:
            at = rung(run, curve)
            return at > reached[-1] and report(at, told.cost(run, curve[-1][1]))

        ended = played(run, cap_j, prunes)
        if ended.state == "target":
            scheduler.on_trial_remove(training)
        else:
            at, cost = RUNGS[-1], told.energy(run)
            if ended.state == "diverged":
                next_rung = min(after for after in RUNGS if after > reached[-1])
                at = max(rung(run, ended.curve), next_rung)
            if ended.state != "cap":
                cost = told.cost(run, ended.curve[-1][1])
            report(at, cost)
            scheduler.on_trial_complete(training, {"log_cost": math.log(cost), "rung": at})
        cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, seconds


def _key(scaled: dict[str, Any]) -> tuple[Any, ...]:
    """Syne Tune tells runs apart by so many digits."""
    return tuple(f"{value:.7e}" if isinstance(value, float) else value for value in scaled.values())


def _scheduler(table: Table, seed: int) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        from syne_tune import config_space
        from syne_tune.optimizer.baselines import MOBSTER

    threadpool_limits(1)
    logging.getLogger("syne_tune").setLevel(logging.ERROR)

    dimensions = {
        name: config_space.choice(list(distribution.choices))
        if isinstance(distribution, CategoricalDistribution)
        else config_space.uniform(0.0, 1.0)
        for name, distribution in table.distributions.items()
    }
    return MOBSTER(
        dimensions,
        metric="log_cost",
        mode="min",
        resource_attr="rung",
        max_t=RUNGS[-1],
        grace_period=RUNGS[0],
        reduction_factor=REDUCTION,
        points_to_evaluate=[],
        random_seed=seed,
        search_options={
            "debug_log": False,
            "num_init_random": START,
            "num_init_candidates": len(table.runs),
            "initial_scoring": "acq_func",
            "restrict_configurations": [table.scaled(run.params) for run in table.runs],
        },
    )
