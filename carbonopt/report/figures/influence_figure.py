"""The figures of what each parameter does to the objectives.

They show how much of the variation it explains, and which way it acts.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from carbonopt.analysis.influence import Effect, Influence, NotKnown, Parameter
from carbonopt.core import format as fmt
from carbonopt.core.quality import Quality
from carbonopt.report import document
from carbonopt.report.figures import style

MOST_EFFECTS = 4  # parameters whose effects are drawn in one figure
OF_EMISSIONS: dict[str, Any] = {"color": style.BLUE, "marker": "o", "linestyle": "-"}
OF_QUALITY: dict[str, Any] = {
    "color": style.VERMILION,
    "marker": "s",
    "linestyle": "--",
    "markerfacecolor": "white",
}
_ROOM = 20  # characters that fit below an axis without touching
_SHORTEST = 6  # characters for one text at least, however many texts there are


def effect_scale(influence: Influence) -> fmt.Scale | None:
    """Return the scale of effects on emissions; None for a quality, which has no unit."""
    if influence.objective != "emissions":
        return None
    effects = [effect for parameter in influence.parameters for effect in parameter.effects]
    return fmt.emissions_scale(
        effect.expected if effect.highest is None else effect.highest for effect in effects
    )


def _span(effect: Effect) -> tuple[float, float]:
    """Return the ends of an effect's interval.

    An effect that one configuration alone shows has no interval: both ends are the effect itself.
    """
    if effect.lowest is None or effect.highest is None:
        return effect.expected, effect.expected
    return effect.lowest, effect.highest


def importance(analyses: Sequence[Influence | NotKnown]) -> document.Figure | None:
    """Draw each parameter's share of the variation in both objectives, with its interval.

    Return None where no share is known.
    """
    known, names = _known(analyses), _by_importance(analyses)
    if not names:
        return None

    def draw(figure: "style.Figure") -> None:
        axes = figure.add_subplot()
        for side, part in zip((-0.16, 0.16), known, strict=False):
            ranked = sorted(part.parameters, key=lambda parameter: names.index(parameter.name))
            rows = [names.index(parameter.name) + side for parameter in ranked]
            spans = [
                (row.importance_lowest, row.importance, row.importance_highest) for row in ranked
            ]
            looks = {
                **_looks(part),
                "linestyle": "none",
                "markersize": 4,
                "elinewidth": 0.9,
                "capsize": 1.8,
            }
            label = f"{part.objective} ({fmt.percent_text(part.level)} interval)"
            axes.errorbar(
                [middle for _, middle, _ in spans], rows, xerr=_around(spans), label=label, **looks
            )
        axes.set_xlim(-0.02, 1.02)  # so that no marker is cut
        quarters = (0.0, 0.25, 0.5, 0.75, 1.0)
        style.ticks_at(axes.xaxis, quarters, map(fmt.percent_text, quarters))
        style.ticks_at(axes.yaxis, range(len(names)), map(_plain, names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("Share of the explained variation")
        axes.grid(axis="x", linewidth=0.3, color="0.8")
        style.legend(figure, axes)

    caption = (
        f"Importance of each parameter for {' and for '.join(part.objective for part in known)}."
    )
    alt = f"By importance: {', '.join(map(_plain, names))}. The tables have the figures."
    return style.drawn(
        draw, height_in=0.9 + 0.26 * len(names), name="influence", caption=caption, alt=alt
    )


def effects(analyses: Sequence[Influence | NotKnown], quality: Quality) -> list[document.Figure]:
    """Draw the outcome to expect at each value of the parameters.

    Each parameter has a row, and each objective a column. The parameters that matter most come
    first, and only their figure is one of the paper's.
    """
    known, names = _known(analyses), _by_importance(analyses)
    several = [names[start : start + MOST_EFFECTS] for start in range(0, len(names), MOST_EFFECTS)]
    return [_effects(known, some, quality, number) for number, some in enumerate(several, start=1)]


def _effects(
    known: Sequence[Influence], names: Sequence[str], quality: Quality, number: int
) -> document.Figure:
    def draw(figure: "style.Figure") -> None:
        grid = figure.subplots(len(names), len(known), sharey="col", squeeze=False)
        for column, part in enumerate(known):
            scale = effect_scale(part)
            factor = scale.per_base if scale else 1.0
            shown = {
                parameter.name: parameter
                for parameter in part.parameters
                if parameter.name in names
            }
            rows = [effect for parameter in shown.values() for effect in parameter.effects]
            ends = [end * factor for row in rows for end in _span(row)]
            top = grid[0][column]
            if rows and style.wants_log(ends):
                style.log_scale(top.yaxis, ends)
            for axes, name in zip(grid[:, column], names, strict=True):
                axes.set_xlabel(_plain(name), labelpad=1)
                if name in shown:
                    _effect(axes, shown[name], _looks(part), factor)
                else:
                    axes.set_axis_off()
            top.set_title(scale.label("Emissions of a run") if scale else quality.label)
            style.plain_ticks(top.yaxis, most=3)

    first = number == 1
    which = "the parameters that matter most" if first else "further parameters"
    return style.drawn(
        draw,
        height_in=0.45 + 1.0 * len(names),
        name="effects" if first else f"effects-{number}",
        caption=f"Marginal effect of {which}, with intervals.",
        alt=(
            f"Expected outcome at each value of {', '.join(map(_plain, names))}. The tables have"
            " the figures."
        ),
        paper=first,
    )


def _looks(influence: Influence) -> dict[str, Any]:
    return OF_EMISSIONS if influence.objective == "emissions" else OF_QUALITY


def _effect(axes: "style.Axes", parameter: Parameter, looks: dict[str, Any], factor: float) -> None:
    """Draw one parameter's effect on one objective.

    Many numbers are drawn over an axis, which is logarithmic where they are far apart. Few numbers,
    and values that are no numbers, are drawn side by side.
    """
    middle = [row.expected * factor for row in parameter.effects]
    ends = [_span(row) for row in parameter.effects]
    low = [lowest * factor for lowest, _ in ends]
    high = [highest * factor for _, highest in ends]
    spans = list(zip(low, middle, high, strict=True))
    texts = [fmt.value_text(row.value) for row in parameter.effects]
    # By the exact type, because a bool is an int but no number here.
    numbers = [float(row.value) for row in parameter.effects if type(row.value) in (int, float)]
    if len(numbers) == len(texts) and sum(map(len, texts)) > _ROOM:
        axes.fill_between(numbers, low, high, color=looks["color"], alpha=0.2, linewidth=0)
        axes.plot(numbers, middle, **looks, markersize=2.5, linewidth=1)
        axes.set_xscale("log" if style.wants_log(numbers) else "linear")
        style.plain_ticks(axes.xaxis, most=3)
        return
    at, room = range(len(texts)), max(_SHORTEST, _ROOM // len(texts))
    broken = [
        "\n".join(textwrap.wrap(_plain(text), room, max_lines=3, placeholder="…")) for text in texts
    ]
    axes.errorbar(
        at,
        middle,
        yerr=_around(spans),
        **looks,
        markersize=3,
        linewidth=0.8,
        elinewidth=0.9,
        capsize=1.8,
    )
    style.ticks_at(axes.xaxis, at, broken)
    axes.set_xlim(-0.4, len(texts) - 0.6)


def _known(analyses: Sequence[Influence | NotKnown]) -> list[Influence]:
    return [part for part in analyses if isinstance(part, Influence) and part.parameters]


def _by_importance(analyses: Sequence[Influence | NotKnown]) -> list[str]:
    """Return the parameters' names, by the larger of their two importances."""
    parameters = [parameter for part in _known(analyses) for parameter in part.parameters]
    by_importance = sorted(
        parameters, key=lambda parameter: (-parameter.importance, parameter.name)
    )
    return list(dict.fromkeys(parameter.name for parameter in by_importance))


def _around(spans: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Return how far the ends of intervals are from their middle, for matplotlib's error bars.

    A distance is 0 where a percentile interval lies beside the middle.
    """
    below = [max(0.0, middle - low) for low, middle, _ in spans]
    return [below, [max(0.0, high - middle) for _, middle, high in spans]]


def _plain(name: str) -> str:
    return name.replace("_", " ")
