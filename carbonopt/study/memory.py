"""Asks what the study's model needs of a GPU's memory."""

from carbonopt.core.config import StudyConfig
from carbonopt.core.errors import CarbonoptError
from carbonopt.core.memory import MemoryAnswer, MemorySpec
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.study.asked import asked


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
    try:
        answer = asked("carbonopt.train.memory", spec.model_dump_json())
    except CarbonoptError as error:
        return MemoryAnswer(why_none=str(error))
    return MemoryAnswer.model_validate_json(answer)
