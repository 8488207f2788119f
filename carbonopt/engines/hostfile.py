"""Trials over the machines of a hostfile, on each of which ssh starts an agent.

DeepSpeed's own launcher reads the same file, but leaves its ranks alive where it is killed. Who may log in where, with
which key and from which port, is ssh's configuration; nothing is asked for on the way."""

import os
import shlex
import shutil
from pathlib import Path

from carbonopt.core.config import HostfileLaunch, StudyConfig
from carbonopt.core.errors import BadInput
from carbonopt.core.space import SearchSpace
from carbonopt.engines.nodes import NodesEngine, agent_program

# Of this command's environment the agents have what begins so; the rest is what ssh gives them on their machine.
PASSED = (
    "CARBONOPT_",
    "CUDA_",
    "DS_",
    "GLOO_",
    "HF_",
    "LD_LIBRARY_PATH",
    "NCCL_",
    "OMP_",
    "PYTHON",
    "TORCH",
    "TRANSFORMERS_",
    "UCX_",
)
_SSH = {
    "BatchMode": "yes",  # it never asks for a password
    "ConnectTimeout": "15",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "6",  # a machine that isn't heard for half a minute is gone
}


class HostfileEngine(NodesEngine):
    def check(self, space: SearchSpace) -> None:
        super().check(space)
        if shutil.which("ssh") is None:
            raise BadInput("launch.kind: hostfile needs ssh on PATH; install an OpenSSH client.")

    def _programs(self) -> list[tuple[str, list[str]]]:
        assert isinstance(self._launch, HostfileLaunch)
        # The same Python in the same folder: a study's files have the same names on all machines. What it finds its
        # modules by stands here, all else is sent to it: others can see a command line.
        path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
        command = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*path, *agent_program()])}"
        options = [text for name, value in _SSH.items() for text in ("-o", f"{name}={value}")]
        return [(host.name, ["ssh", "-T", *options, host.name, command]) for host in self._launch.hosts]

    def _passed(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}

    def _config_of(self, number: int) -> StudyConfig:
        assert isinstance(self._launch, HostfileLaunch)
        return self._config.model_copy(update={"launch": self._launch.on_host(number)})
