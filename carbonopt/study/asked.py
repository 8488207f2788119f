"""Runs programs of `carbonopt.train` that answer a question and need no GPU.

Each runs in a process of its own, because torch takes seconds to import.
"""

import subprocess

from carbonopt.core.errors import CarbonoptError
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.processes import run_module
from carbonopt.spec.launch_settings import LocalLaunch

_PATIENCE_S = 300.0  # enough for torch from a cold network disk, or a large model in many settings


def asked(module: str, question: str) -> str:
    """Return what a module prints when it is run with a question on its standard input.

    The program sees no GPU and does not go online.

    Raises:
        CarbonoptError: If the program fails or takes too long; a sentence without its full stop.
    """
    environment = {**work_environment(LocalLaunch(gpus=()), []), "HF_HUB_OFFLINE": "1"}
    options = {"input": question, "capture_output": True, "text": True, "timeout": _PATIENCE_S}
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            run_module(module), env=environment, check=False, **options
        )
    except subprocess.TimeoutExpired as error:
        raise CarbonoptError(f"it takes longer than {_PATIENCE_S:g} s") from error
    if done.returncode:
        last = next(filter(None, map(str.strip, reversed(done.stderr.splitlines()))), "")
        raise CarbonoptError(
            last.removesuffix(".") or f"its process ended with code {done.returncode}"
        )
    return str(done.stdout)
