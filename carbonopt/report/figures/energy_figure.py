"""The figure of where the study's energy went."""

import textwrap
from typing import Any

from carbonopt.analysis.footprint import Footprint
from carbonopt.core.format import energy_scale, percent_text
from carbonopt.core.trial import Phase
from carbonopt.report import document
from carbonopt.report.figures import style

HATCHED: dict[str, Any] = {
    "color": style.ORANGE,
    "edgecolor": "black",
    "linewidth": 0.5,
    "hatch": "////",
}
PHASES = {
    Phase.PREPARE: "preparation, at each start of carbonopt run",
    Phase.GAP: "between trials, and the study beside them",
    Phase.SETUP: "start-up and end of trials",
    Phase.TRAIN: "training",
    Phase.EVAL: "evaluation",
}


def energy(spent: Footprint) -> document.Figure | None:
    """Draw the study's energy by phase, or return None where there is none.

    The GPUs' part is drawn apart from the rest where their counters give it. Phases whose energy
    is not known are left out.
    """
    if not spent.energy_kwh:
        return None
    names = {phase: name.partition(",")[0] for phase, name in PHASES.items()}
    parts = [
        (names[phase], kwh, spent.gpu_parts_kwh.get(phase))
        for phase, kwh in spent.by_phase_kwh.items()
        if kwh is not None
    ]
    if spent.probes_kwh:
        parts.append(("probes", spent.probes_kwh, spent.gpu_probes_kwh))
    if spent.earlier_attempts_kwh:
        parts.append(
            ("interrupted attempts", spent.earlier_attempts_kwh, spent.gpu_earlier_attempts_kwh)
        )
    split = all(gpu_kwh is not None for _, _, gpu_kwh in parts)
    scale = energy_scale(kwh for _, kwh, _ in parts)
    shares = [percent_text(kwh / spent.energy_kwh) for _, kwh, _ in parts]

    def draw(figure: "style.Figure") -> None:
        axes, rows = figure.add_subplot(), range(len(parts))
        whole = [kwh * scale.per_base for _, kwh, _ in parts]
        gpus = [(gpu_kwh or 0.0) * scale.per_base for _, _, gpu_kwh in parts] if split else whole
        axes.barh(rows, gpus, color=style.BLUE, height=0.65, label="GPUs")
        # A bar of no width would still have its edge, drawn as a line at the end of the first bar.
        if rest := [
            (row, kwh - gpu, gpu)
            for row, kwh, gpu in zip(rows, whole, gpus, strict=True)
            if kwh > gpu
        ]:
            at, width, left = zip(*rest, strict=True)
            axes.barh(at, width, left=left, height=0.65, label="CPU and RAM", **HATCHED)
            style.legend(figure, axes)
        for row, share, end in zip(rows, shares, whole, strict=True):
            axes.annotate(
                share, (end, row), (2, 0), textcoords="offset points", va="center", fontsize=7.0
            )
        style.ticks_at(
            axes.yaxis, rows, ("\n".join(textwrap.wrap(name, 14)) for name, _, _ in parts)
        )
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(whole))  # room for the text behind the longest bar
        style.plain_ticks(axes.xaxis)
        axes.set_xlabel(scale.label("Energy"))

    alt = "; ".join(f"{name} {share}" for (name, _, _), share in zip(parts, shares, strict=True))
    return style.drawn(
        draw, height_in=1.9, name="energy", caption="Energy of the study by phase.", alt=alt
    )
