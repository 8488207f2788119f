"""What a study whose target nobody met says of the way to it."""

import math
from typing import Literal

from carbonopt.core.config import Choices, Dimension, Fixed
from carbonopt.core.study import StudyData
from carbonopt.core.trial import Frozen, TrialRecord, TrialState

# Nats. Seeds change a loss by as much (0.2 to 0.8 % of the perplexity in recorded runs): less is neither up nor down.
FLAT_NLL = 0.002
# Of a range: a value nearer than this to one of its ends is at that end.
AT_THE_END = 0.05

End = Literal["lowest", "highest"]


class Trend(Frozen):
    """Of a trial's loss over the last stretch between two evaluations."""

    fell_by_nll: float  # nats per token; negative: it rose
    steps: int
    lowest_perplexity: float  # of all its evaluations
    lowest_at_step: int

    @property
    def falls(self) -> bool:
        return self.fell_by_nll > FLAT_NLL

    @property
    def rises(self) -> bool:
        return self.fell_by_nll < -FLAT_NLL


class Edge(Frozen):
    """The closest trial has a dimension's last value, and those that the study ran with another one came no closer."""

    dimension: str
    end: End
    value: float


class Shortfall(Frozen):
    """Of the closest complete trial."""

    missing_nll: float  # by how much its loss is above the target's, nats per token
    trend: Trend | None  # None: it was evaluated once
    most_epochs: float | None  # it had as many as the space allows, and its loss still fell; None: not so
    edges: tuple[Edge, ...]


def shortfall(data: StudyData, trial: int, perplexity: float, target_perplexity: float) -> Shortfall | None:
    """What the closest trial lacks, and which way the trials point.

    Args:
        trial: the closest one.
        perplexity: of its configuration, which can be a mean over seeds.

    Returns:
        None if it did not complete or does not miss the target: then its figures say nothing of what it lacks.
    """
    closest = next(record for record in data.records if record.trial == trial)
    if closest.state is not TrialState.COMPLETE or perplexity <= target_perplexity:
        return None
    space, params = data.config.search.space, closest.params
    trend = _trend(closest)
    # Fixed epochs can be raised, too; that the trial would gain by it, its curve alone has to say.
    most = _at_end(space.epochs, params.epochs) == "highest" or isinstance(space.epochs, Fixed)
    edges = []
    for name in ("global_batch_size", "learning_rate"):
        value = getattr(params, name)
        end = _at_end(getattr(space, name), value)
        others = [record for record in data.records if record.evals and getattr(record.params, name) != value]
        if end is not None and others and not (name == "global_batch_size" and value == 1):
            edges.append(Edge(dimension=name, end=end, value=value))
    return Shortfall(
        missing_nll=math.log(perplexity) - math.log(target_perplexity),
        trend=trend,
        most_epochs=params.epochs if most and trend is not None and trend.falls else None,
        edges=tuple(edges),
    )


def _trend(record: TrialRecord) -> Trend | None:
    points = [point for point in record.evals if math.isfinite(point.perplexity)]
    if len(points) < 2:
        return None
    before, last = points[-2:]
    lowest = min(points, key=lambda point: (point.nll, point.step))
    return Trend(
        fell_by_nll=before.nll - last.nll,
        steps=last.step - before.step,
        lowest_perplexity=lowest.perplexity,
        lowest_at_step=lowest.step,
    )


def _at_end(dimension: Dimension, value: float) -> End | None:
    """Which end of its dimension a value has; None: it lies inside, or the dimension has one value only."""
    if isinstance(dimension, Fixed):
        return None
    if isinstance(dimension, Choices):
        low, high, share = float(min(dimension.choices)), float(max(dimension.choices)), 0.0  # type: ignore[type-var]
    else:
        low, high, share = dimension.low, dimension.high, AT_THE_END
    if low == high:
        return None
    if not isinstance(dimension, Choices) and dimension.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    place = (value - low) / (high - low)
    return "lowest" if place <= share else "highest" if place >= 1 - share else None
