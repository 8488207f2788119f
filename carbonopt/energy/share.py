"""The part of a machine's CPU and RAM energy that falls to some of its cores, where several trials share the machine.

CodeCarbon tells the whole machine's. Of the CPU's energy in a window, cores have

    (IDLE × their number × seconds + their busy seconds) ÷ (the same of all cores that share it),

since a core that is reserved costs something while it idles, too. Of the RAM's they have their number ÷ that of all.
Shares add up to the whole. Where the kernel doesn't tell how busy cores are, the CPU's are by number, too.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = 0.1  # of full load: as CodeCarbon 3.3.2 has it, external/hardware.py, "minimum 10% of TDP"
_BUSY = (1, 2, 3, 6, 7, 8)  # of proc_stat(5)'s columns: user, nice, system, irq, softirq, steal


class CoreShare:
    """Running totals, in kWh, of what these cores have `among` those. Cores are numbered as `os.sched_getaffinity`
    does."""

    def __init__(self, cores: Collection[int], among: Collection[int]) -> None:
        self._cores, self._among = frozenset(cores), frozenset(among)
        self.cpu_kwh = self.ram_kwh = 0.0
        self._whole_kwh = (0.0, 0.0)
        self._at_s, self._busy_s = time.monotonic(), _busy_s()

    def add(self, cpu_kwh: float, ram_kwh: float) -> None:
        """Takes the share of what the machine has used since the last call; these are the machine's own totals."""
        cpu_before_kwh, ram_before_kwh = self._whole_kwh
        if (cpu_kwh, ram_kwh) == self._whole_kwh:
            return  # the same reading once more
        at_s, busy_s = time.monotonic(), _busy_s()
        own, whole = (self._weight(cores, at_s - self._at_s, busy_s) for cores in (self._cores, self._among))
        self.cpu_kwh += (cpu_kwh - cpu_before_kwh) * own / whole
        self.ram_kwh += (ram_kwh - ram_before_kwh) * len(self._cores) / len(self._among)
        self._whole_kwh, self._at_s, self._busy_s = (cpu_kwh, ram_kwh), at_s, busy_s

    def _weight(self, cores: Collection[int], seconds: float, busy_s: dict[int, float]) -> float:
        busy = sum(max(0.0, busy_s.get(core, 0.0) - self._busy_s.get(core, 0.0)) for core in cores)
        return _IDLE * len(cores) * seconds + busy


def all_cores() -> frozenset[int]:
    """Of this machine, whoever may use them; nothing where the kernel doesn't tell."""
    return frozenset(_busy_s())


def _busy_s() -> dict[int, float]:
    """Of each core, since the machine was started; nothing where the kernel doesn't tell."""
    lines = (line.split() for line in _STAT.read_text().splitlines()) if _STAT.exists() else ()
    ticks = {line[0].removeprefix("cpu"): line for line in lines if line[0].startswith("cpu") and line[0] != "cpu"}
    hertz = os.sysconf("SC_CLK_TCK")
    return {int(core): sum(int(line[column]) for column in _BUSY) / hertz for core, line in ticks.items()}
