"""Weights & Biases and TensorBoard trackers, as extra views of a study.

Everything is in the storage anyway, so no tracker may fail or slow a trial: trackers work in one
thread of their own, and one that fails is switched off.
"""

import contextlib
import netrc
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from carbonopt.core.trial import EvalPoint, TrialRecord, TrialState
from carbonopt.engines.process.environment import ONE_TRACKED_RUN
from carbonopt.spec.study_config import StudyConfig, WandbTracking
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trial_observer import TrialObserver

_QUEUE_SIZE = 1000  # messages; a trial has about ten
_CLOSE_S = 5.0
_ENDED_WELL = (TrialState.COMPLETE, TrialState.PRUNED)


class _Tracker(TrialObserver, Protocol):
    name: str

    def close(self) -> None: ...

    def abandon(self) -> None:
        """End at once whatever would delay the study's end.

        Called instead of `close` if the tracker failed or hangs.
        """


class Trackers:
    """An observer that passes on what happens in a study to its trackers.

    No method but `close` waits for the trackers, fails or takes noticeable time. `warn` is called
    in the caller's own thread, within these methods.
    """

    def __init__(
        self, openers: dict[str, Callable[[], _Tracker]], warn: Callable[[str], None]
    ) -> None:
        self._openers, self._warn = openers, warn
        self._messages: queue.Queue[Callable[[_Tracker], None] | None] = queue.Queue(_QUEUE_SIZE)
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._opened: list[_Tracker] = []
        self._dropped, self._closed = 0, False
        self._thread: threading.Thread | None = None

    def trial_started(self, spec: TrialSpec) -> None:
        self._send(lambda tracker: tracker.trial_started(spec))

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        self._send(lambda tracker: tracker.evaluated(number, point, emissions_kg_co2e))

    def trial_ended(self, record: TrialRecord) -> None:
        self._send(lambda tracker: tracker.trial_ended(record))

    def close(self) -> None:
        """Let the trackers finish what is queued, for a few seconds at most."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            deadline = time.monotonic() + _CLOSE_S
            # A full queue means that the thread hangs; it is found alive below.
            with contextlib.suppress(queue.Full):
                self._messages.put(None, timeout=_CLOSE_S)
                self._thread.join(max(0.0, deadline - time.monotonic()))
        hangs = self._thread is not None and self._thread.is_alive()
        if hangs:
            self._warnings.put(
                f"the trackers did not finish within {_CLOSE_S:g} s; their latest points are lost."
            )
        if self._dropped:
            self._warnings.put(
                f"the trackers were too slow: {self._dropped} messages to them were left out."
            )
        self._pass_on_warnings()
        for tracker in list(self._opened) if hangs else ():
            tracker.abandon()

    def _send(self, message: Callable[[_Tracker], None]) -> None:
        if not self._openers or self._closed:
            return
        if self._thread is None:
            # A daemon, so that a tracker that hangs can't keep the study's process from ending.
            self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
            self._thread.start()
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            if not self._dropped:
                self._warnings.put(
                    "the trackers are too slow; some of what happens will be missing there."
                )
            self._dropped += 1
        self._pass_on_warnings()

    def _pass_on_warnings(self) -> None:
        while not self._warnings.empty():
            self._warn(self._warnings.get())

    def _work(self) -> None:
        for name, opener in self._openers.items():
            # Called at once.
            self._guarded(name, lambda: self._opened.append(opener()))  # noqa: B023
        while (message := self._messages.get()) is not None:
            for tracker in list(self._opened):
                # Called at once.
                if not self._guarded(tracker.name, lambda: message(tracker)):  # noqa: B023
                    self._opened.remove(tracker)
                    self._guarded(tracker.name, tracker.abandon)
        for tracker in self._opened:
            self._guarded(tracker.name, tracker.close)

    def _guarded(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001
            # Whatever goes wrong in a tracker, it must not end a night of trials.
            text = " ".join(str(error).split()) or "no reason given"
            self._warnings.put(
                f"{name} is switched off for the rest of this run: {type(error).__name__}: {text}"
            )
            return False
        return True


def open_trackers(config: StudyConfig, folder: Path, warn: Callable[[str], None]) -> Trackers:
    """Return the trackers that the study file asks for, which write below `folder`.

    Nothing is imported or written before the first trial. `warn` is called once for each problem.
    """
    openers: dict[str, Callable[[], _Tracker]] = {}
    wanted = config.track.wandb
    if wanted is not None:
        if wanted.mode == "online" and not has_wandb_key():
            needs = (
                "wandb: mode online needs a key, but neither WANDB_API_KEY nor a netrc entry was"
                " found"
            )
            upload = f"wandb sync {folder / 'wandb' / 'offline-run-*'}"
            warn(f"{needs}; it runs offline instead. Upload later with: {upload}")
            wanted = wanted.model_copy(update={"mode": "offline"})
        openers["wandb"] = lambda: _Wandb(wanted, config, folder)
    if config.track.tensorboard:
        openers["tensorboard"] = lambda: _TensorBoard(config.quality.name, folder / "tensorboard")
    return Trackers(openers, warn)


def has_wandb_key() -> bool:
    """Return whether wandb would find a key in WANDB_API_KEY or in the netrc file.

    `wandb login` puts it into the netrc file.
    """
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(netrc_file()).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def netrc_file() -> Path:
    return Path(os.environ.get("NETRC") or Path.home() / ".netrc")


def _point_scalars(point: EvalPoint, quality: str, emissions_kg_co2e: float) -> dict[str, float]:
    scalars = {quality: point.value, "emissions_kg_co2e": emissions_kg_co2e}
    scalars |= {name: getattr(point, name) for name in ("tokens", "train_energy_kwh")}
    return {name: value for name, value in scalars.items() if value is not None}


def _outcome(record: TrialRecord) -> dict[str, Any]:
    same = {
        "state",
        "stop_reason",
        "emissions_kg_co2e",
        "peak_memory_gib",
        "gpu_utilisation",
        "cpu_wait_fraction",
    }
    outcome = record.model_dump(mode="json", include={*same, "kernels"}) | {
        record.quality.name: record.value
    }
    if record.energy_kwh:
        outcome |= {
            "train_energy_kwh": record.energy_kwh.train,
            "total_energy_kwh": record.energy_kwh.total,
        }
    if record.duration_s:
        outcome["train_duration_s"] = record.duration_s.train
    return {name: value for name, value in outcome.items() if value is not None}


class _Wandb:
    """The wandb tracker, with a run for each trial and the study as their group."""

    name = "wandb"

    def __init__(self, wanted: WandbTracking, config: StudyConfig, folder: Path) -> None:
        # Without the folder, wandb would use a temporary one without saying so.
        folder.mkdir(parents=True, exist_ok=True)
        # Environment variables, because there are no settings for these: wandb's service logs in
        # the home directory, its login prints even when silent, and its error reporting delays our
        # exit by seconds when there is no network.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        # Variables that name one run don't apply: each trial is a run of its own.
        for name in filter(ONE_TRACKED_RUN.fullmatch, list(os.environ)):
            del os.environ[name]
        import wandb

        self._wandb, self._wanted, self._folder = wandb, wanted, folder
        # wandb accepts 128 characters.
        self._quality, self._study = config.quality.name, config.name[:120]
        self._runs: dict[int, Any] = {}
        # Without x_disable_stats, the energy of wandb's sampling would count as the trial's.
        switches = ["silent", *(f"disable_{what}" for what in ("code", "git", "job_creation"))]
        switches += [f"x_disable_{what}" for what in ("machine_info", "meta", "stats")]
        # The timeouts are in seconds.
        settings: dict[str, Any] = {
            **dict.fromkeys(switches, True),
            "init_timeout": 10,
            "finish_timeout": 3,
        }
        self._settings = wandb.Settings(
            **settings, console="off", save_code=False, x_save_requirements=False
        )

    def trial_started(self, spec: TrialSpec) -> None:
        self._runs[spec.number] = self._wandb.init(
            **self._wanted.model_dump(),
            group=self._study,
            name=f"{self._study}-{spec.number:04d}",
            config={
                **spec.params.as_record(),
                "trial": spec.number,
                "attempt": spec.attempt,
                "seed": spec.seed,
            },
            dir=str(self._folder),
            reinit="create_new",
            settings=self._settings,
        )

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        if number in self._runs:  # it is missing if the queue was full when the trial started
            self._runs[number].log(
                _point_scalars(point, self._quality, emissions_kg_co2e), step=point.step
            )

    def trial_ended(self, record: TrialRecord) -> None:
        if record.trial in self._runs:
            run = self._runs.pop(record.trial)
            run.summary.update(_outcome(record))
            run.finish(exit_code=0 if record.state in _ENDED_WELL else 1)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish(exit_code=1)
        self._wandb.teardown()

    def abandon(self) -> None:
        def end() -> None:
            # The service is killed below, so that it may not answer.
            with contextlib.suppress(Exception):
                self._wandb.teardown()

        # When Python exits, wandb waits for its service without limit. Starting that wait now
        # removes wandb's exit hook; then the service is killed. The wait is in a thread of its own,
        # because the trackers' thread that hangs may hold wandb's locks.
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(0.5)
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                child.kill()
        ending.join(0.5)


class _TensorBoard:
    """The TensorBoard tracker, with an event file for each trial.

    An event file also has the trial's parameters and outcome for the HParams tab. It is written
    with TensorBoard's own classes: torch's writer would need torch, which the study's process never
    imports.
    """

    name = "tensorboard"

    def __init__(self, quality: str, folder: Path) -> None:
        self._quality, self._folder = quality, folder
        self._writers: dict[int, Any] = {}

    def trial_started(self, spec: TrialSpec) -> None:
        from google.protobuf import struct_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        attempt = "" if spec.attempt == 1 else f"-{spec.attempt}"
        writer = self._writers[spec.number] = EventFileWriter(
            str(self._folder / f"{spec.number:04d}{attempt}")
        )
        params = struct_pb2.Struct()
        params.update(spec.params.as_record())
        _add_session(
            writer, "session_start_info", {"start_time_secs": time.time(), "hparams": params.fields}
        )
        writer.flush()

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        if number in self._writers:
            scalars = _point_scalars(point, self._quality, emissions_kg_co2e)
            _add(self._writers[number], "simple_value", scalars, point.step)
            self._writers[number].flush()

    def trial_ended(self, record: TrialRecord) -> None:
        if record.trial in self._writers:
            writer = self._writers.pop(record.trial)
            numbers = {
                f"final/{k}": v for k, v in _outcome(record).items() if isinstance(v, int | float)
            }
            _add(writer, "simple_value", numbers, record.evals[-1].step if record.evals else 0)
            status = "STATUS_SUCCESS" if record.state in _ENDED_WELL else "STATUS_FAILURE"
            _add_session(
                writer, "session_end_info", {"status": status, "end_time_secs": time.time()}
            )
            writer.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def abandon(self) -> None:
        """Do nothing, because the writers' threads are daemons."""


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
