"""The figure of a policy's reward and gold reward, over its divergence from the start.

The gold reward measures what the reward stands for.
"""

from typing import Any

from carbonopt.analysis.overoptimisation import Overoptimisation, PolicyPoint, PolicyRun
from carbonopt.core.quality import REWARD
from carbonopt.report import document
from carbonopt.report.figures import style

PANELS = {"reward": REWARD.label, "gold_reward": "Gold reward"}
# Without clipping, so that marks at the start, where the axes begin, are drawn whole.
LAST: dict[str, Any] = {
    "marker": "s",
    "color": style.ORANGE,
    "markersize": 5.5,
    "clip_on": False,
    **style.MILESTONE,
}
BEST: dict[str, Any] = {
    "marker": "*",
    "color": style.GREEN,
    "markersize": 9,
    "clip_on": False,
    **style.MILESTONE,
}


def policy(policies: Overoptimisation, target: float) -> document.Figure | None:
    """Draw the shown trial's reward and gold reward over its divergence.

    All other trials' evaluations are drawn behind it. Return None where the trial was evaluated
    fewer than two times, or where its divergence is not known.
    """
    if (shown := policies.shown) is None or len(path := _with_kl(shown)) < 2:
        return None
    others = [point for run in policies.runs if run.trial != shown.trial for point in _with_kl(run)]
    rewards = _places([*path, *others], "reward")[1]
    names = [name for name in PANELS if name == "reward" or shown.best_gold is not None]

    def draw(figure: "style.Figure") -> None:
        panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, names, strict=True):
            axes.set_ylabel(PANELS[name])
            axes.margins(y=0.1)  # room for a star
            axes.plot(
                *_places(path, name),
                "o-",
                color=style.BLUE,
                markersize=3,
                linewidth=1,
                label=_of(shown),
            )
            for label, (point, looks) in _marks(shown).items():
                axes.plot(*_places([point], name), label=label, zorder=4, **looks)
            if others:
                axes.plot(
                    *_places(others, name),
                    ".",
                    color=style.GREY,
                    markersize=3,
                    label="other trials",
                    zorder=1,
                )
            if name == "reward":
                style.draw_target(axes, target, rewards)
        _scale_divergence(panels[-1], max(point.kl_nats or 0.0 for point in [*path, *others]))
        for axes in panels:
            style.plain_ticks(axes.yaxis, most=4)
        style.legend(figure, panels[0])

    both = "Reward and gold reward" if len(names) > 1 else "Reward"
    caption = f"{both} over the divergence from the start."
    caption += style.far_target_text(target, rewards, REWARD)
    alt = (
        f"{both} of trial {shown.trial} at each evaluation, over its divergence from the start. The"
        " table has the "
    )
    alt += "figures of its first and last."
    return style.drawn(
        draw, height_in=1.0 + 1.2 * len(names), name="policy", caption=caption, alt=alt
    )


def _of(run: PolicyRun) -> str:
    return f"evaluations of trial {run.trial}"


def _with_kl(run: PolicyRun) -> list[PolicyPoint]:
    return [point for point in run.points if point.kl_nats is not None]


def _marks(run: PolicyRun) -> dict[str, tuple[PolicyPoint, dict[str, Any]]]:
    """Return the evaluations to mark, by their labels.

    An evaluation that is both the best and the last has one mark, since two would hide each other.
    """
    last, best = run.last, run.best_gold
    if best is None:
        return {"last evaluation": (last, LAST)}
    if best.step == last.step:
        return {"best gold reward, last evaluation": (last, BEST)}
    return {"best gold reward": (best, BEST), "last evaluation": (last, LAST)}


def _places(points: list[PolicyPoint], name: str) -> tuple[list[float], list[float]]:
    known = [
        # Rounding can leave less than 0 for a policy that has not moved.
        (max(point.kl_nats, 0.0), value)
        for point in points
        if point.kl_nats is not None and (value := getattr(point, name)) is not None
    ]
    return [kl_nats for kl_nats, _ in known], [value for _, value in known]


def _scale_divergence(axes: "style.Axes", most_nats: float) -> None:
    """Scale the axis of the divergence by its square root, from the start on.

    Gao et al. 2022 (arXiv 2210.10760) found simple laws over this square root.
    """
    import numpy as np

    axes.set_xlabel("Divergence from the start (nats, square-root scale)")
    axes.set_xlim(0, 1.05 * most_nats or 1.0)
    axes.set_xscale("function", functions=(lambda nats: np.sqrt(np.maximum(nats, 0)), np.square))
    style.plain_ticks(axes.xaxis, most=6)
