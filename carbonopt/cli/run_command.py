"""`carbonopt run`: run a study or a pipeline, or resume it, and write its report."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carbonopt.api.report_files import ReportNotWritten, kept, write_pipeline_report
from carbonopt.cli.answers import print_pipeline, print_recommendation
from carbonopt.cli.exit_codes import as_command, exit_by
from carbonopt.cli.options import StorageUrl, StudyFile
from carbonopt.core.errors import EXIT_MET, EXIT_NOT_MET, BadInput, printable
from carbonopt.core.files import user_path

if TYPE_CHECKING:
    from carbonopt.spec.study_config import StudyConfig
    from carbonopt.spec.study_data import StudyData
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study.session import AsStep
    from carbonopt.study_file.reader import PipelineFile
    from carbonopt.study_file.study_checks import CheckedStudy


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
    configuration is recommended for the target, 3 if none is, and 130 if interrupted.
    """
    from carbonopt.engines.slurm import needs_jobs
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study_file.reader import PipelineFile, load_study

    if (pipeline := PipelineFile.load(study)) is not None:
        of_one_study = {
            "--storage": storage is not None,
            "--trials": trials is not None,
            "--worker": worker,
            "--detach": detach,
        }
        for option, is_given in of_one_study.items():
            if is_given:
                raise BadInput(
                    f"{option} is for one study, but {study} chains several; leave it out."
                )
        exit_by(_run_pipeline(pipeline, out, seed))
    config = _with_options(load_study(study), trials, seed)
    root = (StudyPaths(out) if out is not None else StudyPaths.default(config.name)).root
    if needs_jobs(config):
        code = _run_in_jobs(
            config, study, StudyPaths(root), storage, trials, seed, worker=worker, detach=detach
        )
        raise typer.Exit(code)
    if detach:
        raise BadInput(
            "--detach is for a study with launch.kind: slurm, outside of Slurm's jobs; leave it"
            " out."
        )
    # Imported only after the study file was read: these imports would double the time until a wrong
    # study file is refused.
    from carbonopt.api.study_call import worker_paths

    paths = worker_paths(root) if worker else StudyPaths(root)
    data, page = _run_study(config, study.read_text(encoding="utf-8"), paths, storage, joins=worker)
    exit_by(_print_result(data, page))


def _with_options(
    config: "StudyConfig", trials: int | None = None, seed: int | None = None
) -> "StudyConfig":
    """Return the study with the budget and the seed that the command's options give."""
    for part, key, value in (("budget", "trials", trials), ("search", "seed", seed)):
        if value is not None:
            settings = getattr(config, part).model_copy(update={key: value})
            config = config.model_copy(update={part: settings})
    return config


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
) -> int:
    """Run the study in jobs of Slurm, and return the exit code of the command."""
    from carbonopt.cli.slurm_submission import run_in_jobs
    from carbonopt.storage.url import has_storage
    from carbonopt.study.start_schedule import check_schedule, now_in_utc, plan_first
    from carbonopt.study.stop_request import interruptible
    from carbonopt.study_file.study_checks import check

    if worker:
        raise BadInput(
            "--worker joins from within a job of Slurm; launch.workers says how many jobs are"
            " submitted."
        )
    checked, begins_in_s = check(config), 0
    if config.schedule is not None and not has_storage(paths, storage):
        now = now_in_utc()
        check_schedule(checked, now)
        start = plan_first(checked, now, lambda text: print(text, file=sys.stderr))
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
            lambda: _print_if_ended(checked, paths, storage),
            begins_in_s=begins_in_s,
            detach=detach,
        )
    return code or 0  # 0: --detach, and the jobs go on


def _print_if_ended(
    checked: "CheckedStudy", paths: "StudyPaths", storage: str | None
) -> int | None:
    """Print the result of a study of which nothing is left to do, and return its exit code."""
    from carbonopt.api.study_call import call_ended_study

    with _printed_at_least():
        ended = call_ended_study(checked, paths, storage, lambda text: print(text, file=sys.stderr))
    if ended is None:
        return None
    return EXIT_MET if _print_result(*ended) else EXIT_NOT_MET


def _run_pipeline(file: "PipelineFile", out: Path | None, seed: int | None) -> bool:
    """Run the studies of a pipeline, each in its own folder; finished ones are only read.

    Returns:
        Whether the pipeline has met its targets.
    """
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
                config = _with_options(file.config(step, models), seed=seed)
                text = file.study(step).read_text(encoding="utf-8")
                data, page = _run_study(config, text, paths.study(folder), None, call.as_step(step))
                held.keep()
                call.ended(step, folder, data)
                met |= _print_result(data, page)
            if not met:
                break
    with kept(paths.root):
        view, page = write_pipeline_report(paths, paths.report)
    print()
    met = print_pipeline(view)
    _print_page(page)
    return met


def _run_study(
    config: "StudyConfig",
    text: str,
    paths: "StudyPaths",
    storage: str | None,
    as_step: "AsStep | None" = None,
    *,
    joins: bool = False,
) -> "tuple[StudyData, Path | None]":
    """Run or resume a study with a live display; for the rest see `call_study`.

    If its report can't be written, at least the recommendation is printed.
    """
    from carbonopt.api.study_call import Caller, call_study
    from carbonopt.cli.display import LiveDisplay
    from carbonopt.study.stop_request import interruptible

    caller = Caller(LiveDisplay, interruptible, as_command)
    with _printed_at_least():
        return call_study(caller, config, text, paths, storage, as_step, joins=joins)


def _print_result(data: "StudyData", page: Path | None) -> bool:
    """Print the recommendation and the page of the report; return whether the target was met."""
    met = print_recommendation(data)
    if page is not None:
        _print_page(page)
    return met


def _print_page(page: Path) -> None:
    print(f"\nReport: {printable(str(page))}")


@contextmanager
def _printed_at_least() -> Iterator[None]:
    """Print the recommendation of a study whose report can't be written, and raise the error."""
    try:
        yield
    except ReportNotWritten as error:
        print_recommendation(error.data)
        raise
