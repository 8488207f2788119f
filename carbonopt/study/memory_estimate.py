"""Estimates the GPU memory that a study's model needs, and remembers the answers.

An estimate runs the model on tensors without numbers, which takes seconds to a minute. The answers
are kept in the user's cache folder, by everything that they follow from: the settings, the files of
local models, carbonopt's own code and the libraries' versions.
"""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

import carbonopt
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import is_folder, read_text, write_bytes
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.engines.process.extensions import cache_folder
from carbonopt.spec.model_memory import MemoryAnswer, MemorySpec
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import Workload
from carbonopt.study.asked import asked

_LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "peft")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_ANSWER_MIB = 16  # largest answer that is read


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
    cached = _cache_file(spec, config.workload)
    if cached is not None and (known := _read(cached)) is not None:
        return known
    try:
        answer = asked("carbonopt.train.models.memory_probe", spec.model_dump_json())
    except CarbonoptError as error:
        return MemoryAnswer(why_none=str(error))
    estimated = MemoryAnswer.model_validate_json(answer)
    if cached is not None and estimated.memory is not None:
        _keep(cached, answer)
    return estimated


def _cache_file(spec: MemorySpec, workload: Workload) -> Path | None:
    """Return the file that has the answer, or will have it; None for a model of the hub.

    What a name of the hub stands for can change.
    """
    named = (workload.model, workload.tokenizer)
    places = [source.name_or_path for source in named if source and source.name_or_path]
    if not all(is_folder(Path(place)) for place in places):
        return None
    digest = hashlib.sha256(spec.model_dump_json().encode())
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}".encode())
    for file in _files(places):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return cache_folder() / "carbonopt" / "memory" / f"{digest.hexdigest()}.json"


def _files(folders: list[str]) -> Iterator[Path]:
    """Yield carbonopt's own code, and what stands beside the weights in folders of models."""
    yield from sorted(Path(carbonopt.__file__).parent.rglob("*.py"))
    for folder in folders:
        for file in sorted(Path(folder).iterdir()):
            if file.is_file() and file.suffix not in _WEIGHTS:
                yield file


def _read(file: Path) -> MemoryAnswer | None:
    """Return the answer that a file has; None: there is none, or it is damaged."""
    try:
        return MemoryAnswer.model_validate_json(read_text(file, "the cache", _ANSWER_MIB))
    except (BadInput, ValidationError):
        return None


def _keep(file: Path, answer: str) -> None:
    """Write an answer to the cache, if the cache can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, answer.encode())
    except OSError:
        return
