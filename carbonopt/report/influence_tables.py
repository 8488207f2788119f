"""What each parameter does to emissions and perplexity, in sentences and tables, or why that can't be said."""

from carbonopt.analysis.influence import Effect, Gap, Influence, NotKnown
from carbonopt.core.format import (
    Scale,
    count_text,
    emissions_scale,
    interval_text,
    percent_text,
    quality_text,
    share_text,
    value_text,
)
from carbonopt.report.view import Cell, Part, Table, columns, number, word

NEARLY_ALL = 0.9995  # from here on a share of one decimal would read as the whole
WELL_EXPLAINED = 0.5  # cross-validated R²; below, the model says little about trials that it has not seen


def influence(found: tuple[Influence | NotKnown, ...]) -> Part:
    """What each parameter does to emissions and to perplexity."""
    sentences, tables, folded = [], [], []
    for one in found:
        if isinstance(one, NotKnown):
            sentences.append(
                f"What each parameter does to {one.objective} can't be said from {_learned_from(one)}: it takes "
                f"{one.needed} configurations or more that completed, and two values or more of a parameter."
            )
            continue
        sentences.append(_how_well(one))
        tables.append(_importance(one))
        folded.append(_effects(one))
    if tables:
        sentences.append(
            "Importance is a share of the variation among this study's trials; an effect is the outcome to expect at "
            "one value, the other parameters as they were tried. Neither is a proof of cause."
        )
    gaps = next((one.gaps for one in found if isinstance(one, Influence)), ())
    if gaps:
        sentences.append(_untried(gaps))
    return Part(sentences=tuple(sentences), tables=tuple(tables), folded=tuple(folded))


def _learned_from(one: Influence | NotKnown) -> str:
    trials = count_text(one.trials, "complete trial")
    return f"{trials} of {count_text(one.trials - one.repeats, 'configuration')}" if one.repeats else trials


def _untried(gaps: tuple[Gap, ...]) -> str:
    """Where effects would be extrapolated; it can be that the pruning stopped every trial there."""
    parts = []
    for gap in gaps:
        if gap.low is None or gap.high is None:
            parts.append(f"{gap.name} {', '.join(map(value_text, gap.untried))}")
        else:
            lowest, highest = value_text(gap.tried[0]), value_text(gap.tried[-1])
            beyond = "other than" if lowest == highest else "outside"
            space = interval_text(gap.low, gap.high, value_text)
            parts.append(f"{gap.name} {beyond} {_between(lowest, highest)} (the space has {space})")
    return f"No trial completed with these values, so nothing is said of them: {'; '.join(parts)}."


def _how_well(one: Influence) -> str:
    of_all = f" drawn at random from all {one.trials + one.left_out:,}" if one.left_out else ""
    about = f"{one.objective.capitalize()}: learned from {_learned_from(one)}{of_all}, not from those that were stopped"
    intervals = (
        f"intervals at {percent_text(one.level)} confidence from {count_text(one.resamples, 'bootstrap resample')}"
        + (", repeats of a configuration kept together" if one.repeats else "")
    )
    if one.explained is None:
        return f"{about}, too few to check on trials left out; {intervals}."
    if one.explained <= 0:
        return f"{about}; of trials left out it explains nothing, so take it as no more than a hint; {intervals}."
    weak = "" if one.explained >= WELL_EXPLAINED else ", which is little: take it as a hint"
    return f"{about}; it explains {percent_text(one.explained)} of the variation of trials left out{weak}; {intervals}."


def _importance(one: Influence) -> Table:
    rows = tuple(
        (
            word(parameter.name),
            Cell(
                text=_share_text(parameter.importance),
                sort=parameter.importance,
                share=parameter.importance,
                span=(parameter.importance_lowest, parameter.importance_highest),
            ),
            number(
                _between(_share_text(parameter.importance_lowest), _share_text(parameter.importance_highest)),
                parameter.importance_lowest,
            ),
        )
        for parameter in one.parameters
    )
    return Table(
        caption=f"Importance of each parameter for {one.objective}",
        columns=columns("Parameter", "Importance", f"{percent_text(one.level)} interval"),
        rows=rows,
    )


def _share_text(share: float) -> str:
    """An estimate is never the whole."""
    return "over 99.9 %" if share >= NEARLY_ALL else share_text(share)


def _between(lowest: str, highest: str) -> str:
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _effects(one: Influence) -> Table:
    scale = effect_scale(one)
    unit = "Emissions" if scale else "Perplexity"
    rows = tuple(
        (
            word(parameter.name),
            word(value_text(effect.value)),
            number(str(effect.trials), effect.trials),
            number(effect_text(effect.expected, scale), effect.expected),
            number(
                interval_text(effect.lowest, effect.highest, lambda value: effect_text(value, scale)), effect.lowest
            ),
        )
        for parameter in one.parameters
        for effect in parameter.effects
    )
    return Table(
        caption=f"Marginal effect on {one.objective}: what to expect at each value",
        columns=columns(
            "Parameter",
            "Value",
            "Trials",
            scale.label(unit) if scale else unit,
            f"{percent_text(one.level)} interval",
            numeric_from=2,
        ),
        rows=rows,
    )


def effect_scale(one: Influence) -> Scale | None:
    """The unit of emissions; perplexity has none."""
    if one.objective == "perplexity":
        return None
    effects: list[Effect] = [effect for parameter in one.parameters for effect in parameter.effects]
    return emissions_scale(effect.highest for effect in effects)


def effect_text(value: float, scale: Scale | None) -> str:
    return scale.text(value) if scale else quality_text(value)
