"""The study's energy meter: which phase spent how much, by component.

`CodeCarbonMeter` reads running totals from CodeCarbon; a window is the difference of two readings, so nothing is lost
or counted twice between two windows. CodeCarbon's own tasks can't do that: `flush()` fails while a task is open, which
leaves no way to see a running window's energy, and what is used between two tasks is in neither.
"""

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Protocol

from carbonopt.energy.hardware import check_gpus
from carbonopt.errors import MeasurementError
from carbonopt.record import HowKnown
from carbonopt.trial import Frozen, Phase

# NVML's energy counter ticks about every 0.1 s; a window of a second without any energy can only be a dead sensor.
_LONGEST_ZERO_S = 1.0

# CodeCarbon measures anew only this long after it last did.
_FRESH_AFTER_S = 0.05

# Every argument that CodeCarbon would otherwise take from CODECARBON_* variables or a .codecarbon.config file in the
# home or working directory, where a stray `pue=1.5` changes each figure. PUE and carbon intensity are applied by us:
# at 1,000 g/kWh its emissions in kg are its energy in kWh.
_SETTINGS: dict[str, Any] = {
    "allow_multiple_runs": True,
    "api_call_interval": -1,  # never
    "api_endpoint": "",
    "api_key": "",
    "cloud_provider": None,
    "cloud_region": None,
    "country_2letter_iso_code": None,
    "country_iso_code": "USA",  # it wants one; not used at a forced intensity
    "electricitymaps_api_token": "",  # with None it would look for the token's older name, and with a token go online
    "emissions_endpoint": None,
    "experiment_id": "carbonopt",
    "experiment_name": "carbonopt",
    "force_carbon_intensity_g_co2e_kwh": 1000.0,
    "force_cpu_power": None,
    "force_mode_cpu_load": False,
    "force_ram_power": None,
    "log_level": "warning",
    "logger_preamble": "",
    "logging_logger": None,
    # Never by its own timer, which would race with our readings in another thread and count an interval twice. CPU
    # load is sampled every second all the same.
    "measure_power_secs": 1e9,
    "metadata": None,
    "on_csv_write": "append",
    "output_file": "",
    "output_methods": [],
    "project_name": "carbonopt",
    "prometheus_url": "",
    "pue": 1.0,
    "rapl_include_dram": False,
    "rapl_prefer_psys": False,
    "region": None,
    "tracking_mode": "machine",
    "wue": 0.0,
}


class Reading(Frozen):
    """Energy in kWh by component (None: not measured) and the seconds it was used in."""

    gpu_kwh: float | None = None
    cpu_kwh: float | None = None
    ram_kwh: float | None = None
    duration_s: float = 0.0

    @property
    def total_kwh(self) -> float:
        return math.fsum(part for part in (self.gpu_kwh, self.cpu_kwh, self.ram_kwh) if part is not None)

    def __add__(self, other: "Reading") -> "Reading":
        return self._combined(other, 1.0)

    def __sub__(self, other: "Reading") -> "Reading":
        return self._combined(other, -1.0)

    def _combined(self, other: "Reading", sign: float) -> "Reading":
        def both(mine: float | None, theirs: float | None) -> float | None:
            if mine is None and theirs is None:
                return None
            return (mine or 0.0) + sign * (theirs or 0.0)

        return Reading(
            gpu_kwh=both(self.gpu_kwh, other.gpu_kwh),
            cpu_kwh=both(self.cpu_kwh, other.cpu_kwh),
            ram_kwh=both(self.ram_kwh, other.ram_kwh),
            duration_s=self.duration_s + sign * other.duration_s,
        )


class Meter(Protocol):
    """Splits the energy of a study into windows, each of one phase, one after the other without a gap."""

    known: dict[str, HowKnown]  # of gpu, cpu, ram: how its energy is known; absent where not in the figures

    def enter(self, phase: Phase) -> None:
        """Closes the running window and opens the next. Raises MeasurementError if there is no energy to be had."""

    def running_kwh(self, phase: Phase) -> float:
        """Energy of that phase since it was last taken, the open window included."""

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        """The closed windows of these phases since they were last taken, summed; and forgets them.

        Raises:
            ValueError: if one of them is open now.
        """

    def outer_kwh(self) -> float | None:
        """The whole energy since the first window opened, by a second tracker that knows no phases; None before it."""

    def close(self) -> None:
        """Closes the running window and ends the measurement. What was measured can still be taken."""


class _Windows:
    """Closed windows by phase, and which phase is open: what both meters have in common."""

    def __init__(self, nothing: Reading) -> None:
        self._nothing = nothing  # no energy in no time, with the components that this meter knows
        self._closed: dict[Phase, Reading] = {}
        self._open: Phase | None = None

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        if self._open in phases:
            raise ValueError(f"the open window can't be taken: {self._open} is running; enter another phase first")
        return {phase: self._closed.pop(phase, self._nothing) for phase in phases}

    def _add(self, phase: Phase, reading: Reading) -> None:
        self._closed[phase] = self._closed.get(phase, self._nothing) + reading

    def _closed_kwh(self, phase: Phase) -> float:
        return self._closed.get(phase, self._nothing).total_kwh


class CodeCarbonMeter(_Windows):
    """Measures this machine with CodeCarbon: the GPUs of these NVML indices, all CPUs and RAM. Implements `Meter`.

    Takes one to three seconds to set up, before the first window, so that no window pays for it.

    Raises:
        BadInput: if a GPU doesn't exist or has no energy counter.
        MeasurementError: if CodeCarbon can't measure here.
    """

    def __init__(self, gpu_indices: Sequence[int]) -> None:
        check_gpus(gpu_indices)
        if gpu_indices and shutil.which("nvidia-smi") is None:
            raise MeasurementError(
                "nvidia-smi must be on PATH, but is not: without it CodeCarbon takes every GPU for absent and its "
                "energy for 0. Add its folder to PATH (often /usr/bin, in WSL /usr/lib/wsl/lib)."
            )
        complaints = _hush_codecarbon()
        self._phases = _RunningTotal(gpu_indices, complaints)
        self._outer = _RunningTotal(gpu_indices, complaints)
        nothing = self._phases.read()
        super().__init__(nothing - nothing)
        self._opened_at = nothing
        self._outer_from: Reading | None = None
        self._outer_until: Reading | None = None
        self.known: dict[str, HowKnown] = {"cpu": "measured" if _has_rapl() else "modelled", "ram": "modelled"}
        if gpu_indices:
            self.known["gpu"] = "measured"

    def enter(self, phase: Phase) -> None:
        now = self._close_window()
        if self._outer_from is None:
            self._outer_from = self._outer.read()
        self._opened_at = now
        self._open = phase

    def running_kwh(self, phase: Phase) -> float:
        closed_kwh = self._closed_kwh(phase)
        if phase is not self._open:
            return closed_kwh
        return closed_kwh + (self._read_both() - self._opened_at).total_kwh

    def outer_kwh(self) -> float | None:
        if self._outer_from is None:
            return None
        until = self._outer_until or self._outer.read()
        return (until - self._outer_from).total_kwh

    def close(self) -> None:
        if self._outer_until is not None:
            return
        try:
            self._close_window()
            self._outer_until = self._outer.read()
        finally:
            self._open = None
            self._phases.stop()
            self._outer.stop()

    def _close_window(self) -> Reading:
        now = self._read_both()
        if self._open is not None:
            window = now - self._opened_at
            _refuse_silence(self._open, window)
            self._add(self._open, window)
        return now

    def _read_both(self) -> Reading:
        """A reading of the phases' tracker.

        The outer one is read at the same moments, because CodeCarbon's model of a CPU without RAPL goes with the cube
        of its load since the last sample: sampled at other moments, the same work gives 6 % less energy in all.
        """
        now = self._phases.read()
        self._outer.read()
        return now


class ReplayMeter(_Windows):
    """Takes energy from a table of recorded runs instead of this machine. Implements `Meter`."""

    def __init__(self) -> None:
        super().__init__(Reading(gpu_kwh=0.0))
        self.known: dict[str, HowKnown] = {"gpu": "recorded"}
        self._all_kwh = 0.0

    def advance(self, phase: Phase, energy_kwh: float, duration_s: float) -> None:
        """Adds recorded energy, which the tables don't split by component, to a phase."""
        self._add(phase, Reading(gpu_kwh=energy_kwh, duration_s=duration_s))
        self._all_kwh += energy_kwh

    def enter(self, phase: Phase) -> None:
        self._open = phase

    def running_kwh(self, phase: Phase) -> float:
        return self._closed_kwh(phase)

    def outer_kwh(self) -> float | None:
        return self._all_kwh

    def close(self) -> None:
        self._open = None


class _Complaints(logging.Filter):
    """Keeps what CodeCarbon complains of for our own error's text, and lets nothing through to the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self._cause = ""
        self._latest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self._latest = record.getMessage()
            if record.exc_info and not self._cause:  # the first exception caused those that follow
                self._cause = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        return False

    def __str__(self) -> str:
        return self._cause or self._latest or "nothing"


def _hush_codecarbon() -> _Complaints:
    # A filter, and before the first import: importing and constructing log at INFO whatever log_level says later.
    logger = logging.getLogger("codecarbon")
    for known in logger.filters:
        if isinstance(known, _Complaints):
            return known
    complaints = _Complaints()
    logger.addFilter(complaints)
    return complaints


class _RunningTotal:
    """One CodeCarbon tracker, started, read as the total since its start."""

    def __init__(self, gpu_indices: Sequence[int], complaints: _Complaints) -> None:
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.output_methods.base_output import BaseOutput
        from codecarbon.output_methods.emissions_data import EmissionsData

        class Latest(BaseOutput):
            """What `flush()` hands to its outputs: the only public way to a running total by component."""

            total: EmissionsData | None = None

            def out(self, total: EmissionsData, delta: EmissionsData) -> None:
                self.total = total

        self._complaints = complaints
        self._has_gpus = bool(gpu_indices)
        self._latest = Latest()
        complaints.forget()
        self._tracker = OfflineEmissionsTracker(
            **_SETTINGS,
            gpu_ids=list(gpu_indices),
            output_dir=tempfile.gettempdir(),  # must exist; nothing is written
            output_handlers=[self._latest],
        )
        self._tracker.start()
        self.read()  # the first reading imports more and takes 60 ms
        time.sleep(_FRESH_AFTER_S)  # so that the first window doesn't begin with energy from before it

    def read(self) -> Reading:
        """Energy and seconds since the start; readings less than `_FRESH_AFTER_S` apart give the same energy.

        Raises:
            MeasurementError: CodeCarbon's methods swallow every exception, so silence is the only sign of one.
        """
        self._latest.total = None
        self._tracker.flush()
        data = self._latest.total
        if data is None:
            raise MeasurementError(
                f"CodeCarbon must give an energy reading, but gave none; it said: {self._complaints}"
            )
        self._complaints.forget()
        return Reading(
            # On a machine with GPUs CodeCarbon counts them all when asked for none.
            gpu_kwh=data.gpu_energy if self._has_gpus else None,
            cpu_kwh=data.cpu_energy,
            ram_kwh=data.ram_energy,
            duration_s=data.duration,
        )

    def stop(self) -> None:
        self._tracker.stop()


def _refuse_silence(phase: Phase, window: Reading) -> None:
    if window.duration_s <= _LONGEST_ZERO_S:
        return
    parts = {"GPU": window.gpu_kwh, "CPU": window.cpu_kwh, "RAM": window.ram_kwh}
    silent = [name for name, energy_kwh in parts.items() if energy_kwh is not None and not energy_kwh > 0]
    if silent:
        raise MeasurementError(
            f"a running machine uses energy, but CodeCarbon measured none for {' and '.join(silent)} during "
            f"{window.duration_s:.1f} s of {phase}. Look at what `carbonopt doctor` says."
        )


def _has_rapl() -> bool:
    """Whether the CPU counts its own energy and we may read it: the test by which CodeCarbon chooses, on Linux."""
    from codecarbon.core.cpu import is_rapl_available

    return bool(is_rapl_available())
