"""Plans the next trial of a search from the trials and probes so far."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from carbonopt.core.dimensions import StatedAffects, affecting, affecting_run_cost
from carbonopt.core.errors import shortened
from carbonopt.core.quality import Quality
from carbonopt.search.candidates import (
    ENUMERATED,
    Candidates,
    Distributions,
    Key,
    Values,
    key_of,
)
from carbonopt.search.front_proposal import on_front, propose_for_front
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.curves import FIT_ITERATIONS, one_blas_thread
from carbonopt.search.models.features import check_values
from carbonopt.search.observation import Observation, observe, trial_params
from carbonopt.search.probe_plan import Probing, cheapest, failed_by, worth_probing
from carbonopt.search.proposal import Proposal, first, propose

CENTRES = 3  # number of the best trials near which a large space is searched more densely
SHORT_FIT_FROM = 30  # number of trials from which on the models' parameters hardly change

# System attribute of a trial: the values that its worker is about to give it. It shows several
# workers of an Optuna study of the user's own what the others are about to try; Optuna itself
# stores a value only when the trial asks for it. The workers of a carbonopt study choose under a
# lock instead (`storage.workers`).
CLAIM = "carbonopt:claim"
# Dimensions that decide how many examples a rank computes at once. They leave the quality alone,
# except where the model has batch normalisation, and in scripts without a global batch.
DIVIDE_A_STEP = ("micro_batch_size_per_gpu", "world_size")
_MOST_TRIALS = 10**9  # bound that keeps the numbers of prior studies' trials apart


@dataclass(frozen=True)
class Left:
    """Counts of the configurations that a search has left."""

    untried: int  # configurations among which the next trial is chosen
    # whether these are all that are left; otherwise they were drawn from a larger space
    is_all: bool
    unlikely_to_fit: int = 0  # untried configurations that are unlikely to fit in memory
    failed: int = 0  # further configurations, whose settings failed in a probe
    # further ones that train like one that missed the target
    missing: int = 0
    # further ones that cost as much as a trial that met the target, and so can save nothing
    no_cheaper: int = 0


@dataclass(frozen=True)
class NextTrial:
    """The next trial's values, the expectations of it, and the knowledge that they come from."""

    values: Values | None  # None: nothing is left that could be the answer
    # None: no trial has been evaluated yet, the front is searched, or nothing is left
    proposal: Proposal | None
    knowledge: Knowledge
    # the configuration whose settings are to be measured by a probe first; None: none is worth it
    probe_values: Values | None
    left: Left
    meeting: frozenset[int]  # numbers of the trials that meet the target, as far as is known


class Planner:
    """Plans trials: which configuration is most likely to be the answer, per unit of its cost.

    Args:
        quality: the quality of the search.
        target: the value of it that a trial has to reach.
        goal: whether the cheapest configuration that meets the target is searched, or the front.
        valid: returns whether a combination of values can exist.
        listed: all combinations that can exist. None: they are not known.
        canonical: maps combinations that train alike to the one of them that is tried.
        complete: returns what is fixed in all trials, for the values of the searched dimensions.
        affects: `"cost"` or `"quality"` for dimensions of the user's own that affect one of them.
        settings_decide_cost: whether trainings that differ only in what affects the quality cost
            the same.
        confirmed: whether the answer will be run again with other seeds.
        advised: values near which the best trial is expected, by dimension.
        memory_gib: memory of one device. None: not known.
        estimated_gib: returns a configuration's estimated memory, with its margin, or None where
            there is no estimate. None: nothing is estimated.
        learn_from: a list of trials for each prior study.
        seed: seed of the draws. With the trials' numbers it decides every plan.

    Raises:
        ValueError: if the trials of a prior study have impossible values or user attributes.
    """

    def __init__(
        self,
        quality: Quality,
        target: float,
        *,
        goal: Literal["recommend", "front"],
        valid: Callable[[Values], bool],
        listed: Sequence[Mapping[str, Any]] | None,
        canonical: Callable[[Values], Values],
        complete: Callable[[Values], Mapping[str, Any]],
        affects: Mapping[str, StatedAffects],
        settings_decide_cost: bool,
        confirmed: bool,
        advised: Mapping[str, float],
        memory_gib: float | None,
        estimated_gib: Callable[[Mapping[str, Any]], float | None] | None,
        learn_from: Sequence[Sequence[FrozenTrial]],
        seed: int,
    ) -> None:
        self._quality, self._target_loss = quality, quality.loss_of(target)
        self._goal, self._confirmed = goal, confirmed
        self._valid, self._listed, self._canonical = valid, listed, canonical
        self._complete, self._settings_decide_cost = complete, settings_decide_cost
        self._affects, self._advised = dict(affects), dict(advised)
        self._memory_gib, self._estimated_gib = memory_gib, estimated_gib
        self._seed = seed
        self._earlier = [self._of_earlier(trials, study) for study, trials in enumerate(learn_from)]
        # Finished trials, by number, with their observations: to observe thousands takes seconds.
        self._observed: dict[int, tuple[FrozenTrial, Observation | None]] = {}

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

    def knowledge(
        self,
        trials: Sequence[FrozenTrial],
        distributions: Distributions,
        probes: Sequence[Observation] = (),
    ) -> Knowledge:
        """Return the knowledge that these trials and probes give."""
        observed = map(self._observation, trials)
        observations = [observation for observation in observed if observation is not None]
        return Knowledge(
            quality=self._quality,
            distributions=distributions,
            observations=[*observations, *probes],
            memory_gib=self._memory_gib,
            effort=FIT_ITERATIONS if len(observations) < SHORT_FIT_FROM else 12,
            affects=self._affects,
            quality_affects_cost=any(trial.may_stop_itself for trial in observations),
            earlier=self._earlier,
            advised=self._advised,
            estimated_gib=self._estimated_gib,
        )

    def _observation(self, trial: FrozenTrial) -> Observation | None:
        """Return the observation of a trial, which is made once if the trial has finished.

        Optuna's storages never change a finished trial; another study's has another object.
        """
        known = self._observed.get(trial.number)
        if known is not None and known[0] is trial:
            return known[1]
        observation = observe(trial, self._quality, self._completed)
        if trial.state.is_finished():
            self._observed[trial.number] = trial, observation
        return observation

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
        *,
        replaces_repeat: bool = False,
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
            replaces_repeat: whether the trial takes the place of a repeat, see `propose`.
        """
        rng = np.random.default_rng([self._seed, number])
        knowledge = self.knowledge(trials, distributions, probes)
        meeting = self.meeting(knowledge, refuted)
        centres = self._centres(trials, distributions, self._good(knowledge, meeting, rng))
        space = self._candidates(distributions, queued or {})
        tried = tried_in(trials, distributions)
        untried = space.untried(tried, centres, rng)
        worth_trying = partial(self._worth_trying, knowledge, meeting, distributions, probes)
        working, promising, candidates = worth_trying(untried)
        completed = [self._completed(values) for values in candidates]
        # Also in an infinite space, see `propose`.
        by_mean = self._confirmed or space.listed is None
        index, proposal = self._choose(
            completed, knowledge, meeting, rng, by_mean=by_mean, replaces_repeat=replaces_repeat
        )
        values, probe = None if index is None else candidates[index], None
        if values is not None and probing is not None:
            *_, alike = worth_trying(space.alike(values, tried))
            chance = 0.0 if proposal is None else proposal.chance
            values, probe = self._with_settings(values, alike, knowledge, probing, chance, rng)
        fitting = (
            len(candidates)
            if values or not candidates
            else int(knowledge.likely_to_fit(completed).sum())
        )
        left = Left(
            untried=len(candidates),
            is_all=space.listed is not None and len(space.listed) <= ENUMERATED,
            unlikely_to_fit=len(candidates) - fitting,
            failed=len(untried) - len(working),
            missing=len(working) - len(promising),
            no_cheaper=len(promising) - len(candidates),
        )
        return NextTrial(
            values, proposal, knowledge, probe, left, frozenset(trial.number for trial in meeting)
        )

    def _worth_trying(
        self,
        knowledge: Knowledge,
        meeting: Sequence[Observation],
        distributions: Distributions,
        probes: Sequence[Observation],
        values: Sequence[Values],
    ) -> tuple[list[Values], list[Values], list[Values]]:
        """Return the configurations that are left after each reason to leave some out.

        Returns:
            Those that have not failed in a probe; of them, those that may meet the target; and of
            these, those that may save something.
        """
        working = self._not_failed(values, probes)
        promising = self._may_meet(working, knowledge, distributions)
        return working, promising, self._may_save(promising, meeting, distributions)

    def _not_failed(self, values: Sequence[Values], probes: Sequence[Observation]) -> list[Values]:
        """Return the configurations whose settings have not failed in a probe."""
        return [each for each in values if not failed_by(each, probes, self._affects)]

    def _may_meet(
        self, values: Sequence[Values], knowledge: Knowledge, distributions: Distributions
    ) -> list[Values]:
        """Return the configurations that don't train like one that missed the target.

        The others differ from it only in dimensions that don't affect the quality, such as the ZeRO
        stage. If they met the target, it would be by luck. Configurations of which one run met the
        target are kept. All are returned if the whole front is searched, which gains by a lower
        cost at the same quality.
        """
        of_quality = affecting("quality", distributions, self._affects)
        names = [name for name in distributions if name in of_quality or name in DIVIDE_A_STEP]
        if self._goal == "front" or len(names) == len(distributions):
            return list(values)
        ended = [
            (key_of(trial.params, names), met)
            for trial in knowledge.observations
            if (met := trial.meets(self._target_loss)) is not None
        ]
        missed = {key for key, met in ended if not met} - {key for key, met in ended if met}
        return [each for each in values if key_of(self._completed(each), names) not in missed]

    def _may_save(
        self,
        values: Sequence[Values],
        meeting: Sequence[Observation],
        distributions: Distributions,
    ) -> list[Values]:
        """Return the configurations that can cost less than the trials that meet the target.

        The others differ from such a trial only in dimensions that don't affect the cost, such as
        the learning rate. If they cost less, it is by the scatter of measurements. All
        configurations are returned if the whole front is searched, which gains by a better quality,
        too, or if more than the settings decides the cost.
        """
        if self._goal == "front" or not self._settings_decide_cost:
            return list(values)
        names = affecting_run_cost(distributions, self._affects)
        met = {key_of(trial.params, names) for trial in meeting}
        return [each for each in values if key_of(self._completed(each), names) not in met]

    def _centres(
        self, trials: Sequence[FrozenTrial], distributions: Distributions, good: Sequence[int]
    ) -> list[Values]:
        """Return the configurations of the best trials, near which a large space is drawn from.

        Args:
            good: numbers of good trials, the best first.
        """
        names = distributions.keys()
        best = (trial.params for trial in trials if trial.number in good[:CENTRES])
        return [{name: params[name] for name in names} for params in best if names <= params.keys()]

    def _choose(
        self,
        candidates: Sequence[Values],
        knowledge: Knowledge,
        meeting: Sequence[Observation],
        rng: np.random.Generator,
        *,
        by_mean: bool,
        replaces_repeat: bool,
    ) -> tuple[int | None, Proposal | None]:
        """Choose the candidate that is tried next.

        Args:
            candidates: the configurations to choose among, with what is fixed.
            meeting: the trials that meet the target.
            by_mean: whether a configuration's mean over seeds has to meet the target.
            replaces_repeat: see `propose`.

        Returns:
            Its place among the candidates, or None if none could be the answer; and what is
            expected of it, where something is.
        """
        if not candidates:
            return None, None
        if not any(trial.curve for trial in knowledge.observations):
            likely = np.flatnonzero(knowledge.likely_to_fit(candidates)).tolist()
            fitting = [candidates[place] for place in likely]
            return likely[first(fitting, rng, knowledge.begins_near)], None
        if self._goal == "front":
            return propose_for_front(candidates, knowledge), None
        proposal = propose(
            candidates,
            knowledge,
            self._target_loss,
            meeting,
            rng,
            by_mean=by_mean,
            replaces_repeat=replaces_repeat,
        )
        return (None if proposal is None else proposal.index), proposal

    def _with_settings(
        self,
        values: Values,
        alike: Sequence[Values],
        knowledge: Knowledge,
        probing: Probing,
        chance: float,
        rng: np.random.Generator,
    ) -> tuple[Values, Values | None]:
        """Choose the settings that leave the quality alone, which decide what a step costs.

        Args:
            values: the configuration that is tried next.
            alike: this one and untried ones that train to the same quality by other settings.
            probing: what the study knows of its probes.
            chance: the chance that the configuration is the answer.

        Returns:
            The cheapest of these configurations, as far as is known, and the one whose settings are
            worth a probe first; None: none is.
        """
        # The learning rate may depend on the number of ranks, which leave the quality alone
        # otherwise.
        rate = self._rate(values)
        same = [other for other in alike if self._rate(other) == rate]
        whole = [self._completed(other) for other in same]
        measured = worth_probing(whole, knowledge, probing, chance, rng)
        return same[cheapest(whole, knowledge)], None if measured is None else same[measured]

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


def tried_in(trials: Sequence[FrozenTrial], distributions: Distributions) -> set[Key]:
    """Return the configurations of trials, as they are compared."""
    return {key_of(values_of(trial), distributions) for trial in trials}


def values_of(trial: FrozenTrial) -> Values:
    """Return the values of a trial and, if it has not finished, those that it is going to have."""
    coming = {} if trial.state.is_finished() else trial.system_attrs
    return {**coming.get(CLAIM, {}), **coming.get("fixed_params", {}), **trial.params}
