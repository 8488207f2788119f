"""What is to be repeated with other seeds once the search has ended: a pure function of the records.

One configuration is settled after the other: the search's winner first, and while the last one doesn't hold the target,
the next cheapest; one whose mean misses it has no further runs. Once one holds, its runners-up by emissions are
repeated. There are the runs of 1 + confirm.runners_up configurations at most. A choice knows what those before it have
found, so that an interrupted study goes on as if it had never stopped. Last comes the start configuration, where
confirm.baseline asks for it."""

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
    trials: tuple[int, ...]  # the search's trials whose configurations were chosen so far
    next: Repeat | None  # None: nothing is left to run
    not_recorded: tuple[Repeat, ...]  # wanted, but a replay's table has no such run


def plan(data: StudyData, available: Available) -> ConfirmationProgress:
    """What has been chosen to be repeated, and which run is due next. The study must have `confirm`."""
    confirm, target = data.config.confirm, data.config.target.at()
    assert confirm is not None
    tried = configurations(data.records)
    most = 1 + confirm.runners_up
    left = most * (confirm.seeds - 1)
    chosen: list[Configuration] = []
    not_recorded: list[Repeat] = []
    due: Repeat | None = None

    def repeated(config: Configuration) -> Repeat | None:
        """Its next run; None: it has none."""
        for seed in _missing_seeds(data, config.first, confirm.seeds):
            repeat = Repeat(trial=config.trial, seed=seed)
            if available(seed, config.first.params):
                return repeat
            not_recorded.append(repeat)
        return None

    while due is None and most > 0 and left > 0 and (following := _following(tried, chosen, target, confirm.seeds)):
        chosen.append(following)
        left -= following.n - 1
        if not _is_refuted(following, target):
            most -= 1
            due = repeated(following) if left > 0 else None
    if due is None and confirm.baseline and chosen and tried[0].trial == 0:
        chosen.append(tried[0])
        due = repeated(tried[0])
    trials = tuple(dict.fromkeys(config.trial for config in chosen))
    return ConfirmationProgress(trials=trials, next=due, not_recorded=tuple(not_recorded))


def outcome(data: StudyData, available: Available) -> str:
    """What the confirmation has found or what it lacks, in words."""
    progress = plan(data, available)
    if not progress.trials:
        return "no trial met the target, so none was repeated"
    evidence = Evidence.of(data, data.config.target.at())
    chosen = [config for config in evidence.configurations if config.trial in progress.trials]
    parts = []
    for seeds in sorted({config.n for config in chosen}, reverse=True):
        trials = [str(config.trial) for config in chosen if config.n == seeds]
        who = f"trial{'s' if len(trials) > 1 else ''} {', '.join(trials)}"
        parts.append(f"{who} ran with {seeds} seed{'s' if seeds > 1 else ''}")
    if not any(map(evidence.confirmed, chosen)):
        parts.append("none of them was confirmed")
    if progress.not_recorded:
        listed = ", ".join(f"{repeat.seed} of trial {repeat.trial}" for repeat in progress.not_recorded)
        parts.append(f"not in the table: seed {listed}")
    if progress.next is not None:
        parts.append("the budget ended before the confirmation did")
    return "; ".join(parts)


def refuted(records: Iterable[TrialRecord], config: StudyConfig) -> frozenset[int]:
    """Trials, repeats among them, of configurations whose repeats with other seeds missed the target, on average."""
    if config.confirm is None:
        return frozenset()
    target = config.target.at()
    return frozenset(run.trial for tried in configurations(records) if _is_refuted(tried, target) for run in tried.runs)


def _is_refuted(config: Configuration, target: Target) -> bool:
    """Whether its runs so far miss the target, on average, or it failed with another seed."""
    return config.failed_replicate or (config.n > 1 and not target.is_met_by(config.value))


def _following(
    tried: Sequence[Configuration], chosen: Sequence[Configuration], target: Target, seeds: int
) -> Configuration | None:
    """The configuration to repeat after these, by what the search and their repeats say; None: none is left."""
    known = [config if config in chosen else Configuration(runs=(config.first,)) for config in tried]
    evidence = Evidence(known, target, seeds)
    others = [config for config in known if config not in chosen]
    may_hold = [config for config in others if evidence.standing(config) is Standing.UNREPLICATED]
    winner = min(filter(evidence.confirmed, known), key=lambda config: config.mean_rank, default=None)
    following = min(may_hold, key=lambda config: config.rank, default=None)
    if winner is not None and (following is None or winner.rank < following.rank):
        winner_kg = winner.rank[0]
        may_hold += [near for near in others if near.rank < winner.rank and _nearly_meets(near, evidence, target)]
        following = min(may_hold, key=lambda config: (abs(config.rank[0] - winner_kg), config.rank), default=None)
    return next((config for config in tried if following and config.first is following.first), None)


def _nearly_meets(config: Configuration, evidence: Evidence, target: Target) -> bool:
    """Whether a single run is above the target by no more than a standard deviation of the repeats: one farther off
    would have to have been unlucky by more than two."""
    noise, over = evidence.scaled_value, target.shortfall(config.value)
    return noise is not None and 0 < over <= noise.deviation


def _missing_seeds(data: StudyData, first: TrialRecord, seeds: int) -> list[int]:
    """Those that a trial's configuration is still to be run with: of search.seed, search.seed + 1 and so on."""
    own, not_ended = data.config.search.seed, (StopReason.INTERRUPTED, StopReason.BUDGET)
    wanted = [seed for seed in range(own, own + seeds) if seed != first.seed][: seeds - 1]
    repeats = [record for record in data.records if record.repeat_of == first.trial]
    ran = {record.seed for record in repeats if record.stop_reason not in not_ended}
    return [seed for seed in wanted if seed not in ran]
