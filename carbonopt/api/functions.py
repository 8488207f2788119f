"""The functions `carbonopt.run` and `carbonopt.load`."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carbonopt.api.logging_display import LoggingDisplay
from carbonopt.api.opened_study import Study
from carbonopt.api.study_folder import pipeline_in, read_study_folder
from carbonopt.core.errors import BadInput, StudyInterrupted, shortened
from carbonopt.core.files import user_path
from carbonopt.engines.slurm import needs_jobs
from carbonopt.spec.study_config import StudyConfig
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.stop_request import interruptible
from carbonopt.study_file.reader import PipelineFile, load_study, study_of
from carbonopt.study_file.yaml_file import yaml_text

if TYPE_CHECKING:
    from carbonopt.api.study_call import Caller


def run(
    config: Mapping[str, Any] | str | PathLike[str] | StudyConfig,
    out: str | PathLike[str] | None = None,
    *,
    storage: str | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Study:
    """Run a study, or resume it, and write its report, as `carbonopt run` does.

    Nothing is printed. Python's log `carbonopt` has warnings, beginnings and ends of trials, and
    evaluations.

    Ctrl-C, or the interruption of a notebook's kernel, ends the running trial, stores what it has
    used, and raises KeyboardInterrupt; the same call resumes the study. SIGTERM and SIGHUP do the
    same before they do what they did before the call. In a thread that is not the main one,
    signals can't be seen: use `should_stop`.

    Args:
        config: The path of a study file; or what it holds, as a mapping whose relative paths are
            resolved from the working directory; or a study that has been parsed.
        out: The folder of the study. None: `runs/NAME`.
        storage: The SQLAlchemy URL of Optuna's storage. None: the storage that the folder already
            has, else a file in it.
        should_stop: A function that is called a few times a second. If it returns True, the study
            is stopped and can be resumed.

    Returns:
        The study. `Study.recommend` has the recommendation, or says that there is none.

    Raises:
        BadInput: If something is wrong that the user can change. The text names the rule, the value
            found and what to do.
        StudyInterrupted: If `should_stop` ended it.
        CarbonoptError: If the study can't go on, or its report can't be written; it is the class of
            all errors above. What was measured is kept.
    """
    _import_tqdm()
    from carbonopt.api.study_call import call_study

    _check_storage(storage)
    caller = _caller(should_stop)
    study, text = _study_and_text(config)
    if needs_jobs(study):
        raise BadInput(
            "launch.kind is slurm, and outside of a job only the command submits jobs; type:"
            " carbonopt run STUDY.yaml"
        )
    paths = StudyPaths.default(study.name) if out is None else StudyPaths(user_path(out, "out"))
    try:
        data, _ = call_study(caller, study, text, paths, storage)
    except StudyInterrupted as error:
        raise _interruption(study.name, paths, is_stored=error.is_stored) from None
    return Study(paths, data)


def _interruption(name: str, paths: StudyPaths, *, is_stored: bool) -> StudyInterrupted:
    """Return the error of an interrupted call; the command's own one says what to type."""
    text = f"{name} was interrupted; make the same call again to resume it."
    if is_stored:
        text += f" carbonopt.load({str(paths.root)!r}) reads what it has stored."
    return StudyInterrupted(text, is_stored=is_stored)


def load(dir: str | PathLike[str], storage: str | None = None) -> Study:
    """Read a study from its folder; it may still run.

    Args:
        dir: The folder that `carbonopt run` or `carbonopt.run` wrote, such as `runs/quickstart`.
        storage: The SQLAlchemy URL of Optuna's storage. None: the storage that the folder names.

    Raises:
        BadInput: If the folder has no study, has a pipeline of several, or can't be read.
    """
    _import_tqdm()
    _check_storage(storage)
    folder = user_path(dir, "dir")
    if pipeline_in(folder, storage) is not None:
        raise BadInput(f"{folder} holds the studies of a pipeline; give the folder of one of them.")
    return Study(*read_study_folder(folder, storage))


def _import_tqdm() -> None:
    """Import tqdm without its warning in notebooks that lack ipywidgets.

    Optuna imports it for progress bars, which carbonopt never shows.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import_module("tqdm.auto")


def _check_storage(storage: object) -> None:
    if not isinstance(storage, str | None):
        raise BadInput(
            "storage must be the text of an SQLAlchemy URL, such as sqlite:////tmp/study.db, but is"
            f" of type {type(storage).__name__}."
        )


def _study_and_text(
    config: Mapping[str, Any] | str | PathLike[str] | StudyConfig,
) -> tuple[StudyConfig, str]:
    """Return a checked study and the content of its study file."""
    if isinstance(config, StudyConfig):
        return config, yaml_text(config.model_dump(mode="json", exclude_none=True))
    if isinstance(config, Mapping):
        return study_of(config, Path.cwd())
    if not isinstance(config, str | PathLike):
        raise BadInput(
            "config must be a dictionary, the path of a study file or a parsed study, but is of"
            f" type {type(config).__name__}."
        )
    file = user_path(config, "config")
    if PipelineFile.load(file) is not None:
        raise BadInput(
            f"{file} chains several studies; run it by the command: carbonopt run STUDY.yaml"
        )
    return load_study(file), file.read_text(encoding="utf-8")


def _caller(should_stop: Callable[[], bool] | None) -> "Caller":
    """Return a caller that is part of another program.

    Raises:
        BadInput: If `should_stop` can't be called.
    """
    from carbonopt.api.study_call import Caller

    if should_stop is not None and not callable(should_stop):
        raise BadInput(
            "should_stop must be a function without arguments that returns whether to stop, but is"
            f" {shortened(should_stop)}; give one, or leave it out."
        )
    asked = should_stop if should_stop is not None else lambda: False
    return Caller(
        display=lambda config: LoggingDisplay(),
        interruptible=partial(interruptible, asked, passes_on=True),
        as_worker=lambda work: work(),
    )
