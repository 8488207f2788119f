"""How much waiting for clean hours saves, on recorded grids, and what a wrong estimate costs.

    python benchmarks/schedule.py ZONE.csv:Europe/Berlin [ZONE.csv:ZONE ...]

Each file is a trace as `carbon.trace` takes it, of two years or more. On each night of the years
that have 28 days before them, work of some hours is called at 18:00 local time with a window of some
hours. It is planned by `cleanest_start` again every hour, as a study does. The saving is against the
same work begun at once; the oracle begins it once, with perfect foresight.

Prints the tables of reports/schedule.md.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import fmean
from zoneinfo import ZoneInfo

from carbonopt.carbon.expected_intensity import ExpectedIntensity, expected_intensity, hour_of
from carbonopt.carbon.start_time import cleanest_start
from carbonopt.carbon.trace import read_trace
from carbonopt.spec.study_data import CarbonTrace

CALLED_AT = 18
SETTINGS = ((4, 24, 1.0), (8, 24, 1.0), (4, 15, 1.0), (8, 24, 2.0))  # work h, window h, estimate ×
AT_LEAST_SAVING = 0.02  # the default of schedule.at_least_saving
LEARNT_AFTER_H = 1  # in the last column: hours of work after which the duration is known
HOUR = timedelta(hours=1)


@dataclass
class Night:
    """One call: the hours of its window, as they were, and the intensities that were expected."""

    begin: datetime
    actual: list[float]
    expected: ExpectedIntensity


@dataclass
class Sums:
    """Sums of g CO2e per kWh over nights, for work of one kW."""

    at_once: float = 0.0
    oracle: float = 0.0
    planned: float = 0.0
    learnt: float = 0.0  # planned, with the duration known after some hours of work
    by_year: dict[int, list[float]] = field(default_factory=dict)
    late: int = 0
    nights: int = 0
    starts: int = 0

    def saving(self, name: str) -> float:
        return 1 - getattr(self, name) / self.at_once


def nights(trace: CarbonTrace, zone: ZoneInfo, hours: int) -> Iterator[Night]:
    first = datetime.fromisoformat(trace.start)
    begin, rates = hour_of(first), trace.g_co2e_per_kwh
    day = (first + timedelta(days=30)).date()
    while True:
        called = datetime(day.year, day.month, day.day, CALLED_AT, tzinfo=zone).astimezone(UTC)
        at = hour_of(called) - begin
        if at + hours > len(rates):
            return
        actual = [rate for rate in rates[at : at + hours] if rate is not None]
        known = trace.model_copy(update={"g_co2e_per_kwh": rates[:at]})
        if len(actual) == hours:
            until = called + hours * HOUR
            yield Night(called, actual, expected_intensity(known, called, until))
        day = date.fromordinal(day.toordinal() + 1)


def planned(night: Night, work: int, estimate: Callable[[int], float]) -> tuple[float, int, bool]:
    """Return the mean intensity of the hours worked, how often work began, and if it was late.

    Args:
        work: hours of work.
        estimate: returns how often too long the rest is taken to be, after so many hours of work.
    """
    window = len(night.actual)
    finish_by = night.begin + window * HOUR
    done, starts, state, used = 0, 0, "new", list[float]()
    for hour, rate in enumerate(night.actual):
        if done == work:
            break
        now = night.begin + hour * HOUR
        remaining = estimate(done) * (work - done) * HOUR
        least = 0.0 if state == "waits" else AT_LEAST_SAVING
        start = cleanest_start(now, night.expected.at, remaining, finish_by, at_least_saving=least)
        if start.at - now >= HOUR:
            state = "waits"
            continue
        starts += state != "works"
        state, done = "works", done + 1
        used.append(rate)
    return fmean(used), starts, done < work


def scored(called: Sequence[Night], work: int, factor: float) -> Sums:
    """Return the sums over nights of one window."""
    sums, window = Sums(), len(called[0].actual)
    for night in called:
        blocks = [fmean(night.actual[at : at + work]) for at in range(window - work + 1)]
        ours, starts, late = planned(night, work, lambda done: factor)
        learnt, _, _ = planned(night, work, lambda done: factor if done < LEARNT_AFTER_H else 1.0)
        sums.at_once += blocks[0]
        sums.oracle += min(blocks)
        sums.planned += ours
        sums.learnt += learnt
        year = sums.by_year.setdefault(night.begin.year, [0.0, 0.0])
        year[0] += blocks[0]
        year[1] += ours
        sums.late += late
        sums.starts += starts
        sums.nights += 1
    return sums


def main(arguments: list[str]) -> None:
    grids = []
    for argument in arguments:
        path, _, zone = argument.rpartition(":")
        trace = read_trace(Path(path))
        windows = sorted({window for _, window, _ in SETTINGS})
        of_window = {window: list(nights(trace, ZoneInfo(zone), window)) for window in windows}
        grids.append((Path(path).stem, of_window))
    print(
        "| work / window | estimate | oracle saves | planned saves | share | worst grid's year |"
        " share, pace known after 1 h | late nights | starts a night |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for work, window, factor in SETTINGS:
        sums = [scored(called[window], work, factor) for _, called in grids]
        oracle, ours, learnt = (
            fmean(one.saving(name) for one in sums) for name in ("oracle", "planned", "learnt")
        )
        worst = min(1 - own / base for one in sums for base, own in one.by_year.values())
        total = sum(one.nights for one in sums)
        print(
            f"| {work} h / {window} h | × {factor:g} | {100 * oracle:.1f} % | {100 * ours:.1f} % |"
            f" {ours / oracle:.2f} | {100 * worst:.1f} % | {learnt / oracle:.2f} |"
            f" {sum(one.late for one in sums)} of {total} |"
            f" {sum(one.starts for one in sums) / total:.2f} |",
            flush=True,
        )
    for name, called in grids:
        own = [scored(called[window], work, factor) for work, window, factor in SETTINGS[:3]]
        print(
            f"{name}: "
            + ", ".join(
                f"{100 * one.saving('planned'):.1f} of {100 * one.saving('oracle'):.1f} %"
                for one in own
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
