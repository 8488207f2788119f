"""Studies in storages and live pages of them, for tests."""

import base64
import json
import os
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from commands import free_port

from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect

WAIT_S = 240.0  # the live page draws at a low priority, and other tests use the cores
_STATES = {
    TrialState.COMPLETE: optuna.trial.TrialState.COMPLETE,
    TrialState.RUNNING: optuna.trial.TrialState.RUNNING,
}


def store(data: StudyData, folder: Path) -> StudyStorage:
    """A study with its trials, as `carbonopt run` leaves it in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    storage = connect(f"sqlite:///{folder / 'study.db'}")
    stored = StudyStorage.create(storage, data.config, data.provenance)
    for session in data.sessions:
        stored.set_session(session)
    for record in data.records:
        add(stored, record)
    stored.set_ended(data.ended)
    return stored


def add(stored: StudyStorage, record: TrialRecord) -> None:
    """One more trial in Optuna's storage."""
    params = {
        name: record.params.value(name) for name in ("global_batch_size", "learning_rate", "epochs")
    }
    is_complete = record.state is TrialState.COMPLETE
    stored.study.add_trial(
        optuna.create_trial(
            state=_STATES.get(record.state, optuna.trial.TrialState.PRUNED),
            values=[record.emissions_kg_co2e, record.value] if is_complete else None,
            params=params,
            distributions={name: _distribution(value) for name, value in params.items()},
            user_attrs={"record": record.as_json()},
        )
    )


def _distribution(value: Any) -> optuna.distributions.BaseDistribution:
    if isinstance(value, int):
        return optuna.distributions.IntDistribution(0, 10**6)
    return optuna.distributions.FloatDistribution(0.0, 1e3)


def change(stored: StudyStorage, record: TrialRecord) -> None:
    """Another record of a trial that runs."""
    trial = stored.study.get_trials(deepcopy=False)[record.trial]
    stored._storage.set_trial_user_attr(trial._trial_id, "record", record.as_json())


class Server(NamedTuple):
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def cpu_s(self) -> float:
        """The CPU time that it has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def watching(
    folder: Path, *options: str, port: int | None = None, open_files: int | None = None
) -> Iterator[Server]:
    """`carbonopt watch` as a user starts it, from when it answers; it may open so many files."""
    port = port or free_port()
    command = [sys.executable, "-m", "carbonopt", "watch", str(folder), "--port", str(port)]
    if open_files is not None:
        command = ["prlimit", f"--nofile={open_files}", *command]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"http://127.0.0.1:{port}/\n", process.stderr
            yield Server(process, port)
        finally:
            process.kill()


class Message(NamedTuple):
    kind: str
    version: str
    size: int  # bytes of its data, as sent
    content: Any
    came_s: float  # by the monotonic clock


class Stream:
    """The events that one page hears, and the parts that they make."""

    def __init__(self, url: str, since: str = "") -> None:
        request = urllib.request.Request(f"{url}events", headers={"Last-Event-ID": since})
        self._answer = urllib.request.urlopen(request, timeout=WAIT_S)
        self.parts: dict[str, list[str]] = {}
        self.version = since

    def close(self) -> None:
        self._answer.close()

    def next(self) -> Message:
        """The next message that changes something."""
        end = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < end, "nothing changed"
            fields = self._event()
            if fields.get("event") in ("whole", "change"):
                break
        data = fields["data"]
        content = json.loads(zlib.decompress(base64.b64decode(data)))
        message = Message(fields["event"], fields["id"], len(data), content, time.monotonic())
        self._take(message)
        return message

    def until(self, part: str, text: str) -> Message:
        """The message after which a part has a text."""
        while True:
            message = self.next()
            if text in "\n".join(self.parts.get(part, [])):
                return message

    def _event(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        while True:
            line = self._answer.readline().decode().rstrip("\r\n")
            assert line or fields or not self._answer.isclosed(), "the stream has ended"
            if not line:
                if fields:
                    return fields
                continue
            name, _, value = line.partition(": ")
            fields[name] = value

    def _take(self, message: Message) -> None:
        self.version = message.version
        if message.kind == "whole":
            self.parts = message.content
            return
        for name, places in message.content.items():
            if places is None:
                del self.parts[name]
                continue
            lines = self.parts.setdefault(name, [])
            for start, removed, added in places:
                lines[start : start + removed] = added
