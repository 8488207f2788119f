"""Estimates the GPU memory that a study's model needs."""

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.spec.model_memory import MemoryAnswer, MemorySpec
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study.asked import asked


def ask_memory(config: StudyConfig, gpu_memory_gib: float | None = None) -> MemoryAnswer:
    """Estimate the GPU memory that a study's configurations need.

    No GPU is used, nothing is downloaded, and no data is prepared.

    Args:
        gpu_memory_gib: Memory of each GPU, if it is known: evaluations use as much of it as they
            can.
    """
    assert config.workload is not None
    spec = MemorySpec(
        workload=config.workload.model_dump(mode="json"),
        space=config.search.space,
        world_size=config.launch.world_size,
        gpu_memory_bytes=None if gpu_memory_gib is None else round(gpu_memory_gib * BYTES_PER_GIB),
    )
    try:
        answer = asked("carbonopt.train.models.memory_probe", spec.model_dump_json())
    except CarbonoptError as error:
        return MemoryAnswer(why_none=str(error))
    return MemoryAnswer.model_validate_json(answer)
