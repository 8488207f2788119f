"""What the batch size does to an epoch: its time, memory, energy and emissions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from carbonopt.analysis.batch import BatchEffect, Spanned
from carbonopt.core.format import emissions_scale, energy_scale
from carbonopt.report import document
from carbonopt.report.figures import style

_DIGIT = 0.055  # of a batch size at its axis, as a share of that axis


def batch(effect: BatchEffect) -> document.Figure:
    sizes = [at_batch.global_batch_size for at_batch in effect.batches]
    stopped = frozenset(at_batch.global_batch_size for at_batch in effect.batches if at_batch.only_stopped)
    energy = energy_scale(at_batch.energy_kwh.highest for at_batch in effect.batches)
    emissions = emissions_scale(at_batch.emissions_kg_co2e.highest for at_batch in effect.batches)
    seconds = max(at_batch.duration_s.highest for at_batch in effect.batches)
    time_unit, per_second = ("s", 1.0) if seconds < 600 else ("min", 1 / 60) if seconds < 36_000 else ("h", 1 / 3600)
    panels: list[tuple[str, str, float, int | None]] = [
        (f"Time ({time_unit})", "duration_s", per_second, effect.least_duration),
        ("Memory (GiB)", "peak_memory_gib", 1.0, effect.least_memory),
        (energy.label("Energy"), "energy_kwh", energy.per_base, effect.least_energy),
        (emissions.label("Emissions"), "emissions_kg_co2e", emissions.per_base, effect.least_energy),
    ]

    def draw(figure: "style.Figure") -> None:
        grid = figure.subplots(2, 2, sharex=True)
        for axes, (label, name, factor, minimum) in zip(grid.flat, panels, strict=True):
            spans = {at_batch.global_batch_size: getattr(at_batch, name) for at_batch in effect.batches}
            known = {size: span for size, span in spans.items() if span is not None}
            if len(known) > 1:
                axes.set_ylabel(label)
                _over_batch(axes, known, factor, minimum, stopped)
            else:  # one value would be no effect of the batch
                where = "".join(f"for batch {size:,} only" for size in known) or "for no batch"
                text = f"{label.partition(' (')[0]} is known\n{where}"
                axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
                axes.set_axis_off()
        shown = _apart(sizes)
        for axes in grid[1]:
            axes.set_xlabel("Global batch size")
            axes.set_xscale("log", base=2)
            style.ticks_at(axes.xaxis, shown, map(str, shown))
            axes.margins(x=0.12)
        style.legend(figure, grid[0][0])

    alt = f"An epoch over batch sizes {', '.join(map(str, sizes))}: least energy at {effect.least_energy}, least time "
    alt += f"at {effect.least_duration}. The table has the figures."
    caption = "An epoch's training over the global batch size."
    return style.drawn(draw, height_in=3.1, name="batch", caption=caption, alt=alt)


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those, from the smallest on, whose numbers stand beside each other without touching on a logarithmic axis."""
    whole = math.log(sizes[-1] / sizes[0])
    shown = [sizes[0]]
    for size in sizes[1:]:
        room = 0.5 * (len(str(shown[-1])) + len(str(size))) + 1  # half of each, and a gap
        if math.log(size / shown[-1]) / whole >= _DIGIT * room:
            shown.append(size)
    return shown


def _over_batch(
    axes: "style.Axes", known: Mapping[int, Spanned], factor: float, minimum: int | None, stopped: frozenset[int]
) -> None:
    """Every value as it was, at its batch: the lowest joined by a line, the range above it, the minimum marked; hollow
    where only stopped trials tell of a batch."""
    at = list(known)
    lowest = [span.lowest * factor for span in known.values()]
    highest = [span.highest * factor for span in known.values()]
    above = [high - low for low, high in zip(lowest, highest, strict=True)]
    axes.errorbar(at, lowest, yerr=[[0.0] * len(at), above], ecolor=style.BLUE, label="range", **style.ERROR_BARS)
    axes.plot(at, lowest, "o-", color=style.BLUE, markersize=3, linewidth=1, label="lowest")
    if hollow := [(size, low) for size, low in zip(at, lowest, strict=True) if size in stopped]:
        looks: dict[str, Any] = {"color": style.BLUE, "markersize": 3.5, "markerfacecolor": "white", "zorder": 4}
        axes.plot(*zip(*hollow, strict=True), "o", label="stopped trials only", **looks)
    if minimum is not None:
        looks = {"color": "white" if minimum in stopped else style.VERMILION, "markersize": 9, "zorder": 5}
        axes.plot(minimum, known[minimum].lowest * factor, "*", label="minimum", **looks, **style.MILESTONE)
    if style.wants_log([*lowest, *highest]):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(highest) or 1.0)
    style.plain_ticks(axes.yaxis)
