"""The measured part of a trial's record."""

from typing import Any

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import READINGS_APART_S, TRIAL_PHASES, Phase
from carbonopt.energy.meter_reading import Reading, disagreement, largest


def measured_fields(readings: dict[Phase, Reading]) -> dict[str, Any]:
    """Return the fields of a trial's record that follow from the meter's readings of its phases."""
    train, whole = readings[Phase.TRAIN], _whole(readings)
    seconds = {phase.value: reading.duration_s for phase, reading in readings.items()}
    gpu_energy = {
        phase: gpu for phase, reading in readings.items() if (gpu := reading.gpu) is not None
    }
    nodes = {
        node: {phase: reading.nodes[node] for phase, reading in readings.items()}
        for node in whole.nodes
    }
    return {
        "energy_kwh": _energy(readings),
        "duration_s": {**seconds, "total": whole.duration_s},
        "nodes": tuple({**vars(node), "readings": _energy(parts)} for node, parts in nodes.items()),
        "gpu_energy_kwh": gpu_energy if len(gpu_energy) == len(TRIAL_PHASES) else None,
        "gpu_disagreement": largest(
            (whole.disagreement, disagreement(whole.gpu, whole.duration_s))
        ),
        "gpu_start_temperature_c": train.start_temperature_c,
        "gpu_utilisation": train.gpu_utilisation,
    }


def at_most(point: EvalPoint, train_kwh: float) -> EvalPoint:
    """Return an evaluation with its training energy limited to `train_kwh`."""
    if point.train_energy_kwh is None or point.train_energy_kwh <= train_kwh:
        return point
    return point.model_copy(update={"train_energy_kwh": train_kwh})


def unmeasured(train: Reading) -> str | None:
    """Return why a training's energy is not known, in words; None if it was measured.

    A training too short for a reading has used energy all the same. Counted as 0, it would be the
    cheapest of all.
    """
    counted = {"the GPUs": train.gpu_kwh}
    if train.objective == "all":
        counted |= {"the CPU": train.cpu_kwh, "the RAM": train.ram_kwh}
    silent = [
        name
        for name, energy_kwh in counted.items()
        if energy_kwh is not None and not energy_kwh > 0
    ]
    if not silent:
        return None
    text = (
        f"no energy was measured for {' and '.join(silent)} in the {train.duration_s:.2g} s that it"
        " trained: "
    )
    return (
        f"{text}readings are {READINGS_APART_S * 1000:g} ms apart; train longer (more epochs or"
        " more data)"
    )


def _whole(readings: dict[Phase, Reading]) -> Reading:
    return readings[Phase.TRAIN] + readings[Phase.SETUP] + readings[Phase.EVAL]


def _energy(readings: dict[Phase, Reading]) -> dict[str, float | None]:
    by_phase = {phase.value: reading.total_kwh for phase, reading in readings.items()}
    by_component = {
        f"train_{name}": getattr(readings[Phase.TRAIN], f"{name}_kwh")
        for name in ("gpu", "cpu", "ram")
    }
    return {**by_phase, **by_component, "total": _whole(readings).total_kwh}
