"""The Optuna sampler that weighs what its proposals cost, for any Optuna study.

It serves studies that minimize a cost and optimize a quality, and whose parameters have carbonopt's
names (`global_batch_size`, `learning_rate`, ...). See `observation` for the user attributes that
let it learn from unfinished trials, too. carbonopt's own studies use its `Planner` alone.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args
from zlib import crc32

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from carbonopt.core.dimensions import DIMENSIONS, StatedAffects
from carbonopt.core.errors import shortened
from carbonopt.core.quality import QUALITIES, Quality
from carbonopt.search.candidates import Distributions, Values, draw, movable
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.features import ADVISED, check_dimensions
from carbonopt.search.observation import observe
from carbonopt.search.planner import CLAIM, Planner, tried_in, values_of
from carbonopt.search.pruning import forecast_of_miss

WITHDRAW_S = 2.0  # how long a worker waits for another one to withdraw the same claim


class CarbonSampler(Planner, BaseSampler):
    """A sampler that looks for the cheapest configuration that meets the target, at little cost.

    It proposes the configuration that is most likely to be the answer, per unit of the cost that
    trying it is expected to have. The study needs two objectives: a cost to minimize, in any unit,
    and the quality. (Of a carbonopt study's trials, such as in `learn_from`, the costs are taken
    from the records, in kWh.) Several workers can share a study. They run different
    configurations for as long as there is one that has not been tried.

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
        estimated_gib: returns a configuration's estimated memory in GiB, with the margin that the
            estimate needs, or None where there is no estimate. A configuration that no trial has
            shown to fit or not is judged by it. None: nothing is estimated.
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
        estimated_gib: Callable[[Mapping[str, Any]], float | None] | None = None,
        learn_from: Sequence[Sequence[FrozenTrial]] = (),
        search_space: Mapping[str, BaseDistribution] | None = None,
        seed: int | None = 0,
    ) -> None:
        known = _known_quality(quality)
        _check_target(known, target)
        if goal not in ("recommend", "front"):
            raise ValueError(f"goal must be 'recommend' or 'front', but got {shortened(goal)}.")
        _check_memory_and_seed(memory_gib, seed)
        _check_space(search_space, listed)
        _check_given(affects, advised)
        _check_learn_from(learn_from)
        super().__init__(
            known,
            target,
            goal=goal,
            valid=valid or (lambda values: True),
            listed=listed,
            canonical=canonical,
            complete=complete,
            affects=affects or {},
            settings_decide_cost=False,  # how many steps a user's own training makes is not known
            confirmed=confirmed,
            advised=advised or {},
            memory_gib=memory_gib,
            estimated_gib=estimated_gib,
            learn_from=learn_from,
            seed=int(np.random.default_rng().integers(2**32)) if seed is None else seed,
        )
        self._given_space = search_space
        self._search_space = IntersectionSearchSpace(include_pruned=True)
        # The place of the latest trial, and the knowledge from the trials before it.
        self._before: tuple[_Place, Knowledge] | None = None

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
                    tried_in(others, search_space),
                    np.random.default_rng([self._seed, trial.number]),
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


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _known_quality(quality: Any) -> Quality:
    if not isinstance(quality, Quality) and quality not in QUALITIES:
        raise ValueError(
            f"quality must be one of {', '.join(QUALITIES)}, but got {shortened(quality)}."
        )
    return quality if isinstance(quality, Quality) else QUALITIES[quality]


def _check_target(quality: Quality, target: Any) -> None:
    if not _is_number(target) or not math.isfinite(target) or quality.beyond(target):
        raise ValueError(
            f"target must be a finite {quality.name}, {quality.bounds_text}, but got"
            f" {shortened(target)}."
        )


def _check_memory_and_seed(memory_gib: Any, seed: Any) -> None:
    if memory_gib is not None and not (_is_number(memory_gib) and memory_gib > 0):
        raise ValueError(
            "memory_gib must be above 0, or None where it is not known, but got"
            f" {shortened(memory_gib)}."
        )
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(
            "seed must be a whole number from 0, or None for another one each time, but got"
            f" {shortened(seed)}."
        )


def _check_space(search_space: Any, listed: Any) -> None:
    if search_space is not None and not isinstance(search_space, Mapping):
        raise ValueError(
            f"search_space must give dimensions by their names, but got {shortened(search_space)}."
        )
    if listed is not None:
        _check_listed(listed, search_space or {})


def _check_learn_from(learn_from: Any) -> None:
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
            if values.items() <= values_of(other).items()
        ]
        rivals = [number for number in same if number != trial.number]
        if not rivals:
            return True
        if min(rivals) < trial.number or time.monotonic() > deadline:
            claim({})
            return False
        time.sleep(0.05)
