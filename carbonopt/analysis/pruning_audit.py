"""The error rates of pruning, from the trials that ran on as an audit."""

from carbonopt.analysis.confidence import LEVEL
from carbonopt.analysis.front import pareto_front
from carbonopt.core.trial import TrialState
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData

# Only these states show whether a trial would have mattered; one that ended by the budget or a
# crash doesn't.
_TELLING = (TrialState.COMPLETE, TrialState.DIVERGED)


class Audit(Frozen):
    """The outcome of trials that were to be stopped for their target and ran on as an audit.

    The interval is Clopper and Pearson's, which holds for any number of trials.
    """

    ended: int  # number that ran to their end
    # Number of these that met the target after all or, with search.goal: front, ended on the front.
    mattered: int
    cut_short: int  # number that did not reach their end, for another reason, or still run
    lowest_rate: float | None  # rate of `mattered` among `ended`; None: none ended
    highest_rate: float | None
    level: float = LEVEL  # level of that interval


def audit(data: StudyData) -> Audit | None:
    """Return how often pruning was wrong where audited; None where no audit was asked for."""
    search, target = data.config.search, data.config.target.at()
    if not search.pruning.audit:
        return None
    audited = [record for record in data.records if record.audited_at_step is not None]
    ended = [record for record in audited if record.state in _TELLING]
    front = pareto_front(record for record in data.records if record.repeat_of is None)
    mattered = sum(
        record.trial in front if search.goal == "front" else record.meets(target)
        for record in ended
    )
    lowest, highest = _rate_interval(mattered, len(ended)) if ended else (None, None)
    cut_short = len(audited) - len(ended)
    return Audit(
        ended=len(ended),
        mattered=mattered,
        cut_short=cut_short,
        lowest_rate=lowest,
        highest_rate=highest,
    )


def _rate_interval(hits: int, n: int) -> tuple[float, float]:
    from scipy.special import betaincinv  # imported here as in `Pooled.margin`

    tail = (1 - LEVEL) / 2
    lowest = float(betaincinv(hits, n - hits + 1, tail)) if hits else 0.0
    return lowest, float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
