"""The figure of what the batch size does to an epoch.

It shows time, memory, energy and emissions and, where it is known, the quality.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from carbonopt.analysis.batch import BatchEffect, Spanned
from carbonopt.core.format import emissions_scale, energy_scale
from carbonopt.core.quality import Quality
from carbonopt.report import document
from carbonopt.report.figures import style

# measures that do not depend on how long a trial waits for its cores
_UNAFFECTED = ("peak_memory_gib", "quality")
_DIGIT = 0.055  # the width of a digit below the axis, as a share of the axis


def batch(effect: BatchEffect, quality: Quality) -> document.Figure:
    sizes = [at_batch.global_batch_size for at_batch in effect.batches]
    stopped = frozenset(
        at_batch.global_batch_size for at_batch in effect.batches if at_batch.only_stopped
    )
    energy = energy_scale(at_batch.energy_kwh.highest for at_batch in effect.batches)
    emissions = emissions_scale(at_batch.emissions_kg_co2e.highest for at_batch in effect.batches)
    time_unit, per_second = _time_unit(max(each.duration_s.highest for each in effect.batches))
    panels: list[tuple[str, str, float, int | None]] = [
        (f"Time ({time_unit})", "duration_s", per_second, effect.least_duration),
        ("Memory (GiB)", "peak_memory_gib", 1.0, effect.least_memory),
        (energy.label("Energy"), "energy_kwh", energy.per_base, effect.least_energy),
        (
            emissions.label("Emissions"),
            "emissions_kg_co2e",
            emissions.per_base,
            effect.least_energy,
        ),
    ]
    rows, height_in = 2, 3.1
    if effect.best_quality is not None:
        panels.append((quality.label, "quality", 1.0, effect.best_quality))
        rows, height_in = 3, 4.5

    def draw(figure: "style.Figure") -> None:
        grid = figure.subplots(rows, 2, sharex=True)
        for axes, (label, name, factor, minimum) in zip(grid.flat, panels, strict=False):
            spans = {
                at_batch.global_batch_size: getattr(at_batch, name) for at_batch in effect.batches
            }
            known = {size: span for size, span in spans.items() if span is not None}
            if len(known) > 1:
                axes.set_ylabel(label)
                _over_batch(
                    axes, known, factor, minimum, stopped, quality if name == "quality" else None
                )
                if name not in _UNAFFECTED:
                    _mark_slowed(axes, known, factor, effect)
            else:  # a single value shows no effect of the batch size
                where = "".join(f"for batch {size:,} only" for size in known) or "for no batch"
                text = f"{label.partition(' (')[0]} is known\n{where}"
                axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
                axes.set_axis_off()
        shown = _apart(sizes)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes in list(grid.flat)[len(panels) - 2 : len(panels)]:  # the last of each column
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("Global batch size")
            axes.set_xscale("log", base=2)
            style.ticks_at(axes.xaxis, shown, map(str, shown))
            axes.margins(x=0.12)
        style.legend(figure, grid[0][0])

    caption = "An epoch's training over the global batch size"
    if effect.best_quality is not None:
        caption += f", and the {quality.name} that its trials reached"
    caption += "."
    return style.drawn(draw, height_in=height_in, name="batch", caption=caption, alt=_alt(effect))


def _alt(effect: BatchEffect) -> str:
    """Return what the figure shows, for readers who can't see it."""
    tried = ", ".join(str(row.global_batch_size) for row in effect.batches)
    energy_at = effect.least_energy or "several sizes"
    time_at = effect.least_duration or "several sizes"
    least = f"least energy at {energy_at}, least time at {time_at}"
    sentences = [f"An epoch over batch sizes {tried}: {least}."]
    if slowed := [str(row.global_batch_size) for row in effect.batches if row.slowed]:
        sentences.append(f"Other work slowed trials of batch size {', '.join(slowed)}.")
    return " ".join([*sentences, "The table has the figures."])


def _time_unit(seconds: float) -> tuple[str, float]:
    """Return a unit for times up to so many seconds, and its number in a second."""
    if seconds < 600:
        return "s", 1.0
    return ("min", 1 / 60) if seconds < 36_000 else ("h", 1 / 3600)


def _apart(sizes: Sequence[int]) -> list[int]:
    """Return the sizes whose numbers fit beside each other on a logarithmic axis.

    Sizes are taken from the smallest on if their numbers do not touch the one before.
    """
    whole = math.log(sizes[-1] / sizes[0])
    shown = [sizes[0]]
    for size in sizes[1:]:
        room = 0.5 * (len(str(shown[-1])) + len(str(size))) + 1  # half of each number, and a gap
        if math.log(size / shown[-1]) / whole >= _DIGIT * room:
            shown.append(size)
    return shown


def _over_batch(
    axes: "style.Axes",
    known: Mapping[int, Spanned],
    factor: float,
    marked: int | None,
    stopped: frozenset[int],
    quality: Quality | None = None,
) -> None:
    """Draw one panel of the figure: one measure of an epoch over the batch sizes.

    A line joins the lowest values, bars show the ranges above them, and a star marks the minimum.
    Marks are hollow for batch sizes of which only stopped trials are known. For a quality of which
    more is better, the line joins the highest values and the star marks the maximum.
    """
    at = list(known)
    lowest = [span.lowest * factor for span in known.values()]
    highest = [span.highest * factor for span in known.values()]
    best = highest if quality is not None and quality.direction == "maximize" else lowest
    ranges = [
        [low - high for low, high in zip(values, best, strict=True)] for values in (lowest, highest)
    ]
    errors = [[-below for below in ranges[0]], ranges[1]]
    if log := style.wants_log([*lowest, *highest]):
        style.log_scale(axes.yaxis, [*lowest, *highest])
    axes.errorbar(at, best, yerr=errors, ecolor=style.BLUE, label="range", **style.ERROR_BARS)
    axes.plot(at, best, "o-", color=style.BLUE, markersize=3, linewidth=1, label="lowest")
    if hollow := [(size, value) for size, value in zip(at, best, strict=True) if size in stopped]:
        looks: dict[str, Any] = {
            "color": style.BLUE,
            "markersize": 3.5,
            "markerfacecolor": "white",
            "zorder": 4,
        }
        axes.plot(*zip(*hollow, strict=True), "o", label="stopped trials only", **looks)
    if marked is not None:
        looks = {
            "color": "white" if marked in stopped else style.VERMILION,
            "markersize": 9,
            "zorder": 5,
        }
        axes.plot(marked, best[at.index(marked)], "*", label="minimum", **looks, **style.MILESTONE)
    if quality is None and not log:
        axes.set_ylim(0, 1.1 * max(highest) or 1.0)
    style.plain_ticks(axes.yaxis)


def _mark_slowed(
    axes: "style.Axes", known: Mapping[int, Spanned], factor: float, effect: BatchEffect
) -> None:
    """Mark batch sizes whose trials were all slowed: undisturbed, they would lie further down."""
    slowed = {row.global_batch_size for row in effect.batches if row.only_slowed}
    if marked := [(size, span.lowest * factor) for size, span in known.items() if size in slowed]:
        looks: dict[str, Any] = {
            "color": style.ORANGE,
            "markersize": 7,
            "markerfacecolor": "none",
            "zorder": 6,
        }
        axes.plot(*zip(*marked, strict=True), "v", label="slowed trials only", **looks)
