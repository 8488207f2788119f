"""The settings that a study's first trial begins with, where carbonopt has chosen its space."""

import itertools
from collections.abc import Iterator, Mapping

from carbonopt.analysis.gpu_memory import EstimatedNeeds
from carbonopt.core.values import Scalar
from carbonopt.search.models.features import expected_cost
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.model_memory import ModelMemory
from carbonopt.spec.space_settings import Choices

# Settings that trade memory for energy and leave the quality alone. Compiling pays only in longer
# runs: a probe finds out.
_TRADED = ("zero_stage", "offload", "micro_batch_size_per_gpu", "gradient_checkpointing")


def cheapest_that_fits(
    space: SearchSpace,
    start: Mapping[str, Scalar],
    memory: ModelMemory,
    gpu_memory_gib: float,
) -> dict[str, Scalar]:
    """Return a first configuration with the cheapest settings that fit into a GPU's memory.

    It prefers the lowest ZeRO stage, no offload, the largest micro batch and no gradient
    checkpointing, by what each is expected to cost. If nothing fits by the estimate, it takes what
    needs least. Without an estimate the configuration stays as it is.

    Args:
        space: The search space.
        start: The first configuration, a value for each free dimension.
        memory: The memory that the model needs.
        gpu_memory_gib: The memory of each GPU.
    """
    needs = EstimatedNeeds(memory)
    known = []
    for values in _alternatives(space, start):
        params = space.params(values).model_dump(exclude_none=True)
        if (need_gib := needs(params)) is not None:
            known.append((max(need_gib, gpu_memory_gib), expected_cost(params), values))
    if not known:
        return dict(start)
    return min(known, key=lambda option: option[:2])[2]


def _alternatives(space: SearchSpace, start: Mapping[str, Scalar]) -> Iterator[dict[str, Scalar]]:
    free = space.dimensions.free()
    choices = {
        name: domain.choices
        for name in _TRADED
        if name in start and isinstance(domain := free.get(name), Choices)
    }
    for combination in itertools.product(*choices.values()):
        values = {**start, **dict(zip(choices, combination, strict=True))}
        if space.rule_broken(values) is None:
            yield values
