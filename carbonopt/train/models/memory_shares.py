"""Divide the passes that an estimate of memory needs among processes.

torch's compiler takes about a second to trace a layer, once for each micro batch and evaluation. A
process finds its own traces again, and no other's.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from carbonopt.spec.model_memory import Activations, Moment

Settings = dict[str, Any]

# How long passes take beside one that is not compiled, roughly. Measured on two cores with Llama 7B
# and T5-large: 0.05 to 0.3 s, compiled 3 to 8 s, and a compiled evaluation 1 to 4 s.
_COMPILED_TRAINING, _COMPILED_EVALUATION, _PLAIN = 30, 10, 1


@dataclass(frozen=True)
class Share:
    """Passes in one combination of settings.

    Args:
        settings: The combination.
        sizes: The micro batches that are trained.
        eval_sizes: The batches that are evaluated.
    """

    settings: Settings
    sizes: tuple[int, ...]
    eval_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Passes:
    """The memory that passes of a model have taken.

    Args:
        trained: The number of the model's trained parameters.
        moments: The moments of training each micro batch.
        evaluation_bytes: The most bytes at once in evaluating each batch.
    """

    trained: int
    moments: dict[int, tuple[Moment, ...]]
    evaluation_bytes: dict[int, int]

    def joined(self, other: "Passes") -> "Passes":
        """Return these passes and other ones of the same model."""
        moments, evaluation_bytes = other.moments, other.evaluation_bytes
        return Passes(
            self.trained, self.moments | moments, self.evaluation_bytes | evaluation_bytes
        )

    def activations(self, eval_size_of: dict[int, int]) -> list[Activations]:
        """Return the activation memory of each micro batch.

        Args:
            eval_size_of: The batch size of evaluations for each micro batch.
        """
        return [
            Activations(
                micro_batch_size=size,
                moments=self.moments[size],
                evaluation_bytes=self.evaluation_bytes[eval_size],
            )
            for size, eval_size in eval_size_of.items()
        ]


def divided(
    whole: Sequence[Share], processes: int, compiles: Callable[[Settings], bool]
) -> list[list[Share]]:
    """Divide shares so that processes take about equally long and none repeats another's trace.

    Args:
        whole: One share for each combination of settings.
        processes: The most parts.
        compiles: Returns whether the compiler traces the layers in these settings.

    Returns:
        The shares of each process. There are fewer processes if fewer have anything to do.
    """
    takers: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, share in enumerate(whole):
        trace = tuple(item for item in share.settings.items() if item[0] != "output_layer")
        for size in share.sizes:
            takers[(trace, "training", size)].append(number)
        for size in share.eval_sizes:
            takers[(trace, "evaluation", size)].append(number)

    def weight(work: tuple[Any, ...]) -> int:
        trace, kind, _ = work
        compiled = _COMPILED_TRAINING if kind == "training" else _COMPILED_EVALUATION
        return _PLAIN * len(takers[work]) + (compiled if compiles(dict(trace)) else 0)

    loads = [0] * processes
    process_of = {}
    for work in sorted(takers, key=weight, reverse=True):
        process_of[work] = loads.index(min(loads))
        loads[process_of[work]] += weight(work)

    parts = []
    for process in range(processes):
        given: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for (trace, kind, size), numbers in takers.items():
            if process_of[(trace, kind, size)] == process:
                for number in numbers:
                    given[number][kind].append(size)
        parts.append(
            [
                Share(
                    whole[number].settings,
                    tuple(sizes["training"]),
                    tuple(sizes["evaluation"]),
                )
                for number, sizes in sorted(given.items())
            ]
        )
    return [part for part in parts if part]
