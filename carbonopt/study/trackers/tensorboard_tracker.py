"""The TensorBoard tracker."""

import time
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trackers.tracker import ENDED_WELL, Tracker, end_of, outcome, point_scalars

# The modules that the tracker's methods use.
_MODULES = (
    "google.protobuf.struct_pb2",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.plugins.hparams.plugin_data_pb2",
    "tensorboard.summary.writer.event_file_writer",
)


class TensorBoardTracker(Tracker):
    """The TensorBoard tracker, with an event file for each trial.

    An event file also has the trial's parameters and outcome for the HParams tab. It is written
    with TensorBoard's own classes: torch's writer would need torch, which the study's process never
    imports.
    """

    name = "tensorboard"

    def __init__(self, quality: str, folder: Path) -> None:
        for module in _MODULES:  # now, because it would slow a trial
            import_module(module)
        self._quality, self._folder = quality, folder
        self._writers: dict[int, Any] = {}

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        from google.protobuf import struct_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        attempt = "" if spec.attempt == 1 else f"-{spec.attempt}"
        writer = self._writers[spec.number] = EventFileWriter(
            str(self._folder / f"{spec.number:04d}{attempt}")
        )
        begin = None if started_at is None else datetime.fromisoformat(started_at)
        params = struct_pb2.Struct()
        params.update(spec.params.as_record())
        _add_session(
            writer,
            "session_start_info",
            {"start_time_secs": _seconds(begin), "hparams": params.fields},
        )
        writer.flush()

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        if number in self._writers:
            scalars = point_scalars(point, self._quality, emissions_kg_co2e)
            _add(self._writers[number], "simple_value", scalars, point.step)
            self._writers[number].flush()

    def trial_ended(self, record: TrialRecord) -> None:
        if record.trial in self._writers:
            writer = self._writers.pop(record.trial)
            numbers = {
                f"final/{k}": v for k, v in outcome(record).items() if isinstance(v, int | float)
            }
            _add(writer, "simple_value", numbers, record.evals[-1].step if record.evals else 0)
            status = "STATUS_SUCCESS" if record.state in ENDED_WELL else "STATUS_FAILURE"
            end_s = _seconds(end_of(record))
            _add_session(writer, "session_end_info", {"status": status, "end_time_secs": end_s})
            writer.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def abandon(self) -> None:
        """Do nothing, because the writers' threads are daemons."""


def _seconds(moment: datetime | None) -> float:
    """Return the Unix time in seconds; that of now if the moment isn't known."""
    return time.time() if moment is None else moment.timestamp()


def _add_session(writer: Any, key: str, info: dict[str, Any]) -> None:
    """Write a record of the HParams plugin, as `torch.utils.tensorboard.summary.hparams` does."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    plugin = {
        "plugin_name": "hparams",
        "content": HParamsPluginData(**{key: info}).SerializeToString(),
    }
    _add(writer, "metadata", {f"_hparams_/{key}": {"plugin_data": plugin}})


def _add(writer: Any, kind: str, by_tag: dict[str, Any], step: int = 0) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    values = [{"tag": tag, kind: value} for tag, value in by_tag.items()]
    writer.add_event(Event(wall_time=time.time(), step=step, summary={"value": values}))
