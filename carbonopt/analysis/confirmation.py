"""Choose which trials to repeat with other seeds once the search has ended.

The choice is a pure function of the records. Each run goes to the cheapest configuration that may
well be confirmed (`Evidence.chance`). If there is none, a new configuration is tried, if the search
can propose one; otherwise the run goes to the configuration with the best chance. Once the cheapest
confirmed configuration has run with all its seeds, the runs go to those nearest to it in emissions.
With budget.until: converged, the cheapest confirmed one runs only until it is clearly confirmed
and the interval of its saving is narrow enough.
All these runs together are at most as many as 1 + confirm.runners_up configurations need for all
their seeds. Last comes the start configuration, if confirm.baseline asks for it: once, and then
until the interval of the saving is narrow enough.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from carbonopt.analysis.confidence import (
    Configuration,
    Evidence,
    Standing,
    configurations,
    is_failed_replicate,
)
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.format import count_text
from carbonopt.core.quality import Target
from carbonopt.core.trial import START_TRIAL, TrialRecord
from carbonopt.core.values import Frozen
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData

# Least chance of a configuration that may well be confirmed. In simulated studies
# (benchmarks/confirmation.py), with 1/5 fewer had a confirmed winner, and with 1/2 the
# winners emitted more.
_MAY_WELL = 1 / 3

# Least chance of a configuration that is repeated before the start configuration is. The start
# saves nothing, and is often the study's most expensive configuration.
_MAY = 1 / 20

# The most runs that are kept for the start, if no cheaper configuration is confirmed before.
_KEPT_FOR_START = 2

# Widest interval of the saving, as a share of the start's emissions, for which neither the start
# nor a winner that is clearly confirmed runs again.
SAVING_WIDTH = 0.02

# Least degrees of freedom of the emissions' spread that tell whether the interval is narrow. With
# one, two runs that happen to be alike end the repeats, and the interval holds the truth less often
# (docs/confirmation.md).
_LEAST_FREEDOM = 2

# Returns whether a configuration can be run with a seed.
Available = Callable[[int, TrialParams], bool]


class Repeat(Frozen):
    trial: int  # trial of the search whose configuration is run again
    seed: int


class ConfirmationProgress(Frozen):
    trials: tuple[int, ...]  # the search's trials whose configurations were chosen so far
    next: Repeat | None  # None: nothing is left to run
    # whether a new configuration should rather be tried, since the next repeat promises little
    prefers_new: bool
    not_recorded: tuple[Repeat, ...]  # repeats that are due, but that a replay's table lacks


def confirmation_progress(data: StudyData, available: Available) -> ConfirmationProgress:
    """Return what has been chosen to be repeated, and which run is due next.

    The study must have `confirm`.
    """
    confirm = data.config.confirm
    assert confirm is not None
    evidence, prefers_new = Evidence.of(data, data.config.target.at()), False
    baseline = next(
        (candidate for candidate in evidence.configurations if candidate.trial == START_TRIAL), None
    )
    chosen: set[int] = set()
    not_recorded: list[Repeat] = []
    due: Repeat | None = None

    def next_run(candidate: Configuration) -> Repeat | None:
        """Note that a configuration was chosen, and return its next run; None if it has none.

        Runs that a replay's table lacks are noted, too.
        """
        chosen.add(candidate.trial)
        for seed in _missing_seeds(data, candidate.first, confirm.seeds):
            repeat = Repeat(trial=candidate.trial, seed=seed)
            if available(seed, candidate.first.params):
                return repeat
            not_recorded.append(repeat)
        return None

    runs_left = confirm.most_search_repeats - _runs_so_far(data)
    if runs_left > 0:
        start = baseline if data.config.search.start else None
        winner = _cheapest_confirmed(evidence)
        kept = _kept_for_start(data.config, evidence, start) if winner is None else 0
        for candidate in _in_order(data, evidence, start, start_is_due=runs_left <= kept):
            due = next_run(candidate)
            if due is not None:
                prefers_new = (
                    may_try_new(data.config)
                    and winner in (None, start)
                    and not _is_promising(candidate, evidence, start)
                    # a new configuration needs a run of its own and at least one repeat
                    and runs_left >= kept + 2
                )
                break
    had_repeats = {run.repeat_of for run in data.records if run.repeat_of is not None}
    if due is None and (chosen or had_repeats) and confirm.baseline and baseline:
        chosen.add(START_TRIAL)
        # One repeat is always made: the start runs first, when the devices are at their coldest.
        is_known = _saving_is_precise(_cheapest_confirmed(evidence), evidence, baseline)
        if not baseline.failed_replicate and not (baseline.repeated and is_known):
            due = next_run(baseline)
    return ConfirmationProgress(
        trials=tuple(sorted(chosen | had_repeats)),
        next=due,
        prefers_new=prefers_new,
        # The start is also chosen for its own runs.
        not_recorded=tuple(dict.fromkeys(not_recorded)),
    )


def _in_order(
    data: StudyData, evidence: Evidence, start: Configuration | None, *, start_is_due: bool
) -> Iterator[Configuration]:
    """Yield configurations in the order in which the confirmation's runs go to them.

    Args:
        start: The start configuration, if it completed.
        start_is_due: Whether all runs that are left are kept for the start; only a promising
            configuration comes before it.
    """
    config, chosen = data.config, list[Configuration]()
    while following := _following(evidence, chosen, start, config):
        if start_is_due and start is not None and start not in chosen:
            following = following if _is_promising(following, evidence, start) else start
        chosen.append(following)
        yield following


def _is_promising(
    candidate: Configuration, evidence: Evidence, start: Configuration | None
) -> bool:
    """Return whether a configuration other than the start may well be confirmed."""
    return candidate is not start and evidence.chance(candidate) >= _MAY_WELL


def _kept_for_start(config: StudyConfig, evidence: Evidence, start: Configuration | None) -> int:
    """Return how many of the last runs are kept for the start while nothing is confirmed.

    So at least a start that meets the target is confirmed. They are taken from the runs of the
    runners-up. With confirm.baseline none are kept, since the start has runs of its own. With
    budget.until: converged none are kept either, since a run of the start saves nothing.
    """
    confirm = config.confirm
    assert confirm is not None
    if confirm.baseline or config.budget.until == "converged":
        return 0
    if start is None or start.n >= confirm.seeds:
        return 0
    if evidence.standing(start) is Standing.REJECTED or evidence.chance(start) < _MAY_WELL:
        return 0
    of_runners_up = confirm.runners_up * (confirm.seeds - 1)
    return min(_KEPT_FOR_START, of_runners_up, confirm.seeds - start.n)


def may_try_new(config: StudyConfig) -> bool:
    """Return whether new configurations may take the place of repeats.

    They take runs of the runners-up, and a search that learns from repeats has to propose them. It
    still can if `budget.trials` ended it.
    """
    runners_up = config.confirm.runners_up if config.confirm is not None else 0
    learns = config.search.sampler == "carbon" and config.search.goal == "recommend"
    return runners_up > 0 and learns and config.budget.trials is not None


def _runs_so_far(data: StudyData) -> int:
    """Count the confirmation's runs so far: repeats, and configurations tried in their place.

    Repeats of the start that confirm.baseline adds don't count.
    """
    confirm = data.config.confirm
    adds_start = confirm is not None and confirm.baseline
    not_counted = {None, START_TRIAL} if adds_start else {None}
    repeats = sum(record.repeat_of not in not_counted for record in _not_cut_off(data.records))
    return repeats + _added_trials(data)


def _added_trials(data: StudyData) -> int:
    """Count the configurations that were tried in place of repeats."""
    return sum(record.replaces_repeat for record in _not_cut_off(data.records))


def outcome(data: StudyData, available: Available, limit: str | None = None) -> str:
    """Say what the confirmation has found or what it lacks, in sentences.

    Args:
        limit: Which limit of the budget ended it, in words; None: the one that ended the search.
    """
    progress = confirmation_progress(data, available)
    if not progress.trials:
        return "No trial met the target, so none was repeated"
    evidence = Evidence.of(data, data.config.target.at())
    chosen = [
        candidate for candidate in evidence.configurations if candidate.trial in progress.trials
    ]
    parts = []
    for seeds in sorted({candidate.n for candidate in chosen}, reverse=True):
        trials = [str(candidate.trial) for candidate in chosen if candidate.n == seeds]
        who = f"trial{'s' if len(trials) > 1 else ''} {', '.join(trials)}"
        parts.append(f"{who} ran with {seeds} seed{'s' if seeds > 1 else ''}")
    lost = [run for run in data.records if is_failed_replicate(run)]
    if lost:
        parts.append(f"{count_text(len(lost), 'repeat')} ended without a result")
    if not any(map(evidence.confirmed, chosen)):
        parts.append("none of them was confirmed")
    confirm = data.config.confirm
    assert confirm is not None
    winner = _cheapest_confirmed(evidence)
    has_all_seeds = winner is not None and winner.n == confirm.seeds
    if not has_all_seeds and _runs_so_far(data) >= confirm.most_search_repeats:
        most = confirm.most_search_repeats
        used_up = (
            "one run of the confirmation is"
            if most == 1
            else f"{most} runs of the confirmation are"
        )
        parts.append(f"the {used_up} used up")
    if added := _added_trials(data):
        parts.append(f"{count_text(added, 'more trial')} took the place of repeats")
    if progress.not_recorded:
        listed = ", ".join(
            f"{repeat.seed} of trial {repeat.trial}" for repeat in progress.not_recorded
        )
        parts.append(f"not in the table: seed {listed}")
    if progress.next is not None:
        unended = "the confirmation did not end"
        parts.append(unended if limit is None else f"{limit}, so that {unended}")
    return ". ".join(part[:1].upper() + part[1:] for part in parts)


def refuted(records: Iterable[TrialRecord], config: StudyConfig) -> frozenset[int]:
    """Return the trials of configurations whose runs with several seeds missed the target.

    The mean over the runs counts; a configuration that failed with another seed missed, too.
    Repeats are among the returned trials.
    """
    if config.confirm is None:
        return frozenset()
    target = config.target.at()
    return frozenset(
        run.trial
        for tried in configurations(records)
        if _is_refuted(tried, target)
        for run in tried.runs
    )


def _is_refuted(candidate: Configuration, target: Target) -> bool:
    """Return whether the runs so far miss the target on average, or another seed failed."""
    return candidate.failed_replicate or (candidate.n > 1 and not target.is_met_by(candidate.value))


def _following(
    evidence: Evidence,
    excluded: Collection[Configuration],
    start: Configuration | None,
    config: StudyConfig,
) -> Configuration | None:
    """Return the configuration that the next run belongs to; None if none is left.

    Args:
        excluded: configurations that get no further run.
        start: the start configuration, if it completed.
    """
    assert config.confirm is not None
    tried, target, seeds = evidence.configurations, config.target.at(), config.confirm.seeds
    winner = _cheapest_confirmed(evidence)
    unfinished = [
        candidate for candidate in tried if candidate.n < seeds and candidate not in excluded
    ]
    may_hold = [
        candidate
        for candidate in unfinished
        if evidence.standing(candidate) is not Standing.REJECTED
    ]
    if winner is None:
        return _first_to_confirm(may_hold, evidence, start)
    if config.budget.until == "converged":
        reuses = config.budget.reuses
        unfinished = [
            candidate
            for candidate in unfinished
            if (
                _needs_more_seeds(winner, evidence, start)
                if candidate is winner
                else _may_pay(candidate, winner, evidence, seeds, reuses)
            )
        ]
        may_hold = [candidate for candidate in may_hold if candidate in unfinished]
    cheaper = [candidate for candidate in may_hold if candidate.mean_rank < winner.mean_rank]
    if likely := _most_promising(cheaper, evidence, _MAY_WELL):
        return likely
    # The start is the winner, where cheaper ones were not confirmed: its runs come after theirs.
    if winner in may_hold and not (winner is start and cheaper):
        return winner
    winner_kg = winner.emissions_kg_co2e
    near = [
        candidate
        for candidate in unfinished
        if candidate.n == 1 and candidate.mean_rank < winner.mean_rank
    ]
    may_hold += [candidate for candidate in near if _nearly_meets(candidate, evidence, target)]
    return min(
        (candidate for candidate in may_hold if candidate is not winner),
        key=lambda candidate: (abs(candidate.emissions_kg_co2e - winner_kg), candidate.mean_rank),
        default=winner if winner in may_hold else None,
    )


def _first_to_confirm(
    may_hold: Sequence[Configuration], evidence: Evidence, start: Configuration | None
) -> Configuration | None:
    """Return the configuration that the next run belongs to while none is confirmed.

    Args:
        may_hold: the configurations that may be confirmed by further runs.
        start: the start configuration, if it completed.
    """
    rivals = [
        candidate
        for candidate in may_hold
        if start is None or candidate.mean_rank < start.mean_rank
    ]
    promising = _most_promising(rivals, evidence, _MAY)
    if promising is None and start in may_hold:
        return start
    return promising or _most_promising(may_hold, evidence, 0.0)


def _may_pay(
    candidate: Configuration, winner: Configuration, evidence: Evidence, seeds: int, reuses: int
) -> bool:
    """Return whether a configuration's further runs are expected to save what they emit.

    If they confirm it, `reuses` later runs emit less than those of the confirmed winner would. If
    they don't, the first of them mostly refutes it, and no further one is made.
    """
    chance = evidence.chance(candidate)
    saved_kg = winner.emissions_kg_co2e - candidate.emissions_kg_co2e
    expected_runs = 1 + chance * (seeds - candidate.n - 1)
    return chance * reuses * saved_kg > expected_runs * candidate.emissions_kg_co2e


def _needs_more_seeds(
    winner: Configuration, evidence: Evidence, start: Configuration | None
) -> bool:
    """Return whether a converged study runs its winner with further seeds.

    It does until the winner is clearly confirmed and its saving against the start is known well
    enough.
    """
    return not evidence.clearly_confirmed(winner) or not _saving_is_precise(winner, evidence, start)


def _most_promising(
    tried: Sequence[Configuration], evidence: Evidence, least: float
) -> Configuration | None:
    """Return the cheapest configuration that may well be confirmed, else the likeliest one.

    Args:
        least: The least chance of the likeliest one; None is returned where all have less.
    """
    chances = {candidate.trial: evidence.chance(candidate) for candidate in tried}
    likely = [candidate for candidate in tried if chances[candidate.trial] >= _MAY_WELL]
    if likely:
        return min(likely, key=lambda candidate: candidate.mean_rank)
    return max(
        (candidate for candidate in tried if chances[candidate.trial] >= least),
        key=lambda candidate: (chances[candidate.trial], -candidate.rank[0], -candidate.trial),
        default=None,
    )


def _saving_is_precise(
    winner: Configuration | None, evidence: Evidence, start: Configuration | None
) -> bool:
    """Return whether the winner's saving against the start is known well enough.

    So it is where the start misses the target: that saving compares two different qualities.
    """
    if winner is None or start is None or winner is start:
        return True  # there is no saving to know
    if evidence.standing(start) is Standing.REJECTED:
        return True
    spread, interval = evidence.emissions_spread, evidence.saving_interval(winner, start)
    if spread is None or spread.freedom < _LEAST_FREEDOM or interval is None:
        return False
    # A winner that certainly saves nothing needs no narrow interval.
    return interval[1] - interval[0] <= SAVING_WIDTH or interval[1] <= 0


def _cheapest_confirmed(evidence: Evidence) -> Configuration | None:
    confirmed = filter(evidence.confirmed, evidence.configurations)
    return min(confirmed, key=lambda candidate: candidate.mean_rank, default=None)


def _nearly_meets(candidate: Configuration, evidence: Evidence, target: Target) -> bool:
    """Return whether a single run misses the target by at most a standard deviation of the repeats.

    One that misses by more is not repeated: the mean that would confirm it lies about two standard
    deviations from it.
    """
    noise, over = evidence.value_spread, target.shortfall(candidate.value)
    return noise is not None and 0 < over <= noise.deviation


def _missing_seeds(data: StudyData, first: TrialRecord, seeds: int) -> list[int]:
    """Return the seeds that a trial's configuration is still to be run with, the next one first.

    They are search.seed, search.seed + 1 and so on. Configurations that share a seed are lucky or
    unlucky together, for it decides the order of the data. So that one unlucky seed doesn't refute
    them all, each configuration begins with the seed after that with which the one before it began.
    """
    own = data.config.search.seed
    wanted = [seed for seed in range(own, own + seeds) if seed != first.seed][: seeds - 1]
    repeated = list(
        dict.fromkeys(record.repeat_of for record in data.records if record.repeat_of is not None)
    )
    before = repeated.index(first.trial) if first.trial in repeated else len(repeated)
    ran = {record.seed for record in _not_cut_off(data.records) if record.repeat_of == first.trial}
    turn = before % len(wanted)
    return [seed for seed in wanted[turn:] + wanted[:turn] if seed not in ran]


def _not_cut_off(records: Iterable[TrialRecord]) -> Iterator[TrialRecord]:
    return (record for record in records if not record.was_cut_off)
