"""The rules that may end a trial before its own end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carbonopt.core.trial import (
    EvalPoint,
    Forecast,
)


@dataclass(frozen=True)
class Rules:
    """The rules that may end a trial before its own end."""

    # Returns the forecast by which a trial with these evaluations and total steps will miss the
    # target, if it will. None instead of a function: the trial is never pruned for its target.
    should_prune: Callable[[Sequence[EvalPoint], int], Forecast | None] | None
    audit: bool  # True: a trial that should be pruned runs to its end all the same
    cap_kg_co2e: float | None  # emissions of the best trial that meets the target; None: no cap
    emissions_kg_co2e: Callable[[float], float]  # returns the emissions of an energy in kWh
    budget_spent: Callable[[], bool]
    interrupted: Callable[[], bool]
    timeout_s: float  # longest time without progress
    time_limit_s: float | None = None  # longest time for the whole trial
