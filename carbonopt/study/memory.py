"""Asks, in a process of its own, what the study's model needs of a GPU's memory: torch takes seconds to import."""

import subprocess

from carbonopt.core.config import LocalLaunch, StudyConfig
from carbonopt.core.memory import MemoryAnswer, MemorySpec
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.processes import run_module

_PATIENCE_S = 300.0  # torch from a cold network disk; a large model in many settings


def ask_memory(config: StudyConfig, gpu_memory_gib: float | None = None) -> MemoryAnswer:
    """`gpu_memory_gib`: of the GPUs, where it is known: evaluations take of it what they can use.
    Touches no GPU, goes nowhere online and prepares nothing."""
    assert config.workload is not None
    spec = MemorySpec(
        workload=config.workload.model_dump(mode="json"),
        space=config.search.space,
        world_size=config.launch.world_size,
        gpu_memory_bytes=None if gpu_memory_gib is None else round(gpu_memory_gib * BYTES_PER_GIB),
    )
    environment = {**work_environment(LocalLaunch(gpus=()), []), "HF_HUB_OFFLINE": "1"}
    program = run_module("carbonopt.train.memory")
    options = {"input": spec.model_dump_json(), "capture_output": True, "text": True, "timeout": _PATIENCE_S}
    try:
        done = subprocess.run(program, env=environment, check=False, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return MemoryAnswer(why_none=f"it takes longer than {_PATIENCE_S:g} s")
    if done.returncode:
        last = next(filter(None, map(str.strip, reversed(done.stderr.splitlines()))), "")
        return MemoryAnswer(why_none=last.removesuffix(".") or f"its process ended with code {done.returncode}")
    return MemoryAnswer.model_validate_json(done.stdout)
