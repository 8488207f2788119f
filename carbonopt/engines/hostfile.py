"""Engine for trials over the machines of a hostfile; ssh starts an agent on each.

DeepSpeed's own launcher reads the same file, but leaves its ranks alive when it is killed. Users,
keys and ports are set in ssh's configuration; nothing is asked for while connecting.
"""

import os
import shlex
import shutil
from pathlib import Path

from carbonopt.core.errors import BadInput
from carbonopt.engines.nodes import NodesEngine, agent_program
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.launch_settings import HostfileLaunch
from carbonopt.spec.study_config import StudyConfig

# Agents receive this command's environment variables with these prefixes; ssh gives them the rest
# on their machine.
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
    # How downloads leave the network, and whose certificates they trust.
    "ALL_PROXY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_",
    "all_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
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
        # The same Python in the same folder: a study's files have the same names on all machines.
        # Only PYTHONPATH, which finds the modules, is on the command line, which others can see;
        # the other variables are sent to the agent.
        path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
        command = (
            f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*path, *agent_program()])}"
        )
        options = [text for name, value in _SSH.items() for text in ("-o", f"{name}={value}")]
        return [
            (host.name, ["ssh", "-T", *options, host.name, command]) for host in self._launch.hosts
        ]

    def _passed(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}

    def _config_of(self, number: int) -> StudyConfig:
        assert isinstance(self._launch, HostfileLaunch)
        return self._config.model_copy(update={"launch": self._launch.on_host(number)})
