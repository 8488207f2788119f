"""Model of what whole trainings cost.

The cost is the number of steps times the cost of one, plus what the first step costs beyond a mean
one.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from carbonopt.core.arrays import Array
from carbonopt.core.trial import Kernels
from carbonopt.search.models.costs import SettingModel
from carbonopt.search.models.features import Configurations, SpaceEncoder, possible_steps_laws
from carbonopt.search.observation import AnyValues, Observation

# Probability that steps follow one of the other laws that the trials leave possible: a script may
# make as many steps whatever its batch.
_OTHER_LAW = 0.1


@dataclass(frozen=True)
class RunCosts:
    """The model of the costs of configurations' trainings, and of how certain they are."""

    observations: Sequence[Observation]
    encoder: SpaceEncoder
    step_costs: SettingModel

    def means(self, configurations: Configurations, step_costs: Array) -> Array:
        """Return the costs of trainings, given the cost of one step of each.

        They include the mean excess of the first steps of trials whose kernels had been compiled
        before.

        Args:
            step_costs: (n,) or (n, draws); the result has the same shape.
        """
        steps = np.array([self.encoder.steps(values) for values in configurations])
        return np.asarray((steps * step_costs.T + first_costs(self._warm, configurations)).T)

    def draws(
        self,
        configurations: Configurations,
        known: Sequence[Observation],
        count: int,
        rng: Generator,
    ) -> tuple[Array, Array]:
        """Draw the costs of configurations, (n, count), and of trials, (known, count), jointly.

        Whatever changes all costs, such as a first trial beside other work, changes both, so that
        only the difference between them decides which is cheaper. The excess of a trial's first
        step is its own measurement; the excess of a configuration's is in each draw that of some
        trial.
        """
        both = [*configurations, *(trial.params for trial in known)]
        step_costs = np.exp(
            self.step_costs.sample_doubting(self.encoder.system_rows(both), count, rng)
        )
        new, old = np.split(self._drawn_steps(both, count, rng) * step_costs, [len(configurations)])
        own_excess = np.array([trial.first_cost or 0.0 for trial in known])
        return new + self._drawn_first_costs(configurations, count, rng), old + own_excess[:, None]

    def _drawn_steps(self, configurations: Configurations, count: int, rng: Generator) -> Array:
        """Draw the numbers of steps, (n, count), by one of the possible laws in each draw."""
        likeliest = self.encoder.sequences, self.encoder.follows
        others = [law for law in possible_steps_laws(self.observations) if law[1] != likeliest[1]]
        by_law = []
        for sequences, follows in (likeliest, *others):
            encoder = replace(self.encoder, sequences=sequences, follows=follows)
            by_law.append([encoder.steps(values) for values in configurations])
        which = np.zeros(count, dtype=int)
        if others:
            which = np.where(
                rng.random(count) < _OTHER_LAW, rng.integers(1, 1 + len(others), count), 0
            )
        return np.array(by_law).T[:, which]

    def _drawn_first_costs(
        self, configurations: Configurations, count: int, rng: Generator
    ) -> Array:
        """Draw the excess of each first step, (n, count).

        In each draw, all configurations that compile alike have the excess of the same trial.
        """
        place, absent, nothing = rng.random(count), rng.random(count), np.zeros(count)
        drawn = {}
        for kind, costs in _measured_first_costs(self._warm).items():
            of_some_trial = np.array(costs)[(place * len(costs)).astype(int)]
            # What happened in one trial may not happen in the next; what happened in ten will.
            drawn[kind] = np.where(absent < 1 / (1 + len(costs) ** 2), 0.0, of_some_trial)
        return np.array([drawn.get(_compiling(values), nothing) for values in configurations])

    @property
    def _warm(self) -> list[Observation]:
        return [trial for trial in self.observations if trial.kernels is not Kernels.COMPILED]


def first_costs(trials: Iterable[Observation], configurations: Configurations) -> Array:
    """Return, for each configuration, the mean first-step excess of trials that compile as it does.

    It is 0 where no such trial measured it.
    """
    means = {kind: sum(costs) / len(costs) for kind, costs in _measured_first_costs(trials).items()}
    return np.array([means.get(_compiling(values), 0.0) for values in configurations])


def _measured_first_costs(trials: Iterable[Observation]) -> dict[tuple[Any, ...], list[float]]:
    measured = defaultdict[tuple[Any, ...], list[float]](list)
    for trial in trials:
        if trial.first_cost is not None:
            measured[_compiling(trial.params)].append(trial.first_cost)
    return measured


def _compiling(values: AnyValues) -> tuple[Any, ...]:
    """Return the values that decide whether anything is compiled, and how much.

    They are fewer than those that kernels depend on (`affecting("kernels")`): another batch size
    compiles anew, but at about the same cost.
    """
    return tuple(
        values.get(name) for name in ("torch_compile", "attention_implementation", "output_layer")
    )
