"""The evaluations of a trial, its learning curve."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, overload

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema, from_json

from carbonopt.core.errors import BadInput
from carbonopt.core.quality import Quality
from carbonopt.core.refusals import first_refusal
from carbonopt.core.values import Finite, Frozen, Whole

# A training has learned if its loss has fallen by more than this share, and by more than this: 5 %
# of a perplexity, or 5 points of a share. Losses of evaluations fluctuate by less.
_LEARNED_SHARE, _LEARNED = 0.1, 0.05


class EvalPoint(Frozen):
    step: Whole
    # training tokens seen so far, over all ranks; None: they were not recorded, or not reported, or
    # the task has no fixed number of tokens in a step
    tokens: Whole | None
    value: float | None  # value of the quality; None: it was NaN or infinite
    sum: float | None  # the sum over all ranks that makes the value; None: it was NaN or infinite
    count: int = Field(ge=1)  # the number of examples or tokens that the sum is over
    train_energy_kwh: Finite | None = None  # energy of the training window up to here
    # values of other qualities from the same evaluation, by name
    other_qualities: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def of(
        cls,
        quality: Quality,
        total: float,
        count: int,
        *,
        step: int,
        tokens: int | None,
        **others: float,
    ) -> "EvalPoint":
        """Make an evaluation from a sum over all ranks and its count.

        Args:
            others: values of other qualities, by name.
        """
        value, summed = (
            x if math.isfinite(x) else None for x in (quality.value(total, count), total)
        )
        finite = {name: other for name, other in others.items() if math.isfinite(other)}
        return cls(
            step=step, tokens=tokens, count=count, value=value, sum=summed, other_qualities=finite
        )

    def loss(self, quality: Quality) -> float:
        """Return the loss as `Quality.loss` does; NaN where the sum was not finite."""
        return math.nan if self.sum is None else quality.loss(self.sum / self.count)


def breakdown(losses: Sequence[float]) -> int | None:
    """Return the place of the first loss after a training's breakdown; None: it did not break down.

    A training breaks down if its loss, after it had fallen by more than a tenth and by more than
    0.05, rises above the first one from one evaluation to the next, and stays above it.

    Args:
        losses: the losses of a training's evaluations, in their order.
    """
    stays_above = len(losses)
    while stays_above > 0 and losses[stays_above - 1] > losses[0]:
        stays_above -= 1
    if stays_above in (0, len(losses)):
        return None
    fell = losses[0] - losses[stays_above - 1]
    has_learned = fell > max(_LEARNED_SHARE * abs(losses[0]), _LEARNED)
    return stays_above if has_learned else None


@dataclass(frozen=True)
class KnownEnd:
    """The last evaluation of a complete trial, as far as the trial's record knows it.

    The trial's quality is that of its last evaluation, which no later step than its last one has.
    """

    value: float | None  # of the quality; None, as for the fields below: not known
    sum: float | None
    count: int | None
    total_steps: int | None

    def check(self, last: EvalPoint) -> None:
        """Raise ValueError if an evaluation can't be the last one."""
        pairs = {name: (getattr(last, name), getattr(self, name)) for name in _OF_QUALITY}
        for name, (own, known) in pairs.items():
            if known is not None and (own is None or not math.isclose(own, known, rel_tol=1e-9)):
                raise ValueError(f"evals: the last {name} is {own}, but the quality's is {known}")
        if self.total_steps is not None and last.step > self.total_steps:
            raise ValueError(
                f"evals: the last step is {last.step}, but total_steps is {self.total_steps}"
            )


_OF_QUALITY = ("value", "sum", "count")  # fields of an evaluation and of a quality


class StoredEvaluations(Sequence[EvalPoint]):
    """A trial's evaluations in the JSON that stores them, which is parsed when it is asked for.

    A script can have reported ten thousand of them, and few questions look into any.

    Args:
        text: JSON, a list of evaluations.
        quality: the quality that they are of.
        whose: the trial and its study, for errors.
        end: what is known of the last one; None: the trial is not complete.

    Raises:
        BadInput: when an evaluation is first asked for, if the text is no list of evaluations, or
            the last one can't be.
    """

    def __init__(
        self, text: str, quality: Quality, whose: str, end: KnownEnd | None = None
    ) -> None:
        self._text, self._quality, self._whose, self._end = text, quality, whose, end

    @cached_property
    def _points(self) -> tuple[EvalPoint, ...]:
        with self._damage_named():
            points = _POINTS.validate_json(self._text)
            self._check(points, points[-1:])
        self._text = ""
        return points

    def _check(self, points: Sequence[EvalPoint], last: Sequence[EvalPoint]) -> None:
        check_evaluations(points, self._quality)
        if self._end is not None and last:
            self._end.check(last[0])

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            refusal = first_refusal(error, lambda place: list(EvalPoint.model_fields))
            raise self._damaged(f"evals: {refusal.text.removesuffix('.')}") from error
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, why: str) -> BadInput:
        return BadInput(f"{self._whose} is damaged: {why}; restore it from a copy.")

    @property
    def is_parsed(self) -> bool:
        """Whether all evaluations have been made, and are kept."""
        return "_points" in vars(self)

    def losses(self) -> list[float]:
        """Return the losses in order, NaN where a sum was not finite, from the text.

        To make all evaluations and keep them takes ten times as long, and much memory. They must
        not have been made yet.
        """
        with self._damage_named():
            stored = self._stored()
            try:
                return [
                    math.nan
                    if one["sum"] is None
                    else self._quality.loss(one["sum"] / one["count"])
                    for one in stored
                ]
            except (KeyError, TypeError, ZeroDivisionError) as error:
                raise ValueError(f"evals: an evaluation has no sum and count ({error})") from error

    def __bool__(self) -> bool:
        return bool(self._points) if self.is_parsed else self._text[1:].lstrip() != "]"

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[EvalPoint]:
        return iter(self._points)

    @overload
    def __getitem__(self, index: int) -> EvalPoint: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[EvalPoint, ...]: ...
    def __getitem__(self, index: int | slice) -> EvalPoint | tuple[EvalPoint, ...]:
        if isinstance(index, slice) or self.is_parsed:
            return self._points[index]
        # Often only the last one is needed: to make all of them takes ten times as long.
        with self._damage_named():
            stored = self._stored()
        one = stored[index]  # raises IndexError where a tuple does
        with self._damage_named():
            (point,) = _POINTS.validate_python([one])
            self._check([point], [point] if index in (-1, len(stored) - 1) else [])
        return point

    def _stored(self) -> list[Any]:
        try:
            stored: list[Any] = from_json(self._text)
        except ValueError as error:
            raise ValueError(f"evals: its text can't be read: {error}") from error
        return stored

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._points == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def check_evaluations(points: Sequence[EvalPoint], quality: Quality) -> None:
    """Raise ValueError if an evaluation can't be what it says, or if their steps don't rise."""
    for point in points:
        if problem := quality.problem(point.value, point.sum, point.count):
            raise ValueError(f"evals: at step {point.step} {quality.name} {problem}")
    if any(earlier.step >= later.step for earlier, later in itertools.pairwise(points)):
        raise ValueError(f"evals: steps must rise, but are {[point.step for point in points]}")


_POINTS = TypeAdapter(tuple[EvalPoint, ...])


class _LeftAsStored:
    """Pydantic's schema of a tuple of evaluations that leaves StoredEvaluations as they are."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def taken(given: Any, parse: Callable[[Any], Any]) -> Any:
            return given if isinstance(given, StoredEvaluations) else parse(given)

        def dumped(points: Sequence[EvalPoint], dump: Callable[[Any], Any]) -> Any:
            return dump(tuple(points))

        return core_schema.no_info_wrap_validator_function(
            taken,
            handler.generate_schema(tuple[EvalPoint, ...]),
            serialization=core_schema.wrap_serializer_function_ser_schema(dumped),
        )


Evaluations = Annotated[StoredEvaluations | tuple[EvalPoint, ...], _LeftAsStored]


def broke_down_at(evaluations: Evaluations, quality: Quality) -> int | None:
    """Return the place of the first evaluation after a training's breakdown, see `breakdown`."""
    if isinstance(evaluations, StoredEvaluations) and not evaluations.is_parsed:
        return breakdown(evaluations.losses())
    # The live page asks this of all trials whenever one changes.
    if not evaluations or evaluations[-1].loss(quality) <= evaluations[0].loss(quality):
        return None
    return breakdown([point.loss(quality) for point in evaluations])
