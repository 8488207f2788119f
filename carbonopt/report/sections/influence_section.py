"""The effect of each parameter on the objectives."""

from collections.abc import Callable
from operator import attrgetter

from carbonopt.analysis.influence import MOST_TRIALS, Gap, Influence, NotKnown
from carbonopt.core import format as fmt
from carbonopt.report.document import MISSING, Paragraph, Section, Table, num, table, word
from carbonopt.report.figures.influence_figure import effect_scale, effects, importance
from carbonopt.report.study_view import StudyView

NEARLY_ALL = 0.9995  # from here on, a share with one decimal would read as the whole
# Cross-validated R²; below it, the model says little about trials that it has not seen.
WELL_EXPLAINED = 0.5


def section(study: StudyView) -> Section | None:
    analyses = study.influence
    known = [part for part in analyses if isinstance(part, Influence)]
    title, fit = "What each parameter does", _how_well(analyses)
    if not known:
        return Section(key="influence", title=title, blocks=(fit,))
    figure = importance(analyses)
    figures = [figure, *effects(analyses, study.quality)] if figure else []
    tables = [
        *map(_importance, known),
        *(_effects(study, part) for part in known),
        fit,
        _untried(known[0].gaps),
    ]
    weak = [
        part.objective
        for part in known
        if part.explained is None or part.explained < WELL_EXPLAINED
    ]
    doubt = (
        f" Of {' and '.join(weak)} the model explains little or was not checked: take it as a hint."
        if weak
        else ""
    )
    text = (
        "Importance is a share of the variation among this study's trials, and no proof of"
        f" cause.{doubt}"
    )
    return Section(key="influence", title=title, blocks=(Paragraph(text=text), *figures, *tables))


def _importance(influence: Influence) -> Table:
    ends = attrgetter("importance_lowest", "importance_highest")
    columns = [
        word("Parameter", "name"),
        num("Importance", "importance", _share, share=lambda row: True, span=ends),
        num(
            _interval(influence),
            "importance_lowest",
            shown=lambda row: _between(*map(_share, ends(row))),
        ),
    ]
    caption = f"Importance of each parameter for {influence.objective}"
    return table(
        f"importance-{influence.objective}",
        caption,
        influence.parameters,
        columns,
        paper="influence",
    )


def _interval(influence: Influence) -> str:
    return f"{fmt.percent_text(influence.level)} interval"


def _share(share: float) -> str:
    """Return a share as text, which never reads as the whole because it is an estimate."""
    return "over 99.9 %" if share >= NEARLY_ALL else fmt.share_text(share)


def _between(lowest: str, highest: str) -> str:
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _interval_of(lowest: float | None, highest: float | None, text: Callable[[float], str]) -> str:
    return (
        MISSING if lowest is None or highest is None else fmt.interval_text(lowest, highest, text)
    )


def _effects(study: StudyView, influence: Influence) -> Table:
    scale = effect_scale(influence)
    text = scale.text if scale else study.quality.text
    of_effect = attrgetter("value", "trials", "expected", "lowest", "highest")
    rows = [
        (parameter.name, *of_effect(effect))
        for parameter in influence.parameters
        for effect in parameter.effects
    ]
    columns = [
        word("Parameter", 0),
        word("Value", lambda row: fmt.value_text(row[1])),
        num("Trials", 2),
        num(scale.label("Emissions") if scale else study.quality.label, 3, text),
        num(_interval(influence), 4, shown=lambda row: _interval_of(row[4], row[5], text)),
    ]
    expected = (
        "what to expect at each value, the other parameters as they were tried; an interval takes"
        " two configurations"
    )
    caption = f"Marginal effect on {influence.objective}: {expected}"
    return table(f"effects-{influence.objective}", caption, rows, columns, folded=True)


def _how_well(analyses: tuple[Influence | NotKnown, ...]) -> Table:
    """Show what the influence is learned from, and what it explains of trials held back."""

    def explained(row: Influence | NotKnown) -> str:
        if isinstance(row, NotKnown) and row.explained is not None:
            return (
                f"{fmt.percent_text(row.explained)}: no more than their mean says, so nothing is"
                " shown"
            )
        if isinstance(row, NotKnown):
            return f"not known: it takes {row.needed} configurations that differ"
        return fmt.percent_text(row.explained)

    columns = [
        word("Objective", "objective"),
        num("Complete trials", "trials"),
        num("Configurations", lambda row: row.trials - row.repeats),
        num(f"Trials beyond {MOST_TRIALS}, not used", "left_out"),
        num(
            "Variance explained in held-out trials (cross-validated R²)",
            lambda row: getattr(row, "explained", None),
            shown=explained,
        ),
        num("Bootstrap resamples", lambda row: getattr(row, "resamples", None)),
    ]
    note = "Stopped trials are not among them; repeats of a configuration are kept together."
    return table("influence-fit", "How well that is learned", analyses, columns, note=note)


def _untried(gaps: tuple[Gap, ...]) -> Table:
    """Show values without a complete trial, where effects would be extrapolated.

    It can be that pruning stopped every trial there.
    """

    def tried(gap: Gap) -> str:
        values = list(map(fmt.value_text, gap.tried))
        return ", ".join(values) if gap.low is None else _between(values[0], values[-1])

    def not_tried(gap: Gap) -> str:
        if gap.low is None or gap.high is None:
            return ", ".join(map(fmt.value_text, gap.untried))
        return f"the rest of {fmt.interval_text(gap.low, gap.high, fmt.value_text)}"

    columns = [
        word("Parameter", "name"),
        word("Completed with", tried),
        word("Not with", not_tried),
    ]
    return table(
        "untried",
        "Values of the space without a complete trial, of which nothing is said",
        gaps,
        columns,
    )
