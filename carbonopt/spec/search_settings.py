"""The parts `search`, `budget` and `confirm` of a study file."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from carbonopt.core.values import Given
from carbonopt.spec.base_settings import Name, Settings
from carbonopt.spec.space_settings import AUTO, Space, UnchosenSpace


def _space(raw: Any) -> Any:
    return UnchosenSpace() if raw == AUTO else raw


class Pruning(Settings):
    """The rules that stop a trial early."""

    target: bool | None = None  # None: the quality decides (Quality.stops_for_target)
    """[Stops](pruning.md#target) trials that will miss the target. Left out: on for perplexity and
    exact match, off for other qualities."""

    cap: bool = True
    """[Stops](pruning.md#cap) trials that have emitted more than the best one that meets the
    target, or are projected to."""

    audit: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the trials due to be stopped by `target` that run to their end anyway."""


class Search(Settings):
    """The search: its space, its sampler, and its rules for trials."""

    space: Annotated[Space, BeforeValidator(_space, json_schema_input_type=Literal["auto"] | Space)]
    """The [dimensions](#dimensions), or `auto`: [carbonopt chooses them](search.md#space-auto)."""

    sampler: Literal["carbon", "tpe", "nsga2", "gp", "random", "grid"] = "carbon"
    """The sampler: `carbon`, or Optuna's `tpe`, `nsga2`, `gp`, `random` or `grid`; see
    [search](search.md)."""

    goal: Literal["recommend", "front"] = "recommend"
    """`recommend`: the cheapest configuration that meets the target. `front`: the whole trade-off.
    """

    pruning: Pruning = Pruning()
    probes: bool = True
    """[Measures](search.md#probes) settings that don't change the quality by running a few steps,
    and compiles kernels before trials."""

    learn_from: tuple[Name, ...] = Field(default=(), max_length=20)
    """Folders of up to 20 [earlier studies](search.md#learning-from-earlier-studies) that the
    search learns from; needs the sampler `carbon`."""

    start: dict[str, Given] | None = None
    """A configuration that you know: see [start](#start)."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of training and of the search."""

    def violations(self) -> dict[str, bool]:
        return {"start must name a dimension, but is {}; leave it out": self.start == {}}


class Budget(Settings):
    """The limits of a study, which ends when the first of them is reached."""

    trials: int | None = Field(default=None, ge=1, le=1_000_000)
    """Trials of the search. The runs of `confirm` are added to them: repeats and, where these
    promise little, [new configurations](confirmation.md#new-configurations)."""

    hours: float | None = Field(default=None, gt=0, le=1_000_000)
    """Time in which at least one worker runs, over all calls of `carbonopt run`."""

    energy_kwh: float | None = Field(default=None, gt=0, le=1e12)
    """Energy of the whole study, counted as `carbon.objective` says, without PUE."""

    emissions_kg_co2e: float | None = Field(default=None, gt=0, le=1e12)
    """Emissions of the whole study."""

    until: Literal["converged"] | None = None
    """`converged`: the study ends when [another trial doesn't pay](search.md#when-a-study-ends);
    needs the sampler `carbon` and the goal `recommend`."""

    reuses: int = Field(default=10, ge=1, le=1_000_000_000)
    """The number of times that you will run the recommended configuration. `converged` and probes
    weigh their cost against that."""

    def violations(self) -> dict[str, bool]:
        endless = not self.model_dump(exclude_none=True, exclude={"reuses"})
        return {
            "needs at least one of trials, hours, energy_kwh, emissions_kg_co2e, until": endless
        }


class Confirm(Settings):
    """The repetition, after the search, of its winner and the runners-up with other seeds."""

    seeds: int = Field(default=3, ge=2, le=100)
    """Runs of each configuration, including its run in the search. With `budget.until: converged`,
    the winner [needs fewer](confirmation.md#when-a-configuration-is-confirmed) if it clearly meets
    the target and its saving is known well enough."""

    runners_up: int = Field(default=2, ge=0, le=100)
    """How many runs the confirmation has: `seeds` − 1 for each of 1 + this many configurations.
    Which configurations get them follows from the results."""

    baseline: bool = False
    """Also repeats the start (`search.start`, or the one that `space: auto` chose): once, and then
    until the interval of the saving is at most 2 points wide."""

    @property
    def most_search_repeats(self) -> int:
        """The most runs of the confirmation, without those that `baseline` adds.

        They are repeats and new configurations in their place. The start's repeats are among them,
        unless `baseline` gives it runs of its own.
        """
        return (1 + self.runners_up) * (self.seeds - 1)

    @property
    def most_repeats(self) -> int:
        """The most runs of the confirmation, none of which `budget.trials` counts."""
        return self.most_search_repeats + self.baseline * (self.seeds - 1)
