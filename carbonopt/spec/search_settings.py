"""The parts `search`, `budget` and `confirm` of a study file."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
)

from carbonopt.core.values import Given
from carbonopt.spec.base_settings import Name, Settings
from carbonopt.spec.space_settings import AUTO, Space, UnchosenSpace


def _space(raw: Any) -> Any:
    return UnchosenSpace() if raw == AUTO else raw


class Pruning(Settings):
    # Stop a trial that can't reach the target, as predicted from its curve and the other trials.
    # None: the quality decides (Quality.stops_for_target).
    target: bool | None = None
    cap: bool = True  # stop a trial that emits more than the best one that meets the target
    # share of the trials that would be stopped but are run to their end instead
    audit: float = Field(default=0.0, ge=0, le=1)


class Search(Settings):
    space: Annotated[Space, BeforeValidator(_space)]
    sampler: Literal["carbon", "tpe", "nsga2", "gp", "random", "grid"] = "carbon"
    # find the cheapest configuration that meets the target, or the whole Pareto front
    goal: Literal["recommend", "front"] = "recommend"
    pruning: Pruning = Pruning()
    # measure settings that don't affect the quality by a few steps, and compile before a trial
    probes: bool = True
    # folders of prior studies of the same or a similar task
    learn_from: tuple[Name, ...] = Field(default=(), max_length=20)
    # a known configuration: it is the first trial, never pruned, and the baseline
    start: dict[str, Given] | None = None
    seed: int = Field(default=0, ge=0, lt=2**31)


class Budget(Settings):
    """The limits of a study, which ends when the first of them is reached."""

    trials: int | None = Field(default=None, ge=1, le=1_000_000)
    hours: float | None = Field(default=None, gt=0, le=1_000_000)
    energy_kwh: float | None = Field(default=None, gt=0, le=1e12)
    emissions_kg_co2e: float | None = Field(default=None, gt=0, le=1e12)
    # stop when the next trial would cost more than it saves in `reuses` trainings with the winner
    until: Literal["converged"] | None = None
    reuses: int = Field(default=10, ge=1, le=1_000_000_000)

    def violations(self) -> dict[str, bool]:
        endless = not self.model_dump(exclude_none=True, exclude={"reuses"})
        return {
            "needs at least one of trials, hours, energy_kwh, emissions_kg_co2e, until": endless
        }


class Confirm(Settings):
    """The repetition, after the search, of its winner and the runners-up with other seeds."""

    # runs of each configuration, including the run in the search
    seeds: int = Field(default=3, ge=2, le=100)
    runners_up: int = Field(default=2, ge=0, le=100)  # number of configurations beside the winner
    baseline: bool = False  # repeat the start configuration, too
