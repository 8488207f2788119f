"""Messages about a study, to real servers on loopback."""

import email
import email.policy
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiosmtpd.controller import Controller
from commands import free_port, refusal, within
from small_studies import study, trial

from carbonopt.api.end_messages import end_event
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Failure, TrialState
from carbonopt.spec.notify_settings import Notify
from carbonopt.spec.study_data import PlannedStart, SessionLedger, Wait
from carbonopt.study.notifications import CLOSE_S, Message, Notifications, deliver
from carbonopt.study_file.notify_addresses import ADDRESSES, addresses
from carbonopt.study_file.reader import load_study, parse_study

SECRET = "hunter2"


class Mailbox:
    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return "250 OK"


@pytest.fixture
def mailbox() -> Iterator[tuple[str, Mailbox]]:
    box = Mailbox()
    port = free_port()
    server = Controller(box, hostname="127.0.0.1", port=port)
    server.start()
    yield f"mailto://127.0.0.1:{port}?mode=insecure&from=a@example.org&to=b@example.org", box
    server.stop()


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict]]]:
    """An address for Apprise's JSON, and the requests' bodies."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"json://user:{SECRET}@127.0.0.1:{server.server_address[1]}", bodies
    server.shutdown()
    server.server_close()


@pytest.fixture
def deaf() -> Iterator[str]:
    """An address whose server takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"json://user:{SECRET}@127.0.0.1:{server.getsockname()[1]}"


def test_a_mail_and_a_request_have_the_text_and_the_picture(mailbox, hook, tmp_path: Path) -> None:
    picture = tmp_path / "a picture?.png"
    picture.write_bytes(b"\x89PNG of a front")
    (mail_to, box), (hook_to, bodies) = mailbox, hook
    message = Message("the title", "the text <b>\nof two lines", picture)
    assert deliver(message, 1, mail_to) is deliver(message, 2, hook_to) is None
    (mail,), (body,) = box.mails, bodies
    assert mail["subject"] == "the title"
    assert mail.get_body(("plain",)).get_content().splitlines() == ["the text <b>", "of two lines"]
    (attached,) = mail.iter_attachments()
    assert attached.get_content() == picture.read_bytes()
    assert (body["title"], body["message"]) == ("the title", "the text <b>\nof two lines")
    assert len(body["attachments"]) == 1


def test_each_event_is_sent_once(hook) -> None:
    to, bodies = hook
    data = study(trial(0), raw={"notify": {"on": ["target_met", "stalled", "finished"]}})
    warnings: list[str] = []
    notifications = Notifications(data.config, [to], warnings.append)
    notifications.study_began(study())
    notifications.trial_ended(trial(0, perplexity=9.0))  # misses the target
    notifications.trial_ended(trial(1, perplexity=5.0))
    notifications.trial_ended(trial(2, perplexity=4.0))
    failure = Failure(kind="timeout", text="no step was made for 60 s.\nand more")
    stalled = trial(3, perplexity=None, state=TrialState.TIMEOUT, failure=failure)
    notifications.trial_ended(stalled)
    notifications.send("failed", "which nobody asked for")
    notifications.close()
    assert [body["title"] for body in bodies] == [
        "carbonopt: small: target met",
        "carbonopt: small: stalled",
    ]
    assert "Trial 1" in bodies[0]["message"] and "no step was made" in bodies[1]["message"]
    assert warnings == []
    again = Notifications(data.config, [to], warnings.append)
    again.study_began(study(trial(1, perplexity=5.0), stalled))
    again.trial_ended(trial(4, perplexity=4.0))
    again.close()
    assert len(bodies) == 2, "an earlier call has sent it"


def test_a_dead_host_and_one_that_hangs_are_said_without_the_password(deaf: str, hook) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"json://user:{SECRET}@127.0.0.1:{gone.getsockname()[1]}"
    data = study(raw={"notify": {"on": ["finished"]}})
    warnings: list[str] = []
    to, bodies = hook
    notifications = Notifications(data.config, [dead, deaf, to], warnings.append)
    notifications.study_began(study().model_copy(update={"ended": None}))
    began = time.monotonic()
    notifications.send("finished", "the answer")
    assert time.monotonic() - began < CLOSE_S / 2, "sending does not wait for the host that hangs"
    notifications.close()
    assert time.monotonic() - began < 1.5 * CLOSE_S
    assert len(bodies) == 1, "the others don't delay it"
    assert len(warnings) == 2
    assert all(any(f"address {at} (json)" in text for text in warnings) for at in (1, 2))
    assert SECRET not in " ".join(warnings)


def test_addresses_are_checked_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADDRESSES, raising=False)
    with pytest.raises(BadInput, match=ADDRESSES):
        addresses(Notify())
    monkeypatch.setenv(ADDRESSES, f"json://ok.example nowhere://{SECRET}@x")
    with pytest.raises(BadInput, match=r"address 2 of the variable .*\(nowhere\)") as error:
        addresses(Notify())
    assert SECRET not in str(error.value)
    file = tmp_path / "to.txt"
    file.write_text("# ours\njson://ok.example\n \n  # theirs\n\t#\n  mailto://u:p@example.org\n")
    file.chmod(0o640)
    with pytest.raises(BadInput, match="mode is 640; type: chmod 600"):
        addresses(Notify(config=str(file)))
    file.chmod(0o600)
    assert len(addresses(Notify(config=str(file)))) == 2


@pytest.mark.parametrize(
    "notify",
    [
        f"json://u:{SECRET}@host",
        [f"mailtos://user:{SECRET}@host"],
        {f"json://u:{SECRET}@host": 1},
        {"on": [f"json://u:{SECRET}@host"]},
        {"config": f"json://u:{SECRET}@host"},
        {"config": [f"json://u:{SECRET}@host"]},
        {"attach": f"json://u:{SECRET}@host"},
    ],
)
def test_addresses_in_the_study_file_are_refused_and_never_shown(
    notify: Any, replay_study: dict[str, Any]
) -> None:
    with pytest.raises(BadInput) as error:
        parse_study({**replay_study, "notify": notify}, "test")
    assert SECRET not in str(error.value)
    assert "notify" in str(error.value)


@pytest.mark.parametrize("scheme", ["json://", "https://", "mailto:"])
def test_address_in_place_of_the_file_of_addresses_is_answered_with_what_to_do(
    scheme: str, replay_study: dict[str, Any], write_study
) -> None:
    path = write_study({**replay_study, "notify": {"config": f"{scheme}user:{SECRET}@host"}})
    with pytest.raises(BadInput) as error:
        load_study(path)
    assert SECRET not in str(error.value)
    assert "notify.config" in str(error.value) and ADDRESSES in str(error.value)


def test_no_message_is_sent_again_by_a_later_call(hook) -> None:
    """Each call waits anew; both events of an end have one text."""
    to, bodies = hook
    began = "2026-06-03T18:10:00+00:00"
    plan = PlannedStart(at=began, finish_by=began, expected_saving=0.2, rule="")
    wait = Wait(started_at=began, duration_s=600, energy_kwh=0.1, expected_saving=0.2)
    waited = SessionLedger(started_at=began, duration_s=3600, waits=(wait,))
    data = study(
        trial(0, perplexity=9.0), raw={"notify": {"on": ["waiting", "finished", "budget"]}}
    )
    for sessions in ((), (waited,)):
        notifications = Notifications(data.config, [to], print)
        notifications.study_began(data.model_copy(update={"sessions": sessions, "ended": None}))
        notifications.waiting(plan)
        notifications.waiting(plan)
        notifications.send("finished", "the text")
        notifications.send("finished", "the text")
        notifications.close()
    titles = [body["title"].rpartition(": ")[2] for body in bodies]
    assert titles == ["waiting", "finished", "finished"], "the study has ended again"


@pytest.mark.parametrize(
    ("on", "by_budget", "said_after", "event"),
    [
        (["finished", "budget"], True, None, "finished"),
        (["budget"], True, None, "budget"),
        (["budget"], False, None, None),
        (["target_met"], True, None, None),
        (["finished"], True, 2, None),
        (["finished"], True, 1, "finished"),  # it went on
    ],
)
def test_an_end_is_said_once_for_its_trials(
    on: list[str], by_budget: bool, said_after: int | None, event: str | None
) -> None:
    data = study(trial(0), trial(1), raw={"notify": {"on": on}}).model_copy(
        update={"ended": "why", "ended_by_budget": by_budget, "end_said_records": said_after}
    )
    assert end_event(data.config, data) == event


# The command, which is killed once the study's end is stored.
KILLED_AT_THE_REPORT = """
import os
from carbonopt.api import study_call
from carbonopt.cli import app
study_call.write_own_report = lambda *_: os._exit(9)
app.main()
"""


@pytest.mark.slow
def test_an_end_that_a_killed_call_left_unsaid_is_said_by_the_next_one(
    hook, replay_study: dict, tmp_path: Path
) -> None:
    to, bodies = hook
    path, out = tmp_path / "study.yaml", tmp_path / "out"
    asks = replay_study | {"budget": {"trials": 2}, "notify": {"on": ["finished"]}}
    path.write_text(yaml.safe_dump(asks))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_THE_REPORT, "run", path, "--out", out],
        capture_output=True,
        env=os.environ | {ADDRESSES: to},
    )
    assert killed.returncode == 9 and bodies == []
    for _ in range(2):
        again = within("run", path, "--out", out, **{ADDRESSES: to})
        assert again.returncode in (0, 3), again.stderr
        assert [body["title"].rpartition(": ")[2] for body in bodies] == ["finished"]


@pytest.mark.parametrize(
    ("budget", "on", "sent"),
    [
        ({"trials": 2}, ["finished", "budget"], ["finished"]),
        ({"trials": 2}, ["budget"], ["budget"]),
        ({"trials": 1000}, ["finished", "budget"], ["finished"]),
    ],
)
@pytest.mark.slow
def test_a_test_message_and_the_end_of_a_study(
    budget: dict, on: list[str], sent: list[str], hook, replay_study: dict, tmp_path: Path
) -> None:
    """By the command itself: the end has the answer and its picture, the storage no address."""
    to, bodies = hook
    env = {ADDRESSES: to}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(replay_study))
    assert "has no notify" in refusal("notify", path, "--test", **env)
    study = replay_study | {"budget": budget, "notify": {"on": on}}
    path.write_text(yaml.safe_dump(study))
    assert "--test" in refusal("notify", path, **env)
    assert within("notify", path, "--test", **env).stdout == "sent to 1 address\n"
    done = within("run", path, "--out", tmp_path / "out", **env)
    assert done.returncode in (0, 3), done.stderr
    titles = [body["title"].rpartition(": ")[2] for body in bodies]
    assert titles == ["test", *sent]
    assert "The study ended" in bodies[1]["message"]
    assert (
        f"{tmp_path / 'out' / 'report' / 'index.html'} on {platform.node()}" in bodies[1]["message"]
    )
    assert len(bodies[1]["attachments"]) == 1
    again = within("run", path, "--out", tmp_path / "out", **env)
    assert again.returncode == done.returncode and len(bodies) == len(titles)
    for file in (tmp_path / "out").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert SECRET not in done.stdout + done.stderr
