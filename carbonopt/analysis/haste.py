"""How many trials of a search run side by side, and what that was seen to cost."""

import math
from typing import NamedTuple

from carbonopt.core.config import Haste, StudyConfig

KNOW_ALL = ("grid", "random")  # samplers that learn nothing from trials, and lose nothing by several at once


def at_once(config: StudyConfig, ended: int) -> float:
    """How many trials may run, after so many have ended."""
    is_frugal = config.search.sampler not in KNOW_ALL and config.launch.haste == "frugal"
    return frugal(ended) if is_frugal else math.inf


def frugal(ended: int) -> int:
    """Two hardly cost more than one, which tells nothing while it runs; each further one knows as little."""
    return 2 + ended // 6


class Price(NamedTuple):
    """Against one trial at a time."""

    workers: int
    energy: float  # times as much until the answer is found
    speed: float  # times sooner


# Of 60 searches of sampler carbon on nanoGPT's character setting, replayed (benchmarks/scale/haste.py; medians of 20
# seeds, geometric mean of three targets).
PRICES: dict[Haste, tuple[Price, ...]] = {
    "frugal": (Price(2, 1.26, 1.63), Price(4, 1.41, 1.76), Price(8, 1.41, 1.76)),
    "full": (Price(2, 1.26, 1.63), Price(4, 2.03, 1.97), Price(8, 3.48, 2.58)),
}


def price(config: StudyConfig) -> str:
    """What trials side by side cost a search, in words; nothing where they cost nothing."""
    workers = config.launch.side_by_side
    if workers == 1 or config.search.sampler in KNOW_ALL:
        return ""
    seen = [min(PRICES[haste], key=lambda known: abs(math.log(known.workers / workers))) for haste in PRICES]
    told = [
        f"{haste}: {known.energy:.3g} × the energy, {known.speed:.3g} × as fast"
        for haste, known in zip(PRICES, seen, strict=True)
    ]
    return f"{seen[0].workers} workers took, against one, in recorded searches, with launch.haste {'; '.join(told)}"
