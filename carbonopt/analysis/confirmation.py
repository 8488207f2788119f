"""What is to be repeated with other seeds once the search has ended: a pure function of the records.

One configuration is settled after the other: the search's winner first, and while the last one doesn't hold the target
after its repeats, the next cheapest takes its place. Once one holds, its runners-up by emissions are repeated. All
together these are at most 1 + confirm.runners_up configurations. What is known at each choice is what the choices
before it have found, so that an interrupted study goes on as if it had never stopped.
"""

from collections.abc import Callable, Iterable, Sequence

from carbonopt.analysis.confidence import Configuration, Evidence, Standing, configurations
from carbonopt.core.config import StudyConfig
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import Target
from carbonopt.core.study import StudyData
from carbonopt.core.trial import StopReason, TrialRecord
from carbonopt.core.values import Frozen

Available = Callable[[int, TrialParams], bool]  # whether a configuration can be run with a seed


class Repeat(Frozen):
    trial: int  # of the search, whose configuration is run again
    seed: int


class ConfirmationProgress(Frozen):
    """How far the confirmation has come."""

    trials: tuple[int, ...]  # the search's trials whose configurations were chosen so far
    next: Repeat | None  # None: nothing is left to run
    not_recorded: tuple[Repeat, ...]  # wanted, but a replay's table has no such run


def plan(data: StudyData, available: Available) -> ConfirmationProgress:
    """What has been chosen to be repeated, and which run is due next. The study must have `confirm`."""
    confirm = data.config.confirm
    assert confirm is not None
    found = configurations(data.records)
    chosen: list[Configuration] = []
    not_recorded: list[Repeat] = []
    while len(chosen) <= confirm.runners_up:
        following = _following(found, chosen, data.config.target.at(), confirm.seeds)
        if following is None:
            break
        chosen.append(following)
        for seed in _missing_seeds(data, following.first, confirm.seeds):
            repeat = Repeat(trial=following.first.trial, seed=seed)
            if available(seed, following.first.params):
                return ConfirmationProgress(trials=_numbers(chosen), next=repeat, not_recorded=tuple(not_recorded))
            not_recorded.append(repeat)
    return ConfirmationProgress(trials=_numbers(chosen), next=None, not_recorded=tuple(not_recorded))


def outcome(data: StudyData, available: Available) -> str:
    """What the confirmation has found or what it lacks, in words."""
    found = plan(data, available)
    if not found.trials:
        return "no trial met the target, so none was repeated"
    evidence = Evidence.of(data, data.config.target.at())
    chosen = [one for one in evidence.configurations if one.first.trial in found.trials]
    counts = sorted({one.n for one in chosen}, reverse=True)
    parts = [_ran(count, [one.first.trial for one in chosen if one.n == count]) for count in counts]
    if not any(evidence.standing(one) is Standing.CONFIRMED for one in chosen):
        parts.append("none of them was confirmed")
    if found.not_recorded:
        listed = ", ".join(f"{one.seed} of trial {one.trial}" for one in found.not_recorded)
        parts.append(f"not in the table: seed {listed}")
    if found.next is not None:
        parts.append("the budget ended before the confirmation did")
    return "; ".join(parts)


def refuted(records: Iterable[TrialRecord], config: StudyConfig) -> frozenset[int]:
    """Trials, repeats among them, of configurations whose repeats with other seeds missed the target, on average."""
    if config.confirm is None:
        return frozenset()
    evidence = Evidence(configurations(records), config.target.at(), config.confirm.seeds)
    repeated = [one for one in evidence.configurations if one.n > 1 or one.failed_replicate]
    missing = [one for one in repeated if evidence.standing(one) is Standing.REJECTED]
    return frozenset(run.trial for one in missing for run in one.runs)


def _following(
    found: Sequence[Configuration], chosen: Sequence[Configuration], target: Target, seeds: int
) -> Configuration | None:
    """The configuration to repeat after these, by what the search and their repeats say; None: none is left."""
    known = [one if one in chosen else Configuration(runs=(one.first,)) for one in found]
    evidence = Evidence(known, target, seeds)
    by_trial = {one.first.trial: one for one in found}
    taken = {one.first.trial for one in chosen}
    others = [one for one in known if one.first.trial not in taken]
    holds = [one for one in known if evidence.standing(one) is Standing.CONFIRMED]
    may_hold = [one for one in others if evidence.standing(one) is Standing.UNREPLICATED]
    winner = min(holds, key=lambda one: one.mean_rank, default=None)
    following = min(may_hold, key=lambda one: one.rank, default=None)
    if winner is not None and (following is None or winner.rank < following.rank):
        may_hold += [one for one in others if one.rank < winner.rank and _nearly_meets(one, evidence, target)]
        following = min(may_hold, key=lambda one: (abs(one.rank[0] - winner.rank[0]), one.rank), default=None)
    return None if following is None else by_trial[following.first.trial]


def _nearly_meets(one: Configuration, evidence: Evidence, target: Target) -> bool:
    """Whether a single run is above the target by no more than a standard deviation of the repeats.

    To hold the target in the end, one that is farther off would have to have been unlucky by more than two.
    """
    noise, over = evidence.scaled_value, target.shortfall(one.value)
    return noise is not None and 0 < over <= noise.deviation


def _missing_seeds(data: StudyData, first: TrialRecord, seeds: int) -> list[int]:
    """Those that a trial's configuration is still to be run with: of search.seed, search.seed + 1 and so on."""
    own = data.config.search.seed
    wanted = [first.seed, *(seed for seed in range(own, own + seeds) if seed != first.seed)][:seeds]
    not_ended = (StopReason.INTERRUPTED, StopReason.BUDGET)
    run = {
        record.seed
        for record in data.records
        if record.repeat_of == first.trial and record.stop_reason not in not_ended
    }
    return [seed for seed in wanted[1:] if seed not in run]


def _numbers(chosen: Sequence[Configuration]) -> tuple[int, ...]:
    return tuple(one.first.trial for one in chosen)


def _ran(seeds: int, trials: Sequence[int]) -> str:
    listed = ", ".join(map(str, trials))
    return f"trial{'s' if len(trials) > 1 else ''} {listed} ran with {seeds} seed{'s' if seeds > 1 else ''}"
