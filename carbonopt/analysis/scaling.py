"""Scaling: how many ranks (GPUs, or processes on a CPU) are worth using.

For each number of ranks, it is read off the configuration that would be recommended among those
with so many. More ranks are faster and use more energy, since they wait for each other; these runs
say how much.
"""

import math
from collections.abc import Sequence

from carbonopt.analysis.confidence import Configuration, Evidence, Standing
from carbonopt.analysis.recommend import cheapest
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData


class AtWorldSize(Frozen):
    """The configuration with so many ranks that would be recommended, else the best one.

    The figures of a repeated configuration are means over its runs.
    """

    world_size: int
    trial: int  # number of the search's trial
    seeds: int  # number of complete runs
    met: bool
    quality: float
    duration_s: float  # duration of its training
    step_s: float | None  # mean duration of an optimizer step
    energy_kwh: float  # energy of its training, without GPUs of the launch that it leaves idle
    emissions_kg_co2e: float  # emissions of its training, PUE included
    speed_up: float  # the duration with the fewest ranks ÷ its own
    energy_ratio: float  # its own energy ÷ that with the fewest ranks
    # interval of that ratio, at LEVEL; None: nothing was repeated, or it has the fewest ranks
    energy_ratio_interval: tuple[float, float] | None
    slowed: bool = False  # other work on the machine slowed a run: alone it would have taken less


class Scaling(Frozen):
    rows: tuple[AtWorldSize, ...]  # sorted by ranks; two or more
    least_energy: int  # number of ranks, among rows that met the target if any did
    fastest: int  # number of ranks, among the same rows
    # other numbers of ranks, among these, whose energy differs from the least by less than the
    # error; None: nothing was repeated, so that the error is not known
    ties: tuple[int, ...] | None


def scaling(data: StudyData, target: float | None = None) -> Scaling | None:
    """Return the scaling with the number of ranks.

    None: trials are complete for fewer than two numbers of ranks.

    Args:
        target: another target than the study's own.
    """
    goal = data.config.target.at(target)
    evidence = Evidence.of(data, goal)
    standings = {
        config: evidence.standing(config)
        for config in evidence.configurations
        if config.energy_kwh is not None and config.duration_s is not None
    }
    numbers = sorted({config.first.params.world_size for config in standings})
    if len(numbers) < 2:
        return None
    is_own = goal == data.config.target.at()
    chosen = [
        _chosen(
            {
                config: standing
                for config, standing in standings.items()
                if config.first.params.world_size == number
            },
            evidence if is_own else None,
        )
        for number in numbers
    ]
    rows = tuple(
        _row(evidence, config, chosen[0], met=standings[config] is not Standing.REJECTED)
        for config in chosen
    )
    counted = [row for row in rows if row.met] or rows
    least = min(counted, key=lambda row: row.energy_kwh)
    return Scaling(
        rows=rows,
        least_energy=least.world_size,
        fastest=min(counted, key=lambda row: row.duration_s).world_size,
        ties=_ties(evidence, counted, least),
    )


def _chosen(standings: dict[Configuration, Standing], evidence: Evidence | None) -> Configuration:
    best = cheapest(standings, evidence)
    return best or min(
        standings, key=lambda config: (config.quality.rank(config.value), config.trial)
    )


def _figures(config: Configuration) -> tuple[float, float]:
    """Return a configuration's training energy in kWh and its duration in seconds."""
    assert config.energy_kwh is not None and config.duration_s is not None
    return config.energy_kwh, config.duration_s


def _row(
    evidence: Evidence, config: Configuration, fewest: Configuration, *, met: bool
) -> AtWorldSize:
    (energy_kwh, duration_s), (least_kwh, most_s) = _figures(config), _figures(fewest)
    ratio, total_steps = energy_kwh / least_kwh, config.first.total_steps
    margin = None if config is fewest else evidence.log_emissions_margin(config.n, fewest.n)
    return AtWorldSize(
        world_size=config.first.params.world_size,
        trial=config.trial,
        seeds=config.n,
        met=met,
        quality=config.value,
        duration_s=duration_s,
        step_s=duration_s / total_steps if total_steps else None,
        energy_kwh=energy_kwh,
        emissions_kg_co2e=config.emissions_kg_co2e,
        speed_up=most_s / duration_s,
        energy_ratio=ratio,
        energy_ratio_interval=(
            None if margin is None else (ratio * math.exp(-margin), ratio * math.exp(margin))
        ),
        slowed=any(run.is_contended for run in config.runs),
    )


def _ties(
    evidence: Evidence, rows: Sequence[AtWorldSize], least: AtWorldSize
) -> tuple[int, ...] | None:
    if evidence.log_emissions_margin(1) is None:
        return None
    return tuple(
        row.world_size
        for row in rows
        if row is not least
        and row.energy_kwh
        <= least.energy_kwh * math.exp(evidence.log_emissions_margin(row.seeds, least.seeds) or 0.0)
    )
