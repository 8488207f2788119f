"""The files that trials read on this machine: noted with the study, which goes on with these alone."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import carbonopt
from carbonopt.core.config import StudyConfig
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.study import InputFile
from carbonopt.train.tasks.base import task_for

_PIECE_BYTES = 2**20
# The weights of a model can have 100 GB, which nobody wants to wait for before a study begins. Another training of it
# changes them nearly everywhere, so that pieces of a large file show it.
_LARGE_BYTES, _PIECES = 64 * 2**20, 64


def input_files(config: StudyConfig) -> tuple[InputFile, ...]:
    """What trials depend on that is neither in the study file nor on a hub, as it is now; not looked into. Hidden files
    and Markdown say nothing that a trial reads. Raises BadInput if a folder can't be read."""
    try:
        return tuple(dict.fromkeys(_input_files(config)))  # training and evaluation may read the same one
    except OSError as error:
        raise BadInput(f"{error.filename} can't be read: {error.strerror}.") from error


def workload_fingerprint(config: StudyConfig, inputs: Sequence[InputFile], *, auto: bool) -> str:
    """Of all that the prepared data depends on: the workload, and its files by their size and time; where the space is
    chosen in the preparation, also what it is chosen by."""
    workload = None if config.workload is None else config.workload.model_dump(mode="json")
    stats = [(file.path, file.bytes, file.mtime_ns) for file in inputs]
    launch = [config.launch.world_size, bool(config.launch.gpus)] if auto else []
    seen = json.dumps([carbonopt.__version__, workload, stats, *launch], sort_keys=True)
    return hashlib.sha256(seen.encode()).hexdigest()


def _input_files(config: StudyConfig) -> Iterator[InputFile]:
    yield from (_input_file(Path(file)) for file in config.launch.files)
    if (workload := config.workload) is None or not config.launch.trains:
        return
    for path in map(Path, task_for(workload.model_dump(mode="json")).input_files()):
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
                yield _input_file(file)
    for key, name in workload.names_or_paths.items():
        folder, whole = Path(name), key == "dataset"  # with all its folders; of models what lies directly in theirs
        for path in (
            sorted(folder.rglob("*") if whole else folder.iterdir()) if folder.is_absolute() else ()
        ):  # no hub name
            hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
            if not hidden and path.suffix != ".md" and path.is_file():
                yield _input_file(path, whole=whole)


def _input_file(path: Path, *, whole: bool = True) -> InputFile:
    status = path.stat()
    pieces = 0 if whole or status.st_size <= _LARGE_BYTES else _PIECES
    return InputFile(path=str(path), bytes=status.st_size, mtime_ns=status.st_mtime_ns, pieces=pieces)


def with_sha256(files: Iterable[InputFile], interrupted: Callable[[], bool]) -> tuple[InputFile, ...]:
    """With the sha256 of each. Raises StudyInterrupted soon after `interrupted` says so, BadInput if one isn't read."""
    return tuple(file if file.sha256 else _with_sha256(file, interrupted) for file in files)


def check_unchanged(
    noted: Iterable[InputFile], files: Iterable[InputFile], where: str, interrupted: Callable[[], bool]
) -> None:
    """Refuses to go on with a study (in `where`) on other files than those that its first trial found (`noted`). Only
    what has another time is looked into. Raises BadInput, and StudyInterrupted as `with_sha256`."""
    before, after = ({file.path: file for file in some} for some in (noted, files))
    for path in sorted(before.keys() | after.keys()):
        if change := _change(before.get(path), after.get(path), interrupted):
            holds = f"{where} holds a study whose trials read other files: {path} {change}"
            raise BadInput(f"{holds}. Put back what was there, or give another --out (or another name).")


def _change(was: InputFile | None, now: InputFile | None, interrupted: Callable[[], bool]) -> str | None:
    if was is None or now is None:
        return "was not there" if was is None else "is gone"
    if now.bytes != was.bytes:
        return f"has {now.bytes:,} bytes now, and had {was.bytes:,}"
    same = now.mtime_ns == was.mtime_ns or _with_sha256(now, interrupted).sha256 == was.sha256
    return None if same else "has another content now (its sha256 has changed)"


def _with_sha256(file: InputFile, interrupted: Callable[[], bool]) -> InputFile:
    digest = hashlib.sha256()
    last, steps = file.bytes - _PIECE_BYTES, file.pieces - 1
    spread = (last * step // steps for step in range(file.pieces))
    try:
        with Path(file.path).open("rb") as opened:
            for place in spread if file.pieces else range(0, file.bytes, _PIECE_BYTES):
                if interrupted():
                    raise StudyInterrupted(BEFORE_FIRST_TRIAL)
                opened.seek(place)
                digest.update(opened.read(_PIECE_BYTES))
    except OSError as error:
        raise BadInput(f"{file.path} can't be read: {error.strerror}.") from error
    return file.model_copy(update={"sha256": digest.hexdigest()})
