"""The report's tables of where the trials' time and energy went, how fast they trained, and what longer runs would
change."""

from itertools import pairwise

from carbonopt.analysis.amortisation import WORTH_SAYING, Amortisation, AsFirst, CheapestFrom, NotCompared
from carbonopt.analysis.stages import Speed, Stages, StoppedEarly
from carbonopt.core.format import MISSING, energy_scale, energy_text, percent_text, rate_text, seconds_text
from carbonopt.core.trial import Kernels, Stage
from carbonopt.report.savings import sure_of
from carbonopt.report.view import Cell, Part, Table, columns, number, word

_NAMES = {
    Stage.IMPORTS: "starting the processes, importing",
    Stage.DATA: "opening device and data",
    Stage.MODEL: "making the model",
    Stage.ENGINE: "making trainer and engine",
    Stage.COMPILE: "the first step",
    Stage.STEPS: "the other steps",
    Stage.EVALUATION: "evaluation",
    Stage.TEARDOWN: "ending the processes",
}

_COMPILATION_IN_IT = ", compilation in it"  # the first step's name goes on so where any trial compiles

SHARE_TO_TELL = 0.05  # of a training's energy: a first step that took as much can turn a ranking round
_SPENT_ON = {
    Kernels.COMPILED: "for compilation",
    Kernels.LOADED: "with kernels from the cache",
    None: "for compilation, or loading from the cache",
}
LONGER_RUNS = "Longer runs"  # the heading that other sections name
_MOST_LISTED = 5  # trials in a sentence
_NO_IMPORTS_S = 1.0  # importing everything takes several seconds, forking a hundredth of one

_UTILISATIONS = (  # the column, its figure, what it says
    ("GPU busy", "gpu_utilisation", "the share of the training, its first step included, with a kernel on the GPUs, as "
     "NVML samples it once a second"),
    ("FLOP utilisation", "flops_utilisation", "6 × parameters × tokens/s ÷ the GPUs' dense peak in half precision"),
)  # fmt: skip


def by_stage(found: Stages) -> Table:
    scale = energy_scale(one.energy_kwh for one in found.shares)
    rows = tuple(
        (
            word(_name(one.stage, found)),
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
        "the readings, which are 0.05 to 0.1 s apart." + _where_imports_are(found),
    )


def _name(stage: Stage, found: Stages) -> str:
    return _NAMES[stage] + (_COMPILATION_IN_IT if stage is Stage.COMPILE and found.compiles else "")


def _where_imports_are(found: Stages) -> str:
    """Nothing where trials import for themselves, be it because forking them failed."""
    imports = next((one for one in found.shares if one.stage is Stage.IMPORTS), None)
    if imports is None or not found.imported_before or imports.median_s >= _NO_IMPORTS_S:
        return ""
    return (
        " Imports are in the study's preparation: the trials are forks of one process that had imported what they need."
    )


def speeds(found: Stages) -> Table:
    more = [
        (name, attribute, note)
        for name, attribute, note in _UTILISATIONS
        if any(getattr(one, attribute) is not None for one in found.speeds)
    ]
    scale = energy_scale(one.first_step_excess_kwh for one in found.speeds)
    head = ["First step (s)", scale.label("Its excess"), "of the training"]
    told = ("Kernels",) if any(one.kernels for one in found.speeds) else ()
    rows = tuple(
        (
            number(str(one.trial), one.trial),
            number(f"{one.tokens_per_s:,.0f}", one.tokens_per_s),
            number(rate_text(one.millijoules_per_token), one.millijoules_per_token),
            *(word(_kernels(one)) for _ in told),
            number(seconds_text(one.first_step_s), one.first_step_s),
            number(scale.text(one.first_step_excess_kwh), one.first_step_excess_kwh),
            number(percent_text(one.first_step_excess_share), one.first_step_excess_share),
            *(_share_or_dash(getattr(one, attribute)) for _, attribute, _ in more),
        )
        for one in found.speeds
    )
    return Table(
        caption="How fast each trial trained",
        columns=(
            *columns("Trial", "Tokens/s", "mJ a token", numeric_from=0),
            *columns(*told),
            *columns(*head, *(name for name, _, _ in more), numeric_from=0),
        ),
        rows=rows,
        note=f"Of the steps after the first. Its excess: what the first step used beyond a mean one, for "
        f"{'compiling and ' if found.compiles else ''}warming up; it is charged to the trial, and a longer run would "
        "not have it again."
        + (" What one trial has compiled, later ones with the same shapes load from a cache." if found.compiles else "")
        + (" Kernels: as torch's compiler counted in the first step." if told else "")
        + "".join(f" {name}: {note}." for name, _, note in more),
    )


def _kernels(one: Speed) -> str:
    return "–" if one.kernels is None else one.kernels.value


def stopped_early(found: Stages) -> tuple[str, ...]:
    """Of trials that a rule stopped when most of what they had used was their first step."""
    if not found.stopped_early:
        return ()
    listed = [_one_stopped_early(one) for one in found.stopped_early[:_MOST_LISTED]]
    if left := len(found.stopped_early) - len(listed):
        listed.append(f"{left} more")
    return (f"Stopped with most of their training energy spent in the first step: {'; '.join(listed)}.",)


def _one_stopped_early(one: StoppedEarly) -> str:
    of = "" if one.total_steps is None else f" of {one.total_steps:,}"
    after = f"after step {one.steps_done:,}{of}" if one.steps_done else "in it"
    what = f", {_SPENT_ON[one.kernels]}" if one.compiles else ""
    return f"trial {one.trial} {after} ({energy_text(one.first_step_kwh)} of {energy_text(one.training_kwh)}{what})"


def _share_or_dash(share: float | None) -> Cell:
    return word("–") if share is None else number(percent_text(share), share)


def longer_runs(found: Amortisation | None) -> Part:
    """What compilation and warm-up, once a run, make of the recommendation where runs are longer, or come first."""
    if found is None:
        return Part(sentences=())
    sentences = [_once_a_run(found), _by_length(found)]
    if found.not_compared is not None:
        sentences.append(_beside_them(found, found.not_compared))
    if found.as_first is not None:
        sentences.append(_charged_as_first(found, found.as_first))
    # One paragraph, on the page as in the Markdown.
    return Part(
        sentences=(" ".join(sentences),), tables=(_cheapest_by_length(found),) if len(found.cheapest) > 1 else ()
    )


def longer_runs_in_the_answer(found: Amortisation | None) -> tuple[str, ...]:
    """What it comes to and where it stands, where first steps may have decided who is recommended."""
    if found is None or not found.met or found.largest_excess_share <= SHARE_TO_TELL:
        return ()
    if len(found.cheapest) > 1:
        second = found.cheapest[1]
        outcome = f"{_longer_than(second)} trial {second.trial} takes less energy"
    elif found.compared > 1:
        outcome = f"in longer runs trial {found.trial} stays the cheapest of those that may be recommended"
    else:
        outcome = f"trial {found.trial} has no rival that longer runs could favour"
    if found.as_first is not None and found.as_first.cheapest != found.trial:
        charged = "with nothing in the cache" if found.compiles else "with the largest excess of its shapes for each"
        outcome += f"; {charged}, trial {found.as_first.cheapest} would be recommended"
    return (
        f"First steps took up to {percent_text(found.largest_excess_share)} of a trial's training energy, and a run "
        f'makes one, however long it is: {outcome} (see "{LONGER_RUNS}").',
    )


def _once_a_run(found: Amortisation) -> str:
    if not found.excess_kwh > 0:
        return f"The first step of trial {found.trial} took no more energy than its other steps did on average."
    return (
        f"The first step of trial {found.trial} took {energy_text(found.excess_kwh)} more than its other steps did on "
        f"average ({percent_text(found.excess_kwh / found.energy_kwh)} of its training energy), for "
        f"{'compiling and ' if found.compiles else ''}warming up, which a run does once."
    )


def _by_length(found: Amortisation) -> str:
    kind = "may be recommended" if found.met else "completed"
    kind += " and whose first steps were measured" if found.unknown else ""
    if found.compared == 1:
        return (
            f"The trial is the only configuration that {kind}, so there is none that longer runs could put before it."
        )
    among = f"the cheapest of the {found.compared} configurations that {kind}"
    if len(found.cheapest) == 1:
        return f"The trial stays {among}, however much longer all runs are."
    second, last = found.cheapest[1], found.cheapest[-1]
    other = "" if last is second else f"trial {last.trial} takes "
    return (
        f"The trial is {among}, but {_longer_than(second)} trial {second.trial} takes less energy, in very long runs "
        f"{other}{percent_text(last.less_in_the_limit)} less ({sure_of(last.less_in_the_limit, last.less_interval)})."
    )


def _beside_them(found: Amortisation, other: NotCompared) -> str:
    """Of compiled trials that can't be compared: what is known, and what isn't."""
    if other.less_a_token <= WORTH_SAYING:
        few = f"The one compiled trial that is not compared (trial {other.trial}) does not take"
        many = (
            f"None of the {other.of} compiled trials that are not compared (stopped, above the target or not confirmed)"
        )
        none = few if other.of == 1 else f"{many} takes"
        return f"{none} clearly less energy a token after its first step than trial {found.trial}."
    if other.complete:
        why = "which is not confirmed" if other.meets else "which misses the target"
    else:
        of = "" if other.total_steps is None else f" of {other.total_steps:,}"
        why = f"which was stopped after step {other.steps_done:,}{of}"
    return (
        f"Not compared is trial {other.trial}, {why}: it is compiled, and after its first step takes "
        f"{percent_text(other.less_a_token)} less energy a token than trial {found.trial}, but which perplexity longer "
        "runs of it reach is not known."
    )


def _longer_than(one: CheapestFrom) -> str:
    length = _length(one.from_length)
    return "in any longer run" if length == "1" else f"with more than {length} times the steps"


def _charged_as_first(found: Amortisation, as_first: AsFirst) -> str:
    more = percent_text(as_first.energy_kwh / found.energy_kwh - 1)
    whose = "of its own first run" if as_first.like == found.trial else f"of trial {as_first.like}"
    then = (
        f"it stays {'the recommendation' if found.met else 'the cheapest'}"
        if as_first.cheapest == found.trial
        else f"trial {as_first.cheapest} would be {'recommended' if found.met else 'the cheapest'}, "
        f"with {energy_text(as_first.cheapest_energy_kwh)}"
    )
    charged = "With nothing in the cache, that is with" if found.compiles else "With"
    alike = "that compile the same" if found.compiles else "of the same shapes"
    return (
        f"{charged} the excess {whose} "
        f"({energy_text(as_first.excess_kwh)}), the largest among trials {alike}, trial {found.trial} "
        f"takes {energy_text(as_first.energy_kwh)}, {more} more; with all charged so, {then}."
    )


def _cheapest_by_length(found: Amortisation) -> Table:
    excess = energy_scale(one.excess_kwh for one in found.cheapest)
    rest = energy_scale(one.energy_per_length_kwh for one in found.cheapest)
    starts = [one.from_length for one in found.cheapest]
    labels = [*(_range(low, high) for low, high in pairwise(starts)), f"beyond {_length(starts[-1])}"]
    rows = tuple(
        (
            number(label, one.from_length),
            number(str(one.trial), one.trial),
            number(excess.text(one.excess_kwh), one.excess_kwh),
            number(rest.text(one.energy_per_length_kwh), one.energy_per_length_kwh),
            number(MISSING, None)
            if one.trial == found.trial
            else number(percent_text(one.less_in_the_limit), one.less_in_the_limit),
        )
        for label, one in zip(labels, found.cheapest, strict=True)
    )
    head = ("Times the steps", "Cheapest: trial", excess.label("Its first step's excess"), rest.label("The rest"))
    return Table(
        caption="Which configuration takes the least training energy where all runs are longer",
        columns=columns(*head, f"Less than trial {found.trial} in the limit", numeric_from=0),
        rows=rows,
        note="A run of k times the steps is taken to use its first step's excess once and the rest k times. Which "
        "perplexities runs of that length reach is not known.",
    )


def _range(low: float, high: float) -> str:
    return _length(low) if _length(low) == _length(high) else f"{_length(low)} to {_length(high)}"


def _length(value: float) -> str:
    return "1" if rate_text(value) == "1.00" else rate_text(value)
