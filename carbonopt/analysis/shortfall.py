"""Shortfall of a study whose target no trial met, and answers at the ends of the space."""

import itertools
import math
import statistics
from typing import Literal

from pydantic import Field

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import Target
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen
from carbonopt.space.search_space import highest, lowest
from carbonopt.spec.space_settings import Choices, Domain, Fixed
from carbonopt.spec.study_data import StudyData

# In nats, or a share of errors: seeds change a loss by about as much (0.2 to 0.8 % of a perplexity
# in recorded runs).
FLAT_LOSS = 0.002
FLAT_OF_RANGE = 0.01  # share of a trial's losses' range, where a loss may have any scale
AT_THE_END = 0.05  # share of a range within which a value counts as at one of its ends

End = Literal["lowest", "highest"]


class Trend(Frozen):
    """The change of a trial's loss over its last steps, as many as usually lie between two."""

    fell_by_loss: float  # negative: it rose
    steps: int
    best_value: float  # best quality of all its evaluations
    best_at_step: int
    flat_loss: float = Field(exclude=True)  # a smaller change is none

    @property
    def falls(self) -> bool:
        return self.fell_by_loss > self.flat_loss

    @property
    def rises(self) -> bool:
        return self.fell_by_loss < -self.flat_loss


class Edge(Frozen):
    """A trial's value of a dimension that lies at an end of its domain, or nearly so.

    The study ran other trials with another value.
    """

    dimension: str
    end: End
    value: float
    last: float  # the value at that end


class Shortfall(Frozen):
    """The shortfall of the closest complete trial."""

    missing_loss: float  # its loss minus the target's
    trend: Trend | None  # None: it was evaluated once
    # epochs that it had, if they are the most that the space allows and its loss still fell
    most_epochs: float | None
    # epochs that it had, if they are the most that the space allows; None: they are not, or it was
    # evaluated once
    epochs_at_most: float | None
    edges: tuple[Edge, ...]


def shortfall(data: StudyData, trial: int, value: float, target: Target) -> Shortfall | None:
    """Return what the closest trial lacks, and in which direction the trials point.

    None: it did not complete or does not miss the target, so that its figures say nothing about
    what it lacks.

    Args:
        value: the quality of its configuration, which can be a mean over seeds.
    """
    closest = next(record for record in data.records if record.trial == trial)
    if closest.state is not TrialState.COMPLETE or target.is_met_by(value):
        return None
    space, params, trend = data.config.search.space, closest.params, _trend(closest)
    # Fixed epochs can be raised, too; whether the trial would gain by it, only its curve can say.
    epochs = space["epochs"]
    most = (
        params.epochs is not None
        and epochs is not None
        and _at_end(epochs, params.epochs) == "highest"
    )
    most = most or isinstance(epochs, Fixed)
    missing_loss = target.quality.loss_of(value) - target.quality.loss_of(target.value)
    epochs_at_most = params.epochs if most and trend is not None else None
    # Where there is no curve, epochs at the end of the space are the only sign that more may help.
    more = ("epochs",) if trend is None else ()
    return Shortfall(
        missing_loss=missing_loss,
        trend=trend,
        most_epochs=epochs_at_most if trend is not None and trend.falls else None,
        epochs_at_most=epochs_at_most,
        edges=edges(data, params, *more),
    )


def edges(data: StudyData, params: TrialParams, *more: str) -> tuple[Edge, ...]:
    """Return the edges that batch, learning rate and further dimensions have reached.

    A script's study need not have these dimensions.
    """
    at_end = []
    for name in ("global_batch_size", "learning_rate", *more):
        setting, domain = getattr(params, name), data.config.search.space[name]
        if setting is None or domain is None:
            continue
        end = _at_end(domain, setting)
        tried_others = any(
            record.evals and getattr(record.params, name) != setting for record in data.records
        )
        if end is not None and tried_others and not (name == "global_batch_size" and setting == 1):
            last = float(lowest(domain)) if end == "lowest" else highest(domain)
            at_end.append(Edge(dimension=name, end=end, value=setting, last=last))
    return tuple(at_end)


def recommended_edges(data: StudyData, params: TrialParams | None) -> tuple[Edge, ...]:
    """Return the edges beyond which a cheaper configuration may lie; more epochs cost more.

    Args:
        params: None where nothing is recommended.
    """
    at_end = () if params is None else edges(data, params, "epochs")
    return tuple(edge for edge in at_end if (edge.dimension, edge.end) != ("epochs", "highest"))


def _trend(record: TrialRecord) -> Trend | None:
    quality = record.quality.of
    points = [
        (point.loss(quality), point.step, point.value)
        for point in record.evals
        if point.value is not None
    ]
    if len(points) < 2:
        return None
    losses, steps = [loss for loss, *_ in points], [step for _, step, _ in points]
    loss, step, _ = points[-1]
    # The last evaluation, at the end of a run, may follow another one at once.
    usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(steps))
    loss_before, step_before, _ = next(
        point for point in reversed(points) if point[1] <= step - usual / 2
    )
    _, best_step, best_value = min(points)
    fell_by = loss_before - loss
    is_scaled = quality.link == "identity"
    return Trend(
        fell_by_loss=fell_by,
        steps=step - step_before,
        best_value=best_value,
        best_at_step=best_step,
        flat_loss=FLAT_OF_RANGE * (max(losses) - min(losses)) if is_scaled else FLAT_LOSS,
    )


def _at_end(domain: Domain, value: float) -> End | None:
    """Return which end of its domain a value is at.

    None: it lies inside, or the domain has one value only.
    """
    if isinstance(domain, Fixed):
        return None
    if isinstance(domain, Choices):
        values, share = [float(min(domain.choices)), float(max(domain.choices)), value], 0.0
    else:
        values, share = [domain.low, domain.last, value], AT_THE_END
        values = list(map(math.log, values)) if domain.log else values
    low, high, place = values
    if low == high:
        return None
    place = (place - low) / (high - low)
    return "lowest" if place <= share else "highest" if place >= 1 - share else None
