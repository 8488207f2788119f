"""The messages of a study's end, to the addresses of its user."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carbonopt.core.errors import BadInput, StudyInterrupted
from carbonopt.report.assemble import top
from carbonopt.report.render import terminal
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData
from carbonopt.study.notifications import Notifications

_PICTURE = Path("paper") / "figure-pareto.png"  # in a report's folder


@contextmanager
def said_if_it_fails(notifications: Notifications) -> Iterator[None]:
    """Send the message of a failure, unless the study was refused or interrupted by its user."""
    try:
        yield
    except (BadInput, StudyInterrupted):
        raise
    except Exception as error:
        notifications.send("failed", str(error) or type(error).__name__)
        raise


def say_the_end(notifications: Notifications, data: StudyData, page: Path | None) -> None:
    """Send the message of a study's end, with its answer and where its report is."""
    where = "" if page is None else f"\nReport: {page.resolve()} on {platform.node()}"
    text = f"{terminal.render(top(StudyView(data)))}\n  The study ended: {data.ended}.{where}"
    picture = None if page is None else page.parent / _PICTURE
    picture = picture if picture is not None and picture.is_file() else None
    notifications.send("finished", text, picture)
    if data.ended_by_budget:
        notifications.send("budget", text, picture)
