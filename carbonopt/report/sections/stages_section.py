"""The stages of trials: where their time and energy went, and how fast they trained."""

from collections.abc import Iterator

from carbonopt.analysis.stages import Stages, StoppedEarly
from carbonopt.core import format as fmt
from carbonopt.core.trial import Kernels, Stage
from carbonopt.report.document import MISSING, Caveat, Section, Table, num, scaled, table, word
from carbonopt.report.study_view import StudyView

NAMES = {
    Stage.IMPORTS: "starting the processes, importing",
    Stage.DATA: "opening device and data",
    Stage.MODEL: "making the model",
    Stage.ENGINE: "making trainer and engine",
    Stage.COMPILE: "the first step",
    Stage.GENERATION: "generating completions",
    Stage.STEPS: "the other steps",
    Stage.EVALUATION: "evaluation",
    Stage.SAVING: "saving checkpoints",
    Stage.AFTER: "after the last step",
    Stage.TEARDOWN: "ending the processes",
}
# Fields of a trial's speed, by the label of their column.
UTILISATIONS = {
    "GPU busy": "gpu_utilisation",
    "FLOP utilisation": "flops_utilisation",
}
_UTILISATION_NOTES = {
    "GPU busy": (
        "the share of the training, its first step included, with a kernel on the GPUs, as NVML"
        " samples it"
    ),
    "FLOP utilisation": ("6 × parameters × tokens/s ÷ the GPUs' dense peak in half precision"),
}
DEAR_EVALUATION = 0.2  # energy of evaluating, as a share of training's, from which on it is said
# With a smaller share of a run, the saving in training says little about the saving of whole runs.
_SMALL_TRAINING = 0.5
NO_IMPORTS_S = 1.0  # importing everything takes several seconds, a fork 0.01 s
SPENT_ON = {
    Kernels.COMPILED: "compilation",
    Kernels.LOADED: "kernels from the cache",
    None: "compilation or the cache",
}


def section(study: StudyView) -> Section | None:
    stages = study.stages
    continued = any(record.continued_at_steps for record in study.data.records)
    by_stage = _by_stage(stages, continued=continued)
    tables = tuple(made for made in (by_stage, _speeds(study), _stopped_early(stages)) if made.rows)
    return (
        Section(key="stages", title="Time and energy of the trials", blocks=tables, level=3)
        if tables
        else None
    )


def caveats(study: StudyView) -> Iterator[Caveat]:
    share = study.stages.evaluation_share
    if share is not None and share > DEAR_EVALUATION:
        yield study.caveat("dear_evaluation", share=share, advice=_cheaper_evaluation(study))
    record = study.record(study.recommendation.trial)
    used = record.energy_kwh if record is not None else None
    if used is not None and used.total and used.train / used.total < _SMALL_TRAINING:
        share = used.train / used.total
        # A table of recorded runs doesn't have the energy of their start-up.
        rest = "Evaluations" if study.data.provenance.is_replay else "Start-up and evaluations"
        trial = study.recommendation.trial
        yield study.caveat("small_training", trial=trial, share=share, rest=rest)


def _cheaper_evaluation(study: StudyView) -> str:
    """Say how evaluations would take less energy."""
    config = study.data.config
    if config.is_script:
        return "let the script evaluate less often"
    once = config.workload is not None and config.workload.evaluations == 1
    less = "evaluate on less data" if once else "lower workload.evaluations"
    return f"{less}, or raise workload.eval_batch_size_per_gpu"


def _by_stage(stages: Stages, *, continued: bool) -> Table:
    names = NAMES | (
        {Stage.COMPILE: f"{NAMES[Stage.COMPILE]}, compilation in it"} if stages.compiles else {}
    )
    imports_s = next((row.median_s for row in stages.shares if row.stage is Stage.IMPORTS), None)
    attempts = (
        "Training is that of all attempts, up to the checkpoints that they went on from; the other"
        " stages are those of each trial's last attempt."
        if continued
        else "Of each trial's last attempt."
    )
    note = f"{attempts} Energies of stages that last a few tenths of a second are no sharper than "
    note += "the readings, which are 0.05 to 0.1 s apart."
    if stages.imported_before and imports_s is not None and imports_s < NO_IMPORTS_S:
        note += (
            " Imports are in the study's preparation: the trials are forks of one process that had"
            " imported all."
        )
    columns = [
        word("Stage", lambda row: names[row.stage]),
        num("Median of a trial (s)", "median_s", fmt.seconds_text),
        num("All trials (s)", "duration_s", fmt.seconds_text),
        num("Share of time", "duration_share", fmt.percent_text),
        scaled("Energy", "energy_kwh", fmt.energy_scale, stages.shares),
        num("Share of energy", "energy_share", fmt.percent_text, share=lambda row: True),
    ]
    return table(
        "by-stage", "Time and energy of the trials by stage", stages.shares, columns, note=note
    )


def _speeds(study: StudyView) -> Table:
    stages = study.stages
    known = {
        label: name
        for label, name in UTILISATIONS.items()
        if any(getattr(row, name) is not None for row in stages.speeds)
    }
    note = (
        "Speed and energy are of the steps after the first. Excess: the first step's extra energy"
        " over an average step, once a run."
    )
    if stages.compiles:
        note += " Later trials with the same shapes load from a cache what one trial has compiled."
    note += "".join(f" {label}: {_UTILISATION_NOTES[label]}." for label in known)
    kernels = word("Kernels", lambda row: MISSING if row.kernels is None else row.kernels.value)
    in_tokens = all(row.tokens_per_s is not None for row in stages.speeds)
    name = "token" if in_tokens else "example"
    unit, one_of_them = ("Tokens", "a token") if in_tokens else ("Examples", "an example")
    if not in_tokens and study.data.config.packs:
        unit, one_of_them = "Packed rows", "a packed row"
    columns = [
        num("Trial", "trial"),
        num(f"{unit}/s", f"{name}s_per_s", lambda rate: f"{rate:,.0f}"),
        num(f"mJ {one_of_them}", f"millijoules_per_{name}", _millijoules),
        kernels if any(row.kernels for row in stages.speeds) else None,
        num("First step (s)", "first_step_s", fmt.seconds_text),
        scaled(
            "Excess of the first step", "first_step_excess_kwh", fmt.energy_scale, stages.speeds
        ),
        num("Excess, share of training", "first_step_excess_share", fmt.percent_text),
        *(num(label, field, fmt.percent_text) for label, field in known.items()),
    ]
    return table(
        "speeds",
        "How fast each trial trained",
        stages.speeds,
        columns,
        note=note,
        long=True,
        folded=True,
    )


def _millijoules(rate: float) -> str:
    # The rate is 0 where no reading of the energy fell between two steps.
    return fmt.rate_text(rate) if rate else MISSING


def _stopped_early(stages: Stages) -> Table:
    def after(row: StoppedEarly) -> str:
        return f"{row.steps_done:,}" + (
            "" if row.total_steps is None else f" of {row.total_steps:,}"
        )

    caption = "Stopped with most of their training energy spent in the first step"
    columns = [
        num("Trial", "trial"),
        num("After step", "steps_done", shown=after),
        num("First step", "first_step_kwh", fmt.energy_text),
        num("Training", "training_kwh", fmt.energy_text),
        word("Spent on", lambda row: SPENT_ON[row.kernels] if row.compiles else MISSING),
    ]
    return table("stopped-early", caption, stages.stopped_early, columns, folded=True)
