"""Comparison of studies of the same task: on other machines, with other models or other data."""

from collections.abc import Mapping
from typing import Any

from carbonopt.analysis.confidence import (
    Configuration,
    configurations,
    less_interval,
    log_spread,
    welch_margin,
)
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import Target
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData, wall_clock_s


class ComparedRun(Frozen):
    """A configuration's run, by its training window; a mean over its seeds if it was repeated."""

    trial: int  # number of the search's trial
    params: TrialParams
    seeds: int  # number of complete runs
    value: float  # value of the quality, as `Configuration.value`
    emissions_kg_co2e: float  # emissions at the study's own intensity and PUE
    # The next three are None where they are not known for every run.
    common_emissions_kg_co2e: float | None  # the same joules at the common intensity and PUE
    energy_kwh: float | None  # energy as the objective counts it, without PUE
    duration_s: float | None


class ComparedStudy(Frozen):
    name: str  # name of the study, with its folder where several have the same name
    target: Target
    g_co2e_per_kwh: float  # the study's own intensity
    pue: float
    recommended: ComparedRun | None  # None: nothing is recommended
    front: tuple[ComparedRun, ...]  # sorted by emissions
    trials: int  # number of finished trials, repeats included
    spent_energy_kwh: float  # energy of the whole study, without PUE
    spent_emissions_kg_co2e: float  # emissions at the study's own intensity and PUE
    spent_common_emissions_kg_co2e: float
    # time in which a call of `carbonopt run` worked, without waits for the schedule's hours; None:
    # a replay, whose runs used their energy at other times than its own
    spent_duration_s: float | None
    ended: bool


class StudiesComparison(Frozen):
    """The comparison of studies of the same task.

    `g_co2e_per_kwh` and `pue` are the common ones, which are the first study's. At them emissions
    rank as joules do.
    """

    task: str | None  # None: replays, whose tables don't say it
    g_co2e_per_kwh: float
    pue: float
    studies: tuple[ComparedStudy, ...]
    # interval of the share by which the study with the least emissions emits less than the next,
    # from the spread of each one's repeated runs; None: one of them repeated nothing
    less_interval: tuple[float, float] | None = None

    @property
    def by_emissions(self) -> list[ComparedStudy]:
        """The studies by their recommended run's emissions at the common intensity, least first.

        Those whose emissions are not known are left out.
        """
        known = [study for study in self.studies if _common_kg(study) is not None]
        return sorted(known, key=lambda study: _common_kg(study) or 0.0)

    def as_json(self) -> dict[str, Any]:
        """Return what `carbonopt compare --json` prints, except for what is said in words."""
        dumped = self.model_dump(mode="json", exclude={"studies": {"__all__": {"target"}}})
        for study, fields in zip(self.studies, dumped["studies"], strict=True):
            fields["target"] = study.target.as_json()
        return dumped


def _common_kg(study: ComparedStudy) -> float | None:
    return None if study.recommended is None else study.recommended.common_emissions_kg_co2e


def compare_studies(
    studies: Mapping[str, StudyData], recommendations: Mapping[str, Recommendation]
) -> StudiesComparison:
    """Compare studies.

    Args:
        studies: studies by the name that they go by here.
        recommendations: their recommendations, by the same names.

    Raises:
        BadInput: unless all are of one task and one quality.
    """
    tasks = {
        name: data.config.workload.task
        for name, data in studies.items()
        if data.config.workload is not None
    }
    qualities = {name: data.config.quality for name, data in studies.items()}
    _refuse_different("task", tasks)
    _refuse_different(
        "quality", {name: f"{each.name} ({each.direction})" for name, each in qualities.items()}
    )
    first = next(iter(studies.values()))
    common = first.provenance.intensity.g_co2e_per_kwh, first.config.carbon.pue
    compared = StudiesComparison(
        task=next(iter(tasks.values()), None),
        g_co2e_per_kwh=common[0],
        pue=common[1],
        studies=tuple(
            _compared(name, data, recommendations[name], common) for name, data in studies.items()
        ),
    )
    return compared.model_copy(update={"less_interval": _less_interval(compared, studies)})


def _less_interval(
    compared: StudiesComparison, studies: Mapping[str, StudyData]
) -> tuple[float, float] | None:
    """Return the interval of what the best study saves against the next.

    Each has a spread of its own, since machines and models need not be alike: one machine's quiet
    runs say nothing about another's.
    """
    means, emissions_kg = [], []
    for study in compared.by_emissions[:2]:
        spread = log_spread(configurations(studies[study.name].records))
        if spread is None or study.recommended is None or not (kg := _common_kg(study)):
            return None
        means.append((spread, study.recommended.seeds))
        emissions_kg.append(kg)
    if len(means) < 2:
        return None
    return less_interval(emissions_kg[0] / emissions_kg[1], welch_margin(means))


def _refuse_different(what: str, value_by_study: Mapping[str, str]) -> None:
    first = next(iter(value_by_study), "")
    for name, value in value_by_study.items():
        if value != value_by_study[first]:
            has = f"{first} has {value_by_study[first]} and {name} has {value}"
            raise BadInput(
                f"studies are compared if they have the same {what}, but {has}; leave one of them"
                " out."
            )


def _compared(
    name: str, data: StudyData, rec: Recommendation, common: tuple[float, float]
) -> ComparedStudy:
    by_trial = {tried.trial: run_of(tried, common) for tried in configurations(data.records)}
    return ComparedStudy(
        name=name,
        target=rec.target,
        g_co2e_per_kwh=data.provenance.intensity.g_co2e_per_kwh,
        pue=data.config.carbon.pue,
        recommended=None if rec.trial is None else by_trial[rec.trial],
        front=tuple(by_trial[trial] for trial in rec.pareto_front),
        trials=sum(record.has_finished for record in data.records),
        spent_energy_kwh=rec.study_energy_kwh,
        spent_emissions_kg_co2e=rec.study_emissions_kg_co2e,
        spent_common_emissions_kg_co2e=emissions_kg_co2e(rec.study_energy_kwh, *common),
        spent_duration_s=None if data.provenance.is_replay else wall_clock_s(data.sessions),
        ended=data.ended is not None,
    )


def run_of(tried: Configuration, common: tuple[float, float]) -> ComparedRun:
    """Return the run of a configuration.

    Args:
        common: the intensity in g CO2e/kWh and the PUE at which its joules are priced once more.
    """
    energy_kwh = tried.energy_kwh
    return ComparedRun(
        trial=tried.trial,
        params=tried.first.params,
        seeds=tried.n,
        value=tried.value,
        emissions_kg_co2e=tried.emissions_kg_co2e,
        common_emissions_kg_co2e=(
            None if energy_kwh is None else emissions_kg_co2e(energy_kwh, *common)
        ),
        energy_kwh=energy_kwh,
        duration_s=tried.duration_s,
    )
