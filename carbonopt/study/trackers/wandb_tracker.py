"""The Weights & Biases tracker."""

import contextlib
import netrc
import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord
from carbonopt.engines.process.environment import ONE_TRACKED_RUN
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.track_settings import WandbTracking
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trackers.tracker import ENDED_WELL, Tracker, outcome, point_scalars


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


class WandbTracker(Tracker):
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

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
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
                point_scalars(point, self._quality, emissions_kg_co2e), step=point.step
            )

    def trial_ended(self, record: TrialRecord) -> None:
        if record.trial in self._runs:
            run = self._runs.pop(record.trial)
            run.summary.update(outcome(record))
            run.finish(exit_code=0 if record.state in ENDED_WELL else 1)

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
