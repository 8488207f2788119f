"""Estimates the GPU memory that a study's model needs, and remembers the answers.

An estimate runs the model on tensors without numbers, which takes seconds to a minute.
"""

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.spec.model_memory import MemoryAnswer, MemorySpec
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study_file.answer_cache import CachedAnswer
from carbonopt.study_file.model_questions import Answers


def ask_memory(
    config: StudyConfig, answers: Answers, gpu_memory_gib: float | None = None
) -> MemoryAnswer:
    """Estimate the GPU memory that a study's configurations need.

    No GPU is used, nothing is downloaded, and no data is prepared.

    Args:
        config: The study, which trains a model.
        answers: The process that is asked.
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
    named = (config.workload.model, config.workload.tokenizer)
    places = [source.name_or_path for source in named if source and source.name_or_path]
    question = spec.model_dump_json()
    cached = CachedAnswer("memory", question, places)
    if (known := cached.read(MemoryAnswer.model_validate_json)) is not None:
        return known
    try:
        answer = answers.ask("memory", question)
    except CarbonoptError as error:
        return MemoryAnswer(why_none=str(error))
    estimated = MemoryAnswer.model_validate_json(answer)
    if estimated.memory is not None:
        cached.keep(answer)
    return estimated
