"""Number of concurrent trials of a search, and their observed cost."""

import math
from typing import NamedTuple

from carbonopt.spec.study_config import StudyConfig

# Samplers that learn nothing from trials, and lose nothing by running several at once.
LEARN_NOTHING = ("grid", "random")


def most_concurrent_trials(config: StudyConfig, ended: int) -> float:
    """Return how many trials may run at once, after so many have ended."""
    if config.search.sampler in LEARN_NOTHING:
        return math.inf
    most = config.launch.max_concurrent_trials
    return frugal(ended) if most == "auto" else most


def frugal(ended: int) -> int:
    """Return how many concurrent trials use little more energy than one at a time.

    Two hardly cost more than one, which shows nothing while it runs; each further trial is proposed
    with as little knowledge.
    """
    return 2 + ended // 6


class Price(NamedTuple):
    """The cost of concurrent trials, compared with one trial at a time."""

    workers: int
    energy: float  # factor on the energy until the answer is found
    speed: float  # factor by which the answer is found sooner


# From 60 searches of sampler carbon on nanoGPT's character setting, replayed
# (benchmarks/scale/concurrency.py; medians of 20 seeds, geometric mean of three targets).
AUTO_PRICES = (Price(2, 1.26, 1.63), Price(4, 1.41, 1.76), Price(8, 1.41, 1.76))
ALL_PRICES = (Price(2, 1.26, 1.63), Price(4, 2.03, 1.97), Price(8, 3.48, 2.58))


def price(config: StudyConfig) -> str:
    """Say what concurrent trials cost a search; the result is empty where they cost nothing."""
    workers = config.launch.side_by_side
    if workers == 1 or config.search.sampler in LEARN_NOTHING:
        return ""
    auto, all_at_once = (
        min(prices, key=lambda known: abs(math.log(known.workers / workers)))
        for prices in (AUTO_PRICES, ALL_PRICES)
    )
    return (
        f"in recorded searches {auto.workers} workers used {auto.energy:.3g} × the energy of one"
        f" and finished {auto.speed:.3g} × sooner with launch.max_concurrent_trials: auto,"
        f" {all_at_once.energy:.3g} × and {all_at_once.speed:.3g} × with {auto.workers}"
    )
