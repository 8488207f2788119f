"""The last checkpoint of a trial: its files, and the work and energy up to it.

A trial that goes on from a checkpoint keeps what it had used until then, as its own training,
set-up and evaluations. What an attempt used after its last checkpoint was lost: it stays with the
earlier attempts. So each step of a training is counted once, and the sum of both is all that was
used.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from carbonopt.core.errors import BadInput
from carbonopt.core.files import kind_of, parsed_json, remove
from carbonopt.core.trial import Phase, Stage, StageCost, StopReason, TrialRecord, TrialState
from carbonopt.core.values import Frozen, Whole
from carbonopt.energy.meter_reading import Reading
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import checkpoint_name
from carbonopt.storage.paths import StudyPaths

# Longest time from a trial's last report of a step to the last reading that counts. It reports
# twice a second.
_MEASURED_S = 1.0


class Checkpoint(Frozen):
    """A trial as it was when it was last saved."""

    step: Whole  # the last step that counts
    record: TrialRecord  # with all that the attempts had used by then, as far as they count
    readings: dict[Phase, Reading]  # the record's energy, as the meter read it
    stages: dict[Stage, StageCost]

    def as_text(self) -> str:
        """Return it as JSON, for the storage."""
        own = self.model_dump(mode="json", include={"step", "stages"})
        readings = {phase: reading.as_json() for phase, reading in self.readings.items()}
        return json.dumps({**own, "record": self.record.as_json(), "readings": readings})

    @classmethod
    def from_text(cls, text: str, number: int) -> "Checkpoint":
        """Return the checkpoint of a trial that `as_text` has stored.

        Raises:
            BadInput: If it is damaged.
        """
        try:
            stored = parsed_json(text)
            record = TrialRecord.from_json(stored["record"])
            readings = {
                phase: Reading.from_json(reading) for phase, reading in stored["readings"].items()
            }
            return cls(**{**stored, "record": record, "readings": readings})
        except (ValueError, ValidationError, LookupError, TypeError, AttributeError) as error:
            raise BadInput(
                f"the storage is damaged: the checkpoint of trial {number} can't be read; restore"
                " the storage from a copy."
            ) from error

    @property
    def spent_kwh(self) -> float:
        """The energy that counts as the trial's own, of all phases."""
        return self.record.energy_kwh.total if self.record.energy_kwh else 0.0

    @property
    def readings_s(self) -> float:
        """The time that counts as the trial's own, of all phases, in seconds."""
        return sum(reading.duration_s for reading in self.readings.values())

    def unmeasured_steps(self, step: int) -> int:
        """Return how many steps before an attempt's first one have no energy here.

        The energy was stored up to a second after the last report of a step, so the steps of a
        second are measured.

        Args:
            step: The step after which a script goes on.
        """
        done = self.record.steps_done or 0
        if not done:
            return step
        step_s = self.readings[Phase.TRAIN].duration_s / done
        measured = math.ceil(_MEASURED_S / step_s) if step_s > 0 else 0
        return max(0, step - done - measured)

    def as_one_piece(self) -> "Checkpoint":
        """Return it with all energy as training, for a script that tells no phases."""
        whole = sum(self.readings.values(), start=Reading(objective=self._objective))
        nothing = Reading(objective=self._objective)
        readings = dict.fromkeys(self.readings, nothing) | {Phase.TRAIN: whole}
        cost = StageCost(duration_s=whole.duration_s, energy_kwh=whole.total_kwh)
        return self.model_copy(update={"readings": readings, "stages": {Stage.STEPS: cost}})

    @property
    def _objective(self) -> Any:
        return self.readings[Phase.TRAIN].objective

    def counted_in(self, record: TrialRecord, step: int) -> TrialRecord:
        """Return the record of a new attempt, which has begun, as one that goes on.

        Args:
            record: The record, whose earlier attempts have all that was used before.
            step: The step after which the attempt goes on.
        """
        own = self.record
        gpu = own.gpu_energy_kwh
        gpu_kwh = None if gpu is None else sum(phase.counter for phase in gpu.values())
        earlier_gpu_kwh = record.earlier_attempts_gpu_kwh
        known = earlier_gpu_kwh is not None and gpu_kwh is not None
        # what the attempt has not found out itself
        update: dict[str, Any] = {
            name: getattr(record, name) or getattr(own, name)
            for name in (
                "total_steps", "planned_steps", "predictions", "peak_memory_gib",
                "rank_peak_memory_gib", "kernels", "audited_at_step", "forecast",
                "unmeasured_steps",
            )
        }  # fmt: skip
        until_here = {each.started_at for each in own.attempts}
        lost = [each for each in record.earlier_attempts if each.started_at not in until_here]
        still_s = [each for each in (own.standstill_s, record.standstill_s) if each is not None]
        # rounding apart, the earlier attempts have at least what counts now
        update |= {
            "earlier_attempts_energy_kwh": max(
                0.0, record.earlier_attempts_energy_kwh - self.spent_kwh
            ),
            "earlier_attempts_gpu_kwh": (
                max(0.0, earlier_gpu_kwh - gpu_kwh) if known else None  # type: ignore[operator]
            ),
            "continued_at_steps": (*own.continued_at_steps, step),
            "earlier_attempts": (*own.attempts, *lost),
            "steps_done": max(step, record.steps_done or 0),
            "standstill_s": sum(still_s) if still_s else None,
        }
        return record.model_copy(update=update)

    def with_attempt(self, readings: dict[Phase, Reading]) -> dict[Phase, Reading]:
        """Return the readings of an attempt that went on from here, with those until here."""
        return {phase: self.readings[phase] + reading for phase, reading in readings.items()}

    def with_stages(self, stages: dict[Stage, StageCost]) -> dict[Stage, StageCost]:
        """Return the stages of an attempt that went on from here, with those until here."""
        both = dict(self.stages)
        for stage, cost in stages.items():
            both[stage] = both[stage] + cost if stage in both else cost
        return both

    def with_measured(self, record: TrialRecord, own_train_s: float) -> dict[str, Any]:
        """Return what the ranks of both attempts measured, for the record of the later one.

        Args:
            record: The record of the attempt that went on from here.
            own_train_s: How long that attempt trained, in seconds.
        """
        before, train_s = self.record, self.readings[Phase.TRAIN].duration_s
        peaks = [peak for peak in (before.peak_memory_gib, record.peak_memory_gib) if peak]
        ranks = before.rank_peak_memory_gib, record.rank_peak_memory_gib
        waits = [
            (share, seconds)
            for share, seconds in (
                (before.cpu_wait_fraction, train_s),
                (record.cpu_wait_fraction, own_train_s),
            )
            if share is not None
        ]
        whole_s = sum(seconds for _, seconds in waits)
        return {
            "peak_memory_gib": max(peaks, default=None),
            "rank_peak_memory_gib": (
                tuple(map(max, *ranks)) if len(ranks[0]) == len(ranks[1]) else max(ranks, key=len)
            ),
            "cpu_wait_fraction": (
                sum(share * seconds for share, seconds in waits) / whole_s if whole_s else None
            ),
        }


def keep_only(folder: Path, step: int | None) -> None:
    """Remove all of a trial's checkpoints but the one of this step (None: all).

    Files of other names stay: they are somebody else's.

    Raises:
        OSError: If one can't be removed.
    """
    kept = None if step is None else checkpoint_name(step)
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name != kept and entry.name.startswith(("step-", ".step-")):
            remove(entry)


def remove_checkpoints(data: StudyData, paths: StudyPaths, warn: Callable[[str], None]) -> None:
    """Remove the checkpoints of trials that have ended and will not go on.

    Args:
        data: The study as it is stored.
        paths: Its folder.
        warn: Called for each folder that can't be removed.
    """
    for record in data.records:
        goes_on = record.stop_reason is StopReason.INTERRUPTED
        folder = paths.trial_checkpoints(record.trial)
        if record.state is TrialState.RUNNING or goes_on or kind_of(folder) is None:
            continue
        try:
            remove(folder)
        except OSError as error:
            warn(f"{folder} can't be removed: {error.strerror}.")
