"""Trials that other work on the machine slowed down."""

from collections.abc import Iterator

from carbonopt.core.trial import StopReason, TrialRecord
from carbonopt.report.document import Caveat
from carbonopt.report.study_view import StudyView

# Of `cpu_wait_fraction`. The quickstart has 0.03 to 0.04 alone on two cores, and 0.36 beside one busy process, which
# doubles its time.
CONTENDED = 0.15


def is_contended(record: TrialRecord) -> bool:
    return (record.cpu_wait_fraction or 0.0) >= CONTENDED


def caveats(study: StudyView) -> Iterator[Caveat]:
    contended, rec = list(filter(is_contended, study.data.records)), study.recommendation
    if not contended:
        return
    compared = {rec.trial, rec.baseline.trial} if rec.met and rec.baseline else set()
    if len(compared) == 1:
        compared.clear()  # nothing is said to be saved
    decisive = [row for row in contended if (row.trial if row.repeat_of is None else row.repeat_of) in compared]
    worst = max(decisive or contended, key=lambda record: record.cpu_wait_fraction or 0.0)
    key = "cpu_contention_saving" if decisive else "cpu_contention"
    yield study.caveat(key, count=len(contended), trial=worst.trial, share=worst.cpu_wait_fraction)
    pruned = [record.trial for record in contended if record.stop_reason == StopReason.CAP]
    if pruned and rec.met:
        yield study.caveat("cpu_contention_pruned", trials=pruned)
