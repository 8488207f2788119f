"""The Trackio tracker: a run for each trial in a local project.

It writes with Trackio's own storage class, as Trackio's imports of CSV files do. `trackio.init`
would ask the Hugging Face Hub who is logged in, follow variables that send runs to a Space, sample
the machine, print, and turn errors into warnings. The class is no public interface, which is why
the package is pinned.
"""

from typing import Any

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.track_settings import TrackioTracking
from carbonopt.study.trackers.mirror_tracker import (
    MirrorRun,
    MirrorTracker,
    RunSettings,
    point_metrics,
    record_metrics,
)

_STATE, _ATTEMPT = "state", "attempt"


class TrackioTracker(MirrorTracker):
    """The Trackio tracker.

    Raises:
        RuntimeError: From `delete_run`, if the project's file can't be changed.
    """

    name = "trackio"

    def __init__(self, wanted: TrackioTracking, *, joins: bool) -> None:
        super().__init__(joins=joins)
        from trackio.sqlite_storage import SQLiteStorage

        # Otherwise variables of a Space would have it load the project from the Hub.
        SQLiteStorage._dataset_import_attempted = True
        self._storage, self._project = SQLiteStorage, wanted.project
        self._configs: dict[str, dict[str, Any]] = {}  # of each run, by its key

    def find_runs(self) -> dict[int, MirrorRun]:
        keys = [str(run["id"]) for run in self._storage.get_run_records(self._project)]
        ours = [key for key in keys if key.startswith(f"{self.study.id}-")]
        return {int(key.rpartition("-")[2]): self._found_run(key) for key in ours}

    def begin_run(self, settings: RunSettings, earlier: MirrorRun | None) -> MirrorRun:
        run = earlier or MirrorRun(f"{self.study.id}-{settings.number:04d}")
        # Written into the project with the run's next points.
        self._configs[run.key] = {
            **settings.params,
            _ATTEMPT: settings.attempt,
            "trial": settings.number,
            "_Group": self.study.config.name,
            "_Created": settings.started_at,
        }
        return run

    def send_points(self, run: MirrorRun, points: list[EvalPoint]) -> None:
        metrics = {point.step: point_metrics(point, self.study) for point in points}
        self._log(run, metrics)

    def end_run(self, run: MirrorRun, record: TrialRecord) -> None:
        if not record.has_finished:
            return  # the run has no state until then
        outcome = {_STATE: str(record.state), "stop_reason": record.stop_reason}
        self._configs[run.key] |= {name: value for name, value in outcome.items() if value}
        step = record.evals[-1].step if record.evals else 0
        self._log(run, {step: record_metrics(record, self.study)})

    def delete_run(self, run: MirrorRun) -> None:
        if not self._storage.delete_run(self._project, self._run_name(run), run.key):
            raise RuntimeError(f"the run {self._run_name(run)} can't be replaced")

    def close(self) -> None:
        """Do nothing, because everything has been written."""

    def _run_name(self, run: MirrorRun) -> str:
        return f"{self.study.config.name}-{run.key.rpartition('-')[2]}"

    def _found_run(self, key: str) -> MirrorRun:
        name = self._run_name(MirrorRun(key))
        config = self._storage.get_run_config(self._project, name, run_id=key) or {}
        quality = self.study.config.quality.name
        logs = self._storage.get_logs(self._project, name, run_id=key)
        points = {row["step"]: row[quality] for row in logs if quality in row}
        self._configs[key] = config
        return MirrorRun(
            key, points=points, ended_attempt=config[_ATTEMPT] if _STATE in config else None
        )

    def _log(self, run: MirrorRun, metrics: dict[int, dict[str, float]]) -> None:
        self._storage.bulk_log(
            self._project,
            self._run_name(run),
            list(metrics.values()),
            steps=list(metrics),
            config=self._configs[run.key],
            run_id=run.key,
        )
