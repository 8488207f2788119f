"""Attribution of the energy of CPU and RAM to the trial, the study itself, and other work.

Where RAPL measures the CPU, its energy is RAPL's. Otherwise, a CPU of N cores that takes P watts at
full load is modelled to use, in a window of t seconds in which its cores were busy for B seconds,

    P / N × (IDLE × N × t + (1 − IDLE) × B)

joules. The same weights divide the energy in both cases. A CPU second counts 1 − IDLE, whoever
spent it. Each core's IDLE × t belongs to whoever has reserved the core. The parts therefore add up
to the whole, and a trial's part is

    P / N × (IDLE × reserved cores × own t + (1 − IDLE) × CPU seconds of its processes).

Own t leaves out the time in which other work kept the trial waiting for a core. Where nothing
measures the CPU, P is constant, so a neighbour changes this part only if it changes own t or the
trial's own CPU seconds (docs/measuring.md says by how much). The RAM's energy is the power of its
size × own t × the share of the cores that the study has reserved.

P and the RAM's power are CodeCarbon's figures. CodeCarbon itself models the whole CPU with the cube
of its load, P × (0.1 + 0.9 × load³): the energy of the same CPU second then depends on other work.
"""

from collections.abc import Collection
from typing import NamedTuple

from carbonopt.core.units import kwh_from_joules
from carbonopt.energy.cpu_time import (
    CpuTimeSource,
    OwnProcess,
    all_cores,
    busy_seconds,
    usable_cores,
)

# Idle power as a share of full load, as in CodeCarbon 3.3.2, external/hardware.py: "minimum 10% of
# TDP".
IDLE = 0.1


class Powers(NamedTuple):
    """CodeCarbon's figures for the power of a machine's components, in watts."""

    cpu_w: float | None  # power at full load; None: the CPU counts its energy itself
    ram_w: float


class HostUse(NamedTuple):
    """Running totals of energy and CPU time at one moment."""

    at_s: float = 0.0
    cpu_kwh: float = 0.0  # energy of the cores that the study may use, whoever used them
    busy_s: float = 0.0  # busy time of the cores that the study may use, whoever used them
    all_busy_s: float = 0.0  # busy time of all of the machine's cores
    trials_s: float = 0.0  # CPU time of the trials' processes
    waited_s: float = 0.0  # time that the trials' threads waited for a core
    study_s: float = 0.0  # CPU time of the study's own processes


class HostEnergy(NamedTuple):
    """Energy of the CPU and the RAM, in kWh."""

    cpu_kwh: float
    ram_kwh: float

    def __sub__(self, other: "HostEnergy") -> "HostEnergy":
        return HostEnergy(self.cpu_kwh - other.cpu_kwh, self.ram_kwh - other.ram_kwh)


class HostShares(NamedTuple):
    """The energy of one window by who used it.

    The idle energy of the reserved cores and their RAM is the trial's in a trial's window, except
    for the time in which other work kept the trial waiting (see `other`). In all other windows it
    is the study's.
    """

    whole: HostEnergy
    trial: HostEnergy
    study: HostEnergy

    @property
    def other(self) -> HostEnergy:
        """The energy of other work: what is left of the whole.

        It includes the cores that a quota leaves to others, and the idle energy of the reserved
        cores in the time in which other work kept a trial waiting.
        """
        return self.whole - self.trial - self.study


class HostAttribution:
    """Divides the energy of the CPU's cores and the RAM among a trial, its study and other work.

    Args:
        cores: the cores that this study may use, numbered as in `os.sched_getaffinity`; their
            energy is the whole that is divided.
        cpu_times: the CPU times of trials and study; None: all CPU time of this process and its
            children is a trial's.
        slots: the number of slots among which the CPU quota of this process's cgroup is divided.
    """

    def __init__(
        self, cores: Collection[int], cpu_times: CpuTimeSource | None = None, slots: int = 1
    ) -> None:
        self._cores, self._cpu_times = frozenset(cores), cpu_times or OwnProcess()
        self._all = all_cores() | self._cores
        self._reserved = min(len(self._cores), usable_cores(len(self._all)) / slots)
        self._powers = Powers(None, 0.0)
        self._fresh = self._latest = HostUse()  # `_fresh`: totals at RAPL's last new reading
        self._fresh_kwh = 0.0  # RAPL's last new reading
        self._kwh_per_weight = 0.0

    @property
    def machine_share(self) -> float:
        """The share of this machine's CPU and RAM that the study has reserved."""
        return self._reserved / len(self._all)

    def begin(self, powers: Powers, at_s: float, measured_kwh: float) -> None:
        """Start all totals.

        `measured_kwh` is the energy of the whole CPU by RAPL; without RAPL it isn't used.
        """
        self._powers = powers
        self._fresh = self._latest = self._times(at_s, HostUse())
        self._fresh_kwh = measured_kwh
        if powers.cpu_w is not None:
            self._kwh_per_weight = kwh_from_joules(powers.cpu_w / len(self._all))

    def read(self, at_s: float, measured_kwh: float) -> HostUse:
        """Return the totals at a moment of the monotonic clock; `measured_kwh` is as in `begin`.

        While RAPL has no new reading yet, the power until its last one is assumed to continue.
        """
        now = self._times(at_s, self._fresh)
        if self._powers.cpu_w is None and (used_kwh := measured_kwh - self._fresh_kwh):
            whole = _weight(
                len(self._all), now.at_s - self._fresh.at_s, now.all_busy_s - self._fresh.all_busy_s
            )
            self._kwh_per_weight = used_kwh / whole
            now = self._with_energy(now)
            self._fresh, self._fresh_kwh = now, measured_kwh
        else:
            now = self._with_energy(now)
        self._latest = now._replace(cpu_kwh=max(now.cpu_kwh, self._latest.cpu_kwh))
        return self._latest

    def _with_energy(self, now: HostUse) -> HostUse:
        weight = _weight(
            len(self._cores), now.at_s - self._fresh.at_s, now.busy_s - self._fresh.busy_s
        )
        return now._replace(cpu_kwh=self._fresh.cpu_kwh + self._kwh_per_weight * weight)

    def shares(self, start: HostUse, end: HostUse, *, of_trial: bool) -> HostShares:
        """Divide the window between two readings."""
        seconds, cores = end.at_s - start.at_s, len(self._cores)
        ram_kwh = kwh_from_joules(self._powers.ram_w * seconds)
        whole = HostEnergy(end.cpu_kwh - start.cpu_kwh, ram_kwh * cores / len(self._all))
        weight = _weight(cores, seconds, end.busy_s - start.busy_s)
        per_weight = whole.cpu_kwh / weight if weight > 0 else 0.0
        own_seconds = seconds * (1 - _kept_waiting(start, end)) if of_trial else seconds
        reserved_kwh = per_weight * IDLE * self._reserved * own_seconds
        trial_kwh, study_kwh = (
            per_weight * (1 - IDLE) * max(0.0, busy_s)
            for busy_s in (end.trials_s - start.trials_s, end.study_s - start.study_s)
        )
        held_ram_kwh = kwh_from_joules(self._powers.ram_w * own_seconds) * self.machine_share
        if of_trial:
            return HostShares(
                whole,
                HostEnergy(trial_kwh + reserved_kwh, held_ram_kwh),
                HostEnergy(study_kwh, 0.0),
            )
        return HostShares(
            whole,
            HostEnergy(0.0, 0.0),
            HostEnergy(trial_kwh + study_kwh + reserved_kwh, held_ram_kwh),
        )

    def _times(self, at_s: float, before: HostUse) -> HostUse:
        """Return the totals of CPU time now, with the energy of an earlier moment."""
        own = self._cpu_times.read()
        busy = busy_seconds()
        # Only the study's own CPU time is known where the kernel doesn't count the cores' times.
        known_s = own.trials.ran_s + own.study_s
        busy_s = sum(busy.get(core, 0.0) for core in self._cores) if busy else known_s
        return HostUse(
            at_s=at_s,
            cpu_kwh=before.cpu_kwh,
            busy_s=busy_s,
            all_busy_s=sum(busy.values()) if busy else known_s,
            trials_s=own.trials.ran_s,
            waited_s=own.trials.waited_s,
            study_s=own.study_s,
        )


def _weight(cores: int, seconds: float, busy_s: float) -> float:
    return IDLE * cores * seconds + (1 - IDLE) * max(0.0, busy_s)


def _kept_waiting(start: HostUse, end: HostUse) -> float:
    """Return the share of a window in which other work kept a trial from its cores.

    It is the share of the threads' time in which they were ready to run and had no core. The
    quickstart on two cores took 80 ms a step alone; beside one and two busy processes, this leaves
    78 of 120 and 79 of 165 ms. The share is at most the others' share of the cores' busy time, as
    the threads of a trial that has more of them than cores wait for each other, and at most the
    threads' waiting time in the window, as a trial may also wait for a GPU or a disk.
    """
    seconds, busy_s = end.at_s - start.at_s, end.busy_s - start.busy_s
    ran_s, waited_s = end.trials_s - start.trials_s, end.waited_s - start.waited_s
    if min(seconds, busy_s, ran_s, waited_s) <= 0:
        return 0.0
    return max(0.0, min(waited_s / (ran_s + waited_s), waited_s / seconds, 1 - ran_s / busy_s))
