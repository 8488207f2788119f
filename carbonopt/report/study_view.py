"""What sections are made from: a study's data, and what the analyses found, each run once and when it is asked for."""

import json
from functools import cached_property
from typing import Any

from pydantic_core import to_json

from carbonopt.analysis.amortisation import Amortisation, amortisation
from carbonopt.analysis.audit import Audit, audit
from carbonopt.analysis.batch import BatchEffect, batch_effect
from carbonopt.analysis.by_target import TargetRange, recommendation_by_target
from carbonopt.analysis.comparison import Comparison, comparison
from carbonopt.analysis.confidence import by_means
from carbonopt.analysis.diminishing_returns import DiminishingReturns, diminishing_returns
from carbonopt.analysis.footprint import Footprint, footprint
from carbonopt.analysis.front import knee
from carbonopt.analysis.influence import Influence, NotKnown, influence
from carbonopt.analysis.recommend import Recommendation, recommend
from carbonopt.analysis.regions import InRegion, regions
from carbonopt.analysis.replicates import Repeats, repeats
from carbonopt.analysis.repricing import Repricing, repricing
from carbonopt.analysis.stages import Stages, stages
from carbonopt.core.quality import Quality
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord
from carbonopt.energy.intensity import countries
from carbonopt.report.caveats import caveat
from carbonopt.report.document import Caveat
from carbonopt.report.figures.points import Scatter, scatter


class StudyView:
    """`target`: another one than the study's own. `results`: of analyses that have run already, by name."""

    def __init__(self, data: StudyData, target: float | None = None, **results: Any) -> None:
        self.data, self.target = data, target
        self.quality: Quality = data.config.target.quality
        assert results.keys() <= vars(StudyView).keys(), f"no analyses: {results.keys() - vars(StudyView).keys()}"
        self.__dict__ |= results

    @cached_property
    def recommendation(self) -> Recommendation:
        return recommend(self.data, self.target)

    @cached_property
    def recommendation_by_target(self) -> tuple[TargetRange, ...]:
        return recommendation_by_target(self.data)

    @cached_property
    def knee(self) -> int | None:
        return knee(by_means(self.data.records))

    @cached_property
    def comparison(self) -> Comparison | None:
        return comparison(self.data, self.recommendation)

    @cached_property
    def influence(self) -> tuple[Influence | NotKnown, ...]:
        return influence(self.data)

    @cached_property
    def batch(self) -> BatchEffect | None:
        return batch_effect(self.data)

    @cached_property
    def diminishing_returns(self) -> DiminishingReturns | None:
        return diminishing_returns(self.data, self.recommendation)

    @cached_property
    def spent(self) -> Footprint:
        return footprint(self.data)

    @cached_property
    def stages(self) -> Stages:
        return stages(self.data)

    @cached_property
    def amortisation(self) -> Amortisation | None:
        return amortisation(self.data, self.recommendation, self.stages)

    @cached_property
    def repeated(self) -> tuple[Repeats, ...]:
        return repeats(self.data.records)

    @cached_property
    def priced(self) -> Repricing | None:
        return repricing(self.data, self.recommendation)

    @cached_property
    def regions(self) -> tuple[InRegion, ...]:
        return regions(self.data, self.recommendation, countries())

    @cached_property
    def audited(self) -> Audit | None:
        return audit(self.data)

    @cached_property
    def plot(self) -> Scatter:
        return scatter(self.data, self.recommendation, self.repeated, self.quality)

    def results(self) -> dict[str, Any]:
        """What every analysis found, in full precision, for report.json; JSON has no infinity: null stands for it."""
        names = [name for name, made in vars(StudyView).items() if isinstance(made, cached_property) and name != "plot"]
        found = json.loads(to_json({name: getattr(self, name) for name in names}, inf_nan_mode="null"))
        return {**found, "recommendation": self.recommendation.as_json()}

    def caveat(self, key: str, /, **numbers: Any) -> Caveat:
        return caveat(self.quality, key, **numbers)

    def record(self, trial: int | None) -> TrialRecord | None:
        return next((record for record in self.data.records if record.trial == trial), None)
