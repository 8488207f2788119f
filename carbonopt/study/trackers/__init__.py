"""The trackers of a study, which are extra views of it.

Everything is in the storage anyway, so no tracker may fail or slow a trial: trackers work in one
thread of their own, and one that fails is switched off.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.track_settings import WandbTracking
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trackers.mlflow_tracker import MlflowTracker
from carbonopt.study.trackers.tensorboard_tracker import TensorBoardTracker
from carbonopt.study.trackers.tracker import Tracker
from carbonopt.study.trackers.trackio_tracker import TrackioTracker
from carbonopt.study.trackers.wandb_tracker import WandbTracker, has_wandb_key

_QUEUE_SIZE = 1000  # messages; a trial has about ten
# Time that the study's end waits for a tracker that makes no progress.
_CLOSE_S = 5.0
# The same in a command that runs nothing, but sends what trackers lack.
_CATCH_UP_S = 60.0
# Time that it waits for the trackers' imports, which no server can delay.
_OPEN_S = 30.0
_LONGEST_REASON = 300  # characters; a server may answer with a page
# Trackers that are sent at the next command what an earlier one could not send.
_CATCHING_UP = ("mlflow", "trackio")


class Trackers:
    """An observer that passes on what happens in a study to its trackers.

    No method but `close` waits for the trackers, fails or takes noticeable time. `warn` is called
    in the caller's own thread, within these methods.
    """

    def __init__(
        self, openers: dict[str, Callable[[], Tracker]], warn: Callable[[str], None]
    ) -> None:
        self._openers, self._warn = openers, warn
        self._messages: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_QUEUE_SIZE)
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._opened: list[Tracker] = []
        self._all_opened = threading.Event()
        self._last_done_s = 0.0  # when the trackers last did something; monotonic
        self._dropped, self._closed = 0, False
        self._thread: threading.Thread | None = None
        self._study: StudyData | None = None
        self._limit_s = _CLOSE_S  # how long the end waits for a tracker that does nothing more

    def open(self) -> None:
        """Open the trackers, which imports their libraries and reaches no server.

        That takes seconds of a core. A study has time for it while its trials' processes import;
        later it would slow a trial.
        """
        if not self._all_opened.is_set():
            for name, opener in self._openers.items():
                # Called at once.
                self._guarded(name, lambda: self._opened.append(opener()))  # noqa: B023
            self._last_done_s = time.monotonic()
            self._all_opened.set()

    def study_began(self, data: StudyData) -> None:
        """Note the study as this command has found it; the trackers learn of it with its trials."""
        self._study = data

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        self._send(lambda tracker: tracker.trial_started(spec, started_at))

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        self._send(lambda tracker: tracker.evaluated(number, point, emissions_kg_co2e))

    def trial_ended(self, record: TrialRecord) -> None:
        self._send(lambda tracker: tracker.trial_ended(record))

    def study_ended(self, data: StudyData) -> None:
        """Tell the trackers of the study as it is now.

        If nothing was left to run, those that catch up are sent what earlier commands could not
        send; the others have nothing to do.
        """
        if self._study is None:
            self._study, self._limit_s = data, _CATCH_UP_S
            self._openers = {name: self._openers[name] for name in self._catching_up}
        self._send(lambda tracker: tracker.study_ended(data))

    def close(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Let the trackers finish what is queued, as long as they get on with it.

        Once `interrupted` returns True, they have a few seconds in all.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            began_s = time.monotonic()
            # A full queue means that the thread hangs; it is found alive below.
            with contextlib.suppress(queue.Full):
                self._messages.put(None, timeout=_CLOSE_S)
            while self._thread.is_alive() and not self._is_overdue(began_s, interrupted()):
                self._thread.join(0.02)
        hangs = self._thread is not None and self._thread.is_alive()
        if hangs:
            self._warnings.put(
                f"the trackers did not finish within {self._limit_s:g} s: {self._unsent()}."
            )
        if self._dropped:
            self._warnings.put(
                f"the trackers were too slow: {self._dropped} messages to them were left out."
            )
        for tracker in list(self._opened) if hangs else ():
            self._guarded(tracker.name, tracker.abandon)
        self._pass_on_warnings()

    @property
    def _catching_up(self) -> list[str]:
        return [name for name in self._openers if name in _CATCHING_UP]

    def _unsent(self) -> str:
        """Say what becomes of the points that the trackers at work have not been sent."""
        opened = [tracker.name for tracker in self._opened]
        names = opened if self._all_opened.is_set() else list(self._openers)
        later = [name for name in names if name in _CATCHING_UP]
        lost = [name for name in names if name not in _CATCHING_UP]
        parts = [
            f"not all points were sent to {', '.join(later)}, so run the same command again"
            if later
            else "",
            f"the latest points in {', '.join(lost)} are lost" if lost else "",
        ]
        return "; ".join(filter(None, parts))

    def _is_overdue(self, began_s: float, interrupted: bool) -> bool:
        """Return whether the study's end has waited long enough for the trackers.

        It waits for their imports, and then as long as they get on; a user who has interrupted the
        study waits for a few seconds in all.
        """
        now_s = time.monotonic()
        if not self._all_opened.is_set() and not interrupted:
            return now_s - began_s > _OPEN_S
        if interrupted:
            return now_s - began_s > _CLOSE_S
        return now_s - max(began_s, self._last_done_s) > self._limit_s

    def _send(self, message: Callable[[Tracker], None]) -> None:
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
        self.open()
        self._tell_of_study()
        while (message := self._messages.get()) is not None:
            self._tell(message)
        self._tell(lambda tracker: tracker.close(), closes=True)

    def _tell_of_study(self) -> None:
        """Tell the trackers of the study and of the trials that it had before this command."""
        study = self._study
        if study is None:
            return
        self._tell(lambda tracker: tracker.study_began(study))
        for record in study.records:
            if record.has_finished:
                # Called at once.
                self._tell(lambda tracker: tracker.earlier_trial(record))  # noqa: B023

    def _tell(self, message: Callable[[Tracker], None], *, closes: bool = False) -> None:
        """Pass a message on to the trackers; one that fails is abandoned and told nothing more."""
        for tracker in list(self._opened):
            # Called at once.
            succeeded = self._guarded(tracker.name, lambda: message(tracker))  # noqa: B023
            if closes or not succeeded:
                self._opened.remove(tracker)
            if not succeeded:
                self._guarded(tracker.name, tracker.abandon)
            self._last_done_s = time.monotonic()

    def _guarded(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001
            # Whatever goes wrong in a tracker, it must not end a night of trials.
            text = " ".join(str(error).split()) or "no reason given"
            if len(text) > _LONGEST_REASON:
                text = f"{text[:_LONGEST_REASON]} …"
            later = "; the same command sends what is missing" if name in _CATCHING_UP else ""
            self._warnings.put(
                f"{name} is switched off for the rest of this run: {type(error).__name__}:"
                f" {text}{later}"
            )
            return False
        return True


def open_trackers(
    config: StudyConfig, folder: Path, warn: Callable[[str], None], *, joins: bool = False
) -> Trackers:
    """Return the trackers that the study file asks for, which write below `folder`.

    Nothing is imported or written before `Trackers.open` or the first trial. `warn` is called once
    for each problem.

    Args:
        joins: Whether this worker joins a study. The one that leads it sends what earlier commands
            could not send.
    """
    openers: dict[str, Callable[[], Tracker]] = {}
    track = config.track
    if track.wandb is not None:
        wandb = _possible(track.wandb, folder, warn)
        openers["wandb"] = lambda: WandbTracker(wandb, config, folder)
    if track.tensorboard:
        openers["tensorboard"] = lambda: TensorBoardTracker(
            config.quality.name, folder / "tensorboard"
        )
    if (mlflow := track.mlflow) is not None:
        openers["mlflow"] = lambda: MlflowTracker(mlflow, joins=joins)
    if (trackio := track.trackio) is not None:
        openers["trackio"] = lambda: TrackioTracker(trackio, joins=joins)
    return Trackers(openers, warn)


def _possible(wanted: WandbTracking, folder: Path, warn: Callable[[str], None]) -> WandbTracking:
    """Return the settings of wandb, offline where it has no key."""
    if wanted.mode == "offline" or has_wandb_key():
        return wanted
    needs = "wandb: mode online needs a key, but neither WANDB_API_KEY nor a netrc entry was found"
    upload = f"wandb sync {folder / 'wandb' / 'offline-run-*'}"
    warn(f"{needs}; it runs offline instead. Upload later with: {upload}")
    return wanted.model_copy(update={"mode": "offline"})
