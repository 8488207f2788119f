"""A real Slurm on this machine: a controller and nodes that have names and clocks of their own, but
share its devices and files. Nothing of it listens beyond loopback.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from study.test_resume import wait_for

NODES = 4
DAEMONS = ("munged", "slurmctld", "slurmd")
WHERE = "/usr/sbin:/usr/bin:/sbin:/bin"  # Debian's daemons are not on everybody's PATH

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/slurmd.%n
SlurmdParameters=config_overrides
SlurmdTimeout=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MinJobAge=3600
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1,energy=1
AcctGatherEnergyType=acct_gather_energy/pm_counters
NodeName=n[1-{nodes}] NodeHostname=n[1-{nodes}] NodeAddr=127.0.2.[1-{nodes}] Port=[{first}-{last}] CPUs={cpus}
PartitionName=usual Nodes=n[1-{nodes}] Default=YES MaxTime=1-00:00:00 PriorityTier=1
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=1-00:00:00 PriorityTier=10 PreemptMode=OFF
"""


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        taken = 0
        for port in range(first, first + count):
            with socket.socket() as other:
                taken += other.connect_ex(("127.0.0.1", port)) == 0
        if not taken and first + count < 60_000:
            return first


class Cluster:
    """While it is up."""

    def __init__(self, root: Path) -> None:
        self.root, self._daemons = root, {}
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM", "SUBMITIT"))
            },
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:{WHERE}",
        }
        self.host, first = socket.gethostname().partition(".")[0], free_ports(NODES + 1)
        for folder in ("log", "state", "spool"):
            (root / folder).mkdir()
        for number in range(1, NODES + 1):
            self.counter(number).parent.mkdir(parents=True)
            self.counter(number).write_text("0 J\n")
            (self.counter(number).parent / "power").write_text("0 W\n")
        (root / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=self.host,
                controller=first,
                root=root,
                nodes=NODES,
                first=first + 1,
                last=first + NODES,
                cpus=16,
            )
        )
        key = root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = [f"127.0.2.{number} n{number}" for number in range(1, NODES + 1)]
        (root / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", f"127.0.0.1 {self.host}", *names, ""])
        )

    def start(self) -> None:
        munge = [
            "munged",
            "--foreground",
            f"--key-file={self.root}/munge.key",
            f"--socket={self.root}/munge.socket",
        ]
        files = [f"--{name}-file={self.root}/munged.{name}" for name in ("pid", "log", "seed")]
        self._daemon("munged", *munge, *files)
        wait_for((self.root / "munge.socket").exists)
        self.start_controller()
        for number in range(1, NODES + 1):
            self.start_node(number)
        wait_for(lambda: self.asked("sinfo", "-h", "-p", "usual", "-o", "%T %D") == f"idle {NODES}")

    def start_node(self, number: int) -> None:
        sys = self.root / "mount" / f"n{number}"
        sys.mkdir(parents=True, exist_ok=True)
        inside = "; ".join(
            [
                f"hostname n{number}",
                f"mount --bind {self.root}/hosts /etc/hosts",
                f"mount -t overlay overlay -o lowerdir={self.root}/sys/n{number}:/sys {sys}",
                # what is mounted below /sys stays there
                f"mount --rbind /sys/fs/cgroup {sys}/fs/cgroup",
                f"mount --rbind {sys} /sys",
                f"exec slurmd -D -N n{number}",
            ]
        )
        self._daemon(f"n{number}", "unshare", "--mount", "--uts", "sh", "-c", inside)

    def counter(self, number: int) -> Path:
        """Of a node's energy, as Cray's have it, which Slurm reads every second."""
        return self.root / "sys" / f"n{number}" / "cray" / "pm_counters" / "energy"

    def kill_node(self, number: int) -> None:
        """As if its power were cut: slurmd and all that it runs. The controller would notice within
        minutes.
        """
        daemon = self._daemons.pop(f"n{number}")
        own = uts_namespace(daemon.pid)
        assert own not in (None, uts_namespace(os.getpid())), "the node has a host name of its own"
        theirs = {pid for pid in self.pids() if uts_namespace(pid) == own}
        for pid in (daemon.pid, *theirs):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()
        self.asked("scontrol", "update", f"NodeName=n{number}", "State=DOWN", "Reason=gone")

    def stop_controller(self) -> None:
        daemon = self._daemons.pop("slurmctld")
        daemon.terminate()  # it stores its state
        daemon.wait(30)

    def start_controller(self) -> None:
        self._daemon("slurmctld", "slurmctld", "-D")
        wait_for(lambda: "failed" not in self.asked("squeue", "-h"))

    def pids(self) -> set[int]:
        """Of all processes."""
        return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}

    def _daemon(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=self.environment["PATH"])
        with (self.root / "log" / f"{name}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def asked(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr}"

    def state(self, job: str) -> str:
        return self.asked("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def stop(self) -> None:
        self.asked("scancel", "--user", "root", "--signal", "KILL", "--full")
        for _, daemon in sorted(self._daemons.items(), key=lambda item: item[0] == "munged"):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def uts_namespace(pid: int) -> str | None:
    """Where a process's host name is; None: the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")  # noqa: PTH115 – no path
    except OSError:
        return None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = [name for name in DAEMONS if shutil.which(name, path=WHERE) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(
            "needs root and Slurm"
            f" ({', '.join(missing) or 'Debian: slurmctld slurmd slurm-client munge'})"
        )
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)
        made = Cluster(Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.stop()
