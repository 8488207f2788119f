"""Choose which settings to measure by a probe before the next trial.

Settings that leave the quality alone differ only in what a step costs and in whether they fit in
memory, and a few steps show both.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from carbonopt.core.arrays import Array, Mask
from carbonopt.core.dimensions import DIMENSIONS, Affects, StatedAffects, affecting
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.features import Configurations
from carbonopt.search.observation import AnyValues, Observation
from carbonopt.search.proposal import DRAWS

_MEASURED: tuple[Affects, ...] = ("cost", "memory")  # what a probe measures
# Standard deviation of ln(cost) that a choice adds with which nothing has been measured yet. The
# model of step costs would take it to be like the others once those are alike.
_UNSEEN_CHOICE = 0.1
_LEAST_CHANCE_TO_FIT = 0.1  # below this, a probe would most likely just run out of memory


@dataclass(frozen=True)
class Probing:
    """A study's knowledge of its probes."""

    reuses: int  # later runs of the recommendation, in which a cheaper step pays off
    # mean cost of a probe that compiles nothing, in the study's unit; None: no probe has finished
    cost: float | None


def cheapest(configurations: Configurations, knowledge: Knowledge) -> int:
    """Return the index of the configuration whose training is expected to cost least.

    Only configurations that are likely to fit in memory are considered.
    """
    log_cost, _ = knowledge.step_costs.predict(knowledge.encoder.system_rows(configurations))
    costs = knowledge.run_costs(configurations, np.exp(log_cost))
    return int(np.where(knowledge.likely_to_fit(configurations), costs, np.inf).argmin())


def worth_probing(
    configurations: Configurations,
    knowledge: Knowledge,
    probing: Probing,
    chance: float,
    rng: Generator,
) -> int | None:
    """Return the index of the configuration whose probe is expected to save most.

    The configurations all reach the same quality, so the trial takes the one that seems cheapest.
    The result is None if no probe is expected to save more than it costs.

    A probe can show that its configuration is cheaper than the one that seems cheapest now. The
    expected difference is what the probe saves in one training (the knowledge gradient of Frazier,
    Powell and Dayanik 2008, A Knowledge-Gradient Policy for Sequential Information Collection, for
    one setting at a time). It is saved in the trial, and again in each run of the recommendation,
    which the trial becomes with probability `chance`.
    """
    if len(configurations) < 2:
        return None
    now, unknown = cheapest(configurations, knowledge), _unmeasured(configurations, knowledge)
    if probing.cost is None or not knowledge.step_costs.known:
        # There is nothing to weigh with: the first probe measures what a probe and a step cost.
        return now if unknown[now] else None
    log_costs = knowledge.step_costs.sample(
        knowledge.encoder.system_rows(configurations), DRAWS, rng
    )
    novelty = _UNSEEN_CHOICE * np.sqrt(_unseen_choices(configurations, knowledge))
    log_costs += novelty[:, None] * rng.standard_normal(log_costs.shape)
    costs = knowledge.run_costs(configurations, np.exp(log_costs))
    chances = knowledge.chances_to_fit(configurations)
    saved = (
        np.maximum(0.0, costs[now].mean() - costs).mean(1) * chances * (1 + probing.reuses * chance)
    )
    worth = saved - probing.cost - knowledge.compile_costs(configurations)
    worth = np.where(unknown & (chances >= _LEAST_CHANCE_TO_FIT), worth, -math.inf)
    best = int(worth.argmax())
    return best if worth[best] > 0 else None


def _unmeasured(configurations: Configurations, knowledge: Knowledge) -> Mask:
    names = _settings(knowledge.distributions, knowledge.affects)
    measured = [
        trial
        for trial in knowledge.observations
        if trial.cost_per_step or trial.out_of_memory or trial.probe
    ]
    known = {tuple(trial.params.get(name) for name in names) for trial in measured}
    return np.array(
        [tuple(values.get(name) for name in names) not in known for values in configurations]
    )


def _unseen_choices(configurations: Configurations, knowledge: Knowledge) -> Array:
    """Count, for each configuration, the categorical settings that no measured trial has used."""
    names = [
        name
        for name in _settings(knowledge.distributions, knowledge.affects)
        if name in DIMENSIONS and DIMENSIONS[name].choices
    ]
    seen = {
        (name, trial.params.get(name))
        for trial in knowledge.observations
        if trial.cost_per_step
        for name in names
    }
    return np.array(
        [sum((name, values.get(name)) not in seen for name in names) for values in configurations],
        float,
    )


def failed_by(
    values: AnyValues,
    probes: Iterable[Observation],
    affects: Mapping[str, StatedAffects] | None = None,
) -> bool:
    """Return whether a probe with the same settings failed, as a trial would."""
    broken = [probe for probe in probes if probe.broken]
    names = _settings(values, affects) if broken else []
    return any(all(probe.params.get(name) == values[name] for name in names) for probe in broken)


def _settings(names: Collection[str], affects: Mapping[str, StatedAffects] | None) -> list[str]:
    """Return the dimensions that affect what a probe measures."""
    measured = {name for what in _MEASURED for name in affecting(what, names, affects)}
    return [name for name in names if name in measured]
