"""Scaling: how many ranks (GPUs, or processes on a CPU) are worth using.

For each number of ranks, it is read off the cheapest run that met the target. More ranks are faster
and use more energy, since they wait for each other; these runs say how much.
"""

from carbonopt.core.quality import Target
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData


class AtWorldSize(Frozen):
    """The cheapest complete trial with so many ranks that meets the target, else the best one."""

    world_size: int
    trial: int
    met: bool
    quality: float
    duration_s: float  # duration of its training
    step_s: float | None  # mean duration of an optimizer step
    energy_kwh: float  # energy of its training, without GPUs of the launch that it leaves idle
    emissions_kg_co2e: float  # emissions of its training, PUE included
    speed_up: float  # the duration with the fewest ranks ÷ its own
    energy_ratio: float  # its own energy ÷ that with the fewest ranks
    slowed: bool = False  # other work on the machine slowed it: alone it would have taken less


class Scaling(Frozen):
    rows: tuple[AtWorldSize, ...]  # sorted by ranks; two or more
    least_energy: int  # number of ranks, among rows that met the target if any did
    fastest: int  # number of ranks, among the same rows


def scaling(data: StudyData, target: float | None = None) -> Scaling | None:
    """Return the scaling with the number of ranks.

    None: trials are complete for fewer than two numbers of ranks.

    Args:
        target: another target than the study's own.
    """
    complete = [
        record
        for record in data.records
        if record.state is TrialState.COMPLETE
        and record.repeat_of is None
        and record.value is not None
    ]
    numbers = sorted({record.params.world_size for record in complete})
    if len(numbers) < 2:
        return None
    goal = data.config.target.at(target)
    chosen = [
        _chosen([record for record in complete if record.params.world_size == n], goal)
        for n in numbers
    ]
    rows = tuple(
        _row(data, record, chosen[0], met=goal.is_met_by(record.value)) for record in chosen
    )
    counted = [row for row in rows if row.met] or rows
    return Scaling(
        rows=rows,
        least_energy=min(counted, key=lambda row: row.energy_kwh).world_size,
        fastest=min(counted, key=lambda row: row.duration_s).world_size,
    )


def _chosen(records: list[TrialRecord], target: Target) -> TrialRecord:
    met = [record for record in records if target.is_met_by(record.value)]
    if met:
        return min(met, key=lambda record: (_train(record)[0], record.trial))
    return min(records, key=lambda record: (target.quality.rank(_value(record)), record.trial))


def _value(record: TrialRecord) -> float:
    assert record.value is not None
    return record.value


def _train(record: TrialRecord) -> tuple[float, float]:
    """Return a trial's training energy in kWh and its duration in seconds."""
    assert record.energy_kwh is not None and record.duration_s is not None
    return record.energy_kwh.train, record.duration_s.train


def _row(data: StudyData, record: TrialRecord, fewest: TrialRecord, *, met: bool) -> AtWorldSize:
    (energy_kwh, duration_s), (least_kwh, most_s) = _train(record), _train(fewest)
    assert record.value is not None
    return AtWorldSize(
        world_size=record.params.world_size,
        trial=record.trial,
        met=met,
        quality=record.value,
        duration_s=duration_s,
        step_s=duration_s / record.total_steps if record.total_steps else None,
        energy_kwh=energy_kwh,
        emissions_kg_co2e=data.emissions_kg_co2e(energy_kwh),
        speed_up=most_s / duration_s,
        energy_ratio=energy_kwh / least_kwh,
        slowed=record.is_contended,
    )
