"""Effect of the batch size on the time, memory, energy and emissions of an epoch.

It is given whatever the learning rate and the length. An epoch is all training examples once. A
trial trains whole batches and leaves out what is left, up to a batch, so that its own epochs would
be the shorter the larger its batch is. The effect on the quality is added where all trials that
completed have one length.

A trial's first steps cost more than the others (memory is allocated, kernels are chosen), and a
stopped trial spreads that over few steps. For a batch size that trials completed with, only those
count; otherwise those that were stopped after LEAST_STEPS steps and LEAST_SHARE of their way at the
earliest.

Trials that other work on the machine slowed count as measured, and are named: alone they would have
taken less, so that the least measured time and energy need not be the least that is possible.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from carbonopt.core.quality import Quality
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen, is_less
from carbonopt.spec.study_data import StudyData

LEAST_STEPS = 10
LEAST_SHARE = 0.05  # share of all its steps


class Spanned(Frozen):
    """The span of a figure over the trials of one batch size, whose other settings differ."""

    lowest: float
    median: float
    highest: float


class AtBatch(Frozen):
    global_batch_size: int
    # trials that the figures are of: the complete ones or, where none completed, stopped ones
    trials: tuple[int, ...]
    only_stopped: bool = False  # no trial completed, so that the figures are rather too high
    # those of `trials` that other work on the machine slowed
    slowed: tuple[int, ...] = ()
    duration_s: Spanned  # duration of an epoch's training
    energy_kwh: Spanned
    emissions_kg_co2e: Spanned  # PUE included
    peak_memory_gib: Spanned | None  # None: not known for any trial
    # quality that the complete trials reached; None: none did, or some trained longer
    quality: Spanned | None = None

    @property
    def only_slowed(self) -> bool:
        """True if other work slowed every trial, so that even the lowest time is too high."""
        return len(self.slowed) == len(self.trials)


class BatchEffect(Frozen):
    batches: tuple[AtBatch, ...]  # sorted by size; two or more
    # batch sizes whose lowest figures are the minimum; None: several have it
    least_energy: int | None
    least_duration: int | None
    least_memory: int | None  # None also if known for fewer than two batch sizes
    # batch size whose best trial is the best of all; None: known for fewer than two
    best_quality: int | None = None


def batch_effect(data: StudyData) -> BatchEffect | None:
    """Return the effect of the batch size, from trials of known training energy and duration.

    Trials that did not complete count, too, if they ran long enough. None: there are fewer than two
    batch sizes.
    """
    by_size: defaultdict[int, list[tuple[TrialRecord, float]]] = defaultdict(list)
    for record in data.records:
        size, epochs = record.params.global_batch_size, _epochs(data, record)
        if size is not None and epochs:
            by_size[size].append((record, epochs))
    if len(by_size) < 2:
        return None
    # With trials of different lengths, the quality would show these, not the batch.
    complete = [record for record in data.records if record.state is TrialState.COMPLETE]
    equally_long = len({record.params.epochs for record in complete}) == 1
    batches = tuple(_at_batch(data, size, by_size[size], equally_long) for size in sorted(by_size))
    peaks_gib = {
        at.global_batch_size: at.peak_memory_gib.lowest
        for at in batches
        if at.peak_memory_gib is not None
    }
    quality = data.config.quality
    best = {
        at.global_batch_size: _best(quality, at.quality) for at in batches if at.quality is not None
    }
    return BatchEffect(
        batches=batches,
        least_energy=_alone({at.global_batch_size: at.energy_kwh.lowest for at in batches}),
        least_duration=_alone({at.global_batch_size: at.duration_s.lowest for at in batches}),
        least_memory=_alone(peaks_gib) if len(peaks_gib) > 1 else None,
        best_quality=min(best, key=lambda size: quality.rank(best[size]))
        if len(best) > 1
        else None,
    )


def sizes_of_least(by_size: Mapping[int, float]) -> list[int]:
    """Return the batch sizes whose figure is the minimum, to rounding."""
    least = min(by_size.values())
    return [size for size, figure in by_size.items() if not is_less(least, figure)]


def _alone(by_size: Mapping[int, float]) -> int | None:
    """Return the batch size whose figure is the minimum; None: several have it."""
    sizes = sizes_of_least(by_size)
    return sizes[0] if len(sizes) == 1 else None


def _epochs(data: StudyData, record: TrialRecord) -> float | None:
    """Return the epochs that a trial has trained; None if not known, or too few to count."""
    epochs = record.params.epochs
    if record.energy_kwh is None or record.duration_s is None or epochs is None:
        return None
    steps = record.total_steps
    if record.state is not TrialState.COMPLETE:
        steps = record.steps_done or max((point.step for point in record.evals), default=0)
        whole = record.total_steps
        if not whole or steps < LEAST_STEPS or steps < LEAST_SHARE * whole:
            return None
        epochs = epochs * steps / whole
    batch, prepared = record.params.global_batch_size, data.prepared
    if steps is None or batch is None or prepared is None or data.config.is_script:
        return epochs
    # Completions are what a batch counts where a policy writes several for each prompt.
    return steps * batch / (prepared.train_examples * (record.params.num_generations or 1))


def _best(quality: Quality, of_trials: Spanned) -> float:
    return of_trials.lowest if quality.direction == "minimize" else of_trials.highest


def _at_batch(
    data: StudyData, size: int, trained: Sequence[tuple[TrialRecord, float]], equally_long: bool
) -> AtBatch:
    """Return the figures of one batch size.

    Args:
        trained: trials, each with its epochs.
        equally_long: whether all of the study's complete trials have the same number of epochs.
    """
    complete = [
        (record, epochs) for record, epochs in trained if record.state is TrialState.COMPLETE
    ]
    kept = complete or trained
    trainings = [
        (training, epochs) for record, epochs in kept if (training := record.reported_training)
    ]
    energies_kwh = [training.energy_kwh / epochs for training, epochs in trainings]
    peaks_gib = [record.peak_memory_gib for record, _ in kept if record.peak_memory_gib is not None]
    reached = [record.value for record, _ in complete if equally_long and record.value is not None]
    return AtBatch(
        global_batch_size=size,
        trials=tuple(record.trial for record, _ in kept),
        only_stopped=not complete,
        slowed=tuple(record.trial for record, _ in kept if record.is_contended),
        duration_s=_spanned([training.duration_s / epochs for training, epochs in trainings]),
        energy_kwh=_spanned(energies_kwh),
        emissions_kg_co2e=_spanned(list(map(data.emissions_kg_co2e, energies_kwh))),
        peak_memory_gib=_spanned(peaks_gib) if peaks_gib else None,
        quality=_spanned(reached) if reached else None,
    )


def _spanned(values: Sequence[float]) -> Spanned:
    return Spanned(lowest=min(values), median=statistics.median(values), highest=max(values))
