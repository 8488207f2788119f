"""The values of the placeholders in a script's command."""

import itertools
from collections.abc import Collection, Iterator

from carbonopt.core.errors import BadInput
from carbonopt.core.values import Scalar, step_of, steps_between
from carbonopt.space.search_space import is_integer, single_value
from carbonopt.spec.space_settings import Domain, Range, Space, values_of

# names that a command may have beside the dimensions
PLACEHOLDERS = (
    "seed",
    "trial",
    "world_size",
    "gradient_accumulation_steps",
    "output_dir",
    "checkpoint_dir",
    "config",
)
# each is derived where the space has only the other
BATCHES = ("global_batch_size", "micro_batch_size_per_gpu")
_MOST_POINTS = 10_000


def with_batches(record: dict[str, Scalar]) -> dict[str, Scalar]:
    """Return a configuration with all batch sizes that follow from those that it has.

    With only the global batch, each rank takes its part at once. With only the micro batch, this is
    all that a rank takes in a step.

    Raises:
        BadInput: The batch sizes don't go together.
    """
    whole, micro = (record.get(name) for name in BATCHES)
    if whole is None and micro is None:
        return record
    ranks = int(record["world_size"])
    if whole is None:
        whole = int(micro or 0) * ranks
    if micro is None:
        micro = int(whole) // ranks
    steps = int(whole) // max(1, int(micro) * ranks)
    if steps * int(micro) * ranks != int(whole):
        must = "global_batch_size must be a multiple of micro_batch_size_per_gpu × world_size"
        product = f"{micro} × {ranks}" if "micro_batch_size_per_gpu" in record else str(ranks)
        raise BadInput(f"{must}, but got {whole} and {product}.")
    return {
        **record,
        **dict(zip(BATCHES, (whole, micro), strict=True)),
        "gradient_accumulation_steps": steps,
    }


def derived(space: Space) -> dict[str, tuple[str, ...]]:
    """Return the dimensions from which each derived batch size is computed.

    Batch sizes that this space has itself are not derived.
    """
    given = tuple(name for name in BATCHES if space[name] is not None)
    if not given:
        return {}
    made_of = (*given, *(("world_size",) if space["world_size"] is not None else ()))
    return {
        name: made_of for name in (*BATCHES, "gradient_accumulation_steps") if name not in given
    }


def points(space: Space, names: Collection[str], world_size: int) -> Iterator[dict[str, Scalar]]:
    """Yield configurations in which these dimensions take all their choices.

    A range takes both ends and the middle; other dimensions take one value. Configurations that
    can't exist are left out; of very many, the first are taken.
    """
    values: dict[str, tuple[Scalar, ...]] = {"world_size": (world_size,)}
    for name, domain in space.domains().items():
        several = _some_values(name, domain)
        values[name] = several if name in names else several[:1]
    for combination in itertools.islice(itertools.product(*values.values()), _MOST_POINTS):
        record = dict(zip(values, combination, strict=True))
        if all(record.get(name) is not None for name in BATCHES):
            product = int(record[BATCHES[1]]) * int(record["world_size"])
            if int(record[BATCHES[0]]) % product:
                continue
        yield with_batches(record)


def _some_values(name: str, domain: Domain) -> tuple[Scalar, ...]:
    """Return all choices of a domain, or both ends and the middle of a range."""
    if not isinstance(domain, Range):
        return values_of(domain)
    if (single := single_value(name, domain)) is not None:
        return (single,)
    low, high = domain.low, domain.last
    middle = (low * high) ** 0.5 if domain.log else (low + high) / 2
    if domain.step is not None:
        middle = step_of(low, domain.step, steps_between(low, high, domain.step) // 2)
    return tuple(int(value) if is_integer(name, domain) else value for value in (low, middle, high))
