"""The doctor's checks of the host and of what stands beside it: each in an environment with one
thing wrong.
"""

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor.test_doctor import ROOT, advised

from carbonopt.doctor import _reads_hub_cache, before_run, host_checks, service_checks
from carbonopt.doctor.check_result import Status
from carbonopt.spec.workload_settings import Workload
from carbonopt.study_file.reader import load_study


@pytest.mark.parametrize(
    ("free_gib", "disk", "shm"),
    [(0.5, "failure", "warning"), (5, "warning", "ok"), (50, "ok", "ok")],
)
def test_space_that_is_left(
    monkeypatch, tmp_path: Path, free_gib: float, disk: str, shm: str
) -> None:
    monkeypatch.setattr(
        host_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_gib * 2**30)
    )
    assert host_checks.disk(tmp_path / "not" / "there", "type this").status == disk
    assert host_checks.shared_memory(tmp_path).status == shm


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("lacks", ["space", "access"])
def test_a_begun_study_is_not_sent_to_another_folder(
    lacks: str, begun: bool, monkeypatch, tmp_path: Path, replay_study: dict, write_study
) -> None:
    if lacks == "access":
        monkeypatch.setattr(host_checks.os, "access", lambda *_: False)
    else:
        usage = SimpleNamespace(free=0)
        monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda _: usage)
    if begun:
        for name in ("study.db", ".lock"):
            (tmp_path / name).touch()
    (finding,) = before_run(load_study(write_study(replay_study)), tmp_path)
    assert finding.status == Status.FAILURE
    assert finding.advice is not None
    assert ("--out" in finding.advice) is not begun
    assert (str(tmp_path) in finding.advice) is begun


def test_other_work_on_the_cpu_is_told_before_a_study(
    monkeypatch, tmp_path: Path, tiny_study, write_study
) -> None:
    config = load_study(write_study(tiny_study))
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        time.sleep(0.5)  # until they have started
        (told,) = (check for check in before_run(config, tmp_path) if check.name == "CPU load")
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert advised(told) == ("warning", "top")
    assert "busy with other work: timings and modelled energy will be off" in told.found
    monkeypatch.setattr(
        host_checks.psutil, "cpu_percent", lambda interval: 4.4
    )  # nothing here can be sure to be alone
    assert advised(host_checks.cpu_load()) == ("ok", None)


def test_a_hub_folder_is_looked_at_where_something_is_kept_in_it(
    tmp_path: Path, tiny_study, write_study
) -> None:
    own = {"model": {"from_config": {"model_type": "gpt2"}}, "dataset": {"builtin": "python-docs"}}
    folder = str(tmp_path)
    script = {"task": "script", "command": "python train.py", "folder": folder}
    kept = {**tiny_study["workload"], **own}
    for workload, is_looked_at in (
        (kept, False),
        (script, False),
        ({**kept, "model": {"name_or_path": folder}}, False),
        ({**kept, "model": {"name_or_path": folder, "trust_remote_code": True}}, True),
        ({**kept, "model": {"name_or_path": "gpt2"}}, True),
        ({**kept, "tokenizer": {"name_or_path": "gpt2"}}, True),
        ({**kept, "dataset": {"name_or_path": folder}}, True),
    ):
        assert _reads_hub_cache(Workload.model_validate(workload)) is is_looked_at, workload
    names = {check.name for check in before_run(load_study(write_study(tiny_study)), tmp_path)}
    assert "disk for runs" in names and "disk for models" not in names


def test_memory_is_what_the_control_groups_leave(tmp_path: Path) -> None:
    own = tmp_path / "own"
    for group, limit, used in (("", "max", 0), ("outer", "1000", 400), ("outer/inner", "800", 100)):
        folder = tmp_path / "two" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    own.write_text("0::/outer/inner\n")
    assert host_checks._cgroup_left_bytes(tmp_path / "two", own) == 600
    own.write_text("0::/\n")
    assert host_checks._cgroup_left_bytes(tmp_path / "two", own) == math.inf

    first = tmp_path / "one" / "memory" / "job"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("500\n")
    (first / "memory.usage_in_bytes").write_text("600\n")
    own.write_text("5:cpu:/\n4:cpu,memory:/job\n")
    assert host_checks._cgroup_left_bytes(tmp_path / "one", own) == 0


def test_rapl(tmp_path: Path) -> None:
    assert advised(host_checks.rapl(has_gpus=False, powercap=tmp_path)) == ("ok", None)
    assert advised(host_checks.rapl(has_gpus=True, powercap=tmp_path)) == (
        "warning",
        "carbon: {objective: gpu}",
    )
    (tmp_path / "intel-rapl:0").mkdir()
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    counter.write_text("1\n")
    assert "is measured" in host_checks.rapl(has_gpus=True, powercap=tmp_path).found
    counter.chmod(0)
    if not os.access(counter, os.R_OK):  # root may read all
        assert (
            host_checks.rapl(has_gpus=True, powercap=tmp_path).advice
            == f"sudo chmod a+r {tmp_path}/intel-rapl:*/energy_uj"
        )


@pytest.mark.parametrize(
    "text", ["no section\n", "[codecarbon]\npue = %(x)s\n", "[codecarbon]\npue=1\npue=2\n", "\xff"]
)
def test_a_configuration_that_codecarbon_fails_on(monkeypatch, tmp_path: Path, text: str) -> None:
    config = tmp_path / ".codecarbon.config"
    config.write_bytes(text.encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert advised(service_checks.codecarbon_config()) == ("failure", f"mv {config} {config}.bad")
    from codecarbon.core.config import get_hierarchical_config

    with pytest.raises(Exception, match=r"."):  # whichever of configparser's
        get_hierarchical_config()


def test_what_would_be_read_without_end_is_not_opened(monkeypatch, tmp_path: Path) -> None:
    config, key = tmp_path / ".codecarbon.config", tmp_path / ".netrc"
    os.mkfifo(config)
    key.symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    assert advised(service_checks.codecarbon_config()) == ("failure", f"mv {config} {config}.bad")
    assert advised(service_checks.netrc()) == ("failure", f"mv {key} {key}.bad")
    assert service_checks.wandb() is None
    key.unlink()
    assert service_checks.netrc() is None


def test_no_folder_for_temporary_files(monkeypatch) -> None:
    assert host_checks.temporary_files().status == Status.OK
    monkeypatch.setattr(host_checks.tempfile, "tempdir", None)
    monkeypatch.setattr(host_checks.tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    assert advised(host_checks.temporary_files()) == ("failure", "export TMPDIR=/path/with/space")


def test_stray_settings_are_named_and_ignored(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".codecarbon.config").write_text("[codecarbon]\npue=1.5\n")
    monkeypatch.setenv("CODECARBON_PUE", "3")
    finding = service_checks.codecarbon_config()
    assert finding.status == Status.OK
    assert str(tmp_path / ".codecarbon.config") in finding.found
    assert "CODECARBON_PUE" in finding.found


def test_a_hub_that_answers_and_one_that_does_not(monkeypatch) -> None:
    from huggingface_hub import constants

    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert advised(service_checks.hub()) == ("ok", None)
        monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
        assert advised(service_checks.hub()) == ("warning", "export HF_HUB_OFFLINE=1")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")  # which fetches it for us
        assert advised(service_checks.hub()) == ("ok", None)
        monkeypatch.delenv("http_proxy")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    assert advised(service_checks.hub()) == ("warning", "export HF_HUB_OFFLINE=1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert advised(service_checks.hub()) == ("ok", None)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("HF_ENDPOINT", "http://[::1", "unset HF_ENDPOINT"),
        ("HF_HUB_ETAG_TIMEOUT", "soon", "env | grep ^HF_HUB_"),
    ],
)
def test_settings_that_no_trial_could_start_with_are_named(
    tmp_path: Path, name: str, value: str, advice: str
) -> None:
    script = (
        "from carbonopt.doctor.service_checks import hub, hub_disk; [print(one().as_text()) for one in"
        " (hub, hub_disk)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, name: value, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    hub, disk = done.stdout.splitlines()
    assert hub == disk, done.stderr
    assert hub.endswith(f" → {advice}")
    assert ("HF_ENDPOINT" in hub) == (name == "HF_ENDPOINT")


@pytest.mark.parametrize(
    "value",
    [
        "http://h:port",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://a..b",
        "garbage",
        "",
        "file:///x",
    ],
)
def test_a_hub_address_that_cannot_be_one(tmp_path: Path, value: str) -> None:
    # In a process of its own: huggingface_hub reads it when it is imported.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from carbonopt.doctor import service_checks; print(service_checks.hub().as_text())",
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": value, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"HF_ENDPOINT={value!r} must be an address"), done.stderr
    assert done.stdout.endswith("→ unset HF_ENDPOINT\n")


def test_a_proxy_that_cannot_be_one_is_named_without_its_password(monkeypatch) -> None:
    from huggingface_hub import constants

    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", "http://me:s3cret@proxy:99999")
    finding = service_checks.hub()
    assert advised(finding) == ("warning", "unset http_proxy HTTP_PROXY")
    assert "'proxy:99999'" in finding.found
    assert "s3cret" not in finding.found


def test_variables_that_trials_would_die_of(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert host_checks.environment().status == Status.OK
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    finding = host_checks.environment()
    assert finding.status == Status.FAILURE and "but is 'abc'" in finding.found
    assert finding.advice.startswith("export OMP_NUM_THREADS=N")
