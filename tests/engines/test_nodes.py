"""Trials over several machines: two with an sshd each, on which agents run real ranks."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from commands import within
from documents import caveats_of
from ssh_hosts import SshHosts
from study.test_resume import ranks, read, wait_for, workers

from carbonopt.analysis.footprint import footprint
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import TrialState
from carbonopt.engines.agent import Agent
from carbonopt.engines.nodes import NodesEngine, agent_program
from carbonopt.engines.process.environment import Ranks, of_launcher
from carbonopt.spec.hostfile_format import Host, parse_hostfile
from carbonopt.spec.launch_settings import LocalLaunch, _Training
from carbonopt.spec.study_config import StudyConfig
from carbonopt.storage.paths import StudyPaths
from carbonopt.study_file.reader import load_study, parse_study

TWO_HOSTS = "h1 slots=2  # of the rack\n\nh2 slots=2\n"


def test_a_hostfile_is_deepspeeds() -> None:
    assert parse_hostfile(TWO_HOSTS, "hosts") == (
        Host(name="h1", slots=2),
        Host(name="h2", slots=2),
    )


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "hosts must have a line `HOST slots=N` for each machine, but has none."),
        ("# nobody\n", "has none"),
        ("h1\n", "hosts, line 1: must be `HOST slots=N`, with N from 1 to 1024, but is 'h1'."),
        ("h1 slots=0\n", "but is 'h1 slots=0'"),
        ("h1 slots=9999\n", "but is 'h1 slots=9999'"),
        ("\n-oProxyCommand=id slots=2\n", "hosts, line 2: must be"),
        ("$(id) slots=2\n", "must be"),
        (
            "".join(f"h{number} slots=1\n" for number in range(1001)),
            "hosts must have at most 1000 hosts, but has 1001.",
        ),
        (
            "h1 slots=2\nh1 slots=2\n",
            "hosts, line 2: h1 is there twice; give all its slots in one line.",
        ),
    ],
)
def test_what_is_no_hostfile_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(BadInput, match=re.escape(refusal)):
        parse_hostfile(text, "hosts")


@pytest.fixture
def on_hosts(tiny_study: dict, tmp_path: Path) -> dict:
    """One trial of four ranks."""
    (tmp_path / "hosts.txt").write_text(TWO_HOSTS)
    space = {"global_batch_size": 64, "learning_rate": 2e-3, "epochs": 0.2}
    tiny_study["search"] = {
        "sampler": "random",
        "pruning": {"target": False, "cap": False},
        "space": space,
    }
    tiny_study["budget"] = {"trials": 1}
    tiny_study["launch"] = {"kind": "hostfile", "hostfile": "hosts.txt", "device": "cpu"}
    return tiny_study


class CloudLaunch(_Training):
    """A launch of another kind over several machines, as docs/add-an-engine.md describes it."""

    kind: Literal["cloud"] = "cloud"
    gpus: ClassVar[tuple[int, ...]] = ()
    ranks_of_nodes: ClassVar[tuple[int, ...]] = (2, 1)
    world_size: ClassVar[int] = 3
    slots: ClassVar[int] = 1
    side_by_side: ClassVar[int] = 1


class CloudEngine(NodesEngine):
    def _programs(self) -> list[tuple[str, list[str]]]:
        return [("one", agent_program()), ("two", agent_program())]

    def _config_of(self, number: int) -> StudyConfig:
        launch = LocalLaunch(gpus=(), cpu_ranks=self._launch.ranks_of_nodes[number])
        return self._config.model_copy(update={"launch": launch})


def test_an_engine_of_another_kind_can_start_agents(tiny_study: dict) -> None:
    config = parse_study(tiny_study, "study").model_copy(update={"launch": CloudLaunch()})
    assert CloudEngine(config).description == "3 ranks on CPUs of 2 machines"


@pytest.mark.parametrize("hostfile", [None, 3])
def test_a_hostfile_is_asked_for(hostfile: int | None, on_hosts: dict, write_study) -> None:
    on_hosts["launch"] = {
        "kind": "hostfile",
        **({} if hostfile is None else {"hostfile": hostfile}),
    }
    with pytest.raises(
        BadInput, match=r"line [56]: launch.hostfile must be .*, but is (missing|3)[.]$"
    ):
        load_study(write_study(on_hosts))


def test_the_study_file_has_what_the_hostfile_says(
    on_hosts: dict, write_study, tmp_path: Path
) -> None:
    launch = load_study(write_study(on_hosts)).launch
    assert (launch.world_size, launch.ranks_of_nodes, launch.slots, launch.gpus) == (
        4,
        (2, 2),
        1,
        (),
    )
    on_hosts["launch"].pop("device")
    config = load_study(write_study(on_hosts))
    assert config.launch.gpus == (0, 1)
    (tmp_path / "hosts.txt").write_text(TWO_HOSTS.replace("h2", "h3"))
    assert load_study(write_study(on_hosts)).identity() == config.identity(), (
        "on other machines it is the same study"
    )
    (tmp_path / "hosts.txt").write_text(TWO_HOSTS.replace("slots=2", "slots=4"))
    assert load_study(write_study(on_hosts)).identity() != config.identity()
    stored = type(config).model_validate_json(config.model_dump_json())
    assert stored == config, "without the file"


def test_hosts_stand_in_the_hostfile_alone(on_hosts: dict, write_study, tmp_path: Path) -> None:
    on_hosts["launch"]["hosts"] = [{"name": "h9", "slots": 1}]
    with pytest.raises(
        BadInput, match=r"launch\.hosts is what launch\.hostfile says; leave it out\."
    ):
        load_study(write_study(on_hosts))
    with pytest.raises(BadInput, match=r"launch\.hosts is missing|hosts"):
        parse_study({**on_hosts, "launch": {"kind": "hostfile", "hostfile": "x"}}, "here")
    (tmp_path / "hosts.txt").unlink()
    del on_hosts["launch"]["hosts"]
    with pytest.raises(BadInput, match=r"can't read launch\.hostfile"):
        load_study(write_study(on_hosts))


def test_hosts_are_shared_among_trials(on_hosts: dict, write_study, tmp_path: Path) -> None:
    on_hosts["launch"]["nodes_per_trial"] = 1
    launch = load_study(write_study(on_hosts)).launch
    assert (launch.world_size, launch.slots, launch.side_by_side) == (2, 2, 2)
    (tmp_path / "hosts.txt").write_text("h1 slots=2\nh2 slots=4\n")
    with pytest.raises(
        BadInput,
        match=re.escape("the hosts of all trials must have the same slots, but have [2, 4]"),
    ):
        load_study(write_study(on_hosts))
    on_hosts["launch"]["nodes_per_trial"] = 3
    with pytest.raises(
        BadInput, match="nodes_per_trial must divide the number of hosts, but got 3 and 2"
    ):
        load_study(write_study(on_hosts))


def test_ranks_are_numbered_over_all_machines() -> None:
    ranks = Ranks(world_size=3, first=2, here=1, node=1, nodes=2, address="h1", port=4711)
    assert ranks.environments == [
        {
            "MASTER_ADDR": "h1",
            "MASTER_PORT": "4711",
            "WORLD_SIZE": "3",
            "RANK": "2",
            "LOCAL_RANK": "0",
        }
    ]
    assert of_launcher(ranks) == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "h1",
        "PET_MASTER_PORT": "4711",
    }
    alone = Ranks.alone(2)
    assert of_launcher(alone) == {}
    assert (
        alone.can_take_over(Ranks.alone(2))
        and not alone.can_take_over(Ranks.alone(3))
        and not ranks.can_take_over(alone)
    )
    assert not ranks.can_take_over(ranks.model_copy(update={"port": 4712})), (
        "they wait for each other at that port"
    )


def test_a_folder_that_a_machine_does_not_see_is_refused(tmp_path: Path) -> None:
    agent = Agent()
    agent.interrupted.set()  # it would wait for half a minute
    with pytest.raises(
        BadInput, match=r"must be one that all its machines share \(NFS, say\), but .* isn't there"
    ):
        agent._check_sees(tmp_path / "elsewhere" / ".seen")


def run(hosts: SshHosts, study: Path, folder: Path) -> subprocess.Popen:
    command = hosts.command(sys.executable, "-m", "carbonopt", "run", study, "--out", folder)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_two_hosts_train_as_one_machine_does(
    ssh_hosts: SshHosts, on_hosts: dict, write_study, tmp_path: Path
) -> None:
    over_both = run(ssh_hosts, write_study(on_hosts), tmp_path / "both")
    said, _ = over_both.communicate(timeout=300)
    assert over_both.returncode in (0, 3), said
    data = read(tmp_path / "both")
    record = data.records[0]
    assert [node.name for node in record.nodes] == ["h1", "h2"]
    assert all(node.readings.train > 0 for node in record.nodes)
    assert sum(node.readings.total for node in record.nodes) == pytest.approx(
        record.energy_kwh.total, rel=1e-12
    )
    assert footprint(data).closure == pytest.approx(1.0, abs=1e-6)
    assert data.provenance.hardware.nodes == 2
    assert workers(tmp_path / "both") == []

    alone = {**on_hosts, "name": "alone", "launch": {"kind": "local", "gpus": [], "cpu_ranks": 4}}
    on_one = within("run", write_study(alone, "alone.yaml"), "--out", tmp_path / "one")
    assert on_one.returncode in (0, 3), on_one.stderr
    assert read(tmp_path / "one").records[0].value == pytest.approx(record.value, rel=1e-3)


@pytest.mark.slow
def test_a_killed_command_leaves_nothing_on_its_hosts(
    ssh_hosts: SshHosts, on_hosts: dict, write_study, tmp_path: Path
) -> None:
    on_hosts["search"]["space"]["epochs"] = 20
    folder = tmp_path / "out"
    command = run(ssh_hosts, write_study(on_hosts), folder)
    wait_for(
        lambda: StudyPaths(folder).trial(0).exists() and bool(read(folder).records[0].steps_done)
    )
    assert len(ranks(folder)) == 4
    os.kill(command.pid, signal.SIGKILL)
    wait_for(lambda: workers(folder) == [], 2.0)
    wait_for(lambda: not agents(ssh_hosts), 2.0)
    spent_kwh = read(folder).records[0].energy_kwh.total
    assert spent_kwh > 0

    again = run(ssh_hosts, tmp_path / "study.yaml", folder)
    wait_for(lambda: read(folder).records[0].attempt == 2)
    record = read(folder).records[0]
    assert (record.state, record.earlier_attempts_energy_kwh) == (
        TrialState.RUNNING,
        pytest.approx(spent_kwh),
    )
    again.send_signal(signal.SIGINT)
    assert again.wait(60) == 130
    wait_for(lambda: workers(folder) == [] and not agents(ssh_hosts), 2.0)


@pytest.mark.slow
def test_the_time_in_which_a_cut_off_host_left_all_unread_is_said(
    ssh_hosts: SshHosts, on_hosts: dict, write_study, tmp_path: Path
) -> None:
    on_hosts["search"]["space"]["epochs"] = 50
    folder = tmp_path / "out"
    command = run(ssh_hosts, write_study(on_hosts), folder)
    wait_for(
        lambda: StudyPaths(folder).trial(0).exists() and bool(read(folder).records[0].steps_done)
    )
    with ssh_hosts.cut("h2"):
        cut_s = time.monotonic()
        said, _ = command.communicate(timeout=120)
        waited_s = time.monotonic() - cut_s
    wait_for(lambda: not agents(ssh_hosts), 60)
    assert command.returncode == 1
    assert "h2: its agent" in said and "it said nothing" not in said and ".." not in said
    data = read(folder)
    (session,) = data.sessions
    assert 15 < session.unread_s < waited_s + 5
    assert "machine_lost" in caveats_of(data)


def agents(hosts: SshHosts) -> set[str]:
    """Those of these hosts; other tests have others."""
    listed = subprocess.run(
        ["pgrep", "-f", r"python.* -m carbonopt\.engines\.agent"], capture_output=True, text=True
    )
    return hosts.pids() & set(listed.stdout.split())


SCRIPT = """
    import os, sys, time
    import torch, torch.distributed as dist
    import carbonopt.script as carbon
    dist.init_process_group("gloo")
    if float(sys.argv[1]) > 1 and dist.get_rank() == 3:
        sys.exit("no such rate")
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine)
    with carbon.run(total_steps=2) as run:
        run.step(), time.sleep(0.3), run.step()
        run.report(accuracy=mine.item() / 8, loss=float(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_starts_a_scripts_ranks_on_each_host(
    ssh_hosts: SshHosts, on_hosts: dict, write_study, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "\n".join(line.removeprefix("    ") for line in SCRIPT.splitlines())
    )
    on_hosts["workload"] = {"task": "script", "command": "torchrun train.py {learning_rate}"}
    on_hosts["target"] = {"accuracy": 0.5}
    on_hosts["search"]["space"] = {"learning_rate": {"choices": [0.5, 2.0]}}
    on_hosts["search"]["sampler"] = "grid"
    on_hosts["budget"] = {"trials": 2}
    done = run(ssh_hosts, write_study(on_hosts), tmp_path / "out")
    said, _ = done.communicate(timeout=300)
    assert done.returncode == 0, said
    fine, failed = sorted(
        read(tmp_path / "out").records, key=lambda record: record.params.learning_rate
    )
    assert (fine.state, fine.value, fine.evals[-1].other_qualities) == (
        TrialState.COMPLETE,
        0.75,
        {"loss": 4.0},
    )
    assert {node.name for node in fine.nodes} == {"h1", "h2"}
    assert failed.state is TrialState.FAILED
    log = Path(failed.failure.log)
    assert log.name == "log-1-h2.txt" and "no such rate" in log.read_text(), (
        "of the machine whose rank failed"
    )


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_named(
    ssh_hosts: SshHosts, on_hosts: dict, write_study, tmp_path: Path
) -> None:
    (tmp_path / "hosts.txt").write_text("h1 slots=1\nh9 slots=1\n")
    done = run(ssh_hosts, write_study(on_hosts), tmp_path / "out")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 2
    assert "h9: its agent has ended: ssh: Could not resolve hostname h9" in said
    assert not agents(ssh_hosts)
    (tmp_path / "hosts.txt").write_text("h1 slots=1\nroot@h1 slots=1\n")
    done = run(ssh_hosts, write_study(on_hosts), tmp_path / "out")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 2
    assert "but another carbonopt command has the CPU of h1-" in said, (
        "it is one machine by two names"
    )
    assert not agents(ssh_hosts)
