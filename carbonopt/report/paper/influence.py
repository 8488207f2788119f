"""What each parameter does to emissions and to perplexity: how much of the variation, and which way."""

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carbonopt.analysis.influence import Effect, Influence, NotKnown, Objective, Parameter
from carbonopt.core.format import percent_text, value_text
from carbonopt.report.influence_tables import effect_scale
from carbonopt.report.paper.style import BLUE, VERMILION, Draw, legend, plain_ticks, ticks_at, wants_log

MOST_EFFECTS = 4  # parameters whose effects are drawn: those that matter most
LOOKS: dict[Objective, dict[str, Any]] = {
    "emissions": {"color": BLUE, "marker": "o", "linestyle": "-"},
    "perplexity": {"color": VERMILION, "marker": "s", "linestyle": "--", "markerfacecolor": "white"},
}
_ROOM = 20  # characters below an axis, so that texts don't touch
_SHORTEST = 6  # of these for one text, however many there are


def importance_height_in(found: Sequence[Influence | NotKnown]) -> float:
    return 0.9 + 0.26 * len(_by_importance(found))


def effects_height_in(found: Sequence[Influence | NotKnown]) -> float:
    return 0.45 + 1.0 * min(MOST_EFFECTS, len(_by_importance(found)))


def importance(found: Sequence[Influence | NotKnown]) -> Draw | None:
    """Each parameter's share of the variation in both objectives, with its interval; None where it is not known."""
    known, names = _known(found), _by_importance(found)
    if not names:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for side, one in zip((-0.16, 0.16), known, strict=False):
            parameters = {parameter.name: parameter for parameter in one.parameters}
            rows = [(i + side, parameters[name]) for i, name in enumerate(names) if name in parameters]
            axes.errorbar(
                [parameter.importance for _, parameter in rows],
                [row for row, _ in rows],
                xerr=_around([(one.importance_lowest, one.importance, one.importance_highest) for _, one in rows]),
                label=f"{one.objective} ({percent_text(one.level)} interval)",
                **{**LOOKS[one.objective], "linestyle": "none"},
                markersize=4,
                elinewidth=0.9,
                capsize=1.8,
            )
        axes.set_xlim(-0.02, 1.02)  # so that no marker is cut
        ticks_at(axes.xaxis, (0, 0.25, 0.5, 0.75, 1), map(percent_text, (0.0, 0.25, 0.5, 0.75, 1.0)))
        ticks_at(axes.yaxis, range(len(names)), map(_plain, names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("Share of the explained variation")
        axes.grid(axis="x", linewidth=0.3, color="0.8")
        legend(figure, axes)

    return draw


def effects(found: Sequence[Influence | NotKnown]) -> Draw | None:
    """The outcome to expect at each value of the parameters that matter most: a row each, a column an objective."""
    known, names = _known(found), _by_importance(found)[:MOST_EFFECTS]
    if not names:
        return None

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(names), len(known), sharey="col", squeeze=False)
        for column, one in enumerate(known):
            scale = effect_scale(one)
            parameters = {parameter.name: parameter for parameter in one.parameters}
            shown = [parameters[name] for name in names if name in parameters]
            ends = [
                end for parameter in shown for effect in parameter.effects for end in (effect.lowest, effect.highest)
            ]
            factor = scale.per_base if scale else 1.0
            log = wants_log(ends)
            for axes, name in zip(grid[:, column], names, strict=True):
                axes.set_xlabel(_plain(name), labelpad=1)
                if name not in parameters:
                    axes.set_axis_off()
                    continue
                _effect(axes, parameters[name], one.objective, factor)
            top = grid[0][column]
            top.set_title(scale.label("Emissions of a run") if scale else "Perplexity")
            if log:
                top.set_yscale("log")
            plain_ticks(top.yaxis, log, most=3)

    return draw


def _effect(axes: Axes, parameter: Parameter, objective: Objective, factor: float) -> None:
    """Over a logarithmic axis where the values are far apart; what is no number stands side by side."""
    at, texts, log = _across(parameter.effects)
    effects = parameter.effects
    low, middle, high = (
        [getattr(effect, field) * factor for effect in effects] for field in ("lowest", "expected", "highest")
    )
    looks = LOOKS[objective]
    if texts is None:
        axes.fill_between(at, low, high, color=looks["color"], alpha=0.2, linewidth=0)
        axes.plot(at, middle, **looks, markersize=2.5, linewidth=1)
        if log:
            axes.set_xscale("log")
        plain_ticks(axes.xaxis, log, most=3)
        return
    spread = _around(list(zip(low, middle, high, strict=True)))
    axes.errorbar(at, middle, yerr=spread, **looks, markersize=3, linewidth=0.8, elinewidth=0.9, capsize=1.8)
    ticks_at(axes.xaxis, at, texts)
    axes.set_xlim(-0.4, len(effects) - 0.6)


def _across(effects: Sequence[Effect]) -> tuple[list[float], list[str] | None, bool]:
    """Places, the texts at them (None: the axis has round numbers of its own), and whether the axis is logarithmic."""
    values = [effect.value for effect in effects]
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    texts = [value_text(value) for value in values]
    if len(numbers) == len(values) and sum(map(len, texts)) > _ROOM:
        return numbers, None, wants_log(numbers)
    room = max(_SHORTEST, _ROOM // len(texts))
    broken = ["\n".join(textwrap.wrap(_plain(text), room, max_lines=3, placeholder="…")) for text in texts]
    return [float(i) for i in range(len(values))], broken, False


def _known(found: Sequence[Influence | NotKnown]) -> list[Influence]:
    return [one for one in found if isinstance(one, Influence) and one.parameters]


def _by_importance(found: Sequence[Influence | NotKnown]) -> list[str]:
    """The parameters' names, by the larger of their two importances."""
    largest: dict[str, float] = {}
    for parameter in (parameter for one in _known(found) for parameter in one.parameters):
        largest[parameter.name] = max(parameter.importance, largest.get(parameter.name, 0.0))
    return sorted(largest, key=lambda name: (-largest[name], name))


def _around(spans: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Distances from the middle; a percentile interval may lie beside it."""
    return [
        [max(0.0, middle - low) for low, middle, _ in spans],
        [max(0.0, high - middle) for _, middle, high in spans],
    ]


def _plain(name: str) -> str:
    return name.replace("_", " ")
