"""What the batch does, where a run stops paying, and where the study's energy went."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carbonopt.analysis.batch import BatchEffect, Spanned
from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.returns import ENOUGH, Milestone, Returns
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
from carbonopt.report.quantities import emissions_scale, energy_scale, percent_text
from carbonopt.trial import Phase

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
_MANY = 8  # batch sizes; from here on not every one has its number at the axis


def batch(found: BatchEffect | None) -> Draw | None:
    """An epoch's time, memory, energy and emissions over the batch size; None where too few were tried."""
    if found is None:
        return None
    sizes = [one.global_batch_size for one in found.batches]
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
            axes.set_ylabel(label)
            _over_batch(axes, sizes, spans, factor, minimum)
        for axes in grid[1]:
            axes.set_xlabel("Global batch size")
            axes.set_xscale("log", base=2)
            shown = sizes[:: -(-len(sizes) // _MANY)]
            ticks_at(axes.xaxis, shown, map(str, shown))
            axes.margins(x=0.12)
        legend(figure, grid[0][0])

    return draw


def _over_batch(
    axes: Axes, sizes: Sequence[int], spans: Sequence[Spanned | None], factor: float, minimum: int | None
) -> None:
    """Every value as it was, at its batch: the lowest joined by a line, the range above it, the minimum marked."""
    known = [(size, span) for size, span in zip(sizes, spans, strict=True) if span is not None]
    if not known:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
        return
    at = [size for size, _ in known]
    lowest = [span.lowest * factor for _, span in known]
    highest = [span.highest * factor for _, span in known]
    axes.vlines(at, lowest, highest, color=BLUE, linewidth=0.8, label="range")
    axes.scatter(at, highest, marker="_", s=18, color=BLUE, linewidths=0.8)
    axes.plot(at, lowest, "o-", color=BLUE, markersize=3, linewidth=1, label="lowest")
    if minimum is not None:
        star = dict(zip(at, lowest, strict=True))[minimum]
        axes.plot(minimum, star, "*", color=VERMILION, markersize=9, markeredgecolor="black", markeredgewidth=0.5,
                  linestyle="none", label="minimum", zorder=5)  # fmt: skip
    log = wants_log([*lowest, *highest])
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(highest) or 1.0)
    plain_ticks(axes.yaxis, log)


def returns(found: Returns | None, target_perplexity: float) -> Draw | None:
    """Perplexity over emissions inside one run; None where no run has evaluations of known energy."""
    if found is None:
        return None
    scale = emissions_scale([found.points[-1].emissions_kg_co2e])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_xlabel(scale.label("Emissions of the run so far"))
        axes.set_ylabel("Perplexity")
        across, up = _places(found.points, scale.per_base)
        axes.plot(across, up, "o-", color=BLUE, markersize=3, linewidth=1, label=f"evaluations of trial {found.trial}")
        marks: list[tuple[Milestone | None, str, str, str]] = [
            (found.first_meeting, "s", ORANGE, "first at the target"),
            (
                found.enough if found.enough.step < found.lowest.step else None,
                "D",
                VERMILION,
                f"within {percent_text(ENOUGH)} of the lowest",
            ),
            (found.lowest, "*", GREEN, "lowest"),
        ]
        for size, (milestone, marker, colour, label) in zip((6.5, 5, 9), marks, strict=True):
            if milestone is not None:
                place = _places([milestone], scale.per_base)
                axes.plot(*place, marker, color=colour, markersize=size, markeredgecolor="black", label=label,
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
        gpus = [(gpu_kwh or 0.0) * scale.per_base for _, _, gpu_kwh in parts] if split else [0.0 for _ in parts]
        rest = [max(0.0, all_of_it - gpu) for all_of_it, gpu in zip(whole, gpus, strict=True)]
        if split:
            axes.barh(rows, gpus, color=BLUE, height=0.65, label="GPUs")
        if any(rest):
            axes.barh(rows, rest, left=gpus, color=ORANGE, edgecolor="black", linewidth=0.5, hatch="////", height=0.65,
                      label="CPU and RAM" if split else "all components")  # fmt: skip
        for row, (_, energy_kwh, _), end in zip(rows, parts, whole, strict=True):
            axes.annotate(percent_text(energy_kwh / spent.energy_kwh), (end, row), (2, 0), textcoords="offset points",
                          va="center", fontsize=6.5)  # fmt: skip
        ticks_at(axes.yaxis, rows, ("\n".join(textwrap.wrap(name, 14)) for name, _, _ in parts))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(whole))  # room for the text behind the longest bar
        plain_ticks(axes.xaxis, False)
        axes.set_xlabel(scale.label("Energy"))
        if split and any(rest):
            legend(figure, axes)

    return draw
