"""Trials that other work on the machine slowed down."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.report.document import Caveat
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData


def is_charged_by_cpu_time(data: StudyData) -> bool:
    """Return whether no trial is charged for the time in which it waits for a core.

    It is charged where GPUs are measured, since they draw power meanwhile, and in records
    without `other_kwh`, in which the whole CPU was charged by wall time. A trial's CPU time itself
    rises all the same: OpenMP's threads spin while one of them waits.
    """
    measured = "gpu" in data.provenance.energy_source
    return (
        not measured
        and bool(data.sessions)
        and all(session.other_kwh is not None for session in data.sessions)
    )


def most_slowed(
    records: Iterable[TrialRecord], trials: Collection[int | None]
) -> TrialRecord | None:
    """Return the run of these trials, repeats included, that waited longest for a core.

    None: other work slowed none of them.
    """
    runs = [
        record
        for record in records
        if record.is_contended
        and (record.trial if record.repeat_of is None else record.repeat_of) in trials
    ]
    return max(runs, key=lambda record: record.cpu_wait_fraction or 0.0, default=None)


def caveats(study: StudyView) -> Iterator[Caveat]:
    contended = [record for record in study.data.records if record.is_contended]
    rec = study.recommendation
    if any(map(_is_unknown, study.data.records)) and study.data.config.is_script:
        yield study.caveat("cpu_contention_unknown")
    if not contended:
        return
    if is_charged_by_cpu_time(study.data):
        yield _of_cpu_time(study, contended)
        return
    compared = {rec.trial, rec.baseline.trial} if rec.met and rec.baseline else set()
    if len(compared) == 1:
        compared.clear()  # the report states no saving
    decisive = most_slowed(contended, compared)
    worst = decisive or max(contended, key=lambda record: record.cpu_wait_fraction or 0.0)
    key = "cpu_contention_saving" if decisive else "cpu_contention"
    yield study.caveat(key, count=len(contended), trial=worst.trial, share=worst.cpu_wait_fraction)
    pruned = [record.trial for record in contended if record.stop_reason == StopReason.CAP]
    if pruned and rec.met:
        yield study.caveat("cpu_contention_pruned", trials=pruned)


def _is_unknown(record: TrialRecord) -> bool:
    return record.state is TrialState.COMPLETE and record.cpu_wait_fraction is None


def _of_cpu_time(study: StudyView, contended: Sequence[TrialRecord]) -> Caveat:
    """Return the caveat of a study whose trials are charged by CPU time.

    The answer rests on the recommendation, the baseline and what was stopped as too costly.
    """
    rec = study.recommendation
    decisive = {rec.trial, rec.baseline.trial if rec.baseline else None}
    decisive |= {record.trial for record in contended if record.stop_reason == StopReason.CAP}
    slowed = most_slowed(contended, decisive)
    worst = slowed or max(contended, key=lambda record: record.cpu_wait_fraction or 0.0)
    key = "cpu_contention_charged_saving" if slowed else "cpu_contention_charged"
    return study.caveat(key, count=len(contended), trial=worst.trial, share=worst.cpu_wait_fraction)
