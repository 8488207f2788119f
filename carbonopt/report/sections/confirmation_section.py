"""Repeats with other seeds: how far runs differ, and whether the target holds."""

import math
from collections.abc import Callable, Iterator
from operator import attrgetter

from carbonopt.analysis.confidence import Confidence, Evidence, Standing
from carbonopt.analysis.recommend import cheaper_but_unsure
from carbonopt.analysis.repeated_configurations import Repeats, repeats_of
from carbonopt.core import format as fmt
from carbonopt.core.trial import TrialState
from carbonopt.report.document import MISSING, Caveat, Maker, Section, Table, num, table, word
from carbonopt.report.study_view import StudyView

# Words for what is known of a configuration; any other standing is "in doubt".
STANDINGS = {
    None: MISSING,
    Standing.CONFIRMED: "confirmed",
    Standing.REJECTED: "refuted",
}
SEEN_OF_PERPLEXITY = (
    "; in recorded runs of a small GPT on an H200, seeds changed the quality by 0.2 to 0.8 %"
)
# Share of the target: a rule of thumb for what another seed can change, from recorded runs on an
# H200.
NEAR_TARGET = 0.01
OFTEN_MISSED = 0.1  # chance that a rerun misses the target, from which on it is reported


def section(study: StudyView) -> Section | None:
    considered, repeated = _considered(study), _repeats(study)
    tables = [considered] if len(considered.rows) > 1 else []
    if repeated.rows:
        if not tables and considered.note:
            note = f"{considered.note} {repeated.note}".rstrip()
            repeated = repeated.model_copy(update={"note": note})
        tables.append(repeated)
    if not tables:
        return None
    return Section(key="confirmation", title="Repeats with other seeds", blocks=tuple(tables))


def _considered_rows(study: StudyView) -> list[tuple[object, ...]]:
    """Return a row for each configuration that the repeats decided between.

    A row holds the trial, its role, its seeds, the mean of its quality, the bound of that mean, and
    the share that it emits more than the recommended one.
    """
    rec, sure = study.recommendation, study.recommendation.confidence
    rows: list[tuple[object, ...]] = []
    if sure is not None and rec.emissions_kg_co2e is not None:
        rows.append((rec.trial, "recommended", sure.seeds, sure.value_mean, sure.value_bound, None))
        roles = (
            {}
            if sure.safer_alternative is None
            else {sure.safer_alternative.trial: "surer to meet the target"}
        )
        roles |= dict.fromkeys(rec.ties, "a tie, within the error")
        unsure = dict.fromkeys(cheaper_but_unsure(study.data, rec), "cheaper, but not confirmed")
        evidence = Evidence.of(study.data, rec.target)
        by_trial = {each.trial: each for each in evidence.configurations}
        roles |= {trial: role for trial, role in unsure.items() if by_trial[trial].n > 1}
        for trial, role in roles.items():
            tried, kg = by_trial[trial], rec.emissions_kg_co2e
            more = tried.emissions_kg_co2e / kg - 1 if kg else None
            rows.append((trial, role, tried.n, tried.value, evidence.bound(tried), more))
    for rejected in rec.rejected:
        why = "cheaper, but its mean misses the target" if rec.met else "its mean misses the target"
        if rejected.failed_replicate:
            why = "failed with another seed"
        rows.append((rejected.trial, why, rejected.seeds, rejected.value, None, None))
    return rows


def _considered(study: StudyView) -> Table:
    """Show the recommended configuration beside others that repeats decided between."""
    rec, quality, sure = study.recommendation, study.quality, study.recommendation.confidence
    rows, spread = _considered_rows(study), ""
    if sure is not None and sure.value_deviation is not None:
        run = fmt.plus_minus_text(sure.value_mean, sure.value_deviation)
        if sure.emissions_deviation_kg_co2e is not None and rec.emissions_kg_co2e is not None:
            scale = fmt.emissions_scale([rec.emissions_kg_co2e])
            kg = fmt.plus_minus_text(rec.emissions_kg_co2e, sure.emissions_deviation_kg_co2e, scale)
            run += f", {kg} {scale.unit}"
        spread = f"One run of the recommendation: {quality.name} {run} "
        spread += "(mean ± standard deviation, pooled or its own, the larger)."
    columns = [
        num("Trial", 0, strong=lambda row: row[0] == rec.trial),
        word("Role", 1),
        num("Seeds", 2),
        num(f"Mean {quality.name}", 3, quality.text),
        num(f"Its mean {quality.bound_word}", 4, quality.text),
        num("Emits more by", 5, fmt.percent_text),
    ]
    return table(
        "considered", "Configurations that the repeats decided between", rows, columns, note=spread
    )


def _repeats(study: StudyView) -> Table:
    rec, quality, repeated = study.recommendation, study.quality, study.repeated
    scale = fmt.emissions_scale(row.emissions_kg_co2e.highest for row in repeated)

    def chosen(row: Repeats) -> bool:
        return row.params == rec.params

    def mean_and_range(
        label: str, at: str, scale: fmt.Scale | None, text: Callable[[float], str]
    ) -> Iterator[Maker]:
        spread, ends = attrgetter(at), attrgetter(f"{at}.lowest", f"{at}.highest")
        yield num(
            label,
            f"{at}.mean",
            shown=lambda row: fmt.spread_text(spread(row), scale),
            strong=chosen,
        )
        yield num("Range", lambda row: None, shown=lambda row: fmt.interval_text(*ends(row), text))

    bound_label, note = f"Its mean {quality.bound_word}", ""
    if judged := [row for row in repeated if row.standing(rec.target) is not None]:
        note = (
            f"{bound_label}: over all seeds, with {fmt.percent_text(judged[0].level)} confidence."
            " Confirmed: this "
        )
        note += (
            f"bound meets the target of {quality.target_text(rec.target.value)}; in doubt: the mean"
            " of the runs does; "
        )
        note += "refuted: the mean doesn't, or a run diverged or did not fit in memory."
    columns = [
        word("Trials", lambda row: ", ".join(map(str, row.trials)), strong=chosen),
        num("n", "n"),
        word("Seeds", lambda row: ", ".join(map(str, row.seeds))),
        *mean_and_range(quality.label, "value", None, quality.text),
        num(bound_label, "value_bound", quality.text),
        word("Holds the target", lambda row: STANDINGS.get(row.standing(rec.target), "in doubt")),
        *mean_and_range(scale.label("Emissions"), "emissions_kg_co2e", scale, scale.text),
    ]
    caption = (
        "Configurations that completed more than once: mean ± its own standard deviation, and range"
    )
    return table("repeats", caption, repeated, columns, note=note)


def caveats(study: StudyView) -> Iterator[Caveat]:
    rec, quality, sure = study.recommendation, study.quality, study.recommendation.confidence
    if sure is not None:
        yield from _of_confidence(study, sure)
    # Where nothing is recommended, the caveats on the shortfall name these.
    rejected = rec.rejected if rec.met else ()
    for key, trials in (
        ("failed_replicates", rec.failed_replicates if rec.met else ()),
        ("rejected", [each.trial for each in rejected if not each.failed_replicate]),
        ("rejected_failed", [each.trial for each in rejected if each.failed_replicate]),
        ("cheaper_but_unsure", cheaper_but_unsure(study.data, rec)),
        ("ties", rec.ties),
    ):
        if trials:
            yield study.caveat(key, trials=trials)
    if (equal := study.equal_costs) is not None:
        yield study.caveat(
            "equal_costs",
            trials=equal.trials,
            dimensions=" or ".join(equal.dimensions),
            difference=equal.difference,
        )
    if study.repeated and all(len(row.seeds) == 1 for row in study.repeated):
        yield study.caveat("one_seed", quality=quality.name)
    if rec.met and repeats_of(rec.params, study.repeated) is None:
        # Dearer ones are recommended in place of the rejected.
        missed = {*(each.trial for each in rejected), *rec.failed_replicates}
        candidates = sum(
            record.meets(rec.target) and record.trial not in missed
            for record in study.data.records
            if record.repeat_of is None
        )
        yield (
            study.caveat("single_run", candidates=candidates)
            if candidates > 1
            else study.caveat("only_run")
        )
    elif not rec.met and rec.trials_by_state[TrialState.COMPLETE] and not rec.repeats:
        yield study.caveat("single_runs")
    yield from _near_target(study)


def _of_confidence(study: StudyView, sure: Confidence) -> Iterator[Caveat]:
    """Yield the caveats on the recommendation that its repeats give."""
    words = {"quality": study.quality.name, "at_target": study.quality.bound_word}
    if sure.seeds_alike:
        yield study.caveat("seeds_alike", seeds=sure.seeds, quality=study.quality.name)
    elif not sure.confirmed and sure.value_bound is not None:
        yield study.caveat(
            "not_confirmed", seeds=sure.seeds, bound=sure.value_bound, level=sure.level, **words
        )
    elif not sure.confirmed and sure.seeds > 1:
        yield study.caveat("unbounded", seeds=sure.seeds)
    if safer := sure.safer_alternative:
        numbers = {
            "trial": safer.trial,
            "bound": safer.value_bound,
            "difference": safer.emissions_difference,
        }
        yield study.caveat("surer_runner_up", **numbers, **words)
    if sure.confirmed:
        tried = {record.repeat_of for record in study.data.records} - {None}
        if len(tried) > 1:
            yield study.caveat("many_confirmed", tried=len(tried))


def _near_target(study: StudyView) -> Iterator[Caveat]:
    """Yield the caveat on a quality that another seed may move past the target."""
    rec, quality, sure = study.recommendation, study.quality, study.recommendation.confidence
    if rec.value is None or (sure is not None and sure.seeds_alike):
        return
    target = rec.target.value
    if sure is not None and sure.miss_chance is not None and sure.value_deviation is not None:
        if sure.miss_chance > OFTEN_MISSED:
            numbers = {"spread": sure.value_deviation, "chance": sure.miss_chance}
            means = {"mean": sure.value_mean, "target": target, "quality": quality.name}
            yield study.caveat("near_target", **means, **numbers)
    elif (margin := _margin(study, rec.value)) < NEAR_TARGET:
        seen = SEEN_OF_PERPLEXITY if quality.value_of_mean == "exp" else ""
        values = {"value": rec.value, "target": target, "margin": margin}
        yield study.caveat("near_target_single_run", quality=quality.name, seen=seen, **values)


def _margin(study: StudyView, value: float) -> float:
    """Return by how much a value is better than the target, as a share of the target's size.

    For a quality that can be 0 or less, it is a share of the range of all values, if that is wider.
    """
    quality, target = study.quality, study.recommendation.target.value
    scale = abs(target)
    if quality.link == "identity":
        values = [record.value for record in study.data.records if record.value is not None]
        scale = max(scale, max(values) - min(values))
    better = quality.rank(target) - quality.rank(value)
    return better / scale if scale else math.copysign(math.inf, better) if better else 0.0
