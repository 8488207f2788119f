"""The MLflow tracker: a run for the study, and a child of it for each trial.

A child has the evaluations alone, and no metric of each step: MLflow's page becomes slow where some
hundred runs have many metrics (https://github.com/mlflow/mlflow/issues/21841).
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any

import carbonopt
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.track_settings import MlflowTracking
from carbonopt.study.trackers.mirror_tracker import (
    MirrorRun,
    MirrorTracker,
    RunSettings,
    point_metrics,
    record_metrics,
    study_metrics,
)
from carbonopt.study.trackers.tracker import ENDED_WELL, end_of

_TIMEOUT_S = 4  # for an answer; the study's end waits 5 s
_RETRIES = 1  # of a request; a server that is down is not waited for
_CREATE = "/api/2.0/mlflow/runs/create"  # the path of the request that makes a run
_MOST_ANSWER_MIB = 32  # six times as much as a page of runs has
_PAGE = 1000  # runs of one answer, and metrics of one request: MLflow's limits
_LONGEST_VALUE = 500  # characters of a parameter or tag that every version of MLflow takes
# Tags by which a study's runs are found again.
_STUDY, _TRIAL = "carbonopt.study", "carbonopt.trial"
_STATE, _ATTEMPT = "carbonopt.state", "carbonopt.attempt"
_FOREIGN = re.compile(r"[^\w\-. ]")  # what not every version of MLflow takes in a metric's name


class MlflowTracker(MirrorTracker):
    """The MLflow tracker.

    Raises:
        LookupError: From `study_began`, if the experiment has been deleted on the server.
    """

    name = "mlflow"

    def __init__(self, wanted: MlflowTracking, *, joins: bool) -> None:
        super().__init__(joins=joins)
        # Read when MLflow is imported. Without them it reports to its makers what is called, and
        # prints advice.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ.setdefault("MLFLOW_DISABLE_AGENT_HINT", "true")
        from mlflow import MlflowClient, environment_variables

        # Defaults instead of variables, which the scripts of trials would inherit. A variable that
        # the user has set still holds.
        environment_variables.MLFLOW_HTTP_REQUEST_TIMEOUT.default = _TIMEOUT_S
        environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = _RETRIES
        environment_variables.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
        _adapt_sessions(wanted.uri)
        self._client = MlflowClient(tracking_uri=wanted.uri, registry_uri=wanted.uri)
        self._experiment, self._experiment_id, self._parent = wanted.experiment, "", ""
        self._has_ended = False
        self._end: datetime | None = None  # of the study's last call; None: now

    def find_runs(self) -> dict[int, MirrorRun]:
        self._experiment_id = self._existing_experiment() or self._new_experiment()
        found: dict[str | None, list[Any]] = {}
        for run in self._search():
            found.setdefault(run.data.tags.get(_TRIAL), []).append(run)
        kept = {number: self._without_empty(runs) for number, runs in found.items()}
        parent = kept.pop(None, None)
        self._parent = self._new_parent() if parent is None else str(parent.info.run_id)
        if parent is None or not parent.data.params:
            config = self.study.config
            params = {"target": config.target.at(), "sampler": config.search.sampler}
            self._log(self._parent, {}, params=params)
        if parent is not None and not self._joins:
            self._client.update_run(self._parent, status="RUNNING")
        return {int(number): self._found_run(run) for number, run in kept.items() if number}

    def begin_run(self, settings: RunSettings, earlier: MirrorRun | None) -> MirrorRun:
        if earlier is not None:
            self._client.update_run(earlier.key, status="RUNNING")
            self._client.set_tag(earlier.key, _ATTEMPT, str(settings.attempt))
            if not earlier.has_settings:
                self._log(earlier.key, {}, params=settings.params)
                earlier.has_settings = True
            return earlier
        tags = {
            "mlflow.parentRunId": self._parent,
            _STUDY: str(self.study.id),
            _TRIAL: str(settings.number),
            _ATTEMPT: str(settings.attempt),
        }
        run = self._client.create_run(
            self._experiment_id,
            start_time=_milliseconds(_moment(settings.started_at)),
            tags=tags,
            run_name=f"{self.study.config.name}-{settings.number:04d}",
        )
        key = str(run.info.run_id)
        self._log(key, {}, params=settings.params)
        return MirrorRun(key)

    def send_points(self, run: MirrorRun, points: list[EvalPoint]) -> None:
        self._log(run.key, {point.step: point_metrics(point, self.study) for point in points})

    def end_run(self, run: MirrorRun, record: TrialRecord) -> None:
        if not record.has_finished:
            self._client.set_terminated(run.key, "KILLED", _milliseconds(end_of(record)))
            return
        reason = {} if record.stop_reason is None else {"carbonopt.stop_reason": record.stop_reason}
        tags = {_STATE: record.state, _ATTEMPT: str(record.attempt), **reason}
        step = record.evals[-1].step if record.evals else 0
        self._log(run.key, {step: record_metrics(record, self.study)}, tags=tags)
        status = "FINISHED" if record.state in ENDED_WELL else "FAILED"
        self._client.set_terminated(run.key, status, _milliseconds(end_of(record)))

    def delete_run(self, run: MirrorRun) -> None:
        self._client.delete_run(run.key)

    def study_ended(self, data: StudyData) -> None:
        self._has_ended = data.ended is not None
        self._end = max((session.span[1] for session in data.sessions), default=None)
        tags = {"carbonopt.ended": data.ended or "no"}
        self._log(self._parent, {0: study_metrics(data)}, tags=tags)

    def close(self) -> None:
        if self._parent and not self._joins:
            status = "FINISHED" if self._has_ended else "KILLED"
            self._client.set_terminated(self._parent, status, _milliseconds(self._end))

    def _existing_experiment(self) -> str | None:
        """Return the id of the experiment; None if the server has none of this name."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return None
        if experiment.lifecycle_stage != "active":
            raise LookupError(
                f"the experiment {self._experiment!r} has been deleted on the server; restore it"
                " (mlflow experiments restore) or give track.mlflow.experiment another name"
            )
        return str(experiment.experiment_id)

    def _new_experiment(self) -> str:
        from mlflow.exceptions import RestException

        try:
            return str(self._client.create_experiment(self._experiment))
        except RestException:  # another worker may have made it meanwhile
            if (experiment_id := self._existing_experiment()) is None:
                raise
            return experiment_id

    def _new_parent(self) -> str:
        config, study = self.study.config, str(self.study.id)
        tags = {_STUDY: study, "carbonopt.version": carbonopt.__version__}
        begin = min((session.span[0] for session in self.study.sessions), default=None)
        run = self._client.create_run(
            self._experiment_id,
            start_time=_milliseconds(begin),
            tags=tags,
            run_name=config.name,
        )
        return str(run.info.run_id)

    def _without_empty(self, runs: list[Any]) -> Any:
        """Return the earliest run of several of one trial, and delete those that are empty.

        A run is empty if the server made it after the client had given up waiting for it.
        """
        filled = [run for run in runs if run.data.params or run.data.metrics]
        kept = (filled or runs)[-1]
        if not self._joins:
            for run in runs:
                if run is not kept and run not in filled:
                    self._client.delete_run(run.info.run_id)
        return kept

    def _search(self) -> Iterator[Any]:
        """Yield the study's runs, those of its trials too."""
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id],
                f"tags.`{_STUDY}` = '{self.study.id}'",
                max_results=_PAGE,
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    def _found_run(self, run: Any) -> MirrorRun:
        tags, key = run.data.tags, str(run.info.run_id)
        if _STATE in tags and run.info.status in ("FINISHED", "FAILED"):
            ended = int(tags.get(_ATTEMPT, "0"))
        else:
            ended = None
        quality = _metric_name(self.study.config.quality.name)
        history = self._client.get_metric_history(key, quality) if ended is None else ()
        points: dict[int, float | None] = {metric.step: metric.value for metric in history}
        return MirrorRun(key, bool(run.data.params), points, ended)

    def _log(
        self,
        key: str,
        metrics: Mapping[int, Mapping[str, float]],
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Send metrics by their steps, parameters and tags of a run."""
        from mlflow.entities import Metric, Param, RunTag

        now_ms = round(time.time() * 1000)
        given = [
            Metric(_metric_name(name), value, now_ms, step)
            for step, values in metrics.items()
            for name, value in values.items()
        ]
        first, further = given[: _PAGE // 2], given[_PAGE // 2 :]
        self._client.log_batch(
            key,
            first,
            [Param(name, _fitting(value)) for name, value in (params or {}).items()],
            [RunTag(name, _fitting(value)) for name, value in (tags or {}).items()],
        )
        for begin in range(0, len(further), _PAGE):
            self._client.log_batch(key, further[begin : begin + _PAGE])


def _fitting(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


@cache  # once for each server in a process
def _adapt_sessions(uri: str) -> None:
    """Make MLflow's HTTP sessions refuse large answers, and ask only once for a new run.

    A session reads an answer of any size, after it has called its hooks. A server may still make a
    run that it has not answered for in time: another one would then stay empty. MLflow makes
    sessions by one function, and has no setting for either.
    """
    from mlflow.utils import request_utils
    from requests.adapters import HTTPAdapter

    new_session: Any = request_utils._get_request_session

    def adapted(*arguments: Any, **settings: Any) -> Any:
        session = new_session(*arguments, **settings)
        session.hooks["response"] = [_read_within_limit]
        if uri + _CREATE not in session.adapters:
            session.mount(uri + _CREATE, HTTPAdapter())  # which retries nothing
        return session

    request_utils._get_request_session = adapted


def _read_within_limit(response: Any, **_: Any) -> None:
    body = bytearray()
    for part in response.iter_content(2**16):
        body += part
        if len(body) > _MOST_ANSWER_MIB * 2**20:
            response.close()
            raise ValueError(
                f"the server must answer with {_MOST_ANSWER_MIB} MiB at most, but sent more; give"
                " the address of an MLflow server"
            )
    response._content = bytes(body)  # as `response.content` does once it has read everything


def _metric_name(name: str) -> str:
    """Return a name that MLflow takes; ours have one slash, after `carbonopt`."""
    return "/".join(_FOREIGN.sub("_", part) for part in name.split("/", 1))


def _moment(at: str | None) -> datetime | None:
    return None if at is None else datetime.fromisoformat(at)


def _milliseconds(moment: datetime | None) -> int | None:
    """Return a time as MLflow takes it; None, which is now for MLflow, where it isn't known."""
    return None if moment is None else round(moment.timestamp() * 1000)
