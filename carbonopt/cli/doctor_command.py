"""`carbonopt doctor`: check whether this machine is ready."""

import json
from typing import Annotated

import typer

from carbonopt.cli.options import AsJson
from carbonopt.core.errors import printable


def doctor(
    as_json: AsJson = False,
    build: Annotated[
        bool, typer.Option("--build", help="Compile DeepSpeed's operators now.")
    ] = False,
) -> None:
    """Check whether this machine is ready for a study, and say what to type if it is not.

    The exit code is 1 if a check fails, else 0.
    """
    from rich.console import Console
    from rich.text import Text

    from carbonopt.doctor import examine
    from carbonopt.doctor.check_result import Status

    colours = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red"}
    console = Console(highlight=False, soft_wrap=True)
    checks = []
    for check in examine(build):
        checks.append(check)
        if not as_json:
            status = Text(f"{check.status:8}", colours[check.status])
            console.print(status, printable(f"{check.name:20} {check.as_text()}"), markup=False)
    ok = all(check.status != Status.FAILURE for check in checks)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [check.model_dump() for check in checks]}, indent=2))
    raise typer.Exit(0 if ok else 1)
