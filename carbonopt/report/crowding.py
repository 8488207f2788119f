"""Trials that other work on the machine slowed down, in words."""

from carbonopt.analysis.recommend import Recommendation
from carbonopt.record import StudyData
from carbonopt.report.quantities import count_text, percent_text
from carbonopt.trial import TrialRecord

# Of `core_wait`. The quickstart has 0.03 to 0.04 alone on two cores, and 0.36 beside one busy process, which doubles
# its time.
CROWDED = 0.15


def is_crowded(record: TrialRecord) -> bool:
    return (record.core_wait or 0.0) >= CROWDED


def crowding(data: StudyData, rec: Recommendation) -> tuple[str, ...]:
    """A sentence on the trials that waited for cores, and on whether the saving can be trusted; empty if none did."""
    crowded = list(filter(is_crowded, data.records))
    if not crowded:
        return ()
    compared = {} if rec.baseline is None else {rec.baseline.trial: "the baseline"}
    if rec.trial is not None:
        compared[rec.trial] = "the recommended one"
    hit = [one for one in crowded if (one.trial if one.repeat_of is None else one.repeat_of) in compared]
    worst = max(hit or crowded, key=lambda record: record.core_wait or 0.0)
    which = compared.get(worst.trial, "")
    found = (
        f"Other work on the machine kept {count_text(len(crowded), 'trial')} waiting for the cores, trial {worst.trial}"
        f"{f', {which},' if which else ''} for {percent_text(worst.core_wait or 0.0)} of the time that it could have "
        "used them: what such trials took is too high, in time and in energy"
    )
    if not (hit and rec.met):
        return (f"{found}.",)
    return (f"{found}, so that the saving can't be trusted. Run the study again where nothing else runs.",)
