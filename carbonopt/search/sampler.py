"""The sampler that counts what its proposals cost: for carbonopt's studies, and anybody's Optuna study of a cost to
minimize and a quality, whose parameters have carbonopt's names (`global_batch_size`, `learning_rate`, ...); see
`observation` for the user attributes that let it learn from unfinished trials, too."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args
from zlib import crc32

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from carbonopt.core.dimensions import DIMENSIONS, ToldAffects
from carbonopt.core.errors import shortened
from carbonopt.core.quality import QUALITIES, Quality
from carbonopt.search.candidates import Candidates, Distributions, Values, draw, movable
from carbonopt.search.models.curves import one_blas_thread
from carbonopt.search.models.features import ADVISED, check_dimensions, check_values
from carbonopt.search.observation import Observation, observe, trial_params
from carbonopt.search.probes import Probing, cheapest, failed_by, worth_probing
from carbonopt.search.proposal import Knowledge, Proposal, first, on_front, propose, propose_for_front
from carbonopt.search.pruning import should_prune

CENTRES = 3  # of the best trials, near which more of a large space are looked at
SHORT_FIT_FROM = 30  # trials; from here on the models' parameters hardly change

# System attribute of a trial: the values that its worker is about to give it. Several workers see by it what the
# others have in mind; Optuna itself stores a value only when the trial asks for it.
CLAIM = "carbonopt:claim"
_MOST_TRIALS = 10**9  # of a study, for numbers of those of earlier ones
WITHDRAW_S = 2.0  # how long a worker waits for another one to withdraw the same claim


@dataclass(frozen=True)
class NextTrial:
    """The next trial's values, what is expected of it, and what that is concluded from."""

    values: Values | None  # None: nothing is left that could be the answer
    proposal: Proposal | None  # None for the first trial, of which nothing can be expected, and for the front's
    knowledge: Knowledge
    probe: Values | None  # what to measure by a few steps before these values are settled; None: nothing is worth it
    untried: int  # configurations among which the choice was
    meeting: frozenset[int]  # trials that meet the target, as far as is known by now


class CarbonSampler(BaseSampler):
    """Proposes the configuration that is most likely to be the cheapest one meeting the target, for its energy.

    Args:
        quality: the second objective, or its name in `carbonopt.core.quality.QUALITIES`.
        target: what a trial has to reach.
        goal: "recommend": the cheapest configuration that meets the target. "front": the whole trade-off.
        valid: whether a combination of values can exist; None: all can.
        listed: all combinations that can exist, where they are known.
        canonical: of combinations that train alike the one that is tried.
        complete: adds what is fixed to the values of the dimensions that move.
        affects: of dimensions whose names carbonopt doesn't know what they affect, "cost" or "quality" alone. None, or
            where a name is missing: both, as far as the trials tell.
        confirmed: whether the answer will be run again with other seeds: then a configuration's mean has to meet the
            target, as the model knows it, and one lucky run is no answer.
        advised: batch and learning rate, by their names, near which the first trial is and the best is expected, as far
            as they are in the space; None, or where a name is missing: the middle.
        memory_gib: of a device, to stay away from configurations that don't fit.
        learn_from: earlier studies of the same or a similar task, whose trials are told as this one's are.
        search_space: the dimensions. None: those of the trials that have ended; until one has, values are random, and
            workers that begin at once may take the same.
        seed: of the draws; with the trials' numbers it decides every proposal. None: another one each time.

    Several workers can share a study: no two run the same configuration while others are left.

    Raises:
        ValueError: if an argument is out of its range; later, when a trial is asked for, if the study has not these two
            objectives, `valid` refuses everything, or a dimension's values or a trial's user attributes can't be.
    """

    def __init__(
        self,
        quality: str | Quality,
        target: float,
        *,
        goal: Literal["recommend", "front"] = "recommend",
        valid: Callable[[Values], bool] | None = None,
        listed: Sequence[Mapping[str, Any]] | None = None,
        canonical: Callable[[Values], Values] = dict,
        complete: Callable[[Values], Mapping[str, Any]] = dict,
        affects: Mapping[str, ToldAffects] | None = None,
        confirmed: bool = False,
        advised: Mapping[str, float] | None = None,
        memory_gib: float | None = None,
        learn_from: Sequence[Sequence[FrozenTrial]] = (),
        search_space: Mapping[str, BaseDistribution] | None = None,
        seed: int | None = 0,
    ) -> None:
        if not isinstance(quality, Quality) and quality not in QUALITIES:
            raise ValueError(f"quality must be one of {', '.join(QUALITIES)}, but got {quality!r}.")
        self._quality = quality if isinstance(quality, Quality) else QUALITIES[quality]
        if not _is_number(target) or not math.isfinite(target) or self._quality.beyond(target):
            raise ValueError(
                f"target must be a finite {self._quality.name}, {self._quality.bounds_text}, but got {target!r}."
            )
        if goal not in ("recommend", "front"):
            raise ValueError(f"goal must be 'recommend' or 'front', but got {goal!r}.")
        if memory_gib is not None and not (_is_number(memory_gib) and memory_gib > 0):
            raise ValueError(f"memory_gib must be above 0, or None where it is not known, but got {memory_gib!r}.")
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            raise ValueError(
                f"seed must be a whole number from 0, or None for another one each time, but got {seed!r}."
            )
        if search_space is not None and not isinstance(search_space, Mapping):
            raise ValueError(f"search_space must give dimensions by their names, but got {shortened(search_space)}.")
        if listed is not None:
            _check_listed(listed, search_space or {})
        _check_told(affects, advised)
        if isinstance(learn_from, FrozenTrial | str) or not isinstance(learn_from, Sequence):
            raise ValueError(f"learn_from must be a list of studies' trials, but is {shortened(learn_from)}.")
        for study, trials in enumerate(learn_from):
            if not isinstance(trials, Sequence) or not all(isinstance(trial, FrozenTrial) for trial in trials):
                raise ValueError(f"learn_from[{study}] must be an earlier study's trials, but is {shortened(trials)}.")
        self._affects, self._advised = dict(affects or {}), dict(advised or {})
        self._target_loss = self._quality.loss_of(target)
        self._goal, self._complete, self._confirmed, self._memory_gib = goal, complete, confirmed, memory_gib
        self._valid, self._listed, self._canonical = valid or (lambda values: True), listed, canonical
        self._seed = int(np.random.default_rng().integers(2**32)) if seed is None else seed
        self._earlier = [self._of_earlier(trials, study) for study, trials in enumerate(learn_from)]
        self._given_space = search_space
        self._search_space = IntersectionSearchSpace(include_pruned=True)
        self._before: tuple[_Place, Knowledge] | None = None  # what the trials before one have taught

    def _of_earlier(self, trials: Sequence[FrozenTrial], study: int) -> list[Observation]:
        """Of an earlier study, under numbers that no trial of this one has, nor of another one, by their places: trials
        that `optuna.create_trial` made all have the same number."""
        first, told = _MOST_TRIALS * study + 1, []
        for place, trial in enumerate(trials):
            try:
                # What it says itself counts, whatever is fixed in this one.
                taught = observe(trial, self._quality, lambda values: {**self._completed(values), **values})
            except ValueError as error:
                raise ValueError(f"learn_from[{study}][{place}]: {error}") from error
            if taught is not None:
                told.append(replace(taught, number=-first - place))
        return told

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Distributions:
        needed, told = ["minimize", self._quality.direction], [way.name.lower() for way in study.directions]
        if told != needed:
            rule = f"the study must have two objectives, cost to minimize and {self._quality.name} to {needed[1]}"
            raise ValueError(f"{rule}, but has {', '.join(told)}; create it with directions={needed}.")
        space = self._search_space.calculate(study) if self._given_space is None else self._given_space
        check_dimensions(space)
        return movable(space)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        queued = trial.system_attrs.get("fixed_params", {})
        if search_space.keys() <= queued.keys():
            return {}  # in the queue with all its values
        while True:
            others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
            plan = self.plan(others, search_space, trial.number, queued=queued)
            self._before = _place(study, trial.number), plan.knowledge
            values = plan.values
            if values is None:  # nothing can be the answer any more, but the study goes on
                rng = np.random.default_rng([self._seed, trial.number])
                space = self._candidates(search_space, queued)
                values = next(iter(space.untried(_tried(others, search_space), (), rng)), None)
                if values is None:
                    return space.any(rng)
            if _claim(study, trial, values):
                return values

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        return draw(distribution, np.random.default_rng([self._seed, trial.number, crc32(name.encode())]))

    def should_prune(self, study: Study, trial: Trial) -> bool:
        """Whether a running trial can't matter any more, by its user attributes so far (see `observation`) and by what
        the trials before it have taught. Optuna's own pruning refuses studies of two objectives."""
        if trial.study.study_name != study.study_name:
            studies = f"is of {trial.study.study_name!r}, not of {study.study_name!r}"
            raise ValueError(f"should_prune needs the trial's own study, but trial {trial.number} {studies}.")
        frozen = study._storage.get_trial(trial._trial_id)
        before, place = self._before, _place(study, trial.number)
        if before is None or before[0] != place:
            others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
            before = place, self.knowledge(others, self.infer_relative_search_space(study, frozen))
            self._before = before
        own = observe(frozen, self._quality, self._completed)
        target_loss = self._target_loss if self._goal == "recommend" else None
        return own is not None and should_prune(before[1], own, target_loss) is not None

    def knowledge(
        self, trials: Sequence[FrozenTrial], distributions: Distributions, probes: Sequence[Observation] = ()
    ) -> Knowledge:
        """What these trials and probes have taught."""
        told = (observe(trial, self._quality, self._completed) for trial in trials)
        observations = [taught for taught in told if taught is not None]
        effort = 40 if len(observations) < SHORT_FIT_FROM else 12
        return Knowledge(
            self._quality,
            distributions,
            [*observations, *probes],
            self._memory_gib,
            effort,
            self._affects,
            self._earlier,
            self._advised,
        )

    @one_blas_thread()
    def plan(
        self,
        trials: Sequence[FrozenTrial],
        distributions: Distributions,
        number: int,
        refuted: Collection[int] = (),
        probes: Sequence[Observation] = (),
        probing: Probing | None = None,
        queued: Values | None = None,
    ) -> NextTrial:
        """The next trial, after these.

        Args:
            number: that the trial will have; it decides the draws.
            refuted: numbers of trials that don't count as meeting the target, since repeats of them missed it.
            probes: what a few steps alone have taught.
            probing: None: there are no further probes, and settings are chosen by whole trials.
            queued: some of the trial's values, where it has them already.
        """
        rng, names = np.random.default_rng([self._seed, number]), distributions.keys()
        knowledge = self.knowledge(trials, distributions, probes)
        costs = self.meeting(knowledge, refuted)
        good = sorted(costs, key=lambda number: (costs[number], number))
        best_cost = costs[good[0]] if good else math.inf
        if self._goal == "front":
            good = rng.permutation([trial.number for trial in on_front(knowledge)]).tolist()
        if not good:  # what comes closest
            good = [trial.number for trial, *_ in sorted(knowledge.ends, key=lambda end: end[1])]
        best = (trial.params for trial in trials if trial.number in good[:CENTRES])
        centres = [{name: params[name] for name in names} for params in best if names <= params.keys()]
        space = self._candidates(distributions, queued or {})
        tried = _tried(trials, distributions)
        candidates = [
            values for values in space.untried(tried, centres, rng) if not failed_by(values, probes, self._affects)
        ]
        completed = [self._completed(values) for values in candidates]
        index, proposal = None, None
        if candidates and not any(trial.curve for trial in knowledge.observations):
            likely = np.flatnonzero(knowledge.likely_to_fit(completed))
            index = likely[first([completed[place] for place in likely], rng, knowledge.begins_near)]
        elif candidates and self._goal == "front":
            index = propose_for_front(completed, knowledge)
        elif candidates:
            by_mean = self._confirmed or space.listed is None
            proposal = propose(completed, knowledge, self._target_loss, best_cost, rng, by_mean=by_mean)
            index = proposal and proposal.index
        values, probe = None if index is None else candidates[index], None
        if values is not None and probing is not None:
            rate = self._rate(values)  # which may go with the ranks, that otherwise leave the quality alone
            alike = (other for other in space.alike(values, tried) if not failed_by(other, probes, self._affects))
            same = [other for other in alike if self._rate(other) == rate]
            whole = [self._completed(other) for other in same]
            chance = 0.0 if proposal is None else proposal.chance
            measured = worth_probing(whole, knowledge, probing, chance, rng)
            probe = None if measured is None else same[measured]
            values = same[cheapest(whole, knowledge)]
        return NextTrial(values, proposal, knowledge, probe, len(candidates), frozenset(costs))

    def _rate(self, values: Values) -> float | None:
        """The learning rate that the optimizer gets."""
        return trial_params(self._completed(values)).trained_learning_rate

    def _candidates(self, distributions: Distributions, queued: Values) -> Candidates:
        """`queued`: values that those of these dimensions have already."""
        given = {name: CategoricalDistribution([queued[name]]) for name in distributions if name in queued}
        listed = self._listed
        if listed is not None:
            listed = [values for values in listed if all(values.get(name) == queued[name] for name in given)]
        return Candidates({**distributions, **given}, self._valid, listed, self._canonical, self._affects)

    def _completed(self, values: Values) -> Values:
        """With what is fixed."""
        fixed = self._complete(dict(values))
        if not isinstance(fixed, Mapping):
            raise ValueError(f"complete must return what is fixed by its names, but returned {shortened(fixed)}.")
        check_values({name: value for name, value in fixed.items() if value is not values.get(name, fixed)})
        return {**values, **fixed}

    def meeting(self, knowledge: Knowledge, refuted: Collection[int]) -> dict[int, float]:
        """The costs of the trials that meet the target as far as is known, by number."""
        meeting = knowledge.meeting(self._target_loss, by_mean=self._confirmed)
        return {trial.number: trial.cost for trial in meeting if trial.cost is not None and trial.number not in refuted}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_told(affects: Any, advised: Any) -> None:
    """Raises ValueError for what is no mapping of dimensions that can be told to what can be told of them."""
    for given, argument in ((affects, "affects"), (advised, "advised")):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{argument} must give values by dimensions' names, but got {shortened(given)}.")
    for name, what in (affects or {}).items():
        if name in DIMENSIONS or what not in get_args(ToldAffects):
            rule = "affects must say 'cost' or 'quality' of a dimension that carbonopt doesn't know"
            raise ValueError(f"{rule}, but got {shortened(what)} of {name}.")
    for name, value in (advised or {}).items():
        if name not in ADVISED or not (_is_number(value) and 0 < value < math.inf):
            rule = f"advised must give a number above 0 for {' or '.join(ADVISED)}"
            raise ValueError(f"{rule}, but got {shortened(value)} for {name}.")


def _check_listed(listed: Any, space: Mapping[str, BaseDistribution]) -> None:
    """Raises ValueError for what is no list, and for a combination that the space has not."""
    if not (isinstance(listed, Sequence) and listed):
        rule = "listed must be a list of all combinations that can exist, or None"
        raise ValueError(f"{rule}, but is {shortened(listed)}.")
    for row, values in enumerate(listed):
        for name, distribution in space.items():
            if isinstance(values, Mapping) and name in values and not _holds(distribution, values[name]):
                rule = f"listed[{row}] must be in search_space"
                raise ValueError(f"{rule}, but its {name} is {shortened(values[name])}: {distribution}.")


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
    except ValueError:
        return False


_Place = tuple[BaseStorage, int, int]  # of a trial: the storage, the study's number in it, the trial's in that


def _place(study: Study, number: int) -> _Place:
    return study._storage, study._study_id, number


def _tried(trials: Sequence[FrozenTrial], distributions: Distributions) -> set[tuple[Any, ...]]:
    return {tuple(values.get(name) for name in distributions) for values in map(_values_of, trials)}


def _values_of(trial: FrozenTrial) -> Values:
    """Those that a trial has; of one that has not ended, those that it is going to have, too."""
    coming = {} if trial.state.is_finished() else trial.system_attrs
    return {**coming.get(CLAIM, {}), **coming.get("fixed_params", {}), **trial.params}


def _claim(study: Study, trial: FrozenTrial, values: Values) -> bool:
    """Whether a trial may have these values, since no other one that runs has claimed them.

    Of two workers that claim the same, the one that writes last sees the other's claim. The higher number withdraws at
    once; the lower one waits for that, and withdraws itself where the higher one had been first.
    """
    claim = partial(study._storage.set_trial_system_attr, trial._trial_id, CLAIM)
    claim(values)
    deadline = time.monotonic() + WITHDRAW_S
    while True:
        same = [
            other.number for other in study.get_trials(deepcopy=False) if values.items() <= _values_of(other).items()
        ]
        rivals = [number for number in same if number != trial.number]
        if not rivals:
            return True
        if min(rivals) < trial.number or time.monotonic() > deadline:
            claim({})
            return False
        time.sleep(0.05)
