"""The audit of the pruning: what became of trials that the rule for the target would have stopped."""

from carbonopt.analysis.confidence import LEVEL
from carbonopt.analysis.front import pareto_front
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialState
from carbonopt.core.values import Frozen

# A trial that ended otherwise (by the budget, a crash) doesn't tell whether it would have mattered.
_TELLING = (TrialState.COMPLETE, TrialState.DIVERGED)


class Audit(Frozen):
    """Of the trials that were to be stopped for their target and ran on. The interval is Clopper and Pearson's, which
    holds for any number of trials."""

    ended: int  # ran to their end
    mattered: int  # of these, met the target after all; with search.goal: front, ended on the front
    cut_short: int  # did not reach their end, for another reason, or still run
    lowest_rate: float | None  # of `mattered` among `ended`; None: none ended
    highest_rate: float | None
    level: float = LEVEL  # of that interval


def audit(data: StudyData) -> Audit | None:
    """How often the rule was wrong where it was checked; None where no audit was asked for."""
    search, target = data.config.search, data.config.target.at()
    if not search.pruning.audit:
        return None
    audited = [record for record in data.records if record.audited_at_step is not None]
    ended = [record for record in audited if record.state in _TELLING]
    front = pareto_front(record for record in data.records if record.repeat_of is None)
    mattered = sum(record.trial in front if search.goal == "front" else record.meets(target) for record in ended)
    lowest, highest = _interval(mattered, len(ended)) if ended else (None, None)
    return Audit(
        ended=len(ended),
        mattered=mattered,
        cut_short=len(audited) - len(ended),
        lowest_rate=lowest,
        highest_rate=highest,
    )


def _interval(hits: int, n: int) -> tuple[float, float]:
    from scipy.special import betaincinv  # as in `confidence`

    tail = (1 - LEVEL) / 2
    lowest = float(betaincinv(hits, n - hits + 1, tail)) if hits else 0.0
    return lowest, float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
