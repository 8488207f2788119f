"""The messages of a study's end, to the addresses of its user."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carbonopt.core.errors import BadInput, StudyInterrupted
from carbonopt.report.assemble import top
from carbonopt.report.render import terminal
from carbonopt.report.study_view import StudyView
from carbonopt.spec.notify_settings import NotifyEvent
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url
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


def end_event(config: StudyConfig, data: StudyData) -> NotifyEvent | None:
    """Return the event whose message is to say a study's end.

    One message says an end, also if both of its events are asked for. None: none is asked for, or
    the end has been said.
    """
    if config.notify is None or data.end_is_said:
        return None
    if "finished" in config.notify.on:
        return "finished"
    return "budget" if data.ended_by_budget and "budget" in config.notify.on else None


def say_the_end(
    notifications: Notifications,
    event: NotifyEvent,
    data: StudyData,
    page: Path,
    paths: StudyPaths,
    storage: str | None,
) -> None:
    """Send the message of a study's end, with its answer and where its report is.

    The storage then notes that it was sent. A call that is killed before leaves it to the next one.
    """
    where = f"Report: {page.resolve()} on {platform.node()}"
    text = f"{terminal.render(top(StudyView(data)))}\n  The study ended: {data.ended}.\n{where}"
    picture = page.parent / _PICTURE
    notifications.send(event, text, picture if picture.is_file() else None)
    notifications.close()  # now it is sent
    database = connect(storage_url(paths, storage), must_exist=True)
    if (stored := StudyStorage.load(database, data.config.name)) is not None:
        stored.set_end_said(len(data.records))
