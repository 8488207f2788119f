"""The files that trials read on this machine.

They are recorded with the study, which can only be resumed on the same files.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import carbonopt
from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.files import opened_unnoted
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import InputFile, StudyData
from carbonopt.storage.paths import is_study
from carbonopt.train.tasks.task import task_for

_PIECE_BYTES = 2**20
# A model's weights can have 100 GB, and hashing all of them would delay the study's begin. Further
# training changes them nearly everywhere, so that pieces of a large file show it.
_LARGE_BYTES, _PIECES = 64 * 2**20, 64
_MADE_FOLDERS = ("__pycache__", "node_modules", "wandb", "mlruns", "lightning_logs")
_MADE_SUFFIXES = (".egg-info", ".dist-info")
_BYTECODE = (".pyc", ".pyo")
_TENSORBOARD = "events.out.tfevents."
_CLOCK_S = 0.5  # largest difference between a file system's clock and a record's
_UNSTORED_S = 5.0  # longest time between the last storing of a running trial and its end


def input_files(config: StudyConfig) -> tuple[InputFile, ...]:
    """Return the files that trials read from this machine, as they are now.

    What is in the study file or on a hub is left out. The files' contents are not read. Caches,
    bytecode, hidden files, Markdown in a model's or data set's folder and what studies and trackers
    write are no inputs.

    Raises:
        BadInput: If a folder can't be read.
    """
    found: dict[str, InputFile] = {}
    try:
        for file in _input_files(config):
            found.setdefault(file.path, file)  # training and evaluation may read the same one
    except OSError as error:
        raise BadInput(f"{error.filename} can't be read: {error.strerror}.") from error
    return tuple(found.values())


def workload_fingerprint(config: StudyConfig, inputs: Sequence[InputFile], *, auto: bool) -> str:
    """Return a SHA-256 of all that the prepared data depends on.

    This is the version of carbonopt, the workload, and its files by their size and time.

    Args:
        auto: Whether the search space is chosen in the preparation. The fingerprint then includes
            the number of ranks and whether they have GPUs, which the choice depends on.
    """
    workload = None if config.workload is None else config.workload.model_dump(mode="json")
    stats = [(file.path, file.bytes, file.mtime_ns, file.ctime_ns) for file in inputs]
    launch = [config.launch.world_size, bool(config.launch.gpus)] if auto else []
    seen = json.dumps([carbonopt.__version__, workload, stats, *launch], sort_keys=True)
    return hashlib.sha256(seen.encode()).hexdigest()


def _input_files(config: StudyConfig) -> Iterator[InputFile]:
    yield from (_input_file(Path(file)) for file in config.launch.files)
    if (workload := config.workload) is None or not config.launch.trains:
        return
    task = task_for(workload.model_dump(mode="json"))
    programs = task.program_files()
    for path in map(Path, task.input_files()):
        for file in _files_in(path) if path.is_dir() else (path,):
            if file.is_file():
                yield _input_file(file, is_program=file.suffix == ".py" or str(file) in programs)
    for key, name in workload.names_or_paths.items():
        # A data set includes its subfolders, a model only the files directly in its folder.
        folder, whole = Path(name), key == "dataset"
        if folder.is_absolute():  # else it is the name of something on a hub
            for path in _files_in(folder) if whole else _files_beside(folder):
                if path.suffix != ".md":
                    yield _input_file(path, whole=whole)


def _files_beside(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()
    )


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders that a user's program may read.

    Symbolic links are followed.
    """

    def refuse(error: OSError) -> None:
        raise error

    seen = {os.path.realpath(folder)}
    for root, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = [name for name in sorted(folders) if not _is_skipped(Path(root, name), seen)]
        for name in sorted(names):
            path = Path(root, name)
            if (
                not name.startswith((".", _TENSORBOARD))
                and path.suffix not in _BYTECODE
                and path.is_file()
            ):
                yield path


def _is_skipped(folder: Path, seen: set[str]) -> bool:
    """Return whether a folder is to be skipped.

    It is if it holds what programs made for themselves, or has been visited under another name.
    """
    if (
        folder.name.startswith(".")
        or folder.name in _MADE_FOLDERS
        or folder.suffix in _MADE_SUFFIXES
    ):
        return True
    if is_study(folder) or (folder / "pyvenv.cfg").exists():
        return True
    real = os.path.realpath(folder)
    is_known = real in seen
    seen.add(real)
    return is_known


def _input_file(path: Path, *, whole: bool = True, is_program: bool = False) -> InputFile:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise BadInput(
            f"names of input files must be UTF-8, but one is {shown}; rename it."
        ) from error
    status = path.stat()
    return InputFile(
        path=str(path),
        bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        is_program=is_program,
        pieces=0 if whole or status.st_size <= _LARGE_BYTES else _PIECES,
    )


def with_sha256(
    files: Iterable[InputFile], interrupted: Callable[[], bool]
) -> tuple[InputFile, ...]:
    """Return the files with the SHA-256 of each.

    Raises:
        StudyInterrupted: Soon after `interrupted` returned True.
        BadInput: If a file can't be read.
    """
    return tuple(file if file.sha256 else _with_sha256(file, interrupted) for file in files)


def recorded_inputs(
    stored: StudyData,
    files: tuple[InputFile, ...],
    where: str,
    interrupted: Callable[[], bool],
) -> tuple[InputFile, ...]:
    """Return the input files as a study recorded them; as they are, if it has no trials yet.

    Raises:
        BadInput: If they have changed since.
        StudyInterrupted: As `with_sha256`.
    """
    if not stored.records or stored.inputs is None:
        return files
    return check_unchanged(stored.inputs, files, where, interrupted, may_write(stored))


def may_write(data: StudyData) -> tuple[TrialRecord, ...]:
    """Return the trials that can have written into the study's inputs: those of a user's script."""
    return data.records if data.config.is_script else ()


def check_unchanged(
    noted: Iterable[InputFile],
    files: Iterable[InputFile],
    where: str,
    interrupted: Callable[[], bool],
    trials: Sequence[TrialRecord] = (),
) -> tuple[InputFile, ...]:
    """Check that a study's input files are those that its first trial found.

    Only files with another time are read.

    Args:
        noted: The files that the first trial found.
        files: The files that are there now.
        where: The study's folder or storage, for errors.
        trials: Trials that may have written files, because they run a user's script. A file that is
            no program and was changed or removed while one of them ran is recorded as written by
            trials, and not compared any more.

    Returns:
        The files as they are recorded from now on.

    Raises:
        BadInput: If any other file was changed, added or removed.
        StudyInterrupted: As `with_sha256`.
    """
    before, after = ({file.path: file for file in some} for some in (noted, files))
    windows = [written_in(trial) for trial in trials if trial.started_at is not None]
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if was is not None and was.changed_by_trials:
            continue
        if was is not None and now is None and Path(path).is_file():
            # It is still there, though the search for input files does not find it any more.
            now = _input_file(Path(path), whole=not was.pieces)
        if not (change := _change(was, now, interrupted)):
            continue
        is_program = was.is_program if was is not None else now is not None and now.is_program
        changed_s = _changed_s(path, now)
        if is_program or not any(begin <= changed_s <= end for begin, end in windows):
            holds = f"{where} holds a study whose trials read other files: {path} {change}"
            raise BadInput(
                f"{holds}. Put back what was there, or give another folder (or another name)."
            )
        noted_now = now or before[path]
        before[path] = noted_now.model_copy(update={"sha256": None, "changed_by_trials": True})
    return tuple(before.values())


def _changed_s(path: str, now: InputFile | None) -> float:
    """Return when a file was last changed, or removed, in seconds since 1970."""
    if now is not None:
        return now.mtime_ns / 1e9
    try:
        return Path(path).parent.stat().st_mtime
    except OSError:  # its folder is gone, too
        return -math.inf


def written_in(trial: TrialRecord) -> tuple[float, float]:
    """Return the time span in which a trial may have written files, in seconds since 1970.

    A trial that was killed was stored a little before its end.
    """
    assert trial.started_at is not None
    begin_s = datetime.fromisoformat(trial.started_at).timestamp()
    took_s = 0.0 if trial.duration_s is None else trial.duration_s.total
    if trial.span is not None:  # without what earlier attempts took
        took_s = (trial.span[1] - trial.span[0]).total_seconds()
    unsure_s = _UNSTORED_S if trial.state is TrialState.RUNNING else _CLOCK_S
    return begin_s - _CLOCK_S, begin_s + took_s + unsure_s


def _change(
    was: InputFile | None, now: InputFile | None, interrupted: Callable[[], bool]
) -> str | None:
    if was is None or now is None:
        return "was not there" if was is None else "is gone"
    if now.bytes != was.bytes:
        return f"has {now.bytes:,} bytes now, and had {was.bytes:,}"
    # Whoever replaces a file can keep the time of its content (mtime), not of its status (ctime).
    if now.mtime_ns == was.mtime_ns and was.ctime_ns in (None, now.ctime_ns):
        return None
    same = (
        _with_sha256(now.model_copy(update={"pieces": was.pieces}), interrupted).sha256
        == was.sha256
    )
    return None if same else "has another content now (its sha256 has changed)"


def _with_sha256(file: InputFile, interrupted: Callable[[], bool]) -> InputFile:
    digest = hashlib.sha256()
    last, steps = file.bytes - _PIECE_BYTES, file.pieces - 1
    spread = (last * step // steps for step in range(file.pieces))
    try:
        with opened_unnoted(Path(file.path)) as opened:
            for place in spread if file.pieces else range(0, file.bytes, _PIECE_BYTES):
                if interrupted():
                    raise StudyInterrupted(BEFORE_A_TRIAL)
                opened.seek(place)
                digest.update(opened.read(_PIECE_BYTES))
    except OSError as error:
        raise BadInput(f"{file.path} can't be read: {error.strerror}.") from error
    return file.model_copy(update={"sha256": digest.hexdigest()})
