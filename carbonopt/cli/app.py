"""The command line, the only part of carbonopt that prints.

docs/commands.md has its contracts: arguments, exit codes, output. Each command is a file of its
own, `NAME_command.py`. Other packages are imported inside the commands, so that `--help` and a bad
study file get their answer at once.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import carbonopt
from carbonopt.cli.check_command import check
from carbonopt.cli.compare_command import compare
from carbonopt.cli.doctor_command import doctor
from carbonopt.cli.exit_codes import as_command, unraisable
from carbonopt.cli.export_command import export
from carbonopt.cli.init_command import init
from carbonopt.cli.notify_command import notify
from carbonopt.cli.recommend_command import recommend
from carbonopt.cli.report_command import report
from carbonopt.cli.run_command import run
from carbonopt.cli.schema_command import schema
from carbonopt.cli.watch_command import watch
from carbonopt.core.errors import BadInput

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    help=(
        "Finds the training configuration with the lowest emissions that still reaches a target"
        " quality."
    ),
)
for command in (
    init,
    run,
    report,
    recommend,
    export,
    compare,
    watch,
    check,
    schema,
    doctor,
    notify,
):
    app.command()(command)


def _version(value: bool) -> None:
    if value:
        print(f"carbonopt {carbonopt.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise BadInput(
            "the working folder must exist, but it was deleted; change to another one: cd ~."
        ) from error


def main() -> None:
    """Run the `carbonopt` command.

    Each of carbonopt's own errors becomes one sentence on standard error and an exit code.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it, and so does not want the output
            # For as long as Python runs.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")  # for terminals that lack →
    sys.unraisablehook = unraisable
    # A command imports millions of objects, of which hardly any is garbage: by Python's own
    # thresholds, looking for it takes 0.7 of the 5.6 s of CPU time of a replayed study.
    gc.set_threshold(100_000, 20, 100)
    as_command(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))
