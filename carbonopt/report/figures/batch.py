"""What the batch size does to an epoch: its time, memory, energy and emissions."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from carbonopt.analysis.batch import BatchEffect, Spanned
from carbonopt.core.format import emissions_scale, energy_scale
from carbonopt.report import document
from carbonopt.report.figures.style import BLUE, VERMILION, drawn, legend, plain_ticks, ticks_at, wants_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_IN = 3.1
_DIGIT = 0.055  # of a batch size at its axis, as a share of that axis


def batch(found: BatchEffect) -> document.Figure:
    """An epoch's time, memory, energy and emissions over the batch size."""
    sizes = [one.global_batch_size for one in found.batches]
    stopped = frozenset(one.global_batch_size for one in found.batches if one.only_stopped)
    energy = energy_scale(one.energy_kwh.highest for one in found.batches)
    emissions = emissions_scale(one.emissions_kg_co2e.highest for one in found.batches)
    seconds = max(one.duration_s.highest for one in found.batches)
    time_unit, per_second = ("s", 1.0) if seconds < 600 else ("min", 1 / 60) if seconds < 36_000 else ("h", 1 / 3600)
    least = found.least_energy
    panels: list[tuple[str, Sequence[Spanned | None], float, int | None]] = [
        (f"Time ({time_unit})", [one.duration_s for one in found.batches], per_second, found.least_duration),
        ("Memory (GiB)", [one.peak_memory_gib for one in found.batches], 1.0, found.least_memory),
        (energy.label("Energy"), [one.energy_kwh for one in found.batches], energy.per_base, least),
        (emissions.label("Emissions"), [one.emissions_kg_co2e for one in found.batches], emissions.per_base, least),
    ]

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(2, 2, sharex=True)
        for axes, (label, spans, factor, minimum) in zip(grid.flat, panels, strict=True):
            known = {size: span for size, span in zip(sizes, spans, strict=True) if span is not None}
            if len(known) > 1:
                axes.set_ylabel(label)
                _over_batch(axes, known, factor, minimum, stopped)
            else:
                _too_few(axes, label.partition(" (")[0], list(known))
        for axes in grid[1]:
            axes.set_xlabel("Global batch size")
            axes.set_xscale("log", base=2)
            shown = _apart(sizes)
            ticks_at(axes.xaxis, shown, map(str, shown))
            axes.margins(x=0.12)
        legend(figure, grid[0][0])

    alt = f"An epoch over batch sizes {', '.join(map(str, sizes))}: least energy at {least}, least time at "
    alt += f"{found.least_duration}. The table has the figures."
    return drawn(draw, HEIGHT_IN, name="batch", caption="An epoch's training over the global batch size.", alt=alt)


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those, from the smallest on, whose numbers stand beside each other without touching on a logarithmic axis."""
    whole = math.log(sizes[-1] / sizes[0])
    shown = [sizes[0]]
    for size in sizes[1:]:
        room = 0.5 * (len(str(shown[-1])) + len(str(size))) + 1  # half of each, and a gap
        if math.log(size / shown[-1]) / whole >= _DIGIT * room:
            shown.append(size)
    return shown


def _too_few(axes: "Axes", what: str, known: Sequence[int]) -> None:
    """In a panel's place: one value would be no effect of the batch."""
    where = "for no batch" if not known else f"for batch {known[0]:,} only"
    axes.text(0.5, 0.5, f"{what} is known\n{where}", ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()


def _over_batch(
    axes: "Axes", known: Mapping[int, Spanned], factor: float, minimum: int | None, stopped: frozenset[int]
) -> None:
    """Every value as it was, at its batch: the lowest joined by a line, the range above it, the minimum marked.

    Hollow where only stopped trials tell of a batch.
    """
    at = list(known)
    lowest = [span.lowest * factor for span in known.values()]
    highest = [span.highest * factor for span in known.values()]
    above = [high - low for low, high in zip(lowest, highest, strict=True)]
    axes.errorbar(at, lowest, yerr=[[0.0] * len(at), above], fmt="none", ecolor=BLUE, elinewidth=0.8, capsize=1.8,
                  label="range")  # fmt: skip
    axes.plot(at, lowest, "o-", color=BLUE, markersize=3, linewidth=1, label="lowest")
    if hollow := [(size, low) for size, low in zip(at, lowest, strict=True) if size in stopped]:
        axes.plot(*zip(*hollow, strict=True), "o", color=BLUE, markersize=3.5, markerfacecolor="white", zorder=4,
                  label="stopped trials only")  # fmt: skip
    if minimum is not None:
        face = "white" if minimum in stopped else VERMILION
        axes.plot(minimum, known[minimum].lowest * factor, "*", color=face, markersize=9, linestyle="none",
                  markeredgecolor="black", markeredgewidth=0.5, zorder=5, label="minimum")  # fmt: skip
    log = wants_log([*lowest, *highest])
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(highest) or 1.0)
    plain_ticks(axes.yaxis, log)
