"""Emissions of the recommended run and of the study on other grids and at other hours.

The joules are the same; only the intensity differs.
"""

import itertools
import math
from collections.abc import Iterable
from datetime import datetime, timedelta
from operator import attrgetter
from statistics import fmean

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import CarbonTrace, Intensity, StudyData

_HOUR_S = 3600


class InRegion(Frozen):
    place: str  # for the study's own intensity without a place, what its source says
    g_co2e_per_kwh: float
    source: str  # source and year, in the form of the study's own intensity
    run_kg_co2e: float  # emissions of the recommended run's training window, PUE included
    study_kg_co2e: float  # emissions of the whole study
    is_studys_own: bool  # whether it is the study's own reference intensity


class AtHour(Frozen):
    """A run that starts on the hour."""

    start: str  # ISO 8601, UTC
    emissions_kg_co2e: float
    g_co2e_per_kwh: float  # the trace's mean over the run


class StartHours(Frozen):
    """The emissions of the same run, PUE included, over all hours that it could start with."""

    hours: int  # number of these hours of the trace
    # number of hours from which the run would touch one without a value, or last beyond the end
    left_out: int
    mean_kg_co2e: float
    mean_g_co2e_per_kwh: float
    lowest: AtHour  # the earliest one if there are several
    highest: AtHour  # the earliest one if there are several
    # means of the starts at 0:00, 1:00, … 23:00 UTC; None: there is none
    by_hour_kg_co2e: tuple[float | None, ...]


class Repricing(Frozen):
    source: str  # source of the trace
    first_hour: str  # hour with which the trace begins; ISO 8601, UTC
    last_hour: str
    # energy of the recommended run's training window, as the objective counts it; without PUE
    energy_kwh: float
    duration_s: float  # duration of that window
    # None: the trace nowhere has as many hours in a row as the run takes
    starts: StartHours | None
    # emissions of the whole study in the hours that it ran in, PUE included
    study_emissions_kg_co2e: float | None
    study_g_co2e_per_kwh: float | None  # the trace's mean over the study, weighted by energy
    study_unknown: str | None  # why there is no such figure, in words


def regions(
    data: StudyData, rec: Recommendation, intensities: Iterable[Intensity]
) -> tuple[InRegion, ...]:
    """Price the recommended run and the study at each of these intensities and at the study's own.

    The study's own occurs once. The result is sorted by intensity, then by place. Empty: nothing is
    recommended.
    """
    if rec.emissions_kg_co2e is None:
        return ()
    own = data.provenance.intensity
    listed = [own, *(intensity for intensity in intensities if intensity != own)]
    return tuple(
        InRegion(
            place=intensity.place or intensity.source,
            g_co2e_per_kwh=intensity.g_co2e_per_kwh,
            source=intensity.source,
            run_kg_co2e=rec.emissions_kg_co2e * (intensity.g_co2e_per_kwh / own.g_co2e_per_kwh),
            study_kg_co2e=rec.study_emissions_kg_co2e
            * (intensity.g_co2e_per_kwh / own.g_co2e_per_kwh),
            is_studys_own=intensity is own,
        )
        for intensity in sorted(
            listed, key=lambda intensity: (intensity.g_co2e_per_kwh, intensity.place or "")
        )
    )


def repricing(data: StudyData, rec: Recommendation) -> Repricing | None:
    """Price the recommended run and the study by the study's trace.

    A run's power is taken as even over its duration. None: there is no trace, or no recommended run
    whose energy and duration are known.
    """
    if data.trace is None or rec.trial is None:
        return None
    durations = next(record.duration_s for record in data.records if record.trial == rec.trial)
    if rec.energy_kwh is None or durations is None:
        return None
    hours, pue = _Hours(data.trace), data.config.carbon.pue
    study_kg, unknown = _study(data, hours)
    study_kwh = math.fsum(session.own_outer_kwh or 0.0 for session in data.sessions)
    one_g_kg = emissions_kg_co2e(study_kwh, 1.0, pue)  # emissions at 1 g CO2e per kWh
    return Repricing(
        source=data.trace.source,
        first_hour=hours.iso(0),
        last_hour=hours.iso(hours.count - 1),
        energy_kwh=rec.energy_kwh,
        duration_s=durations.train,
        starts=_starts(hours, rec.energy_kwh, durations.train, pue),
        study_emissions_kg_co2e=study_kg,
        study_g_co2e_per_kwh=study_kg / one_g_kg if study_kg is not None and one_g_kg else None,
        study_unknown=unknown,
    )


class _Hours:
    """A trace that can be averaged over any span of time.

    A long span takes no longer than a short one.
    """

    def __init__(self, trace: CarbonTrace) -> None:
        self.begin = datetime.fromisoformat(trace.start)
        self.count = len(trace.g_co2e_per_kwh)
        self._rates = [rate or 0.0 for rate in trace.g_co2e_per_kwh]
        self._sums = [0.0, *itertools.accumulate(self._rates)]
        self._holes = [0, *itertools.accumulate(rate is None for rate in trace.g_co2e_per_kwh)]

    def iso(self, hour: int) -> str:
        return (self.begin + timedelta(hours=hour)).isoformat(timespec="seconds")

    def mean(self, start_s: float, duration_s: float) -> float | None:
        """Return the mean in g CO2e per kWh over a span that starts so long after the trace does.

        None: the span touches an hour without a value.
        """
        end_s = start_s + duration_s
        first = math.floor(start_s / _HOUR_S)
        last = max(math.ceil(end_s / _HOUR_S) - 1, first)
        if first < 0 or last >= self.count or self._holes[last + 1] > self._holes[first]:
            return None
        if first == last:
            return self._rates[first]
        whole = self._sums[last] - self._sums[first + 1]
        parts = ((first + 1) * _HOUR_S - start_s) * self._rates[first] + (
            end_s - last * _HOUR_S
        ) * self._rates[last]
        return (whole * _HOUR_S + parts) / duration_s


def _starts(hours: _Hours, energy_kwh: float, duration_s: float, pue: float) -> StartHours | None:
    starts = []
    by_hour: list[list[float]] = [[] for _ in range(24)]
    for hour in range(hours.count):
        if (rate := hours.mean(hour * _HOUR_S, duration_s)) is not None:
            emissions_kg = emissions_kg_co2e(energy_kwh, rate, pue)
            starts.append(
                AtHour(start=hours.iso(hour), emissions_kg_co2e=emissions_kg, g_co2e_per_kwh=rate)
            )
            by_hour[(hours.begin.hour + hour) % 24].append(emissions_kg)
    if not starts:
        return None
    return StartHours(
        hours=len(starts),
        left_out=hours.count - len(starts),
        mean_kg_co2e=fmean(start.emissions_kg_co2e for start in starts),
        mean_g_co2e_per_kwh=fmean(start.g_co2e_per_kwh for start in starts),
        lowest=min(starts, key=attrgetter("emissions_kg_co2e")),
        highest=max(starts, key=attrgetter("emissions_kg_co2e")),
        by_hour_kg_co2e=tuple(fmean(emissions) if emissions else None for emissions in by_hour),
    )


def _study(data: StudyData, hours: _Hours) -> tuple[float | None, str | None]:
    """Return the emissions of all sessions in kg CO2e, or why they are not known.

    Each session's energy is spread evenly over it.
    """
    if data.provenance.is_replay:
        return None, "the study is a replay, whose energy was used at other times than its own"
    if not data.sessions:
        return None, "no session is stored"
    total_kg = 0.0
    for session in data.sessions:
        if session.own_outer_kwh is None:
            return (
                None,
                f"the session from {session.started_at} on has no reading of its whole energy",
            )
        start_s = (datetime.fromisoformat(session.started_at) - hours.begin).total_seconds()
        if (rate := hours.mean(start_s, session.duration_s)) is None:
            trace = f"the trace, from {hours.iso(0)} to {hours.iso(hours.count)}"
            return None, f"{trace}, lacks hours of the session from {session.started_at} on"
        total_kg += emissions_kg_co2e(session.own_outer_kwh, rate, data.config.carbon.pue)
    return total_kg, None
