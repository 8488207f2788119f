"""A study's data and its analyses, from which the sections are made.

Each analysis runs once, when it is asked for.
"""

import json
from functools import cached_property
from typing import Any

from pydantic_core import to_json

from carbonopt.analysis.alike import alike
from carbonopt.analysis.batch import batch_effect
from carbonopt.analysis.by_node import by_node
from carbonopt.analysis.comparison import comparison, diminishing_returns
from carbonopt.analysis.confidence import by_means
from carbonopt.analysis.equal_costs import equal_costs
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.front import knee
from carbonopt.analysis.gpu_memory import measured_memory
from carbonopt.analysis.influence import influence
from carbonopt.analysis.overoptimisation import overoptimisation
from carbonopt.analysis.probes import probes
from carbonopt.analysis.pruning_audit import audit
from carbonopt.analysis.recommend import recommend, recommendation_by_target
from carbonopt.analysis.repeated_configurations import repeats
from carbonopt.analysis.repricing import regions, repricing
from carbonopt.analysis.scaling import scaling
from carbonopt.analysis.shortfall import recommended_edges
from carbonopt.analysis.stages import amortisation, counts_whole_processes, stages
from carbonopt.analysis.training_work import training_work
from carbonopt.analysis.waiting import waiting
from carbonopt.carbon.intensity import countries
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import Quality
from carbonopt.core.trial import TrialRecord
from carbonopt.core.values import Scalar
from carbonopt.report.caveats import caveat
from carbonopt.report.document import Caveat, Figure
from carbonopt.report.figures.points import scatter
from carbonopt.spec.study_data import StudyData


class StudyView:
    """A study's data, with each analysis as a cached property.

    Args:
        data: The study.
        target: A target to use in place of the study's own.
        results: Results of analyses that have already run, by name.
    """

    def __init__(self, data: StudyData, target: float | None = None, **results: Any) -> None:
        self.data, self.target = data, target
        self.quality: Quality = data.config.quality
        # figures that several sections show, by name, once they are drawn
        self.figures: dict[str, Figure | None] = {}
        assert results.keys() <= vars(StudyView).keys(), (
            f"no analyses: {results.keys() - vars(StudyView).keys()}"
        )
        self.__dict__ |= results

    varied = cached_property(lambda self: self.data.varied)
    recommendation = cached_property(lambda self: recommend(self.data, self.target))
    recommendation_by_target = cached_property(lambda self: recommendation_by_target(self.data))
    knee = cached_property(lambda self: knee(by_means(self.data.records)))
    comparison = cached_property(lambda self: comparison(self.data, self.recommendation))
    equal_costs = cached_property(lambda self: equal_costs(self.data, self.recommendation))
    influence = cached_property(lambda self: influence(self.data))
    alike = cached_property(lambda self: alike(self.data))
    # None where only whole processes are measured: an epoch's share of one, with its imports and
    # evaluations, says little about the batch size.
    batch = cached_property(
        lambda self: None if counts_whole_processes(self.data) else batch_effect(self.data)
    )
    scaling = cached_property(lambda self: scaling(self.data, self.target))
    # The search space, where carbonopt chose it.
    auto = cached_property(lambda self: self.data.prepared and self.data.prepared.auto)
    memory = cached_property(lambda self: measured_memory(self.data))
    diminishing_returns = cached_property(
        lambda self: diminishing_returns(self.data, self.recommendation)
    )
    overoptimisation = cached_property(
        lambda self: overoptimisation(self.data, self.recommendation)
    )
    edges = cached_property(lambda self: recommended_edges(self.data, self.recommendation.params))
    spent = cached_property(lambda self: footprint(self.data))
    work = cached_property(lambda self: training_work(self.data))
    by_node = cached_property(lambda self: by_node(self.data))
    stages = cached_property(lambda self: stages(self.data))
    probes = cached_property(lambda self: probes(self.data))
    amortisation = cached_property(
        lambda self: amortisation(self.data, self.recommendation, self.stages)
    )
    repeated = cached_property(lambda self: repeats(self.data.records))
    priced = cached_property(lambda self: repricing(self.data, self.recommendation))
    waiting = cached_property(lambda self: waiting(self.data))
    regions = cached_property(lambda self: regions(self.data, self.recommendation, countries()))
    audited = cached_property(lambda self: audit(self.data))
    plot = cached_property(
        lambda self: scatter(self.data, self.recommendation, self.repeated, self.quality)
    )

    def results(self) -> dict[str, Any]:
        """Return what every analysis found, in full precision, for report.json.

        JSON has no infinity and no NaN: null stands for them.
        """
        names = [
            name
            for name, made in vars(StudyView).items()
            if isinstance(made, cached_property) and name != "plot"
        ]
        computed = json.loads(
            to_json({name: getattr(self, name) for name in names}, inf_nan_mode="null")
        )
        return {**computed, "recommendation": self.recommendation.as_json()}

    def caveat(self, key: str, /, **numbers: Any) -> Caveat:
        return caveat(self.quality, key, **numbers)

    def settings(self, params: TrialParams) -> dict[str, Scalar]:
        """Return a configuration's settings by name.

        A script's world size is left out where it is 1, because its user has not set it.
        """
        settings = params.as_record()
        if self.data.config.is_script and params.world_size == 1:
            del settings["world_size"]
        return settings

    def record(self, trial: int | None) -> TrialRecord | None:
        return next((record for record in self.data.records if record.trial == trial), None)
