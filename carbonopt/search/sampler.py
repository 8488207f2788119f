"""The sampler that counts what its proposals cost.

It serves carbonopt's studies, and anybody's Optuna study of two objectives, a cost to minimize and a quality, whose
parameters have carbonopt's names (`global_batch_size`, `learning_rate`, `epochs`, ...); see `observation` for the user
attributes that let it learn from unfinished trials, too.
"""

import math
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study
from optuna.trial import FrozenTrial

from carbonopt.core.quality import QUALITIES
from carbonopt.search.candidates import Candidates, Values, draw
from carbonopt.search.front import on_front, propose_for_front
from carbonopt.search.models.curves import one_blas_thread
from carbonopt.search.models.features import check_dimensions
from carbonopt.search.observation import Observation, observe
from carbonopt.search.proposal import Knowledge, Proposal, first, propose

CENTRES = 3  # good trials, near which more of a large space are looked at
SHORT_FIT_FROM = 30  # trials; from here on the models' parameters hardly change

# System attribute of a trial: the values that its worker is about to give it. Several workers see by it what the
# others have in mind; Optuna itself stores a value only when the trial asks for it.
CLAIM = "carbonopt:claim"
WITHDRAW_S = 2.0  # how long a worker waits for another one to withdraw the same claim


@dataclass(frozen=True)
class NextTrial:
    """The next trial's values, what is expected of it, and what that is concluded from."""

    values: Values | None  # None: nothing is left that could be the answer
    proposal: Proposal | None  # None for the first trial, of which nothing can be expected, and for the front's
    knowledge: Knowledge
    untried: int  # configurations among which the choice was
    meeting: frozenset[int]  # trials that meet the target, as far as is known by now


class CarbonSampler(BaseSampler):
    """Proposes the configuration that is most likely to be the cheapest one meeting the target, for its energy.

    Args:
        quality: the second objective, by its name in `carbonopt.core.quality.QUALITIES`.
        target: what a trial has to reach.
        goal: "recommend": the cheapest configuration that meets the target. "front": the whole trade-off of cost
            and quality, whatever the target; see `front`.
        valid: whether a combination of values can exist; None: all can.
        listed: all combinations that can exist, where they are known.
        complete: adds what is fixed to the values of the dimensions that move.
        confirmed: whether the answer will be run again with other seeds before it is believed: a configuration's mean
            has to meet the target then, as the model knows it, and one lucky run is no answer.
        memory_gib: of a device, to stay away from configurations that don't fit.
        search_space: the dimensions. None: they are those of the trials that have ended; until one has, values are
            random, and workers that begin at once may take the same.
        seed: of the draws; with the trials' numbers it decides every proposal. None: another one each time.

    Several workers, threads or processes, can work on one study: no two run the same configuration while others are
    left.

    Raises:
        ValueError: if an argument is out of its range; later, when a trial is asked for, if the study has not these two
            objectives, `valid` refuses everything, or a dimension's values or a trial's user attributes
            can't be what their names say.
    """

    def __init__(
        self,
        quality: str,
        target: float,
        *,
        goal: Literal["recommend", "front"] = "recommend",
        valid: Callable[[Values], bool] | None = None,
        listed: Sequence[Mapping[str, Any]] | None = None,
        complete: Callable[[Values], Mapping[str, Any]] = dict,
        confirmed: bool = False,
        memory_gib: float | None = None,
        search_space: Mapping[str, BaseDistribution] | None = None,
        seed: int | None = 0,
    ) -> None:
        if quality not in QUALITIES:
            raise ValueError(f"quality must be one of {', '.join(QUALITIES)}, but got {quality!r}.")
        self._quality = QUALITIES[quality]
        if not math.isfinite(target) or self._quality.beyond(target):
            raise ValueError(f"target must be a finite {quality}, {self._quality.bounds_text}, but got {target!r}.")
        if goal not in ("recommend", "front"):
            raise ValueError(f"goal must be 'recommend' or 'front', but got {goal!r}.")
        if memory_gib is not None and not memory_gib > 0:
            raise ValueError(f"memory_gib must be above 0, or None where it is not known, but got {memory_gib!r}.")
        self._target_loss = self._quality.loss_of(target)
        self._goal = goal
        self._valid = valid or (lambda values: True)
        self._listed = listed
        self._complete = complete
        self._confirmed = confirmed
        self._memory_gib = memory_gib
        self._seed = int(np.random.default_rng().integers(2**32)) if seed is None else seed
        self._given_space = search_space
        self._search_space = IntersectionSearchSpace(include_pruned=True)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        needed = ["minimize", self._quality.direction]
        directions = [direction.name.lower() for direction in study.directions]
        if directions != needed:
            raise ValueError(
                f"the study must have two objectives, cost to minimize and {self._quality.name} to "
                f"{self._quality.direction}, but has {', '.join(directions)}; create it with directions={needed}."
            )
        space = self._search_space.calculate(study) if self._given_space is None else self._given_space
        check_dimensions(space)
        return {name: one for name, one in space.items() if not one.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if search_space.keys() <= trial.system_attrs.get("fixed_params", {}).keys():
            return {}  # in the queue with all its values
        while True:
            trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
            values = self.plan(trials, search_space, trial.number).values
            if values is None:  # nothing can be the answer any more, but the study goes on
                rng = np.random.default_rng([self._seed, trial.number])
                candidates = self._candidates(search_space)
                values = next(iter(candidates.untried(_tried(trials, search_space), (), rng)), None)
                if values is None:
                    return candidates.any(rng)
            if _claim(study, trial, values):
                return values

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        rng = np.random.default_rng([self._seed, trial.number, zlib.crc32(param_name.encode())])
        return draw(param_distribution, rng)

    def knowledge(self, trials: Sequence[FrozenTrial], distributions: Mapping[str, BaseDistribution]) -> Knowledge:
        """What these trials have taught."""
        observations = [found for one in trials if (found := observe(one, self._quality)) is not None]
        effort = 40 if len(observations) < SHORT_FIT_FROM else 12
        return Knowledge(self._quality, distributions, observations, self._memory_gib, effort)

    @one_blas_thread
    def plan(
        self,
        trials: Sequence[FrozenTrial],
        distributions: Mapping[str, BaseDistribution],
        number: int,
        refuted: Collection[int] = (),
    ) -> NextTrial:
        """The next trial, after these.

        Args:
            number: that the trial will have; it decides the draws.
            refuted: numbers of trials that don't count as meeting the target, since repeats of them missed it.
        """
        rng = np.random.default_rng([self._seed, number])
        knowledge = self.knowledge(trials, distributions)
        meeting = self.meeting(knowledge, refuted)
        met = frozenset(meeting)
        cheapest = sorted((one.cost, number) for number, one in meeting.items() if one.cost is not None)
        if self._goal == "front":
            shown = [one.number for one in on_front(knowledge)]
            good = {int(number) for number in rng.permutation(shown)[:CENTRES]}
        else:
            good = {number for _, number in cheapest[:CENTRES]}
        best = [one for one in trials if one.number in good]
        centres = [
            {name: one.params[name] for name in distributions}
            for one in best
            if distributions.keys() <= one.params.keys()
        ]
        space = self._candidates(distributions)
        candidates = space.untried(_tried(trials, distributions), centres, rng)
        if not candidates:
            return NextTrial(None, None, knowledge, 0, met)
        completed = [{**values, **self._complete(values)} for values in candidates]
        if not any(one.curve for one in knowledge.observations):
            likely = np.flatnonzero(knowledge.likely_to_fit(completed))
            index = likely[first([completed[index] for index in likely], rng)]
            return NextTrial(candidates[index], None, knowledge, len(candidates), met)
        if self._goal == "front":
            index = propose_for_front(completed, knowledge)
            return NextTrial(candidates[index], None, knowledge, len(candidates), met)
        best_cost = cheapest[0][0] if cheapest else math.inf
        by_mean = self._confirmed or space.infinite
        proposal = propose(completed, knowledge, self._target_loss, best_cost, rng, by_mean=by_mean)
        values = None if proposal is None else candidates[proposal.index]
        return NextTrial(values, proposal, knowledge, len(candidates), met)

    def meeting(self, knowledge: Knowledge, refuted: Collection[int]) -> dict[int, Observation]:
        """The trials that meet the target as far as is known, by number."""
        found = knowledge.meeting(self._target_loss, by_mean=self._confirmed)
        return {one.number: one for one in found if one.number not in refuted}

    def _candidates(self, distributions: Mapping[str, BaseDistribution]) -> Candidates:
        return Candidates(distributions, self._valid, self._listed)


def _tried(trials: Sequence[FrozenTrial], distributions: Mapping[str, BaseDistribution]) -> set[tuple[Any, ...]]:
    """The values that trials have, or are about to have."""
    return {tuple(values.get(name) for name in distributions) for values in map(_values_of, trials)}


def _values_of(trial: FrozenTrial) -> Values:
    """Those that a trial has; of one that has not ended, those that it is going to have, too."""
    if trial.state.is_finished():
        return trial.params
    return {**trial.system_attrs.get(CLAIM, {}), **trial.system_attrs.get("fixed_params", {}), **trial.params}


def _claim(study: Study, trial: FrozenTrial, values: Values) -> bool:
    """Whether a trial may have these values, since no other one that runs has claimed them.

    Of two workers that claim the same, the one that writes last sees the other's claim. The higher number withdraws at
    once; the lower one waits for that, and withdraws itself where the higher one had been first.
    """

    def claim(values: Values) -> None:
        study._storage.set_trial_system_attr(trial._trial_id, CLAIM, values)

    claim(values)
    deadline = time.monotonic() + WITHDRAW_S
    while True:
        trials = study.get_trials(deepcopy=False)
        same_claims = [one.number for one in trials if one.number != trial.number and _shares(_values_of(one), values)]
        if not same_claims:
            return True
        if min(same_claims) < trial.number or time.monotonic() > deadline:
            claim({})
            return False
        time.sleep(0.05)


def _shares(one: Values, other: Values) -> bool:
    return all(name in one and one[name] == value for name, value in other.items())
