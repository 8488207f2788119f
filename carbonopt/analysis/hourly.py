"""A carbon trace that can be averaged over any span of time."""

import itertools
import math
from datetime import datetime, timedelta

from carbonopt.spec.study_data import CarbonTrace

HOUR_S = 3600


class Hours:
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
        first = math.floor(start_s / HOUR_S)
        last = max(math.ceil(end_s / HOUR_S) - 1, first)
        if first < 0 or last >= self.count or self._holes[last + 1] > self._holes[first]:
            return None
        if first == last:
            return self._rates[first]
        whole = self._sums[last] - self._sums[first + 1]
        parts = ((first + 1) * HOUR_S - start_s) * self._rates[first] + (
            end_s - last * HOUR_S
        ) * self._rates[last]
        return (whole * HOUR_S + parts) / duration_s

    def mean_of(self, begin: datetime, end: datetime) -> float | None:
        """Return the mean in g CO2e per kWh between two times; None as for `mean`."""
        start_s = (begin - self.begin).total_seconds()
        return self.mean(start_s, (end - begin).total_seconds())
