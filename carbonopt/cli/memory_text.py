"""Describes a study's GPU memory: what each GPU needs, what fits, and how many GPUs are needed."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from carbonopt.analysis.gpu_memory import (
    GPU_NUMBERS,
    USABLE_SHARE,
    MemoryEstimate,
    MemoryNeed,
    checkpoint_bytes,
    differing_settings,
    needs_by_gpus,
)
from carbonopt.core import format as fmt
from carbonopt.core.dimensions import DIMENSIONS, TrainingParams
from carbonopt.core.errors import CarbonoptError
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.energy.hardware import describe_hardware
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.model_memory import ModelMemory
from carbonopt.study_file.memory_estimate import ask_memory
from carbonopt.study_file.model_questions import Answers
from carbonopt.study_file.study_checks import CheckedStudy

_LABEL, _INDENT = "  memory      ", " " * 14
# Numbers of GPUs up to this one are shown, and the launch's own; larger ones are only checked for
# whether the study fits.
_SHOWN_GPUS = 8
_TOO_MUCH = "*"
_USABLE = fmt.percent_text(USABLE_SHARE)
_NONE = "–"  # where no such configuration can exist
_ALWAYS_SHOWN = ("zero_stage", "offload")
_COLUMNS = ("world_size", "micro_batch_size_per_gpu")  # settings with columns of their own
_NEEDS_GIB = "give --gpu-memory GIB"

ByGpus = Mapping[int, Sequence[MemoryNeed]]


def describe_memory(checked: CheckedStudy, gpu_memory_gib: float | None, answers: Answers) -> str:
    """Describe the memory that each GPU needs, in lines to follow those of `cli.check_text`.

    Args:
        checked: A study on GPUs, or any study if `gpu_memory_gib` is given.
        gpu_memory_gib: Memory of each GPU. None: that of this machine's GPUs.
        answers: The process that estimates.
    """
    if not checked.is_settled:
        return (
            f"{_LABEL}not estimated: what trials may use is chosen by the preparation of"
            " `carbonopt run`; `check` estimates it then."
        )
    if gpu_memory_gib is not None:
        of_each = f"a GPU of {gpu_memory_gib:g} GiB"
    else:
        try:
            hardware = describe_hardware(checked.config.launch.gpus)
        except CarbonoptError:  # `check` has printed the reason under "not here"
            of_each = f"whether that fits is not known here: {_NEEDS_GIB}"
        else:
            gpu_memory_gib = hardware.gpu_memory_gib
            of_each = hardware.gpus[0] + (
                "" if gpu_memory_gib is None else f", {gpu_memory_gib:.1f} GiB"
            )
    answer = ask_memory(checked.config, answers, gpu_memory_gib)
    if answer.memory is None:
        why = str(answer.why_none)
        return f"{_LABEL}not estimated: {why}{'' if why.endswith('?') else '.'}"
    by_gpus = needs_by_gpus(checked.space, answer.memory)
    lines = [
        f"{_LABEL}GiB on each GPU, estimated ({of_each})",
        *_table(by_gpus, checked.space, gpu_memory_gib),
    ]
    lines += (f"{_INDENT}{line}" for line in _adapters(answer.memory))
    if answer.memory.left_out is not None:
        lines.append(f"{_INDENT}not estimated: {answer.memory.left_out}")
    if gpu_memory_gib is not None:
        lines += (f"{_INDENT}{line}" for line in _answers(by_gpus, checked.space, gpu_memory_gib))
    return "\n".join(lines)


def _adapters(memory: ModelMemory) -> Iterator[str]:
    """Yield what LoRA trains, by rank, and which ranks are larger than they can be of use."""
    by_rank = {profile.settings["lora_rank"] or 0: profile for profile in memory.profiles}
    for rank, profile in sorted(by_rank.items()):
        if rank == 0:
            continue
        trained, parameters = profile.trained_parameters, profile.parameters
        yield (
            f"lora_rank {rank}: trains {trained:,} of {parameters:,} parameters"
            f" ({fmt.percent_text(trained / parameters)})"
        )
        if rank > (most := profile.smallest_side) > 0:
            yield (
                f"lora_rank {rank} is above {most}, the smallest side of a matrix that it adapts:"
                " there, a higher rank adds parameters and nothing else"
            )


def describe_checkpoints(checked: CheckedStudy, answers: Answers) -> str:
    """Describe what the checkpoints of a trial take on disk, in a line like `describe_memory`'s."""
    given = checked.config.checkpoint
    assert given is not None
    minutes = "minute" if given.every_minutes == 1 else "minutes"
    label = f"  {'saved':<11} every {fmt.value_text(given.every_minutes)} {minutes}"
    answer = ask_memory(checked.config, answers)
    if answer.memory is None:
        return f"{label}; what a checkpoint takes is not estimated: {answer.why_none}"
    smallest, largest = (
        fmt.memory_text(size / BYTES_PER_GIB)
        for size in checkpoint_bytes(checked.space, answer.memory)
    )
    span = smallest if smallest == largest else f"{smallest} to {largest}"
    return (
        f"{label}; a trial's checkpoint takes about {span} GiB on disk, and two are there while one"
        " is written"
    )


def _table(by_gpus: ByGpus, space: SearchSpace, gpu_memory_gib: float | None) -> Iterator[str]:
    """Yield the lines of the table of memory needs.

    There is a row for each number of GPUs, ZeRO stage, offload and other setting that differs, and
    a column for each micro batch size with the largest need at one moment.
    """
    every = [need for needs in by_gpus.values() for need in needs]
    names = [
        *_ALWAYS_SHOWN,
        *differing_settings((need.params for need in every), (*_ALWAYS_SHOWN, *_COLUMNS)),
    ]
    grouped: defaultdict[tuple[str, ...], list[MemoryNeed]] = defaultdict(list)
    for gpus, needs in by_gpus.items():
        own, asked = (
            gpus == space.world_size,
            gpus <= _SHOWN_GPUS and (space.on_gpu or gpu_memory_gib is not None),
        )
        for need in needs:
            # Without ZeRO, all GPUs hold the same, however many there are.
            if own or (asked and need.params.zero_stage > 0):
                grouped[str(gpus), *(_setting(need, name) for name in names)].append(need)
    shown = [need for alike in grouped.values() for need in alike]
    sizes = sorted({need.params.micro_batch_size_per_gpu for need in shown})
    labels = [DIMENSIONS[name].label for name in names]
    parts = [name for name in MemoryEstimate.model_fields if name != "peak_gib"]
    rows = [
        [
            "GPUs",
            *labels,
            *(name.removesuffix("_gib") for name in parts),
            *(f"at {size}" for size in sizes),
        ]
    ]
    for key, alike in grouped.items():
        most = [max(getattr(need.estimate, part) for need in alike) for part in parts]
        peaks = [
            _peak([n for n in alike if n.params.micro_batch_size_per_gpu == size], gpu_memory_gib)
            for size in sizes
        ]
        rows.append([*key, *map(fmt.memory_text, most), *peaks])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield _INDENT + "  ".join(
            cell.rjust(width) for cell, width in zip(row, widths, strict=True)
        )
    yield (
        f"{_INDENT}at N: the most at one moment with a micro batch of N; each part, of the largest"
        " one, by itself"
    )
    if any(_NONE in row for row in rows):
        yield f"{_INDENT}{_NONE}: no global batch is a multiple of micro batch × GPUs"
    if any(cell.endswith(_TOO_MUCH) for row in rows for cell in row):
        yield f"{_INDENT}{_TOO_MUCH}: over {_USABLE} of a GPU's memory, which counts as not fitting"


def _setting(need: MemoryNeed, name: str) -> str:
    value = getattr(need.params, name)
    return "default" if value is None else fmt.value_text(value)


def _peak(needs: Sequence[MemoryNeed], gpu_memory_gib: float | None) -> str:
    """Return the largest need, with or without gradient accumulation; a dash if there is none."""
    if not needs:
        return _NONE
    most = max(needs, key=lambda need: need.estimate.peak_gib)
    fits = gpu_memory_gib is None or most.fits(gpu_memory_gib)
    return fmt.memory_text(most.estimate.peak_gib) + ("" if fits else _TOO_MUCH)


def _answers(by_gpus: ByGpus, space: SearchSpace, gpu_memory_gib: float) -> Iterator[str]:
    own = by_gpus[space.world_size]
    fitting = [need for need in own if need.fits(gpu_memory_gib)]
    how_many = "all" if len(fitting) == len(own) else "none" if not fitting else f"{len(fitting)}"
    gpus = fmt.count_text(space.world_size, "GPU")
    of_them = (
        f"{how_many} of {fmt.count_text(len(own), 'estimated combination')}"
        if len(own) > 1
        else f"{how_many} of it"
    )
    if own:
        yield f"fits on {gpus}: {of_them}, counted as fitting up to {_USABLE} of its memory"
    enough = next(
        (n for n, needs in by_gpus.items() if any(need.fits(gpu_memory_gib) for need in needs)),
        None,
    )
    if enough is None:
        most = max(gpus for gpus, needs in by_gpus.items() if needs)
        options = _unused_options([need.params for needs in by_gpus.values() for need in needs])
        advice = f"; you may allow: {', '.join(options)}" if options else ""
        yield f"fewest GPUs: none of up to {most}{advice}"
        return
    least = min(by_gpus[enough], key=lambda need: need.estimate.peak_gib)
    yield (
        f"fewest GPUs: {enough}; least memory there: {fmt.memory_text(least.estimate.peak_gib)} GiB"
        f" ({_named(least)})"
    )


def _unused_options(every: Sequence[TrainingParams]) -> list[str]:
    """Name what needs less memory and is not in the space, in the words of the study file."""
    least_batch = min(params.micro_batch_size_per_gpu for params in every)
    options = {
        "smaller micro batches": least_batch > 1,
        "zero_stage 3": all(params.zero_stage < 3 for params in every),
        "offload: parameters": all(params.offload != "parameters" for params in every),
        "larger global batches (for more GPUs)": all(
            params.world_size < max(GPU_NUMBERS) for params in every
        ),
    }
    return [name for name, is_unused in options.items() if is_unused]


def _named(need: MemoryNeed) -> str:
    names = ("zero_stage", "offload", "micro_batch_size_per_gpu")
    return ", ".join(f"{DIMENSIONS[name].label} {_setting(need, name)}" for name in names)
