"""Find the trials whose settings cost as much as the recommended one's."""

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.dimensions import affecting_run_cost
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData


class EqualCosts(Frozen):
    """Trials that met the target with settings that cost as much as the recommended one's.

    They differ from it only in settings that don't affect the cost. It is chance that the
    recommended one measured the least of them.
    """

    trials: tuple[int, ...]  # without the recommended one
    dimensions: tuple[str, ...]  # in which they differ from it; none affects the cost
    difference: float  # the largest by which the emissions of one differ from its, as a share


def equal_costs(data: StudyData, rec: Recommendation) -> EqualCosts | None:
    """Return the trials whose settings cost as much as the recommended one's; None: none do.

    A dimension that doesn't affect the cost, such as the learning rate, can't have saved anything
    (`affecting_run_cost`). Repeats of one configuration are not among them.
    """
    if rec.params is None or not rec.emissions_kg_co2e or not data.config.settings_decide_cost:
        return None
    space = data.config.search.space
    free = tuple(space.free())
    deciding = affecting_run_cost(free, space.affects())
    alike = [
        record
        for record in data.records
        if record.trial != rec.trial
        and record.repeat_of is None
        and record.meets(rec.target)
        and record.emissions_kg_co2e is not None
        and all(record.params.value(name) == rec.params.value(name) for name in deciding)
    ]
    if not alike:
        return None
    shares = [(record.emissions_kg_co2e or 0.0) / rec.emissions_kg_co2e for record in alike]
    return EqualCosts(
        trials=tuple(record.trial for record in alike),
        dimensions=tuple(
            name
            for name in free
            if any(record.params.value(name) != rec.params.value(name) for record in alike)
        ),
        difference=max(abs(share - 1) for share in shares),
    )
