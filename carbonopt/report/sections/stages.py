"""Where the trials' time and energy went, and how fast they trained."""

from operator import attrgetter

from carbonopt.analysis.stages import Speed, Stages, StoppedEarly
from carbonopt.core import format as fmt
from carbonopt.core.trial import Kernels, Stage
from carbonopt.report.document import MISSING, Section, Table, num, table, word
from carbonopt.report.study_view import StudyView

NAMES = {
    Stage.IMPORTS: "starting the processes, importing",
    Stage.DATA: "opening device and data",
    Stage.MODEL: "making the model",
    Stage.ENGINE: "making trainer and engine",
    Stage.COMPILE: "the first step",
    Stage.STEPS: "the other steps",
    Stage.EVALUATION: "evaluation",
    Stage.TEARDOWN: "ending the processes",
}
UTILISATIONS = {  # the column, its figure
    "GPU busy": "gpu_utilisation",
    "FLOP utilisation": "flops_utilisation",
}
UTILISATION_NOTE = (
    "GPU busy: the share of the training, its first step included, with a kernel on the GPUs, as NVML samples it. FLOP "
    "utilisation: 6 × parameters × tokens/s ÷ the GPUs' dense peak in half precision."
)
NO_IMPORTS_S = 1.0  # importing everything takes several seconds, forking a hundredth of one
SPENT_ON = {Kernels.COMPILED: "compilation", Kernels.LOADED: "kernels from the cache", None: "compilation or the cache"}


def section(study: StudyView) -> Section | None:
    found = study.stages
    tables = tuple(made for made in (_by_stage(found), _speeds(found), _stopped_early(found)) if made.rows)
    return Section(key="stages", title="Time and energy of the trials", blocks=tables, level=3) if tables else None


def _by_stage(found: Stages) -> Table:
    scale = fmt.energy_scale(row.energy_kwh for row in found.shares)

    def name(stage: Stage) -> str:
        return NAMES[stage] + (", compilation in it" if stage is Stage.COMPILE and found.compiles else "")

    imports_s = next((row.median_s for row in found.shares if row.stage is Stage.IMPORTS), None)
    forked = ""
    if found.imported_before and imports_s is not None and imports_s < NO_IMPORTS_S:
        forked = " Imports are in the study's preparation: the trials are forks of one process that had imported all."
    return table(
        "by-stage",
        "Time and energy of the trials by stage",
        found.shares,
        [
            word("Stage", lambda row: name(row.stage)),
            num("Median of a trial (s)", lambda row: row.median_s, fmt.seconds_text),
            num("All trials (s)", lambda row: row.duration_s, fmt.seconds_text),
            num("Share of time", lambda row: row.duration_share, fmt.percent_text),
            num(scale.label("Energy"), lambda row: row.energy_kwh, scale.text),
            num("Share of energy", lambda row: row.energy_share, fmt.percent_text, share=lambda row: True),
        ],
        note="Of each trial's last attempt. Energies of stages that last a few tenths of a second are no sharper "
        f"than the readings, which are 0.05 to 0.1 s apart.{forked}",
    )


def _speeds(found: Stages) -> Table:
    scale = fmt.energy_scale(row.first_step_excess_kwh for row in found.speeds)
    measured = {
        name: figure
        for name, figure in UTILISATIONS.items()
        if any(getattr(row, figure) is not None for row in found.speeds)
    }
    told = any(row.kernels for row in found.speeds)

    def kernels(row: Speed) -> str:
        return MISSING if row.kernels is None else row.kernels.value

    cached = (
        " What one trial has compiled, later ones with the same shapes load from a cache." if found.compiles else ""
    )
    return table(
        "speeds",
        "How fast each trial trained",
        found.speeds,
        [
            num("Trial", lambda row: row.trial),
            num("Tokens/s", lambda row: row.tokens_per_s, lambda rate: f"{rate:,.0f}"),
            num("mJ a token", lambda row: row.millijoules_per_token, fmt.rate_text),
            word("Kernels", kernels) if told else None,
            num("First step (s)", lambda row: row.first_step_s, fmt.seconds_text),
            num(scale.label("Its excess"), lambda row: row.first_step_excess_kwh, scale.text),
            num("of the training", lambda row: row.first_step_excess_share, fmt.percent_text),
            *(num(name, attrgetter(figure), fmt.percent_text) for name, figure in measured.items()),
        ],
        note="Of the steps after the first. Its excess: what the first step used beyond a mean one, once a "
        f"run.{cached}" + (f" {UTILISATION_NOTE}" if measured else ""),
        long=True,
        folded=True,
    )


def _stopped_early(found: Stages) -> Table:
    """Trials that a rule stopped when most of what they had used was their first step."""

    def after(row: StoppedEarly) -> str:
        return f"{row.steps_done:,}" + ("" if row.total_steps is None else f" of {row.total_steps:,}")

    return table(
        "stopped-early",
        "Stopped with most of their training energy spent in the first step",
        found.stopped_early,
        [
            num("Trial", lambda row: row.trial),
            num("After step", lambda row: row.steps_done, shown=after),
            num("First step", lambda row: row.first_step_kwh, fmt.energy_text),
            num("Training", lambda row: row.training_kwh, fmt.energy_text),
            word("Spent on", lambda row: SPENT_ON[row.kernels] if row.compiles else MISSING),
        ],
        folded=True,
    )
