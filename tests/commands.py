"""The `carbonopt` command for tests: as a process, or within this one, which spares the seconds of
its imports.
"""

import gc
import io
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

import pytest

from carbonopt.cli.app import main
from carbonopt.engines.process.extensions import extensions_folder


def carbonopt(
    *arguments: object, cwd: Path | None = None, timeout_s: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "carbonopt", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=timeout_s,
    )


def compiler_with_cache(folder: Path) -> str:
    """A C++ compiler that takes what DeepSpeed has compiled for this user already, which takes most
    of a minute of CPU time; its path in this folder.
    """
    compiler, name = folder / "c++", "deepspeed_shm_comm.so"
    compiler.write_text(
        """#!/bin/sh
before=
for one in "$@"; do
  case "$before" in -o) made="$one" ;; -MF) depends="$one" ;; esac
  before="$one"
done
kept="$(dirname "$0")/compiled/$(basename "${made:-nothing}")"
[ -f "$kept" ] || exec c++ "$@"
: > "${depends:-/dev/null}"
exec cp "$kept" "$made"
"""
    )
    compiler.chmod(0o755)
    if compiled := sorted(extensions_folder().rglob(name), key=lambda path: path.stat().st_mtime):
        (folder / "compiled").symlink_to(compiled[-1].parent)
    return str(compiler)


def within(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: its own `main` with these arguments, so the same output,
    warnings and exit code.

    For tests of what a command says and does; those of a process (signals, its end, its streams)
    start one.
    """
    command = ["carbonopt", *map(str, arguments)]
    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    ]
    with pytest.MonkeyPatch.context() as patch, _as_they_were(), _shown_on(streams[1]):
        patch.setattr(sys, "argv", command)
        for name, value in environment.items():
            patch.setenv(name, value)
        with (
            redirect_stdout(streams[0]),
            redirect_stderr(streams[1]),
            pytest.raises(SystemExit) as ended,
        ):
            main()
    said, errors = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(command, ended.value.code or 0, said, errors)


@contextmanager
def _as_they_were() -> Iterator[None]:
    """What `main` sets for the rest of its process ends with the body."""
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    thresholds = gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _shown_on(stream: TextIO) -> Iterator[None]:
    """Warnings that Python shows by itself, where pytest would collect them."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
    ) -> None:
        stream.write(warnings.formatwarning(message, category, filename, lineno))

    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in (
            DeprecationWarning,
            PendingDeprecationWarning,
            ImportWarning,
            ResourceWarning,
        ):
            warnings.simplefilter("ignore", category)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def refusal(*arguments: object, **environment: str) -> str:
    """The one sentence of a refused command."""
    done = within(*arguments, **environment)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("carbonopt: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
