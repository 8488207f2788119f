"""Messages about a study by Apprise.

No message may fail a study, or delay its end by more than CLOSE_S. Each address has a thread of its
own, which sends the messages one after the other, so that an address that hangs delays no other.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.notify_settings import Notify, NotifyEvent
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import PlannedStart
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study_file.notify_addresses import address_scheme, addresses, apprise_service

if TYPE_CHECKING:
    from carbonopt.spec.study_data import StudyData

CLOSE_S = 5.0


@dataclass(frozen=True)
class Message:
    title: str
    text: str
    picture: Path | None = None


class Notifications:
    """An observer of trials that sends the messages of a study, none of them twice.

    `warn` is called in the caller's own thread.
    """

    def __init__(self, config: StudyConfig, to: Sequence[str], warn: Callable[[str], None]) -> None:
        self._config, self._addresses, self._warn = config, to, warn
        settings = config.notify
        self._left = set(settings.on) if settings is not None and to else set[NotifyEvent]()
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._senders: tuple[_Sender, ...] = ()

    @classmethod
    def of(
        cls, config: StudyConfig, warn: Callable[[str], None], *, joins: bool
    ) -> "Notifications":
        """Return the notifications that a study file asks for, which may be none.

        A worker that joins sends none, because the leading one knows of all trials.

        Raises:
            BadInput: As `addresses`.
        """
        has_none = joins or config.notify is None
        return cls(config, () if has_none else addresses(config.notify or Notify()), warn)

    def study_began(self, data: "StudyData") -> None:
        """Leave out the events that an earlier call of the study's command has seen."""
        for record in data.records:
            self._left -= {event for event in ("target_met", "stalled") if self._is(event, record)}
        if any(session.waits for session in data.sessions):
            self._left -= {"waiting"}

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None: ...

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None: ...

    def trial_ended(self, record: TrialRecord) -> None:
        quality = self._config.quality
        if self._is("target_met", record) and record.value is not None:
            reached = f"{quality.name} {quality.text(record.value)}"
            self.send("target_met", f"Trial {record.trial} met the target: {reached}.")
        if self._is("stalled", record):
            why = "" if record.failure is None else f": {record.failure.sentence}"
            self.send("stalled", f"Trial {record.trial} was stopped{why}.")

    def waiting(self, start: PlannedStart) -> None:
        """Send the message of a wait for the hours of the schedule."""
        self.send("waiting", f"The study waits until {start.local_time}{start.effect}.")

    def send(self, event: NotifyEvent, text: str, picture: Path | None = None) -> None:
        """Send the message of an event, if the study file asks for it and it was not sent yet."""
        if event not in self._left:
            return
        self._left.remove(event)
        if not self._senders:
            self._senders = tuple(
                _Sender(number, address, self._problems)
                for number, address in enumerate(self._addresses, start=1)
            )
        title = f"carbonopt: {self._config.name}: {event.replace('_', ' ')}"
        attached = picture if self._config.notify and self._config.notify.attach else None
        for sender in self._senders:
            sender.messages.put(Message(title, text, attached))

    def close(self) -> None:
        """Wait until all messages are sent, for a few seconds at most."""
        for sender in self._senders:
            sender.messages.put(None)
        deadline_s = time.monotonic() + CLOSE_S
        for sender in self._senders:
            sender.thread.join(max(0.0, deadline_s - time.monotonic()))
            if sender.thread.is_alive():
                self._warn(
                    f"{sender.name} did not take its messages within {CLOSE_S:g} s; they may be"
                    " missing."
                )
        self._senders = ()
        while not self._problems.empty():
            self._warn(self._problems.get())

    def _is(self, event: NotifyEvent, record: TrialRecord) -> bool:
        if event == "stalled":
            return record.state is TrialState.TIMEOUT
        target = self._config.target.at()
        return (
            record.state is TrialState.COMPLETE
            and record.value is not None
            and target.is_met_by(record.value)
        )


class _Sender:
    """Sends messages to one address in a thread of its own, until it is given None."""

    def __init__(self, number: int, address: str, problems: "queue.SimpleQueue[str]") -> None:
        self.messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.name = _named(number, address)
        self._number, self._address, self._problems = number, address, problems
        # A daemon, so that a host that hangs can't keep the study's process from ending.
        self.thread = threading.Thread(target=self._work, name=f"notify {number}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (message := self.messages.get()) is not None:
            if (problem := deliver(message, self._number, self._address)) is not None:
                self._problems.put(problem)


def deliver(message: Message, number: int, address: str) -> str | None:
    """Send a message to an address; return a sentence on what went wrong, or None.

    Args:
        number: The address's place among all of them, from 1 on, by which it is named.
    """
    try:
        if _sent(message, address):
            return None
        why = "it could not be reached, or did not accept it"
    except Exception as error:  # noqa: BLE001
        # Whatever fails, it must not end a night of trials.
        why = type(error).__name__  # its text can hold the address
    return f"the message {message.title!r} did not reach {_named(number, address)}: {why}."


def _sent(message: Message, address: str) -> bool:
    import apprise
    from apprise.attachment.file import AttachFile

    service = apprise_service(address)
    attached = None
    if message.picture is not None and service.attachment_support:
        attached = [AttachFile(str(message.picture))]  # type: ignore[no-untyped-call]
    to_one = apprise.Apprise()
    to_one.add(service)
    # As plain text: a mail would otherwise take it for HTML and lose its lines.
    as_text = apprise.NotifyFormat.TEXT
    return bool(
        to_one.notify(body=message.text, title=message.title, attach=attached, body_format=as_text)
    )


def _named(number: int, address: str) -> str:
    return f"address {number} ({address_scheme(address)})"
