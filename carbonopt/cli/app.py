"""The command line: the only room that prints. docs/commands.md has its contracts: arguments, exit codes, output."""

import errno
import importlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

import carbonopt
from carbonopt.core.errors import BadInput, CarbonoptError

if TYPE_CHECKING:
    from carbonopt.core.config import StudyConfig
    from carbonopt.core.study import StudyData
    from carbonopt.report.document import Document
    from carbonopt.report.pipeline import PipelineView
    from carbonopt.report.studies import StudiesView
    from carbonopt.storage.paths import PipelinePaths, StudyPaths
    from carbonopt.study.check import Checked
    from carbonopt.study.crew import Crew, Member
    from carbonopt.study.file import PipelineFile
    from carbonopt.study.loop import AsStep

# Other rooms are imported inside the commands, so that `--help` and a bad study file are answered at once.

EXIT_MET, EXIT_NOT_MET, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 3, 2, 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Finds the training configuration with the lowest emissions that still reaches a target quality.",
)

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")]
StudyDir = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study, such as runs/quickstart.")]
StorageUrl = Annotated[str | None, typer.Option("--storage", metavar="URL", help="SQLAlchemy URL of Optuna's storage.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.command()
def run(
    study: StudyFile,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Default: runs/NAME.")] = None,
    storage: StorageUrl = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, max=10**6, help="Instead of budget.trials.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**31 - 1, help="Instead of search.seed.")] = None,
    worker: Annotated[bool, typer.Option("--worker", help="Join the study, which another command leads.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit to Slurm and return.")] = False,
) -> None:
    """Run a study, or go on with it, and write its report.

    The same command after any interruption reaches the configured total. Ends with 0 if a trial met the target, 3 if
    none did, 130 if interrupted.
    """
    from carbonopt.engines.slurm import in_allocation
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study.file import PipelineFile, load_study

    if (pipeline := PipelineFile.load(study)) is not None:
        options = (
            *(("--storage", storage), ("--trials", trials)),
            *(("--worker", worker or None), ("--detach", detach or None)),
        )
        if given := [name for name, value in options if value is not None]:
            raise BadInput(f"{given[0]} is for one study, but {study} chains several; leave it out.")
        _run_pipeline(pipeline, out, seed)
    config = load_study(study)
    for part, key, value in (("budget", "trials", trials), ("search", "seed", seed)):
        if value is not None:
            config = config.model_copy(update={part: getattr(config, part).model_copy(update={key: value})})
    root = (StudyPaths(out) if out is not None else StudyPaths.default(config.name)).root
    if config.launch.kind == "slurm" and not in_allocation():
        _run_in_jobs(config, study, StudyPaths(root), storage, trials, seed, worker=worker, detach=detach)
    if detach:
        raise BadInput("--detach is for a study with launch.kind: slurm, outside of Slurm's jobs; leave it out.")
    paths = _worker_paths(root) if worker else StudyPaths(root)
    data, page = _run_study(config, study.read_text(encoding="utf-8"), paths, storage, joins=worker)
    met = _print_recommendation(data)
    if page is not None:
        print(f"\nReport: {_printable(str(page))}")
    _exit(met)


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
    from carbonopt.cli.slurm import run_in_jobs
    from carbonopt.study.check import check
    from carbonopt.study.stop_request import interruptible

    if worker:
        raise BadInput("--worker joins from within a job of Slurm; launch.workers says how many jobs are submitted.")
    check(config)
    options = {"--storage": storage, "--trials": trials, "--seed": seed}
    arguments = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    with interruptible() as interrupted:
        code = run_in_jobs(config, study, paths, storage, arguments, interrupted, detach=detach)
    raise typer.Exit(code or 0)


def _worker_paths(root: Path) -> "StudyPaths":
    from carbonopt.storage.paths import StudyPaths

    return StudyPaths(root, f"{socket.gethostname()}-{os.getpid()}")


def _run_pipeline(file: "PipelineFile", out: Path | None, seed: int | None) -> NoReturn:
    """Each study in a folder of its own; those that have ended are only read."""
    from carbonopt.analysis.recommend import recommend as recommend_for
    from carbonopt.storage.paths import PipelinePaths, StudyPaths, own_folder
    from carbonopt.study.pipeline import PipelineCall, check_pipeline

    check_pipeline(file)  # before the first takes its hours
    pipeline = file.pipeline
    paths = PipelinePaths(out if out is not None else StudyPaths.default(pipeline.name).root)
    with own_folder(paths), PipelineCall(pipeline, paths) as call:
        for number, step in enumerate(pipeline.pipeline, start=1):
            met = False
            for taken in pipeline.beginnings(step):
                if (models := call.begins_with(step, taken)) is None:
                    continue
                folder = pipeline.folder(step, taken)
                print(f"\nStep {number} of {len(pipeline.pipeline)}: {_printable(folder)}", flush=True)
                config = file.config(step, models)
                if seed is not None:
                    config = config.model_copy(update={"search": config.search.model_copy(update={"seed": seed})})
                text = file.study(step).read_text(encoding="utf-8")
                data, page = _run_study(config, text, paths.study(folder), None, call.as_step(step))
                call.ended(step, folder, data)
                met |= recommend_for(data).met
                _print_recommendation(data)
                print(f"\nReport: {_printable(str(page))}")
            if not met:
                break
    view, page = _write_pipeline_report(paths, paths.report)
    print()
    met = _print_pipeline(view)
    print(f"\nReport: {_printable(str(page))}")
    _exit(met)


def _run_study(
    config: "StudyConfig",
    text: str,
    paths: "StudyPaths",
    storage: str | None,
    as_step: "AsStep | None" = None,
    *,
    joins: bool = False,
) -> "tuple[StudyData, Path | None]":
    """Runs it, or goes on with it, and writes its report, unless it `joins` another command's; `text`: its file."""
    from carbonopt.doctor import before_run
    from carbonopt.doctor.check import Status
    from carbonopt.engines.slurm import here
    from carbonopt.study.check import check
    from carbonopt.study.crew import Member, crew, printed_to

    checked = check(config)
    if paths.root.resolve() in map(Path.resolve, map(Path, config.search.learn_from)):
        raise BadInput(
            f"search.learn_from must name earlier studies, but {paths.root} is this one's folder; leave it out."
        )
    findings = before_run(here(config), paths.root)
    if failures := [str(check) for check in findings if check.status == Status.FAILURE]:
        raise BadInput("; ".join(failures))

    def join(member: Member, own: "StudyPaths") -> None:
        _work(checked.in_slot(member.slot), text, own, storage, None, member=member)

    def beside(member: Member) -> None:
        own = _worker_paths(paths.root)
        with printed_to(own.worker_log):
            _as_command(lambda: join(member, own))

    with crew(config.launch.slots, beside) as others:
        warnings = [str(check) for check in findings if check.status == Status.WARNING]
        return _work(checked, text, paths, storage, as_step, warnings, joins=joins, crew=others)


def _work(
    checked: "Checked",
    text: str,
    paths: "StudyPaths",
    storage: str | None,
    as_step: "AsStep | None",
    warnings: Sequence[str] = (),
    *,
    joins: bool = True,
    crew: "Crew | None" = None,
    member: "Member | None" = None,
) -> "tuple[StudyData, Path | None]":
    """Works on a study in one slot of its launch; as `_run_study`."""
    from carbonopt.cli.display import LiveDisplay
    from carbonopt.core.files import check_kinds
    from carbonopt.storage.paths import own_folder
    from carbonopt.storage.study import written
    from carbonopt.study.loop import run_study
    from carbonopt.study.stop_request import interruptible
    from carbonopt.study.trackers import open_trackers

    with own_folder(paths), written(str(paths.root)), interruptible() as interrupted:
        display = LiveDisplay(checked.config)

        def begins() -> None:
            if crew is not None:
                crew.begin()
            for warning in warnings:
                display.warn(warning)

        def meanwhile() -> None:
            _import_ahead()
            from carbonopt.report.build import NAMES

            check_kinds(paths.report, NAMES)

        trackers = open_trackers(checked.config, paths.trackers, display.warn)
        try:
            data = run_study(
                checked,
                text,
                paths,
                storage,
                display,
                trackers,
                interrupted,
                begins,
                meanwhile,
                as_step,
                joins=joins,
                crew=crew,
                member=member,
            )
        finally:
            trackers.close()
            display.close()
        interrupted.raise_on_signal()  # what was measured is stored
        return data, None if joins else _write_report(data, paths, paths.report)


@app.command()
def report(
    study_dir: StudyDir,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR2", help="Default: DIR/report.")] = None,
    storage: StorageUrl = None,
) -> None:
    """Write the report again from the storage."""
    from carbonopt.core.files import PIPELINE_JSON, REPORT_JSON

    if (pipeline := _pipeline_in(study_dir, storage)) is not None:
        folder = out if out is not None else pipeline.report
        _refuse_other_files(folder, PIPELINE_JSON, "report of a pipeline")
        print(_write_pipeline_report(pipeline, folder)[1])
        return
    paths, data = _read(study_dir, storage)
    folder = out if out is not None else paths.report
    _refuse_other_files(folder, REPORT_JSON, "report")
    print(_write_report(data, paths, folder))


@app.command()
def recommend(
    study_dir: StudyDir,
    target: Annotated[float | None, typer.Option("--target", metavar="X", help="For the same quality.")] = None,
    as_json: AsJson = False,
    storage: StorageUrl = None,
) -> None:
    """Print the recommendation alone; another target needs no new trial."""
    if (pipeline := _pipeline_in(study_dir, storage)) is not None:
        if target is not None:
            raise BadInput(f"--target is for one study, but {study_dir} holds several; give the folder of one of them.")
        _exit(_print_pipeline(_pipeline_view(pipeline), as_json=as_json))
    paths, data = _read(study_dir, storage)
    if not as_json:
        from carbonopt.storage.paths import is_locked

        _exit(_print_recommendation(data, target, running=is_locked(paths)))
    from carbonopt.report.assemble import top
    from carbonopt.report.study_view import StudyView

    study = StudyView(data, target)
    caveats = [caveat.as_json() for caveat in top(study).caveats]
    print(json.dumps({**study.recommendation.as_json(), "caveats": caveats}, indent=2, allow_nan=False))
    _exit(study.recommendation.met)


@app.command()
def export(
    study_dir: StudyDir,
    form: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="One record a trial.")] = "jsonl",
    storage: StorageUrl = None,
) -> None:
    """Print one record a trial, every state included."""
    if (pipeline := _pipeline_in(study_dir, storage)) is not None:
        folders = ", ".join(folder for folder in _pipeline_view(pipeline).studies)
        raise BadInput(f"export is of one study, but {study_dir} holds several; give the folder of one: {folders}.")
    _, data = _read(study_dir, storage)
    records = [record.as_json() for record in data.records]
    if form == "jsonl":
        sys.stdout.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
    else:
        from carbonopt.report.data import csv_text

        sys.stdout.write(csv_text(records))


@app.command()
def compare(
    study_dirs: Annotated[
        list[Path], typer.Argument(metavar="DIR DIR ...", help="The folders of two or more studies.")
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR2", help="Also write a page there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show studies of the same task beside each other: other machines, models or data."""
    from carbonopt.core.files import COMPARISON_JSON
    from carbonopt.report.studies import StudiesView, compared
    from carbonopt.report.study_view import StudyView

    if len({folder.resolve() for folder in study_dirs}) < max(2, len(study_dirs)):
        given = " ".join(map(str, study_dirs))
        raise BadInput(f"compare needs the folders of two or more different studies, but got {given}.")
    read = [(folder, _read(folder, None)[1]) for folder in study_dirs]
    called = Counter(data.config.name for _, data in read)
    names = [data.config.name if called[data.config.name] == 1 else f"{data.config.name} ({at})" for at, data in read]
    view = StudiesView({name: StudyView(data) for name, (_, data) in zip(names, read, strict=True)})
    document = compared(view)
    if out is not None:
        _refuse_other_files(out, COMPARISON_JSON, "comparison")
        page = _write_comparison(view, document, out)
    if as_json:
        caveats = [caveat.as_json() for caveat in document.caveats]
        print(json.dumps({**view.results(), "caveats": caveats}, indent=2, allow_nan=False))
        return
    from carbonopt.cli.display import print_tables
    from carbonopt.report.render import terminal

    print(_printable(terminal.render(document)))
    print_tables([table for table in document.tables() if not table.folded], _printable)
    if out is not None:
        print(f"Page: {_printable(str(page))}")


@app.command()
def check(
    study: StudyFile,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", metavar="GIB", help="Of each GPU, from 0.1 to 1,000,000.")
    ] = None,
) -> None:
    """Validate a study file; say what the study will do and roughly cost, and what memory each GPU needs."""
    from carbonopt.core.errors import BadInput
    from carbonopt.study.file import PipelineFile, load_study

    if gpu_memory is not None and not 0.1 <= gpu_memory <= 1e6:
        raise BadInput(f"--gpu-memory must be from 0.1 to 1,000,000 GiB, but got {gpu_memory:g}; give a GPU's memory.")

    pipeline = PipelineFile.load(study)
    config = load_study(study) if pipeline is None else None

    from carbonopt.cli.check import describe_study
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study.check import as_prepared
    from carbonopt.study.check import check as check_study
    from carbonopt.study.weights import check_weights

    if pipeline is not None:
        from carbonopt.study.pipeline import check_pipeline

        steps = {step.step: step for step in pipeline.pipeline.pipeline}
        for number, (name, checked) in enumerate(check_pipeline(pipeline).items(), start=1):
            # What is needed takes the place of what its own file names.
            needs = ", ".join(f"the {key} of {other}" for key, other in steps[name].needs.items())
            print(_printable(f"\nStep {number} of {len(steps)}: {name}{f', which gets {needs}' if needs else ''}"))
            print(_printable(describe_study(checked)))
    if config is None:
        return
    paths = StudyPaths.default(config.name)
    checked = as_prepared(check_study(config), paths.prepared)
    check_weights([(config, ())])
    print(_printable(describe_study(checked)))
    print(f"  folder      {paths.root}, unless `carbonopt run` is given --out", flush=True)
    if config.launch.is_local:
        from carbonopt.energy.hardware import check_gpus

        try:
            check_gpus(config.launch.gpus)
        except CarbonoptError as error:  # it may be meant for another machine
            print(f"  not here    {_printable(str(error))}", flush=True)
    if config.launch.trains and checked.is_settled:
        from carbonopt.cli.memory import describe_memory

        print(_printable(describe_memory(checked, gpu_memory)))


@app.command()
def doctor(
    as_json: AsJson = False,
    build: Annotated[bool, typer.Option("--build", help="Compile DeepSpeed's operators now.")] = False,
) -> None:
    """Say whether this machine is ready for a study, and if not, what to type.

    Ends with 1 if a check fails, else with 0.
    """
    from rich.console import Console
    from rich.text import Text

    from carbonopt.doctor import examine
    from carbonopt.doctor.check import Status

    colours = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red"}
    console = Console(highlight=False, soft_wrap=True)
    checks = []
    for check in examine(build):
        checks.append(check)
        if not as_json:
            status = Text(f"{check.status:8}", colours[check.status])
            console.print(status, _printable(f"{check.name:20} {check.as_text()}"), markup=False)
    ok = all(check.status != Status.FAILURE for check in checks)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [check.model_dump() for check in checks]}, indent=2))
    raise typer.Exit(0 if ok else 1)


def _version(value: bool) -> None:
    if value:
        print(f"carbonopt {carbonopt.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise BadInput("the working folder must exist, but it was deleted; change to another one: cd ~.") from error


# The base of what typer raises for wrong arguments; typer brings its own copy of click and doesn't name this class.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """The `carbonopt` command: every error that is ours becomes one sentence on standard error and an exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called us, who then wants nothing of it
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115, for as long as Python runs
        getattr(sys, name).reconfigure(errors="backslashreplace")  # for terminals without →
    sys.unraisablehook = _unraisable
    _as_command(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))


def _as_command(run: Callable[[], int | None]) -> NoReturn:
    """Ends the process with the exit code that `run` returns, or with that of its error, which is said."""
    try:
        code = run()
        sys.stdout.flush()
    except KeyboardInterrupt:  # one that typer didn't see
        _fail("interrupted.", EXIT_INTERRUPTED)
    except _UsageError as error:
        _fail(error.format_message(), EXIT_BAD_INPUT)  # type: ignore[attr-defined]
    except CarbonoptError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # `carbonopt export … | head`
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            _fail("no further process can be started; raise the limit (ulimit -u) and type the same command again.", 1)
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it can't take is not tried again when Python ends
        _fail(f"no space left for {error.filename or 'the output'}; make room and type the same command again.", 1)
    finally:
        signal.signal(signal.SIGINT, _end_at_once)  # while Python tidies up, a KeyboardInterrupt would be a traceback
    if code == EXIT_INTERRUPTED:  # what typer makes of Ctrl-C
        _fail("interrupted.", code)
    sys.exit(code)


def _end_at_once(signum: int, frame: Any) -> None:
    os.write(2, b"carbonopt: interrupted.\n")
    os._exit(EXIT_INTERRUPTED)


def _unraisable(error: "sys.UnraisableHookArgs") -> None:
    """A Ctrl-C that falls into a finalizer is lost there, whatever is done; it only shall not be shown as an error."""
    if error.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(error)


def _exit(met: bool) -> NoReturn:
    raise typer.Exit(EXIT_MET if met else EXIT_NOT_MET)


def _fail(text: str, code: int) -> None:
    if code == EXIT_BAD_INPUT:  # one sentence, whatever a user put into a name
        text = " ".join(text.split())
    print(f"carbonopt: {_printable(text)}", file=sys.stderr)
    sys.exit(code)


def _printable(text: str) -> str:
    """What users name can hold terminal sequences."""
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)


def _read(study_dir: Path, url: str | None) -> "tuple[StudyPaths, StudyData]":
    """A study from its folder. Raises BadInput if there is none, or it can't be read."""
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.storage.pipeline import read_study

    paths = StudyPaths(study_dir)
    try:
        if url is None and not paths.storage.exists() and not paths.storage_pointer.exists():
            advice = "give the folder that `carbonopt run` wrote, such as runs/NAME"
            raise BadInput(f"{study_dir} holds no study; {advice}.")
        return paths, read_study(paths, url).read()
    except OSError as error:
        advice = "ask its owner for a copy" if isinstance(error, PermissionError) else "give a study's folder"
        raise BadInput(f"{study_dir} can't be read: {error.strerror}; {advice}.") from error


def _import_ahead() -> None:
    """What the search and the report take seconds to import: a study has time for it when it begins, while its trials'
    processes import, and none between trials or later."""
    libraries = ("sklearn.inspection", "matplotlib.backends.backend_pdf", "pyarrow.parquet")
    for module in ("carbonopt.search.strategy", "carbonopt.report.build", *libraries):
        importlib.import_module(module)


def _refuse_other_files(folder: Path, own: Path, what: str) -> None:
    """Raises BadInput if the folder has files, but not the one that tells it is of this kind."""
    try:
        strange = folder.is_dir() and any(folder.iterdir()) and not (folder / own).exists()
    except OSError as error:
        raise BadInput(f"--out {folder} can't be looked into: {error.strerror}; give another folder.") from error
    if strange:
        raise BadInput(f"--out {folder} holds other files and no {what}; give a new folder.")


def _write_report(data: "StudyData", paths: "StudyPaths", folder: Path) -> Path:
    from carbonopt.analysis.recommend import recommend as recommend_for
    from carbonopt.core.files import read_text
    from carbonopt.report.build import write_report
    from carbonopt.storage.paths import DEEPSPEED_SETTINGS

    winner = recommend_for(data).trial
    settings = paths.trial(winner) / DEEPSPEED_SETTINGS if winner is not None else None
    own = {settings.name: read_text(settings, "DeepSpeed's settings", 1)} if settings and settings.exists() else {}
    with _as_unwritable("report", folder):
        return write_report(data, folder, winner_files=own)


def _pipeline_in(folder: Path, storage: str | None) -> "PipelinePaths | None":
    """None: the folder is no pipeline's."""
    from carbonopt.storage.paths import PipelinePaths

    paths = PipelinePaths(folder)
    try:
        if not paths.ledger.exists():
            return None
    except OSError as error:
        raise BadInput(
            f"{folder} can't be read: {error.strerror}; give the folder of a study or a pipeline."
        ) from error
    if storage is not None:
        raise BadInput(f"--storage is for one study, but {folder} holds several; leave it out.")
    return paths


def _pipeline_view(paths: "PipelinePaths") -> "PipelineView":
    from carbonopt.report.pipeline import PipelineView
    from carbonopt.storage.pipeline import Ledger, read_pipeline

    ledger = Ledger.load(paths)
    data = read_pipeline(paths, ledger) if ledger is not None else None
    if data is None or not data.studies:
        raise BadInput(f"{paths.root} holds no study yet; type `carbonopt run` with its pipeline again.")
    return PipelineView(data)


def _write_pipeline_report(paths: "PipelinePaths", folder: Path) -> "tuple[PipelineView, Path]":
    from carbonopt.report.build import write_pipeline
    from carbonopt.report.pipeline import page

    view = _pipeline_view(paths)
    with _as_unwritable("report", folder):
        return view, write_pipeline(view, page(view), folder)


def _print_pipeline(view: "PipelineView", *, as_json: bool = False) -> bool:
    from carbonopt.report.pipeline import pipeline_top
    from carbonopt.report.render import terminal

    document = pipeline_top(view)
    if as_json:
        caveats = [caveat.as_json() for caveat in document.caveats]
        print(json.dumps({**view.summary.as_json(), "caveats": caveats}, indent=2, allow_nan=False))
    else:
        print(_printable(terminal.render(document)))
    return view.summary.met


def _write_comparison(view: "StudiesView", document: "Document", folder: Path) -> Path:
    from carbonopt.report.build import write_comparison

    with _as_unwritable("comparison", folder):
        return write_comparison(view, document, folder)


@contextmanager
def _as_unwritable(what: str, folder: Path) -> Iterator[None]:
    """Raises BadInput where the folder can't be written; a full disk stays one."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EAGAIN):
            raise
        raise BadInput(f"the {what} can't be written to {folder}: {error.strerror}; give another --out.") from error


def _print_recommendation(data: "StudyData", target: float | None = None, *, running: bool = False) -> bool:
    from carbonopt.cli.display import not_ended
    from carbonopt.report.assemble import top
    from carbonopt.report.render import terminal
    from carbonopt.report.study_view import StudyView

    study, own = StudyView(data, target), data.config.target.value
    recommendation = study.recommendation
    its_own = "" if recommendation.target.value == own else f", whose own target is {own:g},"
    ended = f"The study{its_own} ended: {data.ended}."
    print(_printable(terminal.render(top(study))))
    print(f"  {_printable(not_ended(data, recommendation, running) if data.ended is None else ended)}")
    return recommendation.met
