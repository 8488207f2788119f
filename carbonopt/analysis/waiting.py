"""The cost and the saving of a study's waits for the hours of its schedule.

The saving is that of the trials' energy: each trial's, at the intensity of the hours in which it
ran, against the same trials without the waits before them. The search never sees either.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from carbonopt.analysis.hourly import Hours
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData, Wait, union_s

Span = tuple[datetime, datetime]


class Waiting(Frozen):
    """The waits of all sessions together."""

    waits: int
    waited_s: float
    idle_kwh: float  # energy of the idle devices and the study's processes while it waited
    idle_kg_co2e: float  # PUE included
    first_start: str | None  # start of the first trial; ISO 8601, UTC; None: none has begun
    # share of the emissions, when the first wait began; None: it was not estimated
    expected_saving: float | None
    # share that was saved by the trace's own hours; None: it does not cover them, or the hours of a
    # trial that went on from a checkpoint were not noted yet
    realised_saving: float | None
    # the same with the idle energy as a cost
    realised_net_saving: float | None


def waiting(data: StudyData) -> Waiting | None:
    """Return the cost and the saving of the waits; None: the study never waited."""
    waits = sorted(
        (wait for session in data.sessions for wait in session.waits),
        key=lambda wait: wait.started_at,
    )
    if not waits:
        return None
    idle_kwh = sum(wait.energy_kwh for wait in waits)
    starts = [
        record.first_started_at for record in data.records if record.first_started_at is not None
    ]
    gross, net = _realised(data, waits)
    return Waiting(
        waits=len(waits),
        waited_s=union_s(wait.span for wait in waits),
        idle_kwh=idle_kwh,
        idle_kg_co2e=data.emissions_kg_co2e(idle_kwh),
        first_start=min(starts, default=None),
        expected_saving=waits[0].expected_saving,
        realised_saving=gross,
        realised_net_saving=net,
    )


def _realised(data: StudyData, waits: list[Wait]) -> tuple[float | None, float | None]:
    """Return the saving of the trials' emissions, without and with the waits' own."""
    if data.trace is None:
        return None, None
    hours = Hours(data.trace)
    emitted, instead, waited = 0.0, 0.0, 0.0
    for record in data.records:
        if record.energy_kwh is None or record.duration_s is None:
            continue
        if record.spans is None:
            return None, None
        without_waits = [_without_waits(span, waits) for span in record.spans]
        then, without = _mean_of(hours, record.spans), _mean_of(hours, without_waits)
        if then is None or without is None:
            return None, None
        emitted += record.energy_kwh.total * then
        instead += record.energy_kwh.total * without
    for wait in waits:
        rate = hours.mean_of(*wait.span)
        if rate is None:
            return None, None
        waited += wait.energy_kwh * rate
    if not instead:
        return None, None
    return 1 - emitted / instead, 1 - (emitted + waited) / instead


def _without_waits(span: Span, waits: list[Wait]) -> Span:
    """Return when a span of work would have been without the waits before it."""
    begin, end = span
    earlier = timedelta(seconds=union_s((wait.span for wait in waits), begin))
    return begin - earlier, end - earlier


def _mean_of(hours: Hours, spans: Sequence[Span]) -> float | None:
    """Return the mean intensity over spans, by their length, in g CO2e per kWh."""
    weighted, seconds = 0.0, 0.0
    for begin, end in spans:
        rate = hours.mean_of(begin, end)
        if rate is None:
            return None
        weighted += rate * (end - begin).total_seconds()
        seconds += (end - begin).total_seconds()
    return weighted / seconds if seconds else None
