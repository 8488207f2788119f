"""Small charts of the page: placed here from the facts, drawn by the template as SVG, which needs no script."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.ticker import LogLocator, MaxNLocator

from carbonopt.analysis.batch import AtBatch, BatchEffect, Spanned
from carbonopt.analysis.diminishing_returns import ENOUGH, DiminishingReturns
from carbonopt.analysis.influence import Influence, NotKnown
from carbonopt.core.format import (
    Scale,
    emissions_scale,
    emissions_text,
    energy_scale,
    interval_text,
    memory_text,
    percent_text,
    quality_text,
    seconds_text,
    tick_text,
    value_text,
)
from carbonopt.core.values import Frozen
from carbonopt.report.influence_tables import effect_scale, effect_text
from carbonopt.report.points import Axis, frame
from carbonopt.report.sections import spanned_text

# The view box, in its own units: text of 11 units is 11 pixels where the chart is as wide as that.
WIDTH, HEIGHT = 320, 210
LEFT, RIGHT, TOP, BOTTOM = 54, 308, 30, 162
LETTER = 6.5  # of a label, with its share of the space to the next
LINE = 13  # from one line of a label to the next
MOST_LISTED = 18  # characters of a list in an axis' title, so that it is not wider than the chart


class Tick(Frozen):
    at: float
    text: str
    row: int = 0  # below the axis, where texts are too long to stand in one


class Mark(Frozen):
    x: float
    y: float
    ends: tuple[float, float] | None = None  # of its interval, from below
    hint: str  # its figures
    label: tuple[Tick, ...] = ()  # its lines, at their heights
    lead: tuple[float, float] | None = None  # a thin line from the label to the mark, from above
    anchor: str = "middle"
    strong: bool = False


class Chart(Frozen):
    title: str
    x_title: str
    y_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    joined: bool = False  # a line through the marks
    level: Tick | None = None  # a line across


class Outcome(Frozen):
    """What a chart over named values shows at one of them."""

    name: str
    middle: float
    lowest: float
    highest: float
    hint: str
    strong: bool = False


def influence(found: Sequence[Influence | NotKnown]) -> dict[str, tuple[Chart, ...]]:
    """The marginal effects by objective, each parameter's in a chart of its own, the most important first."""
    return {one.objective: _effects(one) for one in found if isinstance(one, Influence)}


def _effects(one: Influence) -> tuple[Chart, ...]:
    scale = effect_scale(one)
    factor = scale.per_base if scale else 1.0
    axis = scale.label("Emissions") if scale else "Perplexity"
    return tuple(
        _over_names(
            parameter.name,
            parameter.name,
            axis,
            [
                Outcome(
                    name=value_text(effect.value),
                    middle=effect.expected * factor,
                    lowest=effect.lowest * factor,
                    highest=effect.highest * factor,
                    hint=f"{value_text(effect.value)}: {effect_text(effect.expected, scale)} "
                    f"({interval_text(effect.lowest, effect.highest, lambda value: effect_text(value, scale))})",
                )
                for effect in parameter.effects
            ],
        )
        for parameter in one.parameters
    )


def batch(found: BatchEffect | None) -> tuple[Chart, ...]:
    """Time, memory, energy and emissions of an epoch: of each batch size the lowest, by which they are compared, and
    the range above it; the minimum marked."""
    if found is None:
        return ()
    energy = energy_scale(one.energy_kwh.highest for one in found.batches)
    emissions = emissions_scale(one.emissions_kg_co2e.highest for one in found.batches)
    charts = [
        _over_batch(found, "Time", "s", 1.0, seconds_text, lambda one: one.duration_s, found.least_duration),
        _over_batch(found, "Memory", "GiB", 1.0, memory_text, lambda one: one.peak_memory_gib, found.least_memory),
        _scaled(found, "Energy", energy, lambda one: one.energy_kwh),
        _scaled(found, "Emissions", emissions, lambda one: one.emissions_kg_co2e),
    ]
    return tuple(chart for chart in charts if chart.marks)


def _scaled(found: BatchEffect, what: str, scale: Scale, of: Callable[[AtBatch], Spanned | None]) -> Chart:
    return _over_batch(found, what, scale.unit, scale.per_base, scale.text, of, found.least_energy)


def _over_batch(
    found: BatchEffect,
    what: str,
    unit: str,
    per_base: float,
    text: Callable[[float], str],
    of: Callable[[AtBatch], Spanned | None],
    least: int | None,
) -> Chart:
    stopped = [one.global_batch_size for one in found.batches if one.only_stopped]
    x_title = "Global batch size"
    if stopped:
        listed = ", ".join(map(str, stopped))
        few = len(listed) <= MOST_LISTED
        x_title += f" ({listed if few else f'{len(stopped)} of {len(found.batches)}'}: stopped trials only)"
    outcomes = [
        Outcome(
            name=str(one.global_batch_size),
            middle=span.lowest * per_base,
            lowest=span.lowest * per_base,
            highest=span.highest * per_base,
            hint=f"batch {one.global_batch_size}: lowest (median to highest) {spanned_text(span, text)} {unit}"
            + (", of stopped trials" if one.only_stopped else ""),
            strong=one.global_batch_size == least,
        )
        for one in found.batches
        if (span := of(one)) is not None
    ]
    title = f"{what} of an epoch"
    if len(outcomes) == 1:
        title = f"{what}: known for batch {outcomes[0].name} only"
    return _over_names(title, x_title, f"{what} ({unit}), lowest to highest", outcomes, "minimum")


def returns(found: DiminishingReturns | None, target_perplexity: float) -> tuple[Chart, ...]:
    """Perplexity over the emissions of one run, with where to stop."""
    if found is None:
        return ()
    scale = emissions_scale([found.points[-1].emissions_kg_co2e])
    names: dict[int, list[str]] = {}
    for point, name in (
        (found.first_meeting, "meets the target"),
        (found.enough, f"within {percent_text(ENOUGH)}"),
        (found.lowest, "lowest"),
    ):
        if point is not None:
            names.setdefault(point.step, []).append(name)
    x = frame([point.emissions_kg_co2e * scale.per_base for point in found.points])
    y = frame([*(point.perplexity for point in found.points), target_perplexity])
    places = [(x.share(point.emissions_kg_co2e * scale.per_base), y.share(point.perplexity)) for point in found.points]
    labels = _labels(
        [(*place, names[point.step]) for point, place in zip(found.points, places, strict=True) if point.step in names]
    )
    marks = []
    for point, (across, up) in zip(found.points, places, strict=True):
        label = labels.get(across, ())
        marks.append(
            Mark(
                x=_across(across),
                y=_up(up),
                hint=f"step {point.step}: {emissions_text(point.emissions_kg_co2e)}, "
                f"perplexity {quality_text(point.perplexity)}",
                label=label,
                lead=(label[-1].at + 4, _up(up) - 5) if label and label[-1].at + 8 < _up(up) - 5 else None,
                anchor="end" if across > 0.5 else "start",
                strong=bool(label),
            )
        )
    return (
        Chart(
            title=f"Perplexity over emissions inside trial {found.trial}",
            x_title=scale.label("Emissions so far"),
            y_title="Perplexity",
            x_ticks=_ticks(x, _across),
            y_ticks=_ticks(y, _up),
            marks=tuple(marks),
            joined=True,
            level=Tick(at=_up(y.share(target_perplexity)), text=f"target {quality_text(target_perplexity)}"),
        ),
    )


def _labels(marked: Sequence[tuple[float, float, list[str]]]) -> dict[float, tuple[Tick, ...]]:
    """The labels' lines, by their marks' places across. They stand at the top, where a curve that falls leaves room,
    and each in lines of its own: of those in the left half, which go on to the right, the first is highest; below them,
    of those in the right half, the last. So no label lies on another's leading line of the same half."""
    left = sorted(one for one in marked if one[0] <= 0.5)
    right = sorted((one for one in marked if one[0] > 0.5), reverse=True)
    lines, top = {}, TOP + 4.0
    for across, up, names in [*left, *right]:
        first = min(top, _up(up) - 9 - LINE * (len(names) - 1))  # above its mark, however high that is
        lines[across] = tuple(Tick(at=round(first + LINE * i, 1), text=name) for i, name in enumerate(names))
        top += LINE * len(names)
    return lines


def _over_names(title: str, x_title: str, y_title: str, outcomes: Sequence[Outcome], label: str = "") -> Chart:
    """Side by side in their order, whatever the values' distances; `label` goes below the strong one, their lowest."""
    if not outcomes:
        return Chart(title=title, x_title=x_title, y_title=y_title, x_ticks=(), y_ticks=(), marks=())
    y = frame([value for one in outcomes for value in (one.lowest, one.highest, one.middle)])
    floor = LINE if label and any(one.strong for one in outcomes) else 0  # room for the label below the lowest mark
    up = partial(_up, floor=floor)
    step = 1 / len(outcomes)
    longest = max(len(one.name) for one in outcomes) + 1
    crowd = math.ceil(LETTER * longest / (step * (RIGHT - LEFT)))  # names in the room of one; two rows take two
    every = math.ceil(crowd / 2)
    marks, ticks = [], []
    for index, one in enumerate(outcomes):
        x = _across((index + 0.5) * step)
        middle = up(y.share(one.middle))
        ends = (up(y.share(one.lowest)), up(y.share(one.highest)))
        marks.append(
            Mark(
                x=x,
                y=middle,
                ends=ends,
                hint=one.hint,
                label=(Tick(at=max(ends[0], middle + 5) + 12, text=label),) if one.strong and label else (),
                strong=one.strong,
            )
        )
        if index % every == 0:
            inside = min(x, WIDTH - LETTER * len(one.name) / 2)  # what would be cut at the edge moves in
            ticks.append(Tick(at=round(inside, 1), text=one.name, row=index // every % min(crowd, 2)))
    return Chart(
        title=title,
        x_title=x_title,
        y_title=y_title,
        x_ticks=tuple(ticks),
        y_ticks=_ticks(y, up),
        marks=tuple(marks),
        joined=True,
    )


def _ticks(axis: Axis, place: Callable[[float], float]) -> tuple[Tick, ...]:
    locator = LogLocator(subs=(1, 2, 5), numticks=6) if axis.log else MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
    return tuple(
        Tick(at=place(axis.share(float(value))), text=tick_text(float(value)))
        for value in locator.tick_values(axis.low, axis.high)
        if axis.holds(float(value))
    )


def _across(share: float) -> float:
    return round(LEFT + share * (RIGHT - LEFT), 1)


def _up(share: float, floor: float = 0.0) -> float:
    return round(BOTTOM - floor - share * (BOTTOM - floor - TOP), 1)
