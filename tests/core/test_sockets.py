"""Unix sockets at paths of any length."""

import os
import socket
import tempfile
from pathlib import Path

import pytest
import yaml
from commands import carbonopt, within

from carbonopt.core.sockets import socket_address


@pytest.mark.parametrize("letters", ["x", "é", " "])
@pytest.mark.parametrize("length", [60, 107, 108, 109, 200, 900])
def test_a_socket_is_reached_however_long_its_path_is(
    letters: str, length: int, tmp_path: Path
) -> None:
    folder = tmp_path
    while (missing := length - len(os.fsencode(folder / "channel")) - 1) > 0:
        folder /= (letters + "x" * missing)[: min(200, missing)]
        folder.mkdir()
    path = str(folder / "channel")
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with socket_address(path) as address:
            server.bind(address)
        server.listen()
        assert Path(path).exists()
        with socket_address(path) as address:
            client.connect(address)
        client.sendall(b"heard")
        assert server.accept()[0].recv(10) == b"heard"
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


SCRIPT = """
import carbonopt.script as carbon
import tempfile, time
with carbon.run(total_steps=3) as run:
    for step in (1, 2, 3):
        time.sleep(0.2)
        run.step(step)
    run.report(accuracy=0.9)
print(tempfile.gettempdir())
"""


@pytest.mark.parametrize("name", ["a folder of Zoë's " + "x" * 110, "gone/" + "x" * 90])
@pytest.mark.slow
def test_a_study_runs_with_any_temporary_folder(name: str, tmp_path: Path) -> None:
    """A folder that is not there is passed over, as Python does."""
    temporary = tmp_path / name
    if not name.startswith("gone"):
        temporary.mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    study = {
        "name": "temporary",
        "workload": {"task": "script", "command": "python train.py {learning_rate}"},
        "target": {"accuracy": 0.4},
        "search": {"space": {"learning_rate": {"choices": [0.5, 0.6]}}},
        "budget": {"trials": 1},
        "carbon": {"intensity_g_co2e_per_kwh": 500},
        "launch": {"gpus": []},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    done = carbonopt(
        "run", tmp_path / "study.yaml", "--out", tmp_path / "out", TMPDIR=str(temporary)
    )
    assert done.returncode == 0, done.stderr
    (record,) = within("export", tmp_path / "out").stdout.splitlines()
    assert '"train": 0.0' not in record and '"value": 0.9' in record
    log = (tmp_path / "out" / "trials" / "0000" / "log-1.txt").read_text()
    assert (str(temporary) if temporary.exists() else tempfile.gettempdir()) in log
    assert not temporary.exists() or not list(temporary.glob("carbonopt-*/channel"))
