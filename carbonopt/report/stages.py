"""The report's tables of where the trials' time and energy went, and how fast they trained."""

from carbonopt.analysis.stages import Stages
from carbonopt.report.quantities import (
    energy_scale,
    percent_text,
    rate_text,
    seconds_text,
)
from carbonopt.report.view import Table, columns, number, word
from carbonopt.trial import Stage

_NAMES = {
    Stage.IMPORTS: "starting the processes, importing",
    Stage.DATA: "opening device and data",
    Stage.MODEL: "making the model",
    Stage.ENGINE: "making trainer and engine",
    Stage.COMPILE: "the first step, compilation in it",
    Stage.STEPS: "the other steps",
    Stage.EVALUATION: "evaluation",
    Stage.TEARDOWN: "ending the processes",
}


def by_stage(found: Stages) -> Table:
    scale = energy_scale(one.energy_kwh for one in found.shares)
    rows = tuple(
        (
            word(_NAMES[one.stage]),
            number(seconds_text(one.median_s), one.median_s),
            number(seconds_text(one.duration_s), one.duration_s),
            number(percent_text(one.duration_share), one.duration_share),
            number(scale.text(one.energy_kwh), one.energy_kwh),
            number(percent_text(one.energy_share), one.energy_share, share=one.energy_share),
        )
        for one in found.shares
    )
    head = ("Stage", "Median of a trial (s)", "All trials (s)", "Share of time", scale.label("Energy"))
    return Table(
        caption="Time and energy of the trials by stage",
        columns=columns(*head, "Share of energy"),
        rows=rows,
        note="Of each trial's last attempt. Energies of stages that last a few tenths of a second are no sharper than "
        "the readings, which are 0.05 to 0.1 s apart.",
    )


def speeds(found: Stages) -> Table:
    known = any(one.flops_utilisation is not None for one in found.speeds)
    scale = energy_scale(one.first_step_excess_kwh for one in found.speeds)
    head = ["Trial", "Tokens/s", "mJ a token", "First step (s)", scale.label("Its excess"), "of the training"]
    rows = tuple(
        (
            number(str(one.trial), one.trial),
            number(f"{one.tokens_per_s:,.0f}", one.tokens_per_s),
            number(rate_text(one.millijoules_per_token), one.millijoules_per_token),
            number(seconds_text(one.first_step_s), one.first_step_s),
            number(scale.text(one.first_step_excess_kwh), one.first_step_excess_kwh),
            number(percent_text(one.first_step_excess_share), one.first_step_excess_share),
            *([number(percent_text(one.flops_utilisation), one.flops_utilisation)] if known else []),
        )
        for one in found.speeds
    )
    return Table(
        caption="How fast each trial trained",
        columns=columns(*head, *(["FLOP utilisation"] if known else []), numeric_from=0),
        rows=rows,
        note="Of the steps after the first. Its excess: what the first step used beyond a mean one, for compiling and "
        "warming up; it is charged to the trial, and a longer run would not have it again. What one trial has "
        "compiled, later ones with the same shapes load from a cache."
        + (" FLOP utilisation: 6 × parameters × tokens/s ÷ the GPUs' dense peak in half precision." if known else ""),
    )
