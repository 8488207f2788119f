"""The measure of how good a trained model is, and the target that it has to reach.

A quality is one number with a name, a direction and bounds. It is made of a sum over all ranks,
divided once by a count. No other package decides about a direction or a scale by a quality's name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MISSING = "–"  # shown where a figure is not known
_LEAST_PERCENT = 5.0  # from which on a value or a target is taken for a percentage


@dataclass(frozen=True)
class Quality:
    name: str  # in study files and records
    label: str  # at the head of a column or an axis
    definition: str  # a sentence, for papers
    direction: Literal["minimize", "maximize"]  # the direction that is better
    lowest: float  # lowest value that is possible
    highest: float
    # how the value is made from sum ÷ count: its exponential, or itself
    value_of_mean: Literal["exp", "identity"] = "identity"
    # Scale of the loss in learning curves: with "log" it falls by power laws (arXiv 2001.08361),
    # with "identity" it can be negative.
    link: Literal["log", "identity"] = "log"
    # True if search.pruning.target is on by default: only where recorded curves show that it is
    # right (reports/search.md).
    stops_for_target: bool = False
    is_share_of_examples: bool = False  # of the evaluation examples, each of which counts alike

    @property
    def bound_word(self) -> str:
        return "at most" if self.direction == "minimize" else "at least"

    @property
    def with_article(self) -> str:
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def bounds_text(self) -> str:
        if not math.isfinite(self.lowest):
            return "any number"
        return f"at least {self.lowest:g}" + (
            f" and at most {self.highest:g}" if math.isfinite(self.highest) else ""
        )

    @property
    def best(self) -> float:
        return self.lowest if self.direction == "minimize" else self.highest

    def value(self, total: float, count: float) -> float:
        """Return the value of a sum over all ranks and its count.

        It is infinite where it is too large for a float, and NaN stays NaN.
        """
        mean = total / count
        try:
            return math.exp(mean) if self.value_of_mean == "exp" else mean
        except OverflowError:
            return math.inf

    def loss(self, mean: float) -> float:
        """Return the loss that is modelled, where lower is better, from sum ÷ count.

        Examples are nats per token and the error rate.
        """
        return self.highest - mean if self.is_share else self.rank(mean)

    @property
    def is_share(self) -> bool:
        """True if the quality counts examples: the loss is then a share of errors."""
        return self.direction == "maximize" and math.isfinite(self.highest)

    def mean_of(self, value: float) -> float:
        """Return the sum ÷ count that makes a value."""
        return math.log(value) if self.value_of_mean == "exp" else value

    def loss_of(self, value: float) -> float:
        """Return the loss of a value, such as the target's."""
        return self.loss(self.mean_of(value))

    def value_of_loss(self, loss: float) -> float:
        """Return the value that has a loss: the inverse of `loss_of`."""
        return self.value(self.highest - loss if self.is_share else self.rank(loss), 1)

    def rank(self, value: float) -> float:
        """Return a value for sorting and comparing, where lower is better.

        The function is its own inverse.
        """
        return value if self.direction == "minimize" else 0.0 - value  # not -0.0 for 0

    def rank_to_rounding(self, value: float) -> float:
        """Return `rank`, rounded to six digits.

        Differences after these come from sums of float32 in another order (other ranks, ZeRO stages
        or kernels), which is no better quality.
        """
        return float(f"{self.rank(value):.6g}")

    def scaled(self, value: float) -> float:
        """Return a value on the scale where seeds move all configurations alike.

        Means are taken on this scale, and lower is better.
        """
        return math.log(value) if self.value_of_mean == "exp" else self.rank(value)

    def unscaled(self, scaled: float) -> float:
        """Undo `scaled`: return the value whose scaled value this is.

        The mean of values is `unscaled` of the mean of `scaled`.
        """
        return self.value(scaled, 1) if self.value_of_mean == "exp" else self.rank(scaled)

    def unscaled_deviation(self, value: float, deviation: float) -> float:
        """Convert a standard deviation on the scale of `scaled` to one of values about `value`."""
        return value * deviation if self.value_of_mean == "exp" else deviation

    def worse_by(self, value: float, reference: float) -> float:
        """Return the share of a reference's size by which a value is worse.

        It is negative if the value is better. Any difference from 0 is an infinite share of it.
        """
        if not reference:
            difference = self.rank(value)
            return math.copysign(math.inf, difference) if difference else 0.0
        share = value / reference - 1 if self.direction == "minimize" else 1 - value / reference
        return share if reference > 0 else -share

    def text(self, value: float | None) -> str:
        """Return a value with four significant digits, zeros at the end included.

        A target then reads like the values that are compared with it. More digits would be noise:
        in recorded runs, seeds of one configuration differed by 0.2 to 0.8 % in perplexity.
        """
        return MISSING if value is None or not math.isfinite(value) else f"{value:#.4g}".rstrip(".")

    def text_beside(self, value: float | None, other: float) -> str:
        """Return a value as `text` does, with as many more digits as tell it from another one."""
        if value is None or not math.isfinite(value) or value == other:
            return self.text(value)
        texts = (f"{value:#.{digits}g}".rstrip(".") for digits in range(4, 18))
        return next(text for text in texts if float(text) != other)

    def target_text(self, value: float) -> str:
        """Return a target as it was given: with all its digits where four are not all."""
        text = self.text(value)
        return text if text == MISSING or float(text) == value else repr(value)

    def loss_text(self, loss: float) -> str:
        """Return a loss, or a difference of two, with its unit."""
        unit = (
            " nats a token"
            if self.value_of_mean == "exp"
            else " (share of errors)"
            if self.is_share
            else ""
        )
        return f"{loss:.3g}{unit}"

    def relaxed(self, value: float, share: float) -> float:
        """Return a value that is worse than this one by a share of its size."""
        worse = share * abs(value)
        return value + worse if self.direction == "minimize" else value - worse

    def beyond(self, value: float) -> str | None:
        """Return the bound that a value breaks, in words; None if it breaks none.

        A value that is not finite is no result, and breaks no bound.
        """
        if not (value < self.lowest or self.highest < value < math.inf):
            return None
        word, bound = (
            ("at least", self.lowest) if value < self.lowest else ("at most", self.highest)
        )
        # Six digits may round it to the bound.
        text = repr(float(value)) if float(f"{value:g}") == bound else f"{value:g}"
        return f"must be {word} {bound:g}, but is {text}"

    def problem(self, value: float | None, total: float | None, count: int | None) -> str | None:
        """Return why a value can't be, or the sum and the count that make it; None if it can.

        Arguments that are None aren't known.
        """
        by_count = None if total is None or count is None else self.value(total, count)
        if (
            value is not None
            and by_count is not None
            and not math.isclose(value, by_count, rel_tol=1e-9)
        ):
            return f"is {value:g}, but its sum and count make {by_count:g}"
        return next(
            (
                problem
                for each in (value, by_count)
                if each is not None and (problem := self.beyond(each))
            ),
            None,
        )


PERPLEXITY = Quality(
    name="perplexity",
    label="Perplexity",
    definition=(
        "Perplexity is the exponential of the mean negative log-likelihood over all target tokens"
        " of the evaluation text."
    ),
    direction="minimize",
    lowest=1.0,  # each token was predicted with certainty
    highest=math.inf,
    value_of_mean="exp",
    stops_for_target=True,
)
ACCURACY = Quality(
    name="accuracy",
    label="Accuracy",
    definition="Accuracy is the share of the evaluation examples that were predicted right.",
    direction="maximize",
    is_share_of_examples=True,
    lowest=0.0,
    highest=1.0,
)

MACRO_F1 = Quality(
    name="macro_f1",
    label="Macro-F1",
    definition=(
        "Macro-F1 is the mean over all classes of the harmonic mean of a class's precision and"
        " recall on the evaluation examples."
    ),
    direction="maximize",
    lowest=0.0,
    highest=1.0,
)
EXACT_MATCH = Quality(
    name="exact_match",
    label="Exact match",
    definition=(
        "Exact match is the share of the evaluation examples whose generated text equals the"
        " expected one; runs of white space count as one space."
    ),
    direction="maximize",
    is_share_of_examples=True,
    lowest=0.0,
    highest=1.0,
    stops_for_target=True,
)
CANONICAL_MATCH = Quality(
    name="canonical_match",
    label="Canonical match",
    definition=(
        "Canonical match is the share of the evaluation examples whose generated SQL equals the"
        " expected one after sqlglot has brought both into one form."
    ),
    direction="maximize",
    is_share_of_examples=True,
    lowest=0.0,
    highest=1.0,
)
EXECUTION_MATCH = Quality(
    name="execution_match",
    label="Execution match",
    definition=(
        "Execution match is the share of the evaluation examples whose generated SQL returns the"
        " same rows from the database as the expected one."
    ),
    direction="maximize",
    is_share_of_examples=True,
    lowest=0.0,
    highest=1.0,
)
PREFERENCE_ACCURACY = Quality(
    name="preference_accuracy",
    label="Preference accuracy",
    definition=(
        "Preference accuracy is the share of the evaluation pairs whose chosen answer is rated"
        " above the rejected one."
    ),
    direction="maximize",
    is_share_of_examples=True,
    lowest=0.0,
    highest=1.0,
)
REWARD = Quality(
    name="reward",
    label="Reward",
    definition=(
        "Reward is the mean, over the evaluation prompts, of what the reward function or model"
        " gives to the completion that greedy decoding makes."
    ),
    direction="maximize",
    lowest=-math.inf,
    highest=math.inf,
    link="identity",
)

QUALITIES: dict[str, Quality] = {
    quality.name: quality
    for quality in (
        *(
            PERPLEXITY,
            ACCURACY,
            MACRO_F1,
            EXACT_MATCH,
            CANONICAL_MATCH,
            EXECUTION_MATCH,
            PREFERENCE_ACCURACY,
            REWARD,
        ),
    )
}


def quality_of(name: str, direction: Literal["minimize", "maximize"] | None) -> Quality:
    """Return the quality with a name.

    A name that carbonopt doesn't know, which a script reports, makes a quality with the given
    direction and without bounds.

    Raises:
        ValueError: if the name is unknown and there is no direction.
    """
    if name in QUALITIES:
        return QUALITIES[name]
    if direction is None:
        raise ValueError(f"must be one of {', '.join(QUALITIES)}, but is {name!r}")
    definition = f"The quality, {name}, is what the training script reports."
    return Quality(
        name, name, definition, direction, lowest=-math.inf, highest=math.inf, link="identity"
    )


@dataclass(frozen=True)
class Target:
    """The value that a quality has to reach."""

    quality: Quality
    value: float

    def is_met_by(self, value: float | None) -> bool:
        """Return whether a value meets the target; None and NaN don't."""
        return value is not None and self.quality.rank(value) <= self.quality.rank(self.value)

    def shortfall(self, value: float) -> float:
        """Return by how much a value misses the target, on the quality's own scale.

        See `Quality.scaled`. It is negative if the value is better.
        """
        if self.quality.value_of_mean == "exp":
            return math.log(value / self.value)
        return self.quality.scaled(value) - self.quality.scaled(self.value)

    def is_on_other_scale(self, values: Sequence[float]) -> bool:
        """Return whether the target may be a share and the values percents, or the reverse.

        Only a quality without bounds may have such values: 82 then meets a target of 0.9. A loss
        above 1 is no percent, so percents count from 5 on.
        """
        percents = (_LEAST_PERCENT, 100.0)
        if not values or math.isfinite(self.quality.highest):
            return False
        if 0 < self.value <= 1:
            least = max(percents[0], 10 * self.value)
            return all(least <= value <= percents[1] for value in values)
        return percents[0] <= self.value <= percents[1] and all(0 <= value <= 1 for value in values)

    def as_json(self) -> dict[str, str | float]:
        """Return the target as in study files and in the output of `recommend --json`.

        An example is {"quality": "perplexity", "at_most": 18.0}.
        """
        return {"quality": self.quality.name, self.quality.bound_word.replace(" ", "_"): self.value}

    def __str__(self) -> str:
        return f"{self.quality.name} {self.value:g}"
