"""`carbonopt notify`: send a test message; and the messages of a study's end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carbonopt.cli.options import StudyFile
from carbonopt.core.errors import BadInput, CarbonoptError, StudyInterrupted

if TYPE_CHECKING:
    from carbonopt.spec.study_data import StudyData
    from carbonopt.study.notifications import Notifications

_PICTURE = Path("paper") / "figure-pareto.png"  # in a report's folder


def notify(
    study: StudyFile,
    test: Annotated[bool, typer.Option("--test", help="Send a test message.")] = False,
) -> None:
    """Send a test message to the addresses that a study's messages go to."""
    from carbonopt.study.notifications import Message, addresses, deliver
    from carbonopt.study.study_file import load_study

    if not test:
        raise BadInput("notify sends test messages alone; give --test.")
    config = load_study(study)
    if config.notify is None:
        raise BadInput(f"{study} has no notify; add it, such as notify: {{on: [finished]}}.")
    to = addresses(config.notify)
    text = "This is a test. The messages of the study will come to this address."
    problems = deliver(Message(f"carbonopt: {config.name}: test", text), to)
    if problems:
        raise CarbonoptError(" ".join(problems))
    print(f"sent to {len(to)} {'address' if len(to) == 1 else 'addresses'}")


@contextmanager
def said_if_it_fails(notifications: "Notifications") -> Iterator[None]:
    """Send the message of a failure, unless the study was refused or interrupted by its user."""
    try:
        yield
    except (BadInput, StudyInterrupted):
        raise
    except Exception as error:
        notifications.send("failed", str(error) or type(error).__name__)
        raise


def say_the_end(notifications: "Notifications", data: "StudyData", page: Path | None) -> None:
    """Send the messages of a study's end, with its answer."""
    from carbonopt.report.assemble import top
    from carbonopt.report.render import terminal
    from carbonopt.report.study_view import StudyView

    where = "" if page is None else f"\nReport: {page}"
    text = f"{terminal.render(top(StudyView(data)))}\n  The study ended: {data.ended}.{where}"
    picture = None if page is None else page.parent / _PICTURE
    picture = picture if picture is not None and picture.is_file() else None
    notifications.send("finished", text, picture)
    if data.ended_by_budget:
        notifications.send("budget", text, picture)
