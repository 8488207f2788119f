"""Files in a script's folder that the study's earlier trials have changed.

A trial that reads one of them does not begin clean.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import Program, TrialSpec
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.input_files import written_in

_MOST_FILES = 10_000  # most files that are looked at, which takes 0.1 s
_MOST_NAMED = 20
_OF_STUDIES = {StudyPaths(Path()).storage.name, StudyPaths(Path()).storage_pointer.name}


def script_folders(program: Program) -> tuple[Path, ...]:
    """Return the folder in which a program runs, and those of its Python scripts."""
    folder = Path(program.folder)
    scripts = (folder / word for word in program.argv if word.endswith(".py"))
    return tuple(dict.fromkeys([folder, *(script.parent for script in scripts)]))


@dataclass
class InheritedFiles:
    """The files that earlier trials have changed, as a trial finds them when it begins.

    The file system records when a file was last read, but not if that time is later than the last
    change already (relatime), or not at all (noatime): such a file, or one that was replaced, may
    have been read.
    """

    folders: Sequence[Path]  # the folders of the script and in which it runs
    # Spans in which earlier trials ran, in seconds since 1970: a file that changed at another time,
    # such as a study file that its user has edited, was not changed by a trial.
    windows: Sequence[tuple[float, float]]
    _found: dict[Path, os.stat_result] = field(init=False)

    def __post_init__(self) -> None:
        self._found = {}
        for folder in self.folders:
            for file in _files(folder):
                with contextlib.suppress(OSError):  # the file has just been removed
                    status = file.stat()
                    if any(begin <= status.st_mtime <= end for begin, end in self.windows):
                        self._found[file] = status

    def read(self) -> tuple[str, ...]:
        """Return the names of the files that have been read since, or may have been."""
        names = sorted(
            self._name(file) for file, before in self._found.items() if _may_be_read(file, before)
        )
        return tuple(names[:_MOST_NAMED])

    def _name(self, file: Path) -> str:
        return str(
            next(file.relative_to(folder) for folder in self.folders if file.is_relative_to(folder))
        )


def _may_be_read(file: Path, before: os.stat_result) -> bool:
    try:
        now = file.stat()
        notes_reads = not os.statvfs(file).f_flag & os.ST_NOATIME
    except OSError:
        return True  # the file was removed, and may have been read before
    is_noted = before.st_atime_ns <= max(before.st_mtime_ns, before.st_ctime_ns)
    return (
        now.st_ino != before.st_ino
        or now.st_atime_ns > before.st_atime_ns
        or not (notes_reads and is_noted)
    )


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, the nearest first.

    Caches, hidden files and the folders of studies are left out.
    """
    waiting, left = [folder], _MOST_FILES
    while waiting:
        try:
            entries = sorted(os.scandir(waiting.pop(0)), key=lambda entry: entry.name)
        except OSError:  # this user may not read the folder
            continue
        if any(entry.name in _OF_STUDIES for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            if (left := left - 1) < 0:
                return
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def inherited_files(spec: TrialSpec, data: StudyData) -> InheritedFiles | None:
    """Return the files that a script's trial finds changed by others.

    None for the study's first trial, and if there is no script.
    """
    earlier = [
        record
        for record in data.records
        if record.started_at is not None and (record.trial != spec.number or spec.attempt > 1)
    ]
    if spec.program is None or not earlier:
        return None
    return InheritedFiles(script_folders(spec.program), [*map(written_in, earlier)])
