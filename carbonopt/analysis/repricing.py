"""Emissions of the recommended run and of the study on other grids and at other hours.

The joules are the same; only the intensity differs.
"""

import math
from collections.abc import Iterable
from operator import attrgetter
from statistics import fmean

from carbonopt.analysis.confidence import configurations
from carbonopt.analysis.hourly import HOUR_S, Hours
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import Intensity, SessionLedger, StudyData


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
    duration_s: float  # duration of that window; like the energy, a mean over its seeds
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
    winner = next(tried for tried in configurations(data.records) if tried.trial == rec.trial)
    duration_s = winner.duration_s
    if rec.energy_kwh is None or duration_s is None:
        return None
    hours, pue = Hours(data.trace), data.config.carbon.pue
    study_kg, unknown = _study(data, hours)
    study_kwh = math.fsum(session.own_outer_kwh or 0.0 for session in data.sessions)
    one_g_kg = emissions_kg_co2e(study_kwh, 1.0, pue)  # emissions at 1 g CO2e per kWh
    return Repricing(
        source=data.trace.source,
        first_hour=hours.iso(0),
        last_hour=hours.iso(hours.count - 1),
        energy_kwh=rec.energy_kwh,
        duration_s=duration_s,
        starts=_starts(hours, rec.energy_kwh, duration_s, pue),
        study_emissions_kg_co2e=study_kg,
        study_g_co2e_per_kwh=study_kg / one_g_kg if study_kg is not None and one_g_kg else None,
        study_unknown=unknown,
    )


def _starts(hours: Hours, energy_kwh: float, duration_s: float, pue: float) -> StartHours | None:
    starts = []
    by_hour: list[list[float]] = [[] for _ in range(24)]
    for hour in range(hours.count):
        if (rate := hours.mean(hour * HOUR_S, duration_s)) is not None:
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


def _study(data: StudyData, hours: Hours) -> tuple[float | None, str | None]:
    """Return the emissions of all sessions in kg CO2e, or why they are not known.

    Each session's energy is spread evenly over it, that of each wait for the hours of the schedule
    over the wait.
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
        if (rate := _session_rate(session, hours)) is None:
            trace = f"the trace, from {hours.iso(0)} to {hours.iso(hours.count)}"
            return None, f"{trace}, lacks hours of the session from {session.started_at} on"
        total_kg += emissions_kg_co2e(session.own_outer_kwh, rate, data.config.carbon.pue)
    return total_kg, None


def _session_rate(session: SessionLedger, hours: Hours) -> float | None:
    """Return the mean intensity of a session, weighted by energy, in g CO2e per kWh.

    None: the trace lacks hours of it.
    """
    total_kwh = session.own_outer_kwh or 0.0
    parts = [(wait.energy_kwh, wait.span) for wait in session.waits]
    working = [span for span in session.working_spans if span[1] > span[0]]
    working_s = sum((end - begin).total_seconds() for begin, end in working)
    rest_kwh = max(0.0, total_kwh - sum(kwh for kwh, _ in parts))
    parts += [
        (rest_kwh * (end - begin).total_seconds() / working_s, (begin, end))
        for begin, end in working
    ]
    rates = [(kwh, hours.mean_of(*span)) for kwh, span in parts]
    weighted = [kwh * rate for kwh, rate in rates if rate is not None]
    if len(weighted) < len(rates) or not rates:
        return None
    if not total_kwh:
        return rates[0][1]
    return math.fsum(weighted) / math.fsum(kwh for kwh, _ in rates)
