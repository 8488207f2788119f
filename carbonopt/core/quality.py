"""How good a trained model is: one number with a name, a direction and bounds, and the target that it has to reach.

A quality is a sum over all ranks divided once by a count: a perplexity is the exponential of a mean negative
log-likelihood, an accuracy is a mean of zeros and ones. Whatever compares, ranks or models qualities asks this file for
the direction and the scale, so that no other room knows one of them by name.
"""

import math
from dataclasses import dataclass
from typing import Literal

MISSING = "–"  # where a figure is not known


@dataclass(frozen=True)
class Quality:
    """A quality.

    Args:
        name: in study files and records.
        label: at the head of a column or an axis.
        definition: a sentence, for papers.
        direction: of what is better.
        lowest, highest: that a value can have.
        value_of_mean: what becomes of sum ÷ count: its exponential, or itself.
        link: of the loss (see `loss`), on which learning curves are modelled. A logarithm for what falls by power laws
            (arXiv 2001.08361), the identity for what can be negative.
    """

    name: str
    label: str
    definition: str
    direction: Literal["minimize", "maximize"]
    lowest: float
    highest: float
    value_of_mean: Literal["exp", "identity"]
    link: Literal["log", "identity"]

    @property
    def bound_word(self) -> str:
        """What stands before a target."""
        return "at most" if self.direction == "minimize" else "at least"

    @property
    def bounds_text(self) -> str:
        """Of its values, in words."""
        return f"at least {self.lowest:g}" + (f" and at most {self.highest:g}" if math.isfinite(self.highest) else "")

    @property
    def best(self) -> float:
        """The best value that there can be."""
        return self.lowest if self.direction == "minimize" else self.highest

    def value(self, total: float, count: float) -> float:
        """The value of a sum over all ranks and its count: divided once. Infinite where it is too large for a float;
        NaN stays NaN."""
        mean = total / count
        if self.value_of_mean == "identity":
            return mean
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf

    def loss(self, mean: float) -> float:
        """What is modelled: lower is better. Of a perplexity the mean negative log-likelihood in nats, of an accuracy
        the error rate.

        Args:
            mean: sum ÷ count.
        """
        if self.direction == "minimize":
            return mean
        return self.highest - mean if self.is_share else -mean

    @property
    def is_share(self) -> bool:
        """Whether it counts examples: the loss is then a share of errors."""
        return self.direction == "maximize" and math.isfinite(self.highest)

    def loss_of(self, value: float) -> float:
        """The loss of a value, such as the target's."""
        return self.loss(math.log(value) if self.value_of_mean == "exp" else value)

    def rank(self, value: float) -> float:
        """For sorting and comparing: lower is better. Its own inverse."""
        return value if self.direction == "minimize" else -value

    def scaled(self, value: float) -> float:
        """On the scale where seeds move all configurations alike and means are taken, lower being better: the logarithm
        of a perplexity, minus an accuracy."""
        return math.log(value) if self.value_of_mean == "exp" else self.rank(value)

    def unscaled(self, scaled: float) -> float:
        """The inverse of `scaled`: the mean of values is `unscaled` of the mean of `scaled`."""
        return self.value(scaled, 1) if self.value_of_mean == "exp" else self.rank(scaled)

    def unscaled_deviation(self, value: float, deviation: float) -> float:
        """A standard deviation on that scale as one of the values about this one."""
        return value * deviation if self.value_of_mean == "exp" else deviation

    def worse_by(self, value: float, reference: float) -> float:
        """The share of a reference by which a value is worse; negative: it is better, than 0 by an infinite share."""
        if not reference:
            return 0.0 if value == reference else -math.inf
        return value / reference - 1 if self.direction == "minimize" else 1 - value / reference

    def text(self, value: float | None) -> str:
        """Four significant digits, zeros at the end included, so that a target reads like what is compared with it. As
        a rule of thumb more would be noise: in recorded runs of a small GPT on an H200, seeds of one configuration
        differed by 0.2 to 0.8 % in perplexity."""
        return MISSING if value is None or not math.isfinite(value) else f"{value:#.4g}".rstrip(".")

    def relaxed(self, value: float, share: float) -> float:
        """A value that is worse by a share of itself."""
        return value * (1 + share if self.direction == "minimize" else 1 - share)

    def beyond(self, value: float) -> str | None:
        """The bound that a value breaks, in words; None: it can be one. What is not finite passes: it is no result, and
        sorted out wherever results are compared."""
        if value < self.lowest:
            return f"must be at least {self.lowest:g}, but is {value:g}"
        if self.highest < value < math.inf:
            return f"must be at most {self.highest:g}, but is {value:g}"
        return None

    def problem(self, value: float | None, total: float | None, count: int | None) -> str | None:
        """Why a value with the sum and the count that it is made of can't be, in words; None: it can. None of them:
        not known."""
        values = [value, None if total is None or count is None else self.value(total, count)]
        return next((found for one in values if one is not None and (found := self.beyond(one))), None)


PERPLEXITY = Quality(
    name="perplexity",
    label="Perplexity",
    definition="Perplexity is the exponential of the mean negative log-likelihood over all target tokens of the "
    "evaluation text.",
    direction="minimize",
    lowest=1.0,  # each token was certain
    highest=math.inf,
    value_of_mean="exp",
    link="log",
)
ACCURACY = Quality(
    name="accuracy",
    label="Accuracy",
    definition="Accuracy is the share of the evaluation examples that were predicted right.",
    direction="maximize",
    lowest=0.0,
    highest=1.0,
    value_of_mean="identity",
    link="log",
)

QUALITIES: dict[str, Quality] = {quality.name: quality for quality in (PERPLEXITY, ACCURACY)}


@dataclass(frozen=True)
class Target:
    """What a quality has to reach."""

    quality: Quality
    value: float

    def is_met_by(self, value: float | None) -> bool:
        """None and NaN meet nothing."""
        return value is not None and self.quality.rank(value) <= self.quality.rank(self.value)

    def shortfall(self, value: float) -> float:
        """By how much a value misses, on the quality's own scale (`Quality.scaled`); negative: it is better."""
        if self.quality.value_of_mean == "exp":
            return math.log(value / self.value)
        return self.quality.scaled(value) - self.quality.scaled(self.value)

    def as_json(self) -> dict[str, str | float]:
        """As study files and `recommend --json` have it: {"quality": "perplexity", "at_most": 18.0}."""
        return {"quality": self.quality.name, self.quality.bound_word.replace(" ", "_"): self.value}

    def __str__(self) -> str:
        return f"{self.quality.name} {self.value:g}"
