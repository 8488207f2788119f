"""Machines that ssh reaches, made on this one: each has a network, a name and an sshd of its own,
but shares its devices and files. They see nothing beyond each other.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SSHD = "/usr/sbin/sshd"
PROGRAMS = ("ip", "unshare", "ssh", "ssh-keygen")
CONFIGURATION = """\
HostKey {root}/host-key
AuthorizedKeysFile {root}/user-key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
ForceCommand echo Welcome; eval "$SSH_ORIGINAL_COMMAND"
"""
CLIENT = """\
Host h*
  IdentityFile {root}/user-key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def _shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


class SshHosts:
    """h1 to hN, while they are up."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self._tag = root, secrets.token_hex(3)
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self._net = f"10.77.{secrets.randbelow(256)}"
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        for key in ("host-key", "user-key"):
            _shell(f"ssh-keygen -q -t ed25519 -N '' -f {self.root}/{key}")
        (self.root / "sshd_config").write_text(CONFIGURATION.format(root=self.root))
        (self.root / "ssh_config").write_text(CLIENT.format(root=self.root))
        addresses = {name: f"{self._net}.{number}" for number, name in enumerate(self.names, 1)}
        named = [f"{address} {name} {self._hostname(name)}" for name, address in addresses.items()]
        (self.root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *named, ""]))
        Path("/run/sshd").mkdir(exist_ok=True)
        bridge, own = f"b{self._tag}", f"{self._net}.254/24"
        _shell(
            f"ip link add {bridge} type bridge && ip addr add {own} dev {bridge} && ip link set"
            f" {bridge} up"
        )
        for name, address in addresses.items():
            netns, veth = f"{self._tag}-{name}", f"{self._tag}{name}"
            _shell(
                f"ip netns add {netns} && ip link add {veth} type veth peer name eth0 netns {netns}"
            )
            _shell(
                f"ip link set {veth} master {bridge} up && ip -n {netns} addr add {address}/24 dev"
                " eth0"
            )
            _shell(f"ip -n {netns} link set eth0 up && ip -n {netns} link set lo up")
            command = self.on(name, SSHD, "-D", "-e", "-f", self.root / "sshd_config")
            log = (self.root / f"{name}.log").open("wb")
            self._daemons.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        for name in self.names:
            reached = "for i in $(seq 100); do ssh $0 true && exit; sleep 0.05; done; exit 1"
            subprocess.run(
                self.command("sh", "-c", reached, name), check=True, capture_output=True, timeout=60
            )

    def _hostname(self, name: str) -> str:
        """Hosts of another process that runs tests are other machines."""
        return f"{name}-{self._tag}"

    @property
    def _mounts(self) -> str:
        binds = {"hosts": "/etc/hosts", "ssh_config": "/etc/ssh/ssh_config"}
        return "".join(f"mount --bind {self.root}/{own} {place}; " for own, place in binds.items())

    def on(self, name: str, *words: str | Path, keys: Path | None = None) -> list[str]:
        """A command of one of the hosts, without ssh. `keys`: what it has for root's .ssh."""
        binds = self._mounts + (
            "" if keys is None else f"mkdir -p ~root/.ssh; mount --bind {keys} ~root/.ssh; "
        )
        inside = ["sh", "-c", f'hostname {self._hostname(name)}; {binds} exec "$@"', "sh"]
        return [
            "ip",
            "netns",
            "exec",
            f"{self._tag}-{name}",
            "unshare",
            "--mount",
            "--uts",
            *inside,
            *map(str, words),
        ]

    def command(self, *words: str | Path) -> list[str]:
        """A command of this machine, where the hosts are known by name and let it in."""
        return [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'{self._mounts} exec "$@"',
            "sh",
            *map(str, words),
        ]

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Cut a host's network off within the context, without a word to either side."""
        _shell(f"ip link set {self._tag}{name} down")
        try:
            yield
        finally:
            _shell(f"ip link set {self._tag}{name} up")

    def pids(self) -> set[str]:
        """Of what runs on these hosts."""
        listed = (
            subprocess.run(
                ["ip", "netns", "pids", f"{self._tag}-{name}"], capture_output=True, text=True
            )
            for name in self.names
        )
        return {pid for done in listed for pid in done.stdout.split()}

    def stop(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait()
        for name in self.names:
            netns = f"{self._tag}-{name}"
            pids = subprocess.run(
                ["ip", "netns", "pids", netns], capture_output=True, text=True
            ).stdout.split()
            subprocess.run(["kill", "-9", *pids], capture_output=True)
            subprocess.run(["ip", "netns", "del", netns], capture_output=True)
        subprocess.run(["ip", "link", "del", f"b{self._tag}"], capture_output=True)


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[SshHosts]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or missing or not Path(SSHD).exists():
        pytest.skip(
            "needs root, sshd, ssh, ip and unshare (Debian: openssh-server openssh-client iproute2)"
        )
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder:
        made = SshHosts(Path(folder), 2)
        try:
            made.start()
            yield made
        finally:
            made.stop()
