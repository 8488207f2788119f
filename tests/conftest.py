"""What several test files need: small study files and a table of recorded runs, made here."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent

# Tests run beside each other: no trial shall take its first half second to find that out.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# A shell that starts pytest in the background has it ignore Ctrl-C, nohup has it ignore the end of its terminal, and so
# would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

BATCHES, RATES, EPOCHS = (16, 32, 64), (1e-4, 1e-3, 4e-3), (1, 2, 4)


def recorded_nll(batch: int, rate: float, epochs: float, fraction: float) -> float:
    """A made-up but sensible loss curve: better with more steps and with the middle learning rate."""
    steps = 6400 / batch * epochs
    return 1.0 + 0.25 * abs(math.log10(rate / 1e-3)) + 12 / math.sqrt(steps * fraction)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """27 recorded runs, 4 evaluations each."""
    lines = []
    for batch in BATCHES:
        for rate in RATES:
            for epochs in EPOCHS:
                total = 6400 // batch * epochs
                evals = [
                    {"step": total * k // 4, "nll": recorded_nll(batch, rate, epochs, k / 4)} for k in (1, 2, 3, 4)
                ]
                lines.append(
                    {
                        "params": {"global_batch_size": batch, "learning_rate": rate, "epochs": epochs},
                        "seed": 0,
                        "total_steps": total,
                        "joules_per_step": 0.5 + batch / 64,
                        "seconds_per_step": 0.01,
                        "joules_per_eval": 2.0,
                        "evals": evals,
                    }
                )
    path = tmp_path / "table.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture
def replay_study(table: Path) -> dict:
    """A study over that table, as plain data."""
    return {
        "name": "replayed",
        "target": {"perplexity": math.exp(1.9)},
        "search": {
            "space": {
                "global_batch_size": {"choices": list(BATCHES)},
                "learning_rate": {"choices": list(RATES)},
                "epochs": {"choices": list(EPOCHS)},
            }
        },
        "budget": {"trials": 12},
        "carbon": {"intensity_g_co2e_per_kwh": 500, "pue": 1.2},
        "launch": {"kind": "replay", "table": str(table)},
    }


@pytest.fixture
def tiny_study() -> dict:
    """A real study on the CPU whose trials take seconds."""
    return {
        "name": "tiny",
        "workload": {
            "model": {
                "from_config": {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}
            },
            "tokenizer": {"kind": "byte"},
            "dataset": {"builtin": "python-docs"},
            "sequence_length": 64,
            "evaluations": 3,
        },
        "target": {"perplexity": 200.0},
        "search": {
            "space": {
                "global_batch_size": {"choices": [64, 128]},
                "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
                "epochs": {"choices": [0.1, 0.2]},
            }
        },
        "budget": {"trials": 3},
        "carbon": {"intensity_g_co2e_per_kwh": 500},
        "launch": {"kind": "local", "gpus": []},
    }


@pytest.fixture
def write_study(tmp_path: Path):
    """Writes a study file; returns its path."""

    def write(study: dict, name: str = "study.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(study))
        return path

    return write


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def postgresql_url(tmp_path: Path):
    """A server of our own, as the user that Debian's package made for it."""
    if shutil.which("pg_ctlcluster") is None or os.geteuid() != 0:
        pytest.skip("needs an installed PostgreSQL server, and root to become its user")
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    data, port = Path("/tmp") / f"carbonopt-pg-{os.getpid()}", free_port()
    password = Path("/tmp") / f"carbonopt-pg-{os.getpid()}.pw"
    password.write_text("s3cret")
    password.chmod(0o644)

    def as_postgres(*command: object) -> None:
        subprocess.run(["runuser", "-u", "postgres", "--", *map(str, command)], check=True, stdout=subprocess.DEVNULL)

    try:
        as_postgres(binaries / "initdb", "-D", data, "-A", "scram-sha-256", "-U", "me", f"--pwfile={password}")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories=/tmp -c fsync=off"
        as_postgres(binaries / "pg_ctl", "-D", data, "-o", options, "-l", f"{data}.log", "-w", "start")
        try:
            yield f"postgresql+psycopg://me:s3cret@127.0.0.1:{port}/postgres"
        finally:
            as_postgres(binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        password.unlink()
        shutil.rmtree(data, ignore_errors=True)
