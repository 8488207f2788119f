"""Trials that other work on the machine slowed down, in words."""

from collections.abc import Collection, Sequence

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.format import count_text, percent_text
from carbonopt.core.study import StudyData
from carbonopt.core.trial import StopReason, TrialRecord

# Of `cpu_wait_fraction`. The quickstart has 0.03 to 0.04 alone on two cores, and 0.36 beside one busy process, which
# doubles its time.
CPU_CONTENTION_FROM = 0.15
_NAMED = 3


def has_cpu_contention(record: TrialRecord) -> bool:
    return (record.cpu_wait_fraction or 0.0) >= CPU_CONTENTION_FROM


def cpu_contention(data: StudyData, rec: Recommendation) -> tuple[str, ...]:
    """A sentence on the trials that waited for cores, and on what of the answer is in doubt; empty if none waited."""
    crowded = _crowded(data)
    if not crowded:
        return ()
    compared = _compared(rec)
    worst = max(_of(compared, crowded) or crowded, key=lambda record: record.cpu_wait_fraction or 0.0)
    which = compared.get(worst.trial, "")
    found = (
        f"Other work on the machine kept {count_text(len(crowded), 'trial')} waiting for the cores, trial {worst.trial}"
        f"{f', {which},' if which else ''} for {percent_text(worst.cpu_wait_fraction or 0.0)} of the time that it "
        "could have used them: what such trials took is too high, in time and in energy"
    )
    doubts = _doubts(crowded, rec)
    if not doubts:
        return (f"{found}.",)
    return (f"{found}, so that {', and '.join(doubts)}. Run the study again where nothing else runs.",)


def doubted(data: StudyData, rec: Recommendation) -> tuple[str, ...]:
    """The sentence where it puts the answer in doubt: it belongs beside the answer then."""
    return cpu_contention(data, rec) if _doubts(_crowded(data), rec) else ()


def doubts_of_winner(data: StudyData, rec: Recommendation) -> tuple[str, ...]:
    """For its model card, which gives what training it took and calls that the least, and compares it with no other."""
    assert rec.trial is not None
    crowded = _crowded(data)
    found = []
    if own := _of({rec.trial}, crowded):
        wait = max(record.cpu_wait_fraction or 0.0 for record in own)
        found.append(
            f"Other work on the machine kept it waiting for the cores, for {percent_text(wait)} of the time that it "
            "could have used them: this energy and these emissions are too high."
        )
    found += [f"Other work on the machine slowed the search: {words}." for words in _capped(crowded)]
    return tuple(found)


def _crowded(data: StudyData) -> list[TrialRecord]:
    return list(filter(has_cpu_contention, data.records))


def _doubts(crowded: Sequence[TrialRecord], rec: Recommendation) -> list[str]:
    if not rec.met:
        return []
    found = ["the saving can't be trusted"] if _of(_compared(rec), crowded) else []
    return [*found, *_capped(crowded)]


def _capped(crowded: Sequence[TrialRecord]) -> list[str]:
    capped = [record.trial for record in crowded if record.stop_reason == StopReason.CAP]
    if not capped:
        return []
    named = ", ".join(map(str, capped[:_NAMED])) + (" and others" if capped[_NAMED:] else "")
    trials = "trial" if len(capped) == 1 else "trials"
    return [f"{trials} {named}, stopped for emitting more than the best one, may be cheaper than that"]


def _compared(rec: Recommendation) -> dict[int, str]:
    found = {} if rec.baseline is None else {rec.baseline.trial: "the baseline"}
    return found if rec.trial is None else {**found, rec.trial: "the recommended one"}


def _of(trials: Collection[int], crowded: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Runs of these trials' configurations, repeats included."""
    return [one for one in crowded if (one.trial if one.repeat_of is None else one.repeat_of) in trials]
