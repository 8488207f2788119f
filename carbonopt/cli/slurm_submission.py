"""Runs `carbonopt run` in Slurm jobs, when it is typed outside of a job.

It submits the jobs, or finds those that an earlier command has submitted, and shows what they print
until they have ended.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from carbonopt.core.errors import EXIT_INTERRUPTED, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.units import human_duration
from carbonopt.engines.slurm import Jobs, command_in_job, state_of
from carbonopt.spec.launch_settings import SlurmLaunch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.storage.folder import own_folder
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.url import storage_url, without_password

_LOOK_AGAIN_S = 2.0
_ASK_AGAIN_S = 5.0  # interval for asking Slurm again where it did not answer
_SILENT_S = 3600.0  # how long Slurm may not answer before the command gives up
_SUBMITIT = "submitit "  # prefix of submitit's own lines in a job's log


def run_in_jobs(
    config: StudyConfig,
    study_file: Path,
    paths: StudyPaths,
    storage: str | None,
    arguments: list[str],
    interrupted: Callable[[], bool],
    print_if_ended: Callable[[], int | None],
    *,
    begins_in_s: int,
    detach: bool,
) -> int | None:
    """Run a study in Slurm jobs, and follow the first one until it has ended.

    Args:
        arguments: Further arguments of the command in the jobs, besides the study file and the
            folder.
        print_if_ended: Prints the result of a study that has ended, and returns its exit code;
            None: the study goes on.
        begins_in_s: Seconds before which Slurm does not begin the jobs.
        detach: Whether to return as soon as the jobs are submitted.

    Returns:
        The exit code of the command in the jobs. None: `detach` is set, and they go on.

    Raises:
        BadInput: If the jobs can't be submitted.
        CarbonoptError: If the jobs were ended before their command could end.
        StudyInterrupted: Soon after `interrupted` returned True, where the jobs go on; or if the
            job was interrupted.
    """
    assert isinstance(config.launch, SlurmLaunch)
    _check(config.launch, paths, storage)
    jobs = Jobs(paths)
    alive = jobs.alive()
    if not alive:
        code = print_if_ended()
        if code is not None:
            return code
    command = command_in_job(
        os.path.realpath(study_file), "--out", os.path.realpath(paths.root), *arguments
    )
    alive, submitted = _submit_missing(config, paths, jobs, alive, command, begins_in_s)
    ends = f"`scancel {' '.join(alive.values())}` ends it"
    if detach:
        print(f"{submitted}; the same command without --detach follows it, {ends}.")
        return None
    print(f"{submitted}; Ctrl-C leaves it running, {ends}.", file=sys.stderr, flush=True)
    leader = alive[0] if 0 in alive else next(iter(alive.values()))
    _follow(jobs, leader, interrupted)
    return _exit_code(jobs, leader)


def _exit_code(jobs: Jobs, leader: str) -> int:
    """Return the exit code of the command in a job that has ended.

    Raises:
        CarbonoptError: If the job was ended before its command could end.
        StudyInterrupted: If the job was interrupted.
    """
    code = jobs.exit_code()
    if code is None:
        log = jobs.log(leader)
        ended = f"job {leader} was ended before the study; what it had stored counts"
        raise CarbonoptError(f"{ended}, and the same command submits another one (log: {log}).")
    if code == EXIT_INTERRUPTED:
        raise StudyInterrupted(
            f"job {leader} was interrupted, such as by scancel; the same command submits another"
            " one, which resumes the study."
        )
    return code


def _submit_missing(
    config: StudyConfig,
    paths: StudyPaths,
    jobs: Jobs,
    alive: dict[int, str],
    command: list[str],
    begins_in_s: int,
) -> tuple[dict[int, str], str]:
    """Submit a job for each worker that has none.

    A job that was cancelled is replaced; a worker that had nothing left to do is not.

    Returns:
        The ids of all jobs by the worker's number, and what was done, in words.
    """
    launch = config.launch
    assert isinstance(launch, SlurmLaunch)
    missing = [
        number
        for number in range(launch.workers)
        if number not in alive and not (alive and jobs.is_done(number))
    ]
    if not missing:
        return alive, f"going on with job {', '.join(alive.values())}"
    # A running leader has the folder.
    with nullcontext() if 0 in alive else own_folder(paths):
        alive = jobs.submit(launch, config.name, command, missing, alive, begins_in_s)
    submitted = f"submitted job {', '.join(alive[number] for number in missing)}"
    if begins_in_s:
        submitted += f", which begins in {human_duration(begins_in_s)} at the earliest"
    return alive, submitted


def _check(launch: SlurmLaunch, paths: StudyPaths, storage: str | None) -> None:
    if shutil.which("sbatch") is None:
        raise BadInput(
            "launch.kind: slurm needs Slurm's sbatch on PATH; run it on a login node, or in a job."
        )
    root = os.path.realpath(paths.root)
    # sbatch's script names the folder in a comment, which a line break would end.
    if not root.isprintable():
        raise BadInput(
            "--out: the folder of a study in jobs must have printable characters alone, but is"
            f" {root!a}."
        )
    url = storage_url(paths, storage)
    if storage is not None and without_password(storage) != storage:
        kept = "a job's command is kept in the study's folder, which must hold no password"
        raise BadInput(f"--storage: {kept}; give it by ~/.pgpass or PGPASSWORD.")
    if launch.workers > 1 and url.startswith("sqlite"):
        needs = (
            "several jobs need a storage that all of them reach: --storage"
            " postgresql://user@host/db"
        )
        raise BadInput(f"launch.workers: {needs}; SQLite's file is for one node.")


def _follow(jobs: Jobs, job: str, interrupted: Callable[[], bool]) -> None:
    """Print a job's state and output until it has ended."""
    log, shown, state = jobs.log(job), 0, ""
    while True:
        now = _state(job, interrupted)
        if now is not None and now != state and now != "COMPLETING":
            print(f"job {job}: {now.lower()}", file=sys.stderr, flush=True)
            state = now
        if log.exists():
            with log.open("rb") as printed:
                printed.seek(shown)
                text = printed.read()
            whole = text.rfind(b"\n") + 1  # the last line may be half written
            shown += whole
            for line in text[:whole].decode(errors="replace").splitlines():
                if not line.startswith(_SUBMITIT):
                    print(line, flush=True)
        if now is None:
            return
        deadline = time.monotonic() + _LOOK_AGAIN_S
        while time.monotonic() < deadline:
            if interrupted():
                raise StudyInterrupted(
                    f"job {job} goes on; the same command follows it, `scancel {job}` ends it."
                )
            time.sleep(0.1)


def _state(job: str, interrupted: Callable[[], bool]) -> str | None:
    """Return a job's state, as `state_of`; while Slurm does not answer, ask again for a while.

    Raises:
        CarbonoptError: If Slurm has not answered for an hour; the job may go on.
        StudyInterrupted: Soon after `interrupted` returned True; the job may go on.
    """
    deadline, said = time.monotonic() + _SILENT_S, False
    while True:
        try:
            return state_of(job)
        except CarbonoptError as error:
            goes_on = f"job {job} may go on, and the same command follows it"
            if time.monotonic() > deadline:
                raise CarbonoptError(f"{error} {goes_on}.") from error
            if not said:
                print(f"Slurm does not answer; asking again: {error}", file=sys.stderr, flush=True)
                said = True
        again = time.monotonic() + _ASK_AGAIN_S
        while time.monotonic() < again:
            if interrupted():
                raise StudyInterrupted(f"{goes_on}.")
            time.sleep(0.1)
