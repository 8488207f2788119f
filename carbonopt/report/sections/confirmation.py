"""What repeats with other seeds say: how far runs differ, and whether the target holds."""

from collections.abc import Iterator
from typing import NamedTuple

from carbonopt.analysis.confidence import Standing
from carbonopt.analysis.replicates import Repeats, repeats_of
from carbonopt.core import format as fmt
from carbonopt.core.trial import TrialState
from carbonopt.report.document import MISSING, Caveat, Section, Table, num, table, word
from carbonopt.report.study_view import StudyView

STANDINGS = {
    Standing.CONFIRMED: "confirmed",
    Standing.INCONCLUSIVE: "in doubt",
    Standing.UNREPLICATED: "in doubt",
    Standing.REJECTED: "refuted",
}
# Of the target. A rule of thumb for what another seed can change, from recorded runs on an H200.
NEAR_TARGET = 0.01


class _Considered(NamedTuple):
    trial: int
    why: str
    seeds: int | None
    quality: float | None
    bound: float | None
    emissions_difference: float | None


def section(study: StudyView) -> Section | None:
    tables = [made for made in (_considered(study), _repeats(study)) if made.rows]
    return Section(key="confirmation", title="Repeats with other seeds", blocks=tuple(tables)) if tables else None


def _considered(study: StudyView) -> Table:
    """The recommended configuration and those beside it, where repeats decided between them."""
    rec, quality, sure = study.recommendation, study.quality, study.recommendation.confidence
    rows = []
    if sure is not None and rec.trial is not None:
        mean, bound = sure.value_mean, sure.value_bound
        rows.append(_Considered(rec.trial, "recommended", sure.seeds, mean, bound, None))
        if other := sure.safer_alternative:
            mean, bound, more = other.value_mean, other.value_bound, other.emissions_difference
            rows.append(_Considered(other.trial, "surer to meet the target", other.seeds, mean, bound, more))
        rows += [_Considered(trial, "a tie, within the error", None, None, None, None) for trial in rec.ties]
    for rejected in rec.rejected:
        why = "failed with another seed" if rejected.failed_replicate else "cheaper, but its mean misses the target"
        mean_of_it = rejected.value
        rows.append(_Considered(rejected.trial, why, rejected.seeds, mean_of_it, None, None))
    deviation = sure.value_deviation if sure else None
    spread = ""
    if sure is not None and deviation is not None:
        spread = f"One run of the recommendation: {quality.name} {fmt.plus_minus_text(sure.value_mean, deviation)}"
        if sure.emissions_deviation_kg_co2e is not None and rec.emissions_kg_co2e is not None:
            scale = fmt.emissions_scale([rec.emissions_kg_co2e])
            kg = fmt.plus_minus_text(rec.emissions_kg_co2e, sure.emissions_deviation_kg_co2e, scale)
            spread += f", {kg} {scale.unit}"
        spread += " (mean ± standard deviation, pooled or its own, the larger)."
    return table(
        "considered",
        "Configurations that the repeats decided between",
        rows,
        [
            num("Trial", lambda row: row.trial, strong=lambda row: row.trial == rec.trial),
            word("Role", lambda row: row.why),
            num("Seeds", lambda row: row.seeds),
            num(f"Mean {quality.name}", lambda row: row.quality, quality.text),
            num(_bound_label(study), lambda row: row.bound, quality.text),
            num("Emits more by", lambda row: row.emissions_difference, fmt.percent_text),
        ],
        note=spread,
    )


def _bound_label(study: StudyView) -> str:
    return f"Its mean {study.quality.bound_word}"


def _repeats(study: StudyView) -> Table:
    """Each configuration that completed more than once."""
    rec, quality, repeated = study.recommendation, study.quality, study.repeated
    target = rec.target
    scale = fmt.emissions_scale(row.emissions_kg_co2e.highest for row in repeated)

    def chosen(row: Repeats) -> bool:
        return row.params == rec.params

    def standing(row: Repeats) -> str:
        found = row.standing(target)
        return MISSING if found is None else STANDINGS[found]

    def quality_range(row: Repeats) -> str:
        spread = row.value
        return fmt.interval_text(spread.lowest, spread.highest, quality.text)

    judged = [row for row in repeated if row.standing(target) is not None]
    note = ""
    if judged:
        note = (
            f"{_bound_label(study)}: over all seeds, with {fmt.percent_text(judged[0].level)} confidence. Confirmed: "
            f"this bound meets the target of {quality.text(target.value)}; in doubt: the mean of the runs does; "
            "refuted: the mean doesn't, or a run diverged or did not fit in memory."
        )
    return table(
        "repeats",
        "Configurations that completed more than once: mean ± its own standard deviation, and range",
        repeated,
        [
            word("Trials", lambda row: ", ".join(map(str, row.trials)), strong=chosen),
            num("n", lambda row: row.n),
            word("Seeds", lambda row: ", ".join(map(str, row.seeds))),
            num(
                quality.label,
                lambda row: row.value.mean,
                shown=lambda row: fmt.spread_text(row.value),
                strong=chosen,
            ),
            num("Range", lambda row: None, shown=quality_range),
            num(_bound_label(study), lambda row: row.value_bound, quality.text),
            word("Holds the target", standing),
            num(
                scale.label("Emissions"),
                lambda row: row.emissions_kg_co2e.mean,
                shown=lambda row: fmt.spread_text(row.emissions_kg_co2e, scale),
                strong=chosen,
            ),
            num(
                "Range",
                lambda row: None,
                shown=lambda row: fmt.interval_text(
                    row.emissions_kg_co2e.lowest, row.emissions_kg_co2e.highest, scale.text
                ),
            ),
        ],
        note=note,
    )


def caveats(study: StudyView) -> Iterator[Caveat]:
    rec, quality, sure = study.recommendation, study.quality, study.recommendation.confidence
    if sure is not None:
        words = {"quality": quality.name, "at_target": quality.bound_word}
        bound = sure.value_bound
        if not sure.confirmed and bound is not None:
            yield study.caveat("not_confirmed", seeds=sure.seeds, bound=bound, level=sure.level, **words)
        elif not sure.confirmed and sure.seeds > 1:
            yield study.caveat("unbounded", seeds=sure.seeds)
        if other := sure.safer_alternative:
            difference = other.emissions_difference
            bound = other.value_bound
            yield study.caveat("surer_runner_up", trial=other.trial, bound=bound, difference=difference, **words)
        if sure.confirmed:
            tried = {record.repeat_of for record in study.data.records} - {None}
            yield study.caveat("many_confirmed", tried=len(tried))
    if rec.failed_replicates:
        yield study.caveat("failed_replicates", trials=rec.failed_replicates)
    if rec.rejected:
        yield study.caveat("rejected", trials=[rejected.trial for rejected in rec.rejected])
    if rec.ties:
        yield study.caveat("ties", trials=rec.ties)
    if study.repeated and all(len(row.seeds) == 1 for row in study.repeated):
        yield study.caveat("one_seed", quality=quality.name)
    yield from _of_single_runs(study)
    yield from _of_the_margin(study)


def _of_single_runs(study: StudyView) -> Iterator[Caveat]:
    rec, records = study.recommendation, study.data.records
    if rec.met and repeats_of(rec.params, study.repeated) is None:
        candidates = sum(record.meets(rec.target) for record in records if record.repeat_of is None)
        yield study.caveat("single_run", candidates=candidates)
    elif not rec.met and rec.trials_by_state[TrialState.COMPLETE] and not study.repeated:
        yield study.caveat("single_runs")


def _of_the_margin(study: StudyView) -> Iterator[Caveat]:
    rec, sure = study.recommendation, study.recommendation.confidence
    reached = rec.value
    if not reached or (sure is not None and sure.confirmed):
        return
    margin = -study.quality.worse_by(reached, rec.target.value)
    spread = sure.value_deviation if sure else None
    if margin < NEAR_TARGET and sure is not None and spread is not None:
        yield study.caveat("near_target", margin=margin, spread=spread / sure.value_mean)
    elif margin < NEAR_TARGET:
        yield study.caveat("near_target_single_run", margin=margin)
