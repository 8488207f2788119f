"""Files that the study's earlier trials have changed, in a script's folder or in their own ones.

A trial that reads one of them does not begin clean.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carbonopt.core.files import is_file
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import Program, TrialSpec
from carbonopt.storage.paths import StudyPaths, is_study
from carbonopt.study.command_outputs import command_outputs
from carbonopt.study_file.input_files import written_in
from carbonopt.train.tasks.script import Script
from carbonopt.train.tasks.task import task_for

_MOST_FILES = 10_000  # largest number of files that are looked at; so many take 0.1 s
_MOST_NAMED = 20
_LARGE_FOLDER = 1000  # entries of a folder, such as one of images, that is looked at last
# Folders that tools write for themselves.
_NOBODYS = re.compile(r"__pycache__|\..*cache.*|\.ipynb_checkpoints|\.(git|hg|svn|venv|hydra)")
_EVENTS = "events.out.tfevents."  # files that a user's TensorBoard reads while the study runs
# What a study writes into its folder, which may be the script's own.
_OF_STUDIES = {path.name for path in vars(StudyPaths(Path())).values() if isinstance(path, Path)}


def script_folders(program: Program) -> tuple[Path, ...]:
    """Return the folder in which a program runs, and those of its Python scripts."""
    folder = Path(program.folder)
    scripts = (folder / word for word in program.argv if word.endswith(".py"))
    return tuple(dict.fromkeys([folder, *(script.parent for script in scripts)]))


@dataclass
class InheritedFiles:
    """The files that earlier trials have changed, as a trial finds them when it begins.

    The file system records when a file was last read. With the mount option `relatime` it skips
    this if the recorded time is already later than the file's last change, and with `noatime` it
    never does it. A file whose reads are not recorded, or that was replaced, may have been read.
    """

    # the folders of the script and in which it runs, and other files and folders that it names
    folders: Sequence[Path]
    # Spans in which earlier trials ran, in seconds since 1970: a file that changed at another time,
    # such as a study file that its user has edited, was not changed by a trial.
    windows: Sequence[tuple[float, float]]
    # The folders that carbonopt gave to trials that have ended. Only those trials and carbonopt
    # itself change what is there, and a trial may have read its own files.
    outputs: Sequence[Path] = ()
    quality_file: Path | None = None  # read by carbonopt itself after each trial
    # the files to which the study's commands, this one and others, have written their own output
    logs: Collection[str] = ()
    _found: dict[Path, os.stat_result] = field(init=False)
    _of_trials: dict[Path, os.stat_result] = field(init=False)

    def __post_init__(self) -> None:
        self._found = {}
        self._of_trials = {}
        outputs = (file for folder in self.outputs for file in _files(folder, follows_links=False))
        for file in itertools.islice(outputs, _MOST_FILES):
            with contextlib.suppress(OSError):
                self._of_trials[file] = _noting_reads(file)
        own_logs = command_outputs()
        for folder in self.folders:
            for file in _files(folder):
                with contextlib.suppress(OSError):  # the file has just been removed
                    status, path = file.stat(), file.resolve()
                    is_of_trial = any(
                        begin <= status.st_mtime <= end for begin, end in self.windows
                    )
                    is_log = (status.st_dev, status.st_ino) in own_logs or str(path) in self.logs
                    if is_of_trial and not is_log and path != self.quality_file:
                        self._found[file] = _noting_reads(file)

    def read(self) -> tuple[str, ...]:
        """Return the names of the files that have been read since, or may have been."""
        found = [file for file, before in self._found.items() if _may_be_read(file, before)]
        found += [file for file, before in self._of_trials.items() if _is_read(file, before)]
        return tuple(sorted(map(self._name, found))[:_MOST_NAMED])

    def _name(self, file: Path) -> str:
        """Return a file's name in the script's folder, or its path if it lies elsewhere."""
        first = self.folders[0]
        shown = file.relative_to(first) if file.is_relative_to(first) else file
        return os.fsencode(shown).decode(errors="backslashreplace")  # a record is UTF-8


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


def _noting_reads(file: Path) -> os.stat_result:
    """Return a file's status, after which its next read is recorded with `relatime`, too.

    Where the recorded read is later than the file's last change, the time of its status (ctime)
    becomes now. That of another user's file can't be changed.
    """
    before = file.stat()
    if before.st_atime_ns > max(before.st_mtime_ns, before.st_ctime_ns):
        with contextlib.suppress(PermissionError):  # another user's
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return file.stat()


def _is_read(file: Path, before: os.stat_result) -> bool:
    """Return whether a file's recorded read is a later one; False if the file was removed."""
    try:
        return file.stat().st_atime_ns > before.st_atime_ns
    except OSError:
        return False


def _files(folder: Path, *, follows_links: bool = True) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, the nearest first; of a file itself.

    Links are followed, as a folder of checkpoints is often one to a larger disk, except in a
    trial's own folder, where they lead to what is not the trial's. Caches, hidden files and the
    folders of studies are left out.
    """
    if is_file(folder):
        yield folder
        return
    waiting, left = [folder], _MOST_FILES
    large: list[list[os.DirEntry[str]]] = []
    seen: set[str] = set()
    while waiting or large:
        if waiting:
            inside = waiting.pop(0)
            if (real := os.path.realpath(inside)) in seen:
                continue
            seen.add(real)
            try:
                entries = sorted(os.scandir(inside), key=lambda entry: entry.name)
            except OSError:  # this user may not read the folder
                continue
            if is_study(inside):
                if inside != folder:
                    continue
                entries = [each for each in entries if not _is_of_study(each.name)]
            if len(entries) > _LARGE_FOLDER:
                large.append(entries)
                continue
        else:
            entries = large.pop(0)
        for entry in entries:
            if _NOBODYS.fullmatch(entry.name):
                continue
            if (left := left - 1) < 0:
                return
            with contextlib.suppress(OSError):  # a link to itself
                if entry.is_dir(follow_symlinks=follows_links):
                    waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=follows_links) and not entry.name.startswith(
                    (".", _EVENTS)
                ):
                    yield Path(entry.path)


def _is_of_study(name: str) -> bool:
    return name in _OF_STUDIES or name.startswith(StudyPaths(Path()).storage.name)


def inherited_files(spec: TrialSpec, data: StudyData, paths: StudyPaths) -> InheritedFiles | None:
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
    folders = [*script_folders(spec.program), *_named(data.config)]
    source, quality_file = spec.program.quality_from, None
    if source is not None and source.file is not None:
        quality_file = (Path(spec.program.folder) / source.file).resolve()
    outputs = _outputs(spec, earlier, paths)
    logs = {path for session in data.sessions for path in session.output_files}
    return InheritedFiles(folders, [*map(written_in, earlier)], outputs, quality_file, logs)


def _outputs(spec: TrialSpec, earlier: Sequence[TrialRecord], paths: StudyPaths) -> list[Path]:
    """Return the folders of output and checkpoints that ended trials and attempts have left."""
    ended = [each.trial for each in earlier if each.has_finished and each.trial != spec.number]
    folders = [folder for number in ended for folder in paths.trial_outputs(number)]
    folders += [paths.trial_checkpoints(number) for number in ended]
    own = Path(spec.output_dir)
    folders += [each for each in paths.trial_outputs(spec.number) if each.name != own.name]
    return [folder.absolute() for folder in folders]


def _named(config: StudyConfig) -> list[Path]:
    """Return the files and folders that a script names now, which may lie outside of its folder."""
    assert config.workload is not None
    task = task_for(config.workload.model_dump(mode="json"))
    folders = task.watched_folders() if isinstance(task, Script) else ()
    return [*map(Path, (*task.input_files(), *folders))]
