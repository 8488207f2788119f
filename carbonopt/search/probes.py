"""Which settings to measure by a probe before the next trial. Settings that leave the quality alone differ by what a
step costs and by what fits in memory alone, and a few steps tell both."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from carbonopt.core.arrays import Array, Mask
from carbonopt.core.dimensions import DIMENSIONS, Affects, ToldAffects, affecting
from carbonopt.search.models.features import Configurations
from carbonopt.search.observation import Observation, Values
from carbonopt.search.proposal import DRAWS, Knowledge

_MEASURED: tuple[Affects, ...] = ("cost", "memory")  # by a probe
# Standard deviation of ln(cost) that a choice adds which nothing has been measured with yet: the model of step costs
# takes it for like the others once those are alike.
_UNSEEN_CHOICE = 0.1
_LEAST_CHANCE_TO_FIT = 0.1  # below, a probe would most likely die of what is known


@dataclass(frozen=True)
class Probing:
    """What a study knows of its probes."""

    reuses: int  # runs of what is recommended, by which a cheaper step pays
    cost: float | None  # of a probe that compiles nothing, in the study's unit, the mean; None: none has ended yet


def cheapest(configurations: Configurations, knowledge: Knowledge) -> int:
    """Index of the one whose training is expected to cost least, of those that are likely to fit in memory."""
    log_cost, _ = knowledge.step_costs.predict(knowledge.encoder.system_rows(configurations))
    costs = knowledge.run_costs(configurations, np.exp(log_cost))
    return int(np.where(knowledge.likely_to_fit(configurations), costs, np.inf).argmin())


def worth_probing(
    configurations: Configurations, knowledge: Knowledge, probing: Probing, chance: float, rng: Generator
) -> int | None:
    """Index of the configuration, of some that reach the same quality, whose probe is expected to save most beyond what
    it costs; None where none saves anything.

    It saves what the cheapest training is expected to become cheaper by knowing what this one takes (the knowledge
    gradient of Frazier, Powell and Dayanik 2008, A Knowledge-Gradient Policy for Sequential Information Collection, of
    one setting at a time): in the trial, and in the runs of what is recommended, which this is by `chance`."""
    if len(configurations) < 2:
        return None
    now, unknown = cheapest(configurations, knowledge), _unmeasured(configurations, knowledge)
    if probing.cost is None or not knowledge.step_costs.known:
        return now if unknown[now] else None  # nothing to weigh with: the first probe says what a probe and a step cost
    log_costs = knowledge.step_costs.sample(knowledge.encoder.system_rows(configurations), DRAWS, rng)
    novelty = _UNSEEN_CHOICE * np.sqrt(_unseen_choices(configurations, knowledge))
    log_costs += novelty[:, None] * rng.standard_normal(log_costs.shape)
    costs = knowledge.run_costs(configurations, np.exp(log_costs))
    chances = knowledge.chances_to_fit(configurations)
    saved = np.maximum(0.0, costs[now].mean() - costs).mean(1) * chances * (1 + probing.reuses * chance)
    worth = saved - probing.cost - knowledge.compile_costs(configurations)
    worth = np.where(unknown & (chances >= _LEAST_CHANCE_TO_FIT), worth, -math.inf)
    best = int(worth.argmax())
    return best if worth[best] > 0 else None


def _unmeasured(configurations: Configurations, knowledge: Knowledge) -> Mask:
    names = _settings(knowledge.distributions, knowledge.affects)
    told = [trial for trial in knowledge.observations if trial.cost_per_step or trial.out_of_memory or trial.probe]
    known = {tuple(trial.params.get(name) for name in names) for trial in told}
    return np.array([tuple(values.get(name) for name in names) not in known for values in configurations])


def _unseen_choices(configurations: Configurations, knowledge: Knowledge) -> Array:
    """How many of each one's settings that are no numbers nothing measured has had."""
    names = [
        name
        for name in _settings(knowledge.distributions, knowledge.affects)
        if name in DIMENSIONS and DIMENSIONS[name].choices
    ]
    seen = {(name, trial.params.get(name)) for trial in knowledge.observations if trial.cost_per_step for name in names}
    return np.array([sum((name, values.get(name)) not in seen for name in names) for values in configurations], float)


def failed_by(values: Values, probes: Iterable[Observation], affects: Mapping[str, ToldAffects] | None = None) -> bool:
    """Whether a probe of the same settings has failed, as a trial would."""
    broken = [probe for probe in probes if probe.broken]
    names = _settings(values, affects) if broken else []
    return any(all(probe.params.get(name) == values[name] for name in names) for probe in broken)


def _settings(names: Collection[str], affects: Mapping[str, ToldAffects] | None) -> list[str]:
    """Those of the dimensions that a probe says something of."""
    measured = {name for what in _MEASURED for name in affecting(what, names, affects)}
    return [name for name in names if name in measured]
