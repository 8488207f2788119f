"""A PostgreSQL server of our own, which can be stopped and started."""

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from commands import free_port


class Server:
    """A server that runs as the user that Debian's package made for it; starting needs root."""

    def __init__(self, folder: Path) -> None:
        self._binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
        self._data, self._port = folder, free_port()
        self.is_running = False
        password = folder.with_name(f"{folder.name}.pw")
        password.write_text("s3cret")
        password.chmod(0o644)
        try:
            initdb = (self._binaries / "initdb", "-D", folder, "-A", "scram-sha-256", "-U", "me")
            self._as_postgres(*initdb, f"--pwfile={password}")
        finally:
            password.unlink()
        self.url = f"postgresql://me:s3cret@127.0.0.1:{self._port}"

    def start(self) -> None:
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c fsync=off"
        options = f"{options} -c unix_socket_directories=/tmp"
        self._control("-o", options, "-l", f"{self._data}.log", "-w", "start")
        self.is_running = True

    def stop(self, mode: str = "fast") -> None:
        """End all connections: in order (`fast`), or as after a crash (`immediate`)."""
        self._control("-m", mode, "-w", "stop")
        self.is_running = False

    def new_database(self) -> str:
        """Return the URL of an empty database."""
        name = f"test_{secrets.token_hex(4)}"
        with psycopg.connect(f"{self.url}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"{self.url}/{name}".replace("postgresql://", "postgresql+psycopg://")

    def _control(self, *arguments: object) -> None:
        self._as_postgres(self._binaries / "pg_ctl", "-D", self._data, *arguments)

    def _as_postgres(self, *command: object) -> None:
        subprocess.run(
            ["runuser", "-u", "postgres", "--", *map(str, command)],
            check=True,
            stdout=subprocess.DEVNULL,
        )


@contextmanager
def running_server(folder: Path) -> Iterator[Server]:
    """A server in a new folder that its user can reach, such as one in /tmp."""
    try:
        server = Server(folder)
        server.start()
        try:
            yield server
        finally:
            if server.is_running:
                server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)


def end_connections(url: str) -> None:
    """End all connections to a database, as its administrator may."""
    ended = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(ended)
