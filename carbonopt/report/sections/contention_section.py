"""Trials that other work on the machine slowed down."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from carbonopt.analysis.confidence import Configuration, configurations
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.core.values import is_less
from carbonopt.report.caveats import TEMPLATES
from carbonopt.report.document import Caveat
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData

# Trainings of the same steps take energies that differ by less than this factor, unless something
# disturbed one of them: seeds of one configuration differed by 5 % on H100s, and by up to 33 % in
# the quickstart on two shared cores.
_UNEVEN = 1.5

# Share of a trial's time from which on waiting for a core leaves nothing of a saving to trust, also
# where waiting itself is not charged. With shares of 0.49 to 0.66 the same steps of small scripts
# took 1.3 to 23 times the energy (docs/measuring.md#cpu-and-ram).
_WAITED_LONG = 1 / 3


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
    yield from _of_uneven_runs(study)
    if any(map(_is_unknown, study.data.records)) and study.data.config.is_script:
        yield study.caveat("cpu_contention_unknown")
    if not contended:
        return
    if is_charged_by_cpu_time(study.data):
        yield _of_cpu_time(study, contended)
        return
    decisive = most_slowed(contended, _compared(study))
    worst = decisive or max(contended, key=lambda record: record.cpu_wait_fraction or 0.0)
    yield _of_waiting("cpu_contention_saving" if decisive else "cpu_contention", study, worst)
    pruned = [record.trial for record in contended if record.stop_reason == StopReason.CAP]
    if pruned and rec.met:
        yield study.caveat("cpu_contention_pruned", trials=pruned)


def _compared(study: StudyView) -> set[int | None]:
    """Return the trials between which the report states a saving; empty: it states none."""
    rec = study.recommendation
    compared = {rec.trial, rec.baseline.trial} if rec.met and rec.baseline else set()
    return compared if len(compared) == 2 else set()


def _of_uneven_runs(study: StudyView) -> Iterator[Caveat]:
    """Yield the caveat of the configuration whose trainings took the most unequal energies.

    It is decisive for the recommendation's and the baseline's runs, and where a configuration's
    least run took less energy than the recommendation does.
    """
    if not study.data.config.settings_decide_cost:
        return
    uneven = [
        (max(energies) / min(energies), min(energies), candidate)
        for candidate in configurations(study.data.records)
        for energies in [_energies_kwh(candidate)]
        if min(energies, default=0.0) > 0 and max(energies) / min(energies) >= _UNEVEN
    ]
    decisive = [each for each in uneven if _decides(each[2], each[1], study)]
    if not uneven:
        return
    times, _, worst = max(decisive or uneven, key=lambda each: each[0])
    energies = _energies_kwh(worst)
    most, least = (worst.runs[energies.index(at)].trial for at in (max(energies), min(energies)))
    key = "uneven_runs_decisive" if decisive else "uneven_runs"
    yield study.caveat(key, trial=most, times=times, other=least)


def _energies_kwh(candidate: Configuration) -> list[float]:
    """Return what each run's training took, as if its first step had been one of the others.

    The first run of some settings may have compiled the kernels that the others load. Empty where
    an energy is not known.
    """
    known = [
        run.energy_kwh.train - (run.first_step_excess_kwh or 0.0)
        for run in candidate.runs
        if run.energy_kwh is not None
    ]
    return known if len(known) == candidate.n else []


def _decides(candidate: Configuration, least_kwh: float, study: StudyView) -> bool:
    rec = study.recommendation
    if not rec.met or rec.energy_kwh is None:
        return False
    compared = (rec.trial, rec.baseline.trial if rec.baseline else None)
    return candidate.trial in compared or is_less(least_kwh, rec.energy_kwh)


def _is_unknown(record: TrialRecord) -> bool:
    return record.state is TrialState.COMPLETE and record.cpu_wait_fraction is None


def _of_cpu_time(study: StudyView, contended: Sequence[TrialRecord]) -> Caveat:
    """Return the caveat of a study whose trials are charged by CPU time.

    The answer rests on the recommendation, the baseline and what was stopped as too costly; or on
    the trial that came closest, if none met the target.
    """
    rec = study.recommendation
    answer = rec.closest.trial if rec.closest else rec.trial
    decisive = {answer, rec.baseline.trial if rec.baseline else None}
    decisive |= {record.trial for record in contended if record.stop_reason == StopReason.CAP}
    slowed = most_slowed(contended, decisive)
    worst = slowed or max(contended, key=lambda record: record.cpu_wait_fraction or 0.0)
    if slowed is None:
        return _of_waiting("cpu_contention_charged", study, worst)
    if _compared(study) and (slowed.cpu_wait_fraction or 0.0) >= _WAITED_LONG:
        return _of_waiting("cpu_contention_saving", study, worst)
    return _of_waiting("cpu_contention_charged_saving", study, worst)


def _of_waiting(key: str, study: StudyView, worst: TrialRecord) -> Caveat:
    """Return a caveat that names the run that waited longest, and why it decides the answer."""
    count = sum(record.is_contended for record in study.data.records)
    numbers = {"count": count, "trial": worst.trial, "share": worst.cpu_wait_fraction}
    role = _role(study, worst) if "{role}" in TEMPLATES[key][1] else None
    return study.caveat(key, **numbers) if role is None else study.caveat(key, role=role, **numbers)


def _role(study: StudyView, run: TrialRecord) -> str:
    """Say why a run decides the answer."""
    rec = study.recommendation
    trial = run.trial if run.repeat_of is None else run.repeat_of
    if trial == rec.trial:
        return "a run of the recommendation"
    if rec.closest is not None and trial == rec.closest.trial:
        return "which came closest to the target"
    if rec.baseline is not None and trial == rec.baseline.trial:
        return "a run of the baseline"
    return "which was stopped as too costly and may have been cheaper"
