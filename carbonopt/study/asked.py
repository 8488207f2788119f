"""Asks the programs of `train` that need no GPU, each in a process of its own: torch takes seconds to import."""

import subprocess

from carbonopt.core.config import LocalLaunch
from carbonopt.core.errors import CarbonoptError
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.processes import run_module

_PATIENCE_S = 300.0  # torch from a cold network disk; a large model in many settings


def asked(module: str, question: str) -> str:
    """What a module's program prints to the question on its standard input. It sees no GPU and goes nowhere online.
    Raises CarbonoptError, a sentence without its full stop, where it doesn't end, or fails."""
    environment = {**work_environment(LocalLaunch(gpus=()), []), "HF_HUB_OFFLINE": "1"}
    options = {"input": question, "capture_output": True, "text": True, "timeout": _PATIENCE_S}
    try:
        done = subprocess.run(run_module(module), env=environment, check=False, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as error:
        raise CarbonoptError(f"it takes longer than {_PATIENCE_S:g} s") from error
    if done.returncode:
        last = next(filter(None, map(str.strip, reversed(done.stderr.splitlines()))), "")
        raise CarbonoptError(last.removesuffix(".") or f"its process ended with code {done.returncode}")
    return str(done.stdout)
