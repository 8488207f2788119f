"""Operators that several processes compile in one folder: a live build is waited for, a dead one is
cleared away.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from psutil import _psutil_linux

from carbonopt.core.builds import Builder, is_whole, nobody_builds, noted_build, unfinished_build
from carbonopt.core.errors import BadInput, StudyInterrupted
from carbonopt.engines.process import extensions
from carbonopt.engines.process.extensions import locks_of, mend, missing_operators, wait_for

OPERATOR = "cpu_adam"
NOTE = "carbonopt-build.json"
# As an operator is loaded, from a source that needs no header of torch's.
BUILD = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
from carbonopt.core.builds import noted_build

folder = Path(cpp_extension._get_build_directory("cpu_adam", verbose=False))
with noted_build(folder):
    cpp_extension.load("cpu_adam", [sys.argv[1]], is_python_module=False)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    made = tmp_path / "extensions" / OPERATOR
    made.mkdir(parents=True)
    return made


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Build:
    """A process that compiles, with a compiler that takes as long as a file is missing."""

    def __init__(self, tmp_path: Path) -> None:
        source, self.go, compiler = tmp_path / "op.cpp", tmp_path / "go", tmp_path / "slow-c++"
        source.write_text('extern "C" int answer() { return 42; }\n')
        wait = f'case "$*" in *" -c "*) while [ ! -f {self.go} ]; do sleep 0.1; done ;; esac'
        compiler.write_text(f'#!/bin/sh\n{wait}\nexec c++ "$@"\n')
        compiler.chmod(0o755)
        environment = {**os.environ, "CXX": str(compiler)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", BUILD, str(source)],
            env=environment,
            start_new_session=True,
            stderr=subprocess.PIPE,
        )

    def kill_all(self) -> None:
        """As when a machine stops, a container ends or a job's time is over: nobody clears up."""
        family = psutil.Process(self.process.pid)
        for process in [family, *family.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a compiler that has just ended
                process.kill()
        self.process.wait()


@pytest.fixture
def begun(folder: Path, tmp_path: Path) -> Iterator[Build]:
    build = Build(tmp_path)
    until(lambda: (folder / "lock").exists() and (folder / "build.ninja").exists())
    until(
        lambda: any(
            child.name() == "ninja"
            for child in psutil.Process(build.process.pid).children(recursive=True)
        )
    )
    yield build
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(folder):
            process.kill()
    if build.process.poll() is None:
        build.process.kill()
    build.process.wait()


def dead(folder: Path) -> bool:
    (lock,) = locks_of([OPERATOR])
    return lock.is_dead


@pytest.mark.slow
def test_a_killed_build_is_cleared_away_and_made_again(
    folder: Path, begun: Build, tmp_path: Path
) -> None:
    assert not dead(folder) and missing_operators([OPERATOR]) == [OPERATOR]
    begun.kill_all()
    until(lambda: dead(folder), 10.0)
    (folder / "cpu_adam.so").write_bytes(b"\x7fELF half")
    wait_for([OPERATOR], lambda: False)
    assert {path.name for path in folder.iterdir()} == {NOTE} and unfinished_build(folder) is None
    again = Build(tmp_path)
    again.go.touch()
    assert again.process.wait(60) == 0, again.process.stderr.read()
    assert missing_operators([OPERATOR]) == [] and locks_of([OPERATOR]) == []


def test_what_ninja_goes_on_with_is_waited_for(folder: Path, begun: Build) -> None:
    begun.process.kill()
    begun.process.wait()
    (lock,) = locks_of([OPERATOR])
    assert not lock.is_dead and lock.is_waited_for
    mend([OPERATOR])
    assert lock.path.exists() and (folder / "build.ninja").exists()
    begun.go.touch()
    until(lambda: dead(folder), 20.0)
    mend([OPERATOR])
    assert not lock.path.exists()


@pytest.mark.slow
def test_a_suspended_or_slow_build_is_never_taken_over(folder: Path, begun: Build) -> None:
    os.kill(begun.process.pid, signal.SIGSTOP)
    os.utime(folder / "lock", (0, 0))
    (lock,) = locks_of([OPERATOR])
    assert lock.age_s > 1e9 and lock.is_waited_for and str(begun.process.pid) in lock.found
    mend([OPERATOR])
    with nobody_builds(folder) as ours:
        assert not ours
    with pytest.raises(StudyInterrupted):
        wait_for([OPERATOR], lambda: True)
    assert lock.path.exists()
    os.kill(begun.process.pid, signal.SIGCONT)
    begun.go.touch()
    assert begun.process.wait(60) == 0 and missing_operators([OPERATOR]) == []


HOLDING = (
    "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True);"
    " time.sleep(60)"
)


def test_a_lock_without_a_note_is_dead_when_no_process_has_it_open(folder: Path) -> None:
    """DeepSpeed's own, of a user's other training; it may be in another container, whose processes
    can't be seen.
    """
    lock = folder / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDING, lock], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert not extensions._is_abandoned(lock), "by the kernel alone"
        assert not dead(folder)
        process.kill()
    assert dead(folder)
    mend([OPERATOR])
    assert not lock.exists()


def test_a_script_finds_no_dead_lock_of_any_operator_or_python(folder: Path) -> None:
    """Which operators a script loads isn't known; its own Python's folder may be another."""
    root = folder.parent
    left, others, held = (
        root / name / "lock" for name in ("fused_adam", "py39_cu118/utils", "py312_cu130/utils")
    )
    for lock in (left, others, held):
        lock.parent.mkdir(parents=True)
    left.touch()
    others.touch()
    (others.parent / "build.ninja").touch()
    (others.parent / "utils.so").touch()
    with subprocess.Popen([sys.executable, "-c", HOLDING, held], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        extensions.clear_dead_locks(os.environ)
        assert [lock.exists() for lock in (left, others, held)] == [False, False, True]
        process.kill()
    assert (others.parent / "utils.so").exists()


def test_locks_that_are_not_torchs_stay(folder: Path, tmp_path: Path) -> None:
    root, outside = folder.parent, tmp_path / "outside"
    links_to, has_code, full, named = (
        root / name / "lock" for name in ("link", "code", "full", "named")
    )
    outside.mkdir()
    (root / "link").symlink_to(outside)
    for lock in (has_code, full, named):
        lock.parent.mkdir()
    for lock in (links_to, has_code):
        lock.touch()
    (has_code.parent / "main.o").touch()
    full.write_text("theirs")
    named.symlink_to(tmp_path / "nowhere")
    extensions.clear_dead_locks(os.environ)
    locks = (links_to, has_code, full, named)
    assert [lock.is_symlink() or lock.exists() for lock in locks] == [True] * 4
    assert (has_code.parent / "main.o").exists()


def test_a_lock_that_cannot_be_judged_ends_no_study(folder: Path, tmp_path: Path) -> None:
    lock, note = folder / "lock", folder / "carbonopt-build.json"
    lock.touch()
    (folder / "build.ninja").touch()
    (tmp_path / "note").write_text("{}")
    note.symlink_to(tmp_path / "note")
    extensions.clear_dead_locks(os.environ)
    assert lock.exists() and note.is_symlink()


@pytest.mark.parametrize(
    ("changes", "is_running"),
    [
        ({}, False),  # this machine: its lock went with it
        ({"boot": "another"}, False),  # this machine, before it was started again
        ({"boot": "another", "host": "another"}, None),
        ({"boot": "another", "machine": "another"}, None),
        ({"boot": "another", "machine": ""}, None),
    ],
)
def test_a_note_tells_a_build_of_this_machine_from_that_of_another(
    changes: dict, is_running: bool | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Builder.here().model_copy(update={"pid": 2**22 + 1, **changes})
    (folder / NOTE).write_text(builder.model_dump_json())
    build = unfinished_build(folder)
    assert build is not None and build.is_running is is_running
    monkeypatch.setattr(
        extensions, "_LOCAL", set()
    )  # as on a network file system, where another machine may hold it
    (folder / "lock").touch()
    assert dead(folder) is (is_running is False)
    mend([OPERATOR])
    assert (folder / "lock").exists() is (is_running is None)
    if is_running is None:
        os.utime(folder / "lock", (0, 0))
        with pytest.raises(BadInput, match=r"rm .*lock"):
            wait_for([OPERATOR], lambda: False)
        assert (folder / "lock").exists()


def test_a_build_that_ends_or_fails_leaves_no_note(folder: Path) -> None:
    with noted_build(folder):
        assert json.loads((folder / NOTE).read_text())["pid"] == os.getpid()
        assert unfinished_build(folder).is_running
    assert unfinished_build(folder) is None
    with pytest.raises(RuntimeError), noted_build(folder):
        raise RuntimeError("no space left on device")
    assert unfinished_build(folder) is None


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_half_a_library_is_taken_away(share: float, folder: Path) -> None:
    whole = Path(_psutil_linux.__file__).read_bytes()
    library = folder / "cpu_adam.so"
    library.write_bytes(whole[: int(share * len(whole))])
    (folder / ".ninja_log").touch()
    assert not is_whole(library) and missing_operators([OPERATOR]) == [OPERATOR]
    mend([OPERATOR])
    assert not library.exists() and not (folder / ".ninja_log").exists()
    shutil.copy(_psutil_linux.__file__, library)
    mend([OPERATOR])
    assert is_whole(library) and missing_operators([OPERATOR]) == []


def test_a_link_in_place_of_the_note_is_not_followed(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("somebody's")
    (folder / NOTE).symlink_to(other)
    with pytest.raises(BadInput, match=NOTE), noted_build(folder):
        pass
    assert other.read_text() == "somebody's"
