"""The figure of one run of all steps of a pipeline, as recommended and as it began."""

from typing import Any

from carbonopt.analysis.pipeline_summary import PathRun
from carbonopt.core.format import emissions_scale, percent_text
from carbonopt.report import document
from carbonopt.report.figures import style
from carbonopt.report.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION

# Each step has a colour and a hatching of its own, so that grey print loses nothing.
_LOOKS = tuple(
    zip(
        (BLUE, ORANGE, GREEN, SKY_BLUE, VERMILION, PURPLE, GREY),
        ("", "////", "....", "xx", "\\\\", "--", ""),
        strict=True,
    )
)
_NARROW = 0.08  # share of the longest bar; narrower parts have no text


def steps(path: PathRun) -> document.Figure:
    """Draw the emissions of each step, as recommended and as at the start.

    The baseline's emissions must be known of every step.
    """
    rows = {
        "at the start": [
            run.baseline.emissions_kg_co2e if run.baseline else 0.0 for run in path.steps
        ],
        "recommended": [run.taken.emissions_kg_co2e for run in path.steps],
    }
    scale = emissions_scale(sum(parts) for parts in rows.values())
    longest = max(sum(parts) for parts in rows.values()) or 1.0

    def draw(figure: "style.Figure") -> None:
        axes = figure.add_subplot(xlabel=scale.label("Emissions of one run of all steps"))
        for place, run in enumerate(path.steps):
            colour, hatch = _LOOKS[place % len(_LOOKS)]
            widths = [parts[place] * scale.per_base for parts in rows.values()]
            lefts = [sum(parts[:place]) * scale.per_base for parts in rows.values()]
            looks: dict[str, Any] = {
                "color": colour,
                "hatch": hatch,
                "edgecolor": "black",
                "linewidth": 0.5,
                "height": 0.6,
            }
            axes.barh(range(len(rows)), widths, left=lefts, label=run.step, **looks)
            for row, parts in enumerate(rows.values()):
                if parts[place] >= _NARROW * longest:
                    centre = lefts[row] + widths[row] / 2
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                    text = percent_text(parts[place] / sum(parts))
                    axes.text(centre, row, text, ha="center", va="center", fontsize=6.5, bbox=box)
        style.ticks_at(axes.yaxis, range(len(rows)), rows)
        axes.invert_yaxis()
        style.plain_ticks(axes.xaxis)
        style.legend(figure, axes)

    alt = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{run.step} {scale.text(kg)}" for run, kg in zip(path.steps, parts, strict=True)
        )
        for name, parts in rows.items()
    )
    caption = "Emissions of one run of all steps, with each step's share."
    return style.drawn(
        draw, height_in=1.6, name="steps", caption=caption, alt=f"{alt} {scale.unit}"
    )
