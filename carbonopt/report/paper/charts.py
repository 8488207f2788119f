"""What the batch does, where a run stops paying, and where the study's energy went."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carbonopt.analysis.batch import BatchEffect, Spanned
from carbonopt.analysis.diminishing_returns import ENOUGH, DiminishingReturns, Milestone
from carbonopt.analysis.footprint import Footprint
from carbonopt.core.format import emissions_scale, energy_scale, percent_text
from carbonopt.core.trial import Phase
from carbonopt.report.paper.style import (
    BLUE,
    GREEN,
    ORANGE,
    TARGET,
    VERMILION,
    Draw,
    legend,
    plain_ticks,
    ticks_at,
    wants_log,
)

BATCH_HEIGHT_IN = 3.1
RETURNS_HEIGHT_IN = 2.3
ENERGY_HEIGHT_IN = 1.9
PHASES = {
    Phase.PREPARE: "preparation",
    Phase.GAP: "between trials",
    Phase.SETUP: "start-up of trials",
    Phase.TRAIN: "training",
    Phase.EVAL: "evaluation",
}
MILESTONES: dict[str, dict[str, Any]] = {  # of a run, each with a shape of its own
    "first at the target": {"marker": "s", "color": ORANGE, "markersize": 6.5},
    f"within {percent_text(ENOUGH)} of the lowest": {"marker": "D", "color": VERMILION, "markersize": 5},
    "lowest": {"marker": "*", "color": GREEN, "markersize": 9},
}
_DIGIT = 0.055  # of a batch size at its axis, as a share of that axis
_DENSE = 40  # evaluations; from here on their marks would be a thick line


def batch(found: BatchEffect | None) -> Draw | None:
    """An epoch's time, memory, energy and emissions over the batch size; None where too few were tried."""
    if found is None:
        return None
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

    def draw(figure: Figure) -> None:
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

    return draw


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those, from the smallest on, whose numbers stand beside each other without touching on a logarithmic axis."""
    whole = math.log(sizes[-1] / sizes[0])
    shown = [sizes[0]]
    for size in sizes[1:]:
        room = 0.5 * (len(str(shown[-1])) + len(str(size))) + 1  # half of each, and a gap
        if math.log(size / shown[-1]) / whole >= _DIGIT * room:
            shown.append(size)
    return shown


def _too_few(axes: Axes, what: str, known: Sequence[int]) -> None:
    """In a panel's place: one value would be no effect of the batch."""
    where = "for no batch" if not known else f"for batch {known[0]:,} only"
    axes.text(0.5, 0.5, f"{what} is known\n{where}", ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()


def _over_batch(
    axes: Axes, known: Mapping[int, Spanned], factor: float, minimum: int | None, stopped: frozenset[int]
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


def returns(found: DiminishingReturns | None, target_perplexity: float) -> Draw | None:
    """Perplexity over emissions inside one run; None where no run has two evaluations of known energy."""
    if found is None or len(found.points) < 2:
        return None
    scale = emissions_scale([found.points[-1].emissions_kg_co2e])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_xlabel(scale.label("Emissions of the run so far"))
        axes.set_ylabel("Perplexity")
        across, up = _places(found.points, scale.per_base)
        dots: dict[str, Any] = {"marker": "o", "markersize": 3} if len(up) < _DENSE else {}
        axes.plot(across, up, color=BLUE, linewidth=1, label=f"evaluations of trial {found.trial}", **dots)
        for milestone, names in _milestones(found):
            place = _places([milestone], scale.per_base)
            axes.plot(*place, **MILESTONES[names[0]], label=", ".join(names), markeredgecolor="black",
                      markeredgewidth=0.5, linestyle="none", zorder=4)  # fmt: skip
        axes.axhline(target_perplexity, label="target", **TARGET)
        log = wants_log([*up, target_perplexity])
        if log:
            axes.set_yscale("log")
        axes.set_xlim(left=0)
        plain_ticks(axes.xaxis, False)
        plain_ticks(axes.yaxis, log)
        legend(figure, axes)

    return draw


def _milestones(found: DiminishingReturns) -> list[tuple[Milestone, list[str]]]:
    """With their names, which one evaluation may have several of: marks on one another would hide all but one."""
    named: dict[int, tuple[Milestone, list[str]]] = {}
    enough = found.enough if found.enough.step < found.lowest.step else None
    for name, milestone in zip(MILESTONES, (found.first_meeting, enough, found.lowest), strict=True):
        if milestone is not None:
            named.setdefault(milestone.step, (milestone, []))[1].append(name)
    return list(named.values())


def _places(points: Sequence[Milestone], per_kg: float) -> tuple[list[float], list[float]]:
    return [point.emissions_kg_co2e * per_kg for point in points], [point.perplexity for point in points]


def energy(spent: Footprint) -> Draw | None:
    """The study's energy by phase, the GPUs' part of it apart where their counters say it; None where there is none."""
    if not spent.energy_kwh:
        return None
    parts = [(PHASES[phase], kwh, spent.gpu_parts_kwh.get(phase)) for phase, kwh in spent.by_phase_kwh.items()]
    if spent.earlier_attempts_kwh:
        parts.append(("interrupted attempts", spent.earlier_attempts_kwh, spent.gpu_earlier_attempts_kwh))
    split = all(gpu_kwh is not None for _, _, gpu_kwh in parts)
    scale = energy_scale(energy_kwh for _, energy_kwh, _ in parts)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        rows = range(len(parts))
        whole = [energy_kwh * scale.per_base for _, energy_kwh, _ in parts]
        if split:
            gpus = [(gpu_kwh or 0.0) * scale.per_base for _, _, gpu_kwh in parts]
            rest = [max(0.0, all_of_it - gpu) for all_of_it, gpu in zip(whole, gpus, strict=True)]
            axes.barh(rows, gpus, color=BLUE, height=0.65, label="GPUs")
            # Of what is nothing the edge alone would be drawn, as a line at the bar's end.
            hatched = [(row, gpu, other) for row, gpu, other in zip(rows, gpus, rest, strict=True) if other > 0]
            if hatched:
                at, left, width = zip(*hatched, strict=True)
                axes.barh(at, width, left=left, color=ORANGE, edgecolor="black", linewidth=0.5, hatch="////",
                          height=0.65, label="CPU and RAM")  # fmt: skip
                legend(figure, axes)
        else:
            axes.barh(rows, whole, color=BLUE, height=0.65)
        for row, (_, energy_kwh, _), end in zip(rows, parts, whole, strict=True):
            axes.annotate(percent_text(energy_kwh / spent.energy_kwh), (end, row), (2, 0), textcoords="offset points",
                          va="center", fontsize=7.0)  # fmt: skip
        ticks_at(axes.yaxis, rows, ("\n".join(textwrap.wrap(name, 14)) for name, _, _ in parts))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(whole))  # room for the text behind the longest bar
        plain_ticks(axes.xaxis, False)
        axes.set_xlabel(scale.label("Energy"))

    return draw
