"""`carbonopt watch` from outside: who may read it, what it refuses, what it never does."""

import asyncio
import hashlib
import http.client
import os
import re
import signal
import socket
import sqlite3
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml
from analysis.test_pipeline import DPO, SFT, pipeline
from commands import free_port, refusal, within
from replays import study_over, write_table
from small_studies import study, trial
from watched_pages import Stream, add, change, store, watching

from carbonopt.core import extras
from carbonopt.core.trial import TrialState
from carbonopt.storage.paths import PipelinePaths
from carbonopt.storage.pipeline_storage import Ledger
from carbonopt.storage.watched_study import Sight
from carbonopt.storage.workers import leased
from carbonopt.watch import server as server_module
from carbonopt.watch.server import LivePage, listening, serve
from carbonopt.watch.watcher import Watcher


@pytest.fixture(scope="module")
def server(finished_study):
    with watching(finished_study) as opened:
        yield opened


def answer(port: int, method: str = "GET", path: str = "/", **headers: str):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()


def state_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Each file with its time of change and its content."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_only_this_machines_names_are_answered(server):
    port = server.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert answer(port, Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        for path in ("/", "/events", "/page.js"):
            status, headers, body = answer(port, path=path, Host=host)
            assert status == 421
            assert b"event" not in body
            assert "access-control-allow-origin" not in headers


@pytest.mark.slow
def test_nothing_but_reads_is_answered(server):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        for path in ("/", "/events", "/style.css"):
            assert answer(server.port, method, path)[0] == 405
    assert answer(server.port, "HEAD")[0] == 200
    for path in ("/study.db", "/../study.db", "/docs", "/openapi.json"):
        assert answer(server.port, path=path)[0] == 404


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(server):
    for path in ("/", "/page.js", "/style.css", "/plotly.js", "/nothing"):
        _, headers, body = answer(server.port, path=path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert headers["cross-origin-resource-policy"] == "same-origin"
        if path in ("/", "/style.css"):
            assert not re.search(rb"https?://", body)


@pytest.mark.slow
def test_it_listens_on_this_machine_alone(server):
    # proc(5): the local address in hexadecimal, and 0A for a socket that listens.
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    listening = [
        row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{server.port:04X}")
    ]
    assert listening == [f"0100007F:{server.port:04X}"]


@pytest.mark.slow
def test_a_page_gets_the_reports_document_then_nothing(server):
    with closing(Stream(server.url)) as stream:
        assert stream.next().kind == "whole"
        stream.until("contents", "energy")
        assert {"header", "now", "section front", "table all-trials"} <= stream.parts.keys()
        version = stream.version
    with closing(Stream(server.url, version)) as again, pytest.raises(TimeoutError):
        again._answer.fp.raw._sock.settimeout(5)
        again.next()


@pytest.mark.slow
def test_nothing_is_written_and_no_lock_is_held(finished):
    before = state_of(finished)
    with watching(finished) as opened, closing(Stream(opened.url)) as stream:
        stream.until("contents", "energy")
        assert state_of(finished) == before
        assert not (finished / "study.db-journal").exists()
        done = within("run", finished.parent / "study.yaml", "--out", finished, "--trials", 14)
        assert done.returncode in (0, 3), done.stderr
        stream.until("table all-trials", '[["13",')


@pytest.mark.slow
def test_a_change_is_sent_within_two_seconds_and_alone(tmp_path):
    stored = store(study(*(trial(number) for number in range(12)), ended=None), tmp_path / "one")
    with (
        leased(stored._storage, stored.study.study_name) as lease,
        watching(tmp_path / "one") as opened,
        closing(Stream(opened.url)) as stream,
    ):
        stream.until("contents", "energy")
        running = trial(
            12, perplexity=None, state=TrialState.RUNNING, worker=lease.worker.id, steps_done=7
        )
        add(stored, running)
        began_s = time.monotonic()
        message = stream.until("now", "step 7 of 40")
        assert message.came_s - began_s <= 2
        assert message.kind == "change"
        change(stored, running.model_copy(update={"steps_done": 8}))
        began_s = time.monotonic()
        message = stream.until("now", "step 8 of 40")
        assert message.came_s - began_s <= 2
        assert message.size < 2000


@pytest.mark.slow
def test_more_pages_than_the_limit_get_503_while_the_others_go_on(tmp_path):
    stored = store(study(trial(0), trial(1), ended=None), tmp_path / "one")
    limit = 50  # half of the files that it may open
    with (
        watching(tmp_path / "one", open_files=2 * limit) as opened,
        ExitStack() as opened_streams,
    ):
        streams = [opened_streams.enter_context(closing(Stream(opened.url))) for _ in range(limit)]
        for path in ("/", "/events"):
            assert answer(opened.port, path=path)[0] == 503
        add(stored, trial(2))
        for stream in streams:
            stream.until("table all-trials", '[["2",')
        streams[0].close()
        end = time.monotonic() + 20
        while (status := answer(opened.port)[0]) == 503:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert status == 200


def test_an_idle_page_hears_that_the_server_is_alive(monkeypatch):
    monkeypatch.setattr(server_module, "_ALIVE_EVERY_S", 0.01)

    async def hear() -> list[bytes]:
        page = LivePage()
        page.publish({"now": ["first"]})
        timer = asyncio.create_task(page.keep_alive())
        messages = [page.messages(""), page.messages("")]
        heard = [await anext(one) for _ in range(3) for one in messages]
        page.publish({"now": ["second"]})
        heard += [await anext(one) for one in messages]
        timer.cancel()
        page.end()
        for one in messages:
            assert await anext(one, None) is None
        return heard

    heard = asyncio.run(hear())
    kinds = [event.partition(b"event: ")[2].partition(b"\r\n")[0] for event in heard]
    assert kinds == [b"whole"] * 2 + [b"alive"] * 4 + [b"change"] * 2
    assert heard[0] is heard[1] and heard[6] is heard[7]  # encoded once


@pytest.mark.slow
def test_a_lost_storage_is_said_and_recovers(tmp_path):
    stored = store(study(trial(0), trial(1), ended=None), tmp_path / "one")
    file = tmp_path / "one" / "study.db"
    with watching(tmp_path / "one") as opened, closing(Stream(opened.url)) as stream:
        stream.until("contents", "trials")
        shown = stream.parts["header"]
        file.rename(tmp_path / "moved.db")
        stream.until("trouble", str(file))
        assert stream.parts["header"] == shown
        (tmp_path / "moved.db").rename(file)
        while stream.parts["trouble"]:
            stream.next()
        add(stored, trial(2))
        stream.until("table all-trials", '[["2",')


@pytest.mark.slow
def test_a_study_that_is_replaced_is_read_anew(tmp_path):
    store(study(trial(0), name="first"), tmp_path / "one")
    store(study(trial(0), name="second"), tmp_path / "two")
    with watching(tmp_path / "one") as opened, closing(Stream(opened.url)) as stream:
        stream.until("contents", "first")
        (tmp_path / "two" / "study.db").replace(tmp_path / "one" / "study.db")
        stream.until("contents", "second")


@pytest.mark.slow
def test_a_killed_server_loses_nothing_for_its_pages(finished_study):
    port = free_port()
    with watching(finished_study, port=port) as opened, closing(Stream(opened.url)) as stream:
        stream.until("contents", "energy")
        before, version = stream.parts, stream.version
    with watching(finished_study, port=port) as again, closing(Stream(again.url, version)) as other:
        assert other.next().kind == "whole"
        other.until("contents", "energy")
        assert other.parts == before


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_its_regular_end(finished_study, end):
    with watching(finished_study) as opened, closing(Stream(opened.url)) as stream:
        stream.next()
        opened.process.send_signal(end)
        assert opened.process.wait(30) == 0  # also while figures are drawn
        assert opened.process.stderr.read() == ""


@pytest.mark.slow
def test_a_study_killed_while_it_wrote_is_shown(tmp_path):
    """Its half-done transaction is undone, as by every other command that reads it."""
    stored = store(study(trial(0), trial(1)), tmp_path / "one")
    stored._storage.engine.dispose()
    file = tmp_path / "one" / "study.db"
    pid = os.fork()
    if pid == 0:
        database = sqlite3.connect(file, isolation_level=None)
        database.execute("PRAGMA cache_size = 1")  # so that it writes before it commits
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE trial_user_attributes SET value_json = '0'")
        database.execute("CREATE TABLE big AS SELECT randomblob(4000) FROM trial_user_attributes")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert file.with_name("study.db-journal").exists()
    with watching(tmp_path / "one") as opened, closing(Stream(opened.url)) as stream:
        stream.until("contents", "trials")
        assert len(stream.parts["table all-trials"]) == 1 + 2


def test_a_taken_port_is_refused(finished_study):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port}" in refusal("watch", finished_study, "--port", port)


def test_ports_out_of_range_are_refused(finished_study):
    for port in (0, 65536, -1):
        assert str(port) in refusal("watch", finished_study, "--port", port)


def test_a_folder_without_a_study_is_refused_with_the_nearest(finished, tmp_path):
    assert str(finished) in refusal("watch", tmp_path)
    assert str(finished) in refusal("watch", tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "runs/NAME" in refusal("watch", tmp_path / "empty" / "none")
    assert not (tmp_path / "missing").exists()


def test_a_damaged_storage_is_refused(tmp_path):
    (tmp_path / "study.db").write_bytes(b"nothing")
    assert str(tmp_path / "study.db") in refusal("watch", tmp_path, "--port", free_port())


@pytest.mark.slow
def test_a_study_on_postgresql_is_followed(tmp_path, postgresql_url):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study_over(write_table(tmp_path))))
    run = ("run", tmp_path / "study.yaml", "--out", tmp_path / "out", "--storage", postgresql_url)
    assert within(*run, "--trials", 3).returncode in (0, 3)
    with (
        watching(tmp_path / "out", "--storage", postgresql_url) as opened,
        closing(Stream(opened.url)) as stream,
    ):
        stream.until("contents", "trials")
        assert within(*run, "--trials", 5).returncode in (0, 3)
        stream.until("table all-trials", '[["4",')
        assert "s3cret" not in str(stream.parts)


@pytest.mark.slow
def test_a_pipeline_is_followed_from_step_to_step(tmp_path):
    ledger = Ledger(pipeline=pipeline())
    ledger.save(PipelinePaths(tmp_path))
    store(SFT, tmp_path / "sft")
    with watching(tmp_path) as opened, closing(Stream(opened.url)) as stream:
        stream.until("contents", "spent")
        assert "sft/report/" in "".join(stream.parts["section provenance"])
        store(DPO, tmp_path / "dpo")
        stream.until("contents", '"run"')
        assert ": dpo" in "\n".join(stream.parts["now"])
        (tmp_path / "pipeline.json").unlink()
        stream.until("trouble", "pipeline.json")
        ledger.save(PipelinePaths(tmp_path))
        while stream.parts["trouble"]:
            stream.next()


def test_without_the_extra_its_name_is_said(finished_study, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    assert "carbonopt[watch]" in refusal("watch", finished_study)


def test_another_storage_than_the_folders_is_refused(finished_study, tmp_path):
    url = f"sqlite:///{tmp_path / 'other.db'}"
    assert "leave the storage out" in refusal(
        "watch", finished_study, "--storage", url, "--port", free_port()
    )
    assert not (tmp_path / "other.db").exists()


@pytest.mark.slow
def test_an_error_of_the_program_ends_it_and_is_raised(finished_study):
    """A page that no longer changes would look like a study that stands still."""

    def look() -> Sight:
        raise ZeroDivisionError

    watcher = Watcher(look)
    watcher.want(True)
    with listening(0) as listener, pytest.raises(ZeroDivisionError):
        serve(watcher, listener)
