"""`carbonopt run`: run a study or a pipeline, or resume it, and write its report."""

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from carbonopt.cli.answers import print_pipeline, print_recommendation
from carbonopt.cli.exit_codes import as_command, exit_by
from carbonopt.cli.notify_command import said_if_it_fails, say_the_end
from carbonopt.cli.options import StorageUrl, StudyFile, user_path
from carbonopt.cli.writing_reports import kept, write_own_report, write_pipeline_report
from carbonopt.core.errors import BadInput, printable

if TYPE_CHECKING:
    from carbonopt.spec.study_config import StudyConfig
    from carbonopt.spec.study_data import StudyData
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study.local_workers import LocalWorker, LocalWorkers
    from carbonopt.study.session import AsStep
    from carbonopt.study.study_checks import CheckedStudy
    from carbonopt.study.study_file import PipelineFile


def run(
    study: StudyFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Default: runs/NAME.", parser=user_path),
    ] = None,
    storage: StorageUrl = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, max=10**6, help="Instead of budget.trials.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**31 - 1, help="Instead of search.seed.")
    ] = None,
    worker: Annotated[
        bool, typer.Option("--worker", help="Join the study, which another command leads.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit to Slurm and return.")] = False,
) -> None:
    """Run or resume a study, and write its report.

    After an interruption, run the same command again to resume the study. The exit code is 0 if a
    trial met the target, 3 if none did, and 130 if interrupted.
    """
    from carbonopt.engines.slurm import in_allocation
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study.study_file import PipelineFile, load_study

    if (pipeline := PipelineFile.load(study)) is not None:
        options = (
            *(("--storage", storage), ("--trials", trials)),
            *(("--worker", worker or None), ("--detach", detach or None)),
        )
        if given := [name for name, value in options if value is not None]:
            raise BadInput(
                f"{given[0]} is for one study, but {study} chains several; leave it out."
            )
        _run_pipeline(pipeline, out, seed)
    config = load_study(study)
    for part, key, value in (("budget", "trials", trials), ("search", "seed", seed)):
        if value is not None:
            config = config.model_copy(
                update={part: getattr(config, part).model_copy(update={key: value})}
            )
    root = (StudyPaths(out) if out is not None else StudyPaths.default(config.name)).root
    if config.launch.kind == "slurm" and not in_allocation():
        _run_in_jobs(
            config, study, StudyPaths(root), storage, trials, seed, worker=worker, detach=detach
        )
    if detach:
        raise BadInput(
            "--detach is for a study with launch.kind: slurm, outside of Slurm's jobs; leave it"
            " out."
        )
    paths = _worker_paths(root) if worker else StudyPaths(root)
    data, page = _run_study(config, study.read_text(encoding="utf-8"), paths, storage, joins=worker)
    met = print_recommendation(data)
    if page is not None:
        print(f"\nReport: {printable(str(page))}")
    exit_by(met)


def _run_in_jobs(
    config: "StudyConfig",
    study: Path,
    paths: "StudyPaths",
    storage: str | None,
    trials: int | None,
    seed: int | None,
    *,
    worker: bool,
    detach: bool,
) -> NoReturn:
    from carbonopt.cli.slurm_submission import run_in_jobs
    from carbonopt.storage.url import has_storage
    from carbonopt.study.start_schedule import check_schedule, first_start, now_in_utc
    from carbonopt.study.stop_request import interruptible
    from carbonopt.study.study_checks import check

    if worker:
        raise BadInput(
            "--worker joins from within a job of Slurm; launch.workers says how many jobs are"
            " submitted."
        )
    checked, begins_in_s = check(config), 0
    if config.schedule is not None and not has_storage(paths, storage):
        now = now_in_utc()
        check_schedule(checked, now)
        start = first_start(checked, now, lambda text: print(text, file=sys.stderr))
        if start is not None:
            begins_in_s = round((datetime.fromisoformat(start.at) - now).total_seconds())
    options = {"--storage": storage, "--trials": trials, "--seed": seed}
    arguments = [
        text for name, value in options.items() if value is not None for text in (name, str(value))
    ]
    with interruptible() as interrupted:
        code = run_in_jobs(
            config,
            study,
            paths,
            storage,
            arguments,
            interrupted,
            begins_in_s=begins_in_s,
            detach=detach,
        )
    raise typer.Exit(code or 0)


def _run_pipeline(file: "PipelineFile", out: Path | None, seed: int | None) -> NoReturn:
    """Run the studies of a pipeline, each in its own folder; finished ones are only read."""
    from carbonopt.analysis.recommend import recommend as recommend_for
    from carbonopt.storage.folder import own_folder
    from carbonopt.storage.paths import PipelinePaths, StudyPaths
    from carbonopt.study.pipeline_run import PipelineCall, check_pipeline

    check_pipeline(file)  # all steps are checked before the first one runs for hours
    pipeline = file.pipeline
    paths = PipelinePaths(out if out is not None else StudyPaths.default(pipeline.name).root)
    with own_folder(paths) as held, PipelineCall(pipeline, paths) as call:
        for number, step in enumerate(pipeline.pipeline, start=1):
            met = False
            for taken in pipeline.beginnings(step):
                if (models := call.begins_with(step, taken)) is None:
                    continue
                folder = pipeline.folder(step, taken)
                print(
                    f"\nStep {number} of {len(pipeline.pipeline)}: {printable(folder)}", flush=True
                )
                config = file.config(step, models)
                if seed is not None:
                    config = config.model_copy(
                        update={"search": config.search.model_copy(update={"seed": seed})}
                    )
                text = file.study(step).read_text(encoding="utf-8")
                data, page = _run_study(config, text, paths.study(folder), None, call.as_step(step))
                held.keep()
                call.ended(step, folder, data)
                met |= recommend_for(data).met
                print_recommendation(data)
                print(f"\nReport: {printable(str(page))}")
            if not met:
                break
    with kept(paths.root):
        view, page = write_pipeline_report(paths, paths.report)
    print()
    met = print_pipeline(view)
    print(f"\nReport: {printable(str(page))}")
    exit_by(met)


def _run_study(
    config: "StudyConfig",
    text: str,
    paths: "StudyPaths",
    storage: str | None,
    as_step: "AsStep | None" = None,
    *,
    joins: bool = False,
) -> "tuple[StudyData, Path | None]":
    """Run or resume a study and write its report, in all slots of its launch.

    Args:
        text: The content of the study file.
        joins: Whether this command joins a study that another one leads; it writes no report then.

    Returns:
        The study, and the page of its report, if one was written.
    """
    from carbonopt.doctor import before_run
    from carbonopt.doctor.check_result import Status
    from carbonopt.engines.slurm import here
    from carbonopt.study.local_workers import LocalWorker, forked_workers, printed_to
    from carbonopt.study.study_checks import check

    checked = check(config)
    if os.path.realpath(paths.root) in map(os.path.realpath, config.search.learn_from):
        raise BadInput(
            f"search.learn_from must name earlier studies, but {paths.root} is this one's folder;"
            " leave it out."
        )
    findings = before_run(here(config), paths.root)
    if failures := [str(check) for check in findings if check.status == Status.FAILURE]:
        raise BadInput("; ".join(failures))

    def join(local_worker: LocalWorker, own: "StudyPaths") -> None:
        _work(
            checked.in_slot(local_worker.slot), text, own, storage, None, local_worker=local_worker
        )

    def beside(local_worker: LocalWorker) -> None:
        own = _worker_paths(paths.root)
        with printed_to(own.worker_log):
            as_command(lambda: join(local_worker, own))

    with forked_workers(config.launch.slots, beside) as others:
        warnings = [str(check) for check in findings if check.status == Status.WARNING]
        return _work(
            checked, text, paths, storage, as_step, warnings, joins=joins, local_workers=others
        )


def _work(
    checked: "CheckedStudy",
    text: str,
    paths: "StudyPaths",
    storage: str | None,
    as_step: "AsStep | None",
    warnings: Sequence[str] = (),
    *,
    joins: bool = True,
    local_workers: "LocalWorkers | None" = None,
    local_worker: "LocalWorker | None" = None,
) -> "tuple[StudyData, Path | None]":
    """Work on a study in one slot of its launch; for the rest see `_run_study`."""
    from carbonopt.cli.display import LiveDisplay
    from carbonopt.storage.folder import own_folder
    from carbonopt.storage.study_storage import written
    from carbonopt.study.local_workers import LocalWorkers
    from carbonopt.study.notifications import Notifications
    from carbonopt.study.run_study import run_study
    from carbonopt.study.session import Session
    from carbonopt.study.stop_request import interruptible
    from carbonopt.study.trackers import open_trackers

    with own_folder(paths) as held, written(paths.root), interruptible() as interrupted:
        display = LiveDisplay(checked.config)
        notifications = Notifications.of(checked.config, display.warn, joins=joins)

        def on_begin() -> None:
            if local_workers is not None:
                local_workers.begin()
            for warning in warnings:
                display.warn(warning)

        def before_measuring() -> None:
            held.keep()
            interrupted.store_first()

        trackers = open_trackers(checked.config, paths.trackers, display.warn)
        session = Session(
            checked,
            text,
            paths,
            display,
            trackers,
            interrupted,
            notifications=notifications,
            url=storage,
            on_begin=on_begin,
            meanwhile=lambda: _look_ahead(paths),
            before_measuring=before_measuring,
            as_step=as_step,
            joins=joins,
            local_workers=local_workers or LocalWorkers(),
            local_worker=local_worker,
        )
        with contextlib.closing(notifications), said_if_it_fails(notifications):
            try:
                data = run_study(session)
            finally:
                trackers.close()
                display.close()
            held.keep()
            # All measurements are stored, so a signal may end it at once.
            interrupted.raise_on_signal()
            page = None if joins else write_own_report(data, paths)
            if checked.config.notify is not None:  # the answer takes a second to work out
                say_the_end(notifications, data, page)
        return data, page


def _worker_paths(root: Path) -> "StudyPaths":
    from carbonopt.storage.paths import StudyPaths

    return StudyPaths(root, f"{socket.gethostname()}-{os.getpid()}")


def _look_ahead(paths: "StudyPaths") -> None:
    """Import the libraries of the search and the report, and check that it can be written.

    This takes seconds. A study has time for it when it begins, while its trials' processes import,
    but not between trials or later.
    """
    from carbonopt.core.files import check_kinds

    libraries = ("sklearn.inspection", "matplotlib.backends.backend_pdf", "pyarrow.parquet")
    for module in ("carbonopt.search.strategy", "carbonopt.report.writing", *libraries):
        importlib.import_module(module)
    from carbonopt.report.writing import NAMES

    check_kinds(paths.report, NAMES)
