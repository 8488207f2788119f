"""The GPU memory that trials needed, beside what `check` would have estimated."""

from collections.abc import Callable

from carbonopt.analysis.gpu_memory import MeasuredMemory, differing_settings
from carbonopt.core import format as fmt
from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.report.document import Maker, Section, num, table, word
from carbonopt.report.sections.trials_section import setting_text
from carbonopt.report.study_view import StudyView

# These settings are always shown, others where they differ.
_SETTINGS = ("micro_batch_size_per_gpu", "zero_stage", "offload")


def section(study: StudyView) -> Section | None:
    if (rows := study.memory) is None:
        return None
    differing = differing_settings((row.params for row in rows), (*_SETTINGS, "world_size"))
    ranks = range(max(len(row.measured_gib) for row in rows))
    labels = ["Measured peak"] if len(ranks) == 1 else [f"Measured, rank {rank}" for rank in ranks]
    columns = [
        *(_setting(name) for name in (*_SETTINGS, *differing)),
        num("Accumulation", "params.gradient_accumulation_steps"),
        num("Trials", lambda row: len(row.trials)),
        num("Parameters", "estimate.parameters_gib", fmt.memory_text),
        num("Gradients", "estimate.gradients_gib", fmt.memory_text),
        num("Optimizer", "estimate.optimizer_gib", fmt.memory_text),
        num("Activations", "estimate.activations_gib", fmt.memory_text),
        num("Estimated peak", "estimate.peak_gib", fmt.memory_text),
        *(num(label, _of_rank(rank), fmt.memory_text) for rank, label in enumerate(labels)),
        num("Estimated ÷ measured", "ratio", "{:.2f}".format),
    ]
    note = (
        "The parts are estimates, each by itself: not all are at their most at the same moment."
        " Measured is the most "
    )
    note += "that tensors took, without what PyTorch's allocator keeps in reserve."
    made = table(
        "memory", "Memory of each GPU in GiB, estimated and measured", rows, columns, note=note
    )
    return Section(key="memory", title="Memory", blocks=(made,))


def _setting(name: str) -> Maker:
    return word(DIMENSIONS[name].label, lambda row: setting_text(getattr(row.params, name)))


def _of_rank(rank: int) -> Callable[[MeasuredMemory], float | None]:
    def most(row: MeasuredMemory) -> float | None:
        return row.measured_gib[rank] if rank < len(row.measured_gib) else None

    return most
