"""The Optuna sampler that weighs what its proposals cost.

It serves carbonopt's studies, and any Optuna study that minimizes a cost and optimizes a quality,
and whose parameters have carbonopt's names (`global_batch_size`, `learning_rate`, ...). See
`observation` for the user attributes that let it learn from unfinished trials, too.
"""

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

from carbonopt.core.dimensions import DIMENSIONS, StatedAffects
from carbonopt.core.errors import shortened
from carbonopt.core.quality import QUALITIES, Quality
from carbonopt.search.candidates import ENUMERATED, Candidates, Distributions, Values, draw, movable
from carbonopt.search.front_proposal import on_front, propose_for_front
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.curves import one_blas_thread
from carbonopt.search.models.features import ADVISED, check_dimensions, check_values
from carbonopt.search.observation import Observation, observe, trial_params
from carbonopt.search.probe_plan import Probing, cheapest, failed_by, worth_probing
from carbonopt.search.proposal import Proposal, first, propose
from carbonopt.search.pruning import forecast_of_miss

CENTRES = 3  # number of the best trials near which a large space is searched more densely
SHORT_FIT_FROM = 30  # number of trials from which on the models' parameters hardly change

# System attribute of a trial: the values that its worker is about to give it. It shows several
# workers of an Optuna study of the user's own what the others are about to try; Optuna itself
# stores a value only when the trial asks for it. The workers of a carbonopt study choose under a
# lock instead (`storage.workers`).
CLAIM = "carbonopt:claim"
_MOST_TRIALS = 10**9  # bound that keeps the numbers of prior studies' trials apart
WITHDRAW_S = 2.0  # how long a worker waits for another one to withdraw the same claim


@dataclass(frozen=True)
class Left:
    """Counts of the configurations that a search has left."""

    untried: int  # configurations among which the next trial is chosen
    # whether these are all that are left; otherwise they were drawn from a larger space
    is_all: bool
    unlikely_to_fit: int = 0  # untried configurations that are unlikely to fit in memory
    failed: int = 0  # further configurations, whose settings failed in a probe


@dataclass(frozen=True)
class NextTrial:
    """The next trial's values, the expectations of it, and the knowledge that they come from."""

    values: Values | None  # None: nothing is left that could be the answer
    # None for the first trial, of which nothing can be expected, and if the front is searched
    proposal: Proposal | None
    knowledge: Knowledge
    # what to measure by a few steps before these values are settled; None: nothing is worth it
    probe_values: Values | None
    left: Left
    meeting: frozenset[int]  # numbers of the trials that meet the target, as far as is known


class CarbonSampler(BaseSampler):
    """A sampler that looks for the cheapest configuration that meets the target, at little cost.

    It proposes the configuration that is most likely to be the answer, per unit of the cost that
    trying it is expected to have. The study needs two objectives: a cost to minimize, in any unit,
    and the quality. (carbonopt's own studies store kg CO2e; there the sampler takes the costs from
    the trials' records, in kWh.) Several workers can share a study: no two run the same
    configuration while others are left.

    Args:
        quality: the second objective: `"perplexity"`, `"accuracy"` or another name of
            `carbonopt.core.quality.QUALITIES`, or a `Quality`.
        target: the value that a trial has to reach, in the unit of the second objective: at most
            this perplexity, or at least this accuracy from 0 to 1.
        goal: `"recommend"` searches for the cheapest configuration that meets the target,
            `"front"` for the whole trade-off.
        valid: returns whether a combination of values can exist. None: all can.
        listed: all combinations that can exist, each as a mapping from the dimensions' names to
            their values. None: they are not known.
        canonical: maps combinations that train alike to the one of them that is tried.
        complete: returns what is fixed in all trials, such as `{"lr_scheduler": "linear"}`, for the
            values of the dimensions that are searched.
        affects: `"cost"` or `"quality"` for each dimension that carbonopt doesn't know and that
            affects one of them alone, such as `{"power_limit_w": "cost"}`. A dimension that isn't
            named affects both, as far as the trials show. None: no dimension is named.
        confirmed: whether the answer will be run again with other seeds. Then a configuration's
            mean has to meet the target, as the model knows it, and one lucky run is no answer.
        advised: `global_batch_size` (in sequences, examples or whatever your batches have) and
            `learning_rate` near which the first trial is and the best is expected, as far as they
            are in the space. A dimension that isn't named is expected in its middle. None: no
            dimension is named.
        memory_gib: memory of one device in GiB, to stay away from configurations that don't fit.
            None: not known.
        learn_from: a list of trials for each prior study of the same or a similar task, such as
            `[earlier.trials]`. They are observed as this study's own are.
        search_space: the dimensions, as Optuna's distributions by their names. None: those of the
            trials that have finished. Until one has, values are random, and workers that start at
            once may take the same.
        seed: seed of the draws, from 0 on. With the trials' numbers it decides every proposal.
            None: another seed each time.

    Raises:
        ValueError: if an argument is out of its range. Later, when a trial is asked for, if the
            study does not have these two objectives, if `valid` refuses everything, or if a
            dimension's values or a trial's user attributes are impossible.
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
        affects: Mapping[str, StatedAffects] | None = None,
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
                f"target must be a finite {self._quality.name}, {self._quality.bounds_text}, but"
                f" got {target!r}."
            )
        if goal not in ("recommend", "front"):
            raise ValueError(f"goal must be 'recommend' or 'front', but got {goal!r}.")
        if memory_gib is not None and not (_is_number(memory_gib) and memory_gib > 0):
            raise ValueError(
                "memory_gib must be above 0, or None where it is not known, but got"
                f" {memory_gib!r}."
            )
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            raise ValueError(
                "seed must be a whole number from 0, or None for another one each time, but got"
                f" {seed!r}."
            )
        if search_space is not None and not isinstance(search_space, Mapping):
            raise ValueError(
                "search_space must give dimensions by their names, but got"
                f" {shortened(search_space)}."
            )
        if listed is not None:
            _check_listed(listed, search_space or {})
        _check_given(affects, advised)
        if isinstance(learn_from, FrozenTrial | str) or not isinstance(learn_from, Sequence):
            raise ValueError(
                f"learn_from must be a list of studies' trials, but is {shortened(learn_from)}."
            )
        for study, trials in enumerate(learn_from):
            if not isinstance(trials, Sequence) or not all(
                isinstance(trial, FrozenTrial) for trial in trials
            ):
                raise ValueError(
                    f"learn_from[{study}] must be an earlier study's trials, but is"
                    f" {shortened(trials)}."
                )
        self._affects, self._advised = dict(affects or {}), dict(advised or {})
        self._target_loss = self._quality.loss_of(target)
        self._goal, self._complete, self._confirmed, self._memory_gib = (
            goal,
            complete,
            confirmed,
            memory_gib,
        )
        self._valid, self._listed, self._canonical = (
            valid or (lambda values: True),
            listed,
            canonical,
        )
        self._seed = int(np.random.default_rng().integers(2**32)) if seed is None else seed
        self._earlier = [self._of_earlier(trials, study) for study, trials in enumerate(learn_from)]
        self._given_space = search_space
        self._search_space = IntersectionSearchSpace(include_pruned=True)
        # The place of the latest trial, and the knowledge from the trials before it.
        self._before: tuple[_Place, Knowledge] | None = None

    def _of_earlier(self, trials: Sequence[FrozenTrial], study: int) -> list[Observation]:
        """Return the observations of a prior study, with numbers that no other trial has.

        Numbers are negative and made of the trial's place in `learn_from`, because all trials of
        `optuna.create_trial` share one number.
        """
        begins, observations = _MOST_TRIALS * study + 1, []
        for place, trial in enumerate(trials):
            try:
                # The trial's own values take precedence over what is fixed in this study.
                observation = observe(
                    trial, self._quality, lambda values: {**self._completed(values), **values}
                )
            except ValueError as error:
                raise ValueError(f"learn_from[{study}][{place}]: {error}") from error
            if observation is not None:
                observations.append(replace(observation, number=-begins - place))
        return observations

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Distributions:
        needed, directions = (
            ["minimize", self._quality.direction],
            [way.name.lower() for way in study.directions],
        )
        if directions != needed:
            rule = (
                f"the study must have two objectives, cost to minimize and {self._quality.name} to"
                f" {needed[1]}"
            )
            raise ValueError(
                f"{rule}, but has {', '.join(directions)}; create it with directions={needed}."
            )
        space = (
            self._search_space.calculate(study) if self._given_space is None else self._given_space
        )
        check_dimensions(space)
        return movable(space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        queued = trial.system_attrs.get("fixed_params", {})
        if search_space.keys() <= queued.keys():
            return {}  # the trial was enqueued with all its values
        while True:
            others = [
                other for other in study.get_trials(deepcopy=False) if other.number != trial.number
            ]
            plan = self.plan(others, search_space, trial.number, queued=queued)
            self._before = _place(study, trial.number), plan.knowledge
            values = plan.values
            # Nothing is likely to be cheaper, but the study goes on: propose what else may meet the
            # target.
            if values is None:
                values = self.plan(
                    others,
                    search_space,
                    trial.number,
                    refuted=plan.meeting,  # as if no trial met the target
                    queued=queued,
                ).values
            if values is None:
                return self._candidates(search_space, queued).any(
                    np.random.default_rng([self._seed, trial.number])
                )
            if _claim(study, trial, values):
                return values

    def sample_independent(
        self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution
    ) -> Any:
        return draw(
            distribution, np.random.default_rng([self._seed, trial.number, crc32(name.encode())])
        )

    def should_prune(self, study: Study, trial: Trial) -> bool:
        """Return whether a running trial can no longer matter.

        This is decided from its user attributes so far, such as its learning curve, and from the
        observations of the trials before it. Optuna's own pruning refuses studies of two
        objectives.

        Args:
            study: the study that uses this sampler.
            trial: a trial of that study that is running. It counts with the user attributes that
                have been set.

        Returns:
            True if the trial will miss the target, or with the goal `"front"` if it will be off the
            front. It is False while the trial's curve covers less than a third of its steps.

        Raises:
            ValueError: if the trial is of another study, if the study does not have the two
                objectives, or if a trial's values or user attributes are impossible.
        """
        if trial.study.study_name != study.study_name:
            studies = f"is of {trial.study.study_name!r}, not of {study.study_name!r}"
            raise ValueError(
                f"should_prune needs the trial's own study, but trial {trial.number} {studies}."
            )
        frozen = study._storage.get_trial(trial._trial_id)
        before, place = self._before, _place(study, trial.number)
        if before is None or before[0] != place:
            others = [
                other for other in study.get_trials(deepcopy=False) if other.number != trial.number
            ]
            before = place, self.knowledge(others, self.infer_relative_search_space(study, frozen))
            self._before = before
        own = observe(frozen, self._quality, self._completed)
        target_loss = self._target_loss if self._goal == "recommend" else None
        return own is not None and forecast_of_miss(before[1], own, target_loss) is not None

    def knowledge(
        self,
        trials: Sequence[FrozenTrial],
        distributions: Distributions,
        probes: Sequence[Observation] = (),
    ) -> Knowledge:
        """Return the knowledge that these trials and probes give."""
        observed = (observe(trial, self._quality, self._completed) for trial in trials)
        observations = [observation for observation in observed if observation is not None]
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
        """Plan the next trial, after these trials.

        Args:
            number: the number that the trial will have; it decides the draws.
            refuted: numbers of trials that don't count as meeting the target, since repeats of them
                missed it.
            probes: observations of probes, which ran a few steps alone.
            probing: what the study knows of its probes. None: there are no further probes, and
                settings are chosen by whole trials.
            queued: values that the trial has already, if some are fixed.
        """
        rng, names = np.random.default_rng([self._seed, number]), distributions.keys()
        knowledge = self.knowledge(trials, distributions, probes)
        meeting = self.meeting(knowledge, refuted)
        good = self._good(knowledge, meeting, rng)
        best = (trial.params for trial in trials if trial.number in good[:CENTRES])
        centres = [
            {name: params[name] for name in names} for params in best if names <= params.keys()
        ]
        space = self._candidates(distributions, queued or {})
        tried = _tried(trials, distributions)
        untried = space.untried(tried, centres, rng)
        candidates = [values for values in untried if not failed_by(values, probes, self._affects)]
        completed = [self._completed(values) for values in candidates]
        index, proposal = None, None
        if candidates and not any(trial.curve for trial in knowledge.observations):
            likely = np.flatnonzero(knowledge.likely_to_fit(completed))
            index = likely[
                first([completed[place] for place in likely], rng, knowledge.begins_near)
            ]
        elif candidates and self._goal == "front":
            index = propose_for_front(completed, knowledge)
        elif candidates:
            by_mean = self._confirmed or space.listed is None
            proposal = propose(
                completed, knowledge, self._target_loss, meeting, rng, by_mean=by_mean
            )
            index = proposal and proposal.index
        values, probe = None if index is None else candidates[index], None
        if values is not None and probing is not None:
            # The learning rate may depend on the number of ranks, which leave the quality alone
            # otherwise.
            rate = self._rate(values)
            alike = (
                other
                for other in space.alike(values, tried)
                if not failed_by(other, probes, self._affects)
            )
            same = [other for other in alike if self._rate(other) == rate]
            whole = [self._completed(other) for other in same]
            chance = 0.0 if proposal is None else proposal.chance
            measured = worth_probing(whole, knowledge, probing, chance, rng)
            probe = None if measured is None else same[measured]
            values = same[cheapest(whole, knowledge)]
        fitting = (
            len(candidates)
            if values or not candidates
            else int(knowledge.likely_to_fit(completed).sum())
        )
        left = Left(
            untried=len(candidates),
            is_all=space.listed is not None and len(space.listed) <= ENUMERATED,
            unlikely_to_fit=len(candidates) - fitting,
            failed=len(untried) - len(candidates),
        )
        return NextTrial(
            values, proposal, knowledge, probe, left, frozenset(trial.number for trial in meeting)
        )

    def _good(
        self, knowledge: Knowledge, meeting: Sequence[Observation], rng: np.random.Generator
    ) -> list[int]:
        """Return the numbers of the trials near which to look.

        These are the cheapest that meet the target or, if the front is searched, those of the front
        in random order. If there are none, they are the trials that came closest to the target.
        """
        good = [
            trial.number for trial in sorted(meeting, key=lambda trial: (trial.cost, trial.number))
        ]
        if self._goal == "front":
            good = rng.permutation([trial.number for trial in on_front(knowledge)]).tolist()
        return good or [
            trial.number for trial, *_ in sorted(knowledge.ends, key=lambda end: end[1])
        ]

    def _rate(self, values: Values) -> float | None:
        """Return the learning rate that the optimizer gets."""
        return trial_params(self._completed(values)).optimizer_learning_rate

    def _candidates(self, distributions: Distributions, queued: Values) -> Candidates:
        """Return the candidates of these dimensions, some of which may be fixed to a queued value.

        Args:
            queued: values that the trial has already, by dimension.
        """
        given = {
            name: CategoricalDistribution([queued[name]])
            for name in distributions
            if name in queued
        }
        listed = self._listed
        if listed is not None:
            listed = [
                values
                for values in listed
                if all(values.get(name) == queued[name] for name in given)
            ]
        return Candidates(
            {**distributions, **given}, self._valid, listed, self._canonical, self._affects
        )

    def _completed(self, values: Values) -> Values:
        """Return these values together with what is fixed."""
        fixed = self._complete(dict(values))
        if not isinstance(fixed, Mapping):
            raise ValueError(
                f"complete must return what is fixed by its names, but returned {shortened(fixed)}."
            )
        check_values(
            {name: value for name, value in fixed.items() if value is not values.get(name, fixed)}
        )
        return {**values, **fixed}

    def meeting(self, knowledge: Knowledge, refuted: Collection[int]) -> list[Observation]:
        """Return the trials of known cost that meet the target as far as is known."""
        meeting = knowledge.meeting(self._target_loss, by_mean=self._confirmed)
        return [trial for trial in meeting if trial.number not in refuted]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_given(affects: Any, advised: Any) -> None:
    """Check the arguments `affects` and `advised`.

    Raises:
        ValueError: if one is no mapping, names a dimension that it must not name, or has a value
            that it must not have.
    """
    for given, argument in ((affects, "affects"), (advised, "advised")):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(
                f"{argument} must give values by dimensions' names, but got {shortened(given)}."
            )
    for name, what in (affects or {}).items():
        if name in DIMENSIONS or what not in get_args(StatedAffects):
            rule = "affects must say 'cost' or 'quality' of a dimension that carbonopt doesn't know"
            raise ValueError(f"{rule}, but got {shortened(what)} of {name}.")
    for name, value in (advised or {}).items():
        if name not in ADVISED or not (_is_number(value) and 0 < value < math.inf):
            rule = f"advised must give a number above 0 for {' or '.join(ADVISED)}"
            raise ValueError(f"{rule}, but got {shortened(value)} for {name}.")


def _check_listed(listed: Any, space: Mapping[str, BaseDistribution]) -> None:
    """Check the argument `listed`.

    Raises:
        ValueError: if it is no list, or has a combination that the search space does not have.
    """
    if not (isinstance(listed, Sequence) and listed):
        rule = "listed must be a list of all combinations that can exist, or None"
        raise ValueError(f"{rule}, but is {shortened(listed)}.")
    for row, values in enumerate(listed):
        for name, distribution in space.items():
            if (
                isinstance(values, Mapping)
                and name in values
                and not _holds(distribution, values[name])
            ):
                rule = f"listed[{row}] must be in search_space"
                raise ValueError(
                    f"{rule}, but its {name} is {shortened(values[name])}: {distribution}."
                )


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
    except ValueError:
        return False


# Identifies a trial: the storage, the study's number in it, and the trial's number in the study.
_Place = tuple[BaseStorage, int, int]


def _place(study: Study, number: int) -> _Place:
    return study._storage, study._study_id, number


def _tried(trials: Sequence[FrozenTrial], distributions: Distributions) -> set[tuple[Any, ...]]:
    return {tuple(values.get(name) for name in distributions) for values in map(_values_of, trials)}


def _values_of(trial: FrozenTrial) -> Values:
    """Return the values of a trial and, if it has not finished, those that it is going to have."""
    coming = {} if trial.state.is_finished() else trial.system_attrs
    return {**coming.get(CLAIM, {}), **coming.get("fixed_params", {}), **trial.params}


def _claim(study: Study, trial: FrozenTrial, values: Values) -> bool:
    """Return whether a trial may have these values, which no other running trial has claimed.

    If two workers claim the same values, the one that writes last sees the other's claim. The trial
    with the higher number withdraws at once. The one with the lower number waits WITHDRAW_S for
    that, and withdraws itself if the other has not.
    """
    claim = partial(study._storage.set_trial_system_attr, trial._trial_id, CLAIM)
    claim(values)
    deadline = time.monotonic() + WITHDRAW_S
    while True:
        same = [
            other.number
            for other in study.get_trials(deepcopy=False)
            if values.items() <= _values_of(other).items()
        ]
        rivals = [number for number in same if number != trial.number]
        if not rivals:
            return True
        if min(rivals) < trial.number or time.monotonic() > deadline:
            claim({})
            return False
        time.sleep(0.05)
