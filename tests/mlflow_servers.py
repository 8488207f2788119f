"""A real MLflow server of our own, which can be killed and started again, and servers that fail."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from commands import free_port

_STARTS_WITHIN_S = 240  # it imports for half a minute on busy cores


class MlflowServer:
    """A server on the loopback address, read back by its REST interface."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        where = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        stores = ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        stores += ["--artifacts-destination", str(self._folder / "artifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server-log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *where, *stores],
                stdout=log,
                stderr=log,
                env={**os.environ, **quiet},
                start_new_session=True,
            )
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not self._answers():
            text = (self._folder / "server-log.txt").read_text()
            assert self._process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill the server and its own processes, as a crash of the machine would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def lose_everything(self) -> None:
        """Remove what a killed server has stored."""
        for file in self._folder.glob("mlflow.db*"):
            file.unlink()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call its REST interface: a GET, or a POST where there is a body."""
        request = Request(
            f"{self.url}/api/2.0/mlflow/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=60) as answer:
            return dict(json.loads(answer.read()))

    def experiment(self, name: str) -> str:
        """Return the id of an experiment."""
        found = self.call(f"experiments/get-by-name?experiment_name={name}")
        return str(found["experiment"]["experiment_id"])

    def runs(self, experiment: str) -> "list[Run]":
        """Return the runs of an experiment that have not been deleted."""
        body = {"experiment_ids": [self.experiment(experiment)], "max_results": 1000}
        return [Run(self, run) for run in self.call("runs/search", body).get("runs", [])]

    def study_runs(self, experiment: str) -> "tuple[Run, dict[int, Run]]":
        """Return the one parent run of an experiment, and its children by their trials' numbers."""
        runs = self.runs(experiment)
        (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.tags]
        children = [run for run in runs if run is not parent]
        assert {run.tags["mlflow.parentRunId"] for run in children} <= {parent.id}
        numbers = [int(run.tags["carbonopt.trial"]) for run in children]
        assert len(set(numbers)) == len(numbers)
        return parent, dict(zip(numbers, children, strict=True))


class Run:
    def __init__(self, server: MlflowServer, raw: dict[str, Any]) -> None:
        self._server, data = server, raw["data"]
        self.id, self.status = raw["info"]["run_id"], raw["info"]["status"]
        # Unix times in ms; None: it has none
        self.begin_ms: int | None = raw["info"].get("start_time")
        self.end_ms: int | None = raw["info"].get("end_time")
        self.tags = {tag["key"]: tag["value"] for tag in data.get("tags", [])}
        self.params = {param["key"]: param["value"] for param in data.get("params", [])}
        self.metrics = {metric["key"]: metric["value"] for metric in data.get("metrics", [])}

    def history(self, metric: str) -> list[tuple[int, float]]:
        """Return all steps and values of a metric, in order."""
        path = f"metrics/get-history?run_id={self.id}&metric_key={metric}"
        found = self._server.call(path).get("metrics", [])
        return sorted((int(point["step"]), point["value"]) for point in found)


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that answers with a handler."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def refusing_server() -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything with 401; its address, and the paths that were asked."""
    asked: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b"You are not authenticated."  # as MLflow's own `--app-name basic-auth`
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="mlflow"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with _serving(Refuse) as address:
        yield address, asked


@contextmanager
def flooding_server(status: int, most_mib: int) -> Iterator[tuple[str, list[int]]]:
    """A server whose answers have no end before this size; its address, and what it has sent, in
    MiB.
    """
    sent: list[int] = []

    class Flood(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()
            for _ in range(most_mib):
                try:
                    self.wfile.write(b" " * 2**20)
                except OSError:
                    return
                sent.append(1)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with _serving(Flood) as address:
        yield address, sent


@contextmanager
def slow_proxy(url: str, nth_create: int, delay_s: float) -> Iterator[tuple[str, list[str]]]:
    """A proxy of a server that holds back one request for a new run before it passes it on; its
    address, and the paths of the requests that it has passed on.
    """
    passed: list[str] = []
    creates = iter(range(1, 1000))

    class Pass(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path.endswith("runs/create") and next(creates) == nth_create:
                time.sleep(delay_s)
            kept = {"Content-Type": "application/json"}
            request = Request(url + self.path, body or None, kept, method=self.command)
            try:
                with urlopen(request, timeout=60) as answer:
                    status, text = answer.status, answer.read()
            except HTTPError as error:
                status, text = error.code, error.read()
            passed.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client no longer waits
                self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with _serving(Pass) as address:
        yield address, passed


@contextmanager
def mute_server() -> Iterator[str]:
    """The address of a socket that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield f"http://127.0.0.1:{mute.getsockname()[1]}"
