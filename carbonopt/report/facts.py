"""Every number that a report shows, in full precision, once: data/report.json, which all pages are made of."""

import json
from typing import Any

from carbonopt.analysis.amortisation import Amortisation
from carbonopt.analysis.audit import Audit
from carbonopt.analysis.batch import BatchEffect
from carbonopt.analysis.by_target import TargetRange
from carbonopt.analysis.comparison import Comparison
from carbonopt.analysis.diminishing_returns import DiminishingReturns
from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.influence import Influence, NotKnown
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.regions import InRegion
from carbonopt.analysis.replicates import Repeats
from carbonopt.analysis.repricing import Repricing
from carbonopt.analysis.stages import Stages
from carbonopt.core.values import Frozen


class Facts(Frozen):
    """What the analysis of a study found."""

    recommendation: Recommendation
    recommendation_by_target: tuple[TargetRange, ...]  # for every target
    knee: int | None  # the front's, by trial number; None: fewer than three trials on it
    comparison: Comparison | None  # None: nothing is recommended, or it is its own baseline
    influence: tuple[Influence | NotKnown, ...]  # emissions, then perplexity
    batch: BatchEffect | None  # None: fewer than two batch sizes were tried
    diminishing_returns: DiminishingReturns | None  # None: no complete trial to look into
    spent: Footprint
    stages: Stages
    amortisation: Amortisation | None  # None: no first step was measured, or not the recommended one's
    repeated: tuple[Repeats, ...]
    priced: Repricing | None
    regions: tuple[InRegion, ...]  # the recommended run and the study elsewhere, by intensity; empty: there is no run
    audited: Audit | None

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: null stands for it."""
        return {**json.loads(self.model_dump_json()), "recommendation": self.recommendation.as_json()}
