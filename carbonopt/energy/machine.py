"""The meter of this machine: the GPUs' own counters and CodeCarbon, read at the same windows' edges."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from carbonopt.core.errors import MeasurementError
from carbonopt.core.study import EnergySource
from carbonopt.core.trial import TRIAL_PHASES, Phase
from carbonopt.core.units import kwh_from_joules
from carbonopt.energy.codecarbon import FRESH_AFTER_S, CodeCarbonTotals, has_rapl, power_models
from carbonopt.energy.counter import EnergyCounters, measure_idle
from carbonopt.energy.meter import (
    OF_GPUS,
    UTILISATION_EVERY_S,
    EnergyWindows,
    Objective,
    Reading,
    disagreement,
)
from carbonopt.energy.share import CoreShare
from carbonopt.energy.slurm import StepEnergy

# A component without any energy in so long can only be a dead sensor.
_LONGEST_ZERO_S = 1.0


class CounterSnapshot(NamedTuple):
    """All running totals at one moment."""

    at_s: float
    gpus_j: tuple[float, ...]
    codecarbon_gpu_kwh: float
    cpu_kwh: float
    ram_kwh: float
    read_by_s: float  # later than `at_s` by more than a few ms only where other work leaves this process no core


class MachineMeter(EnergyWindows):
    """Measures the GPUs of these NVML indices by their own counters, and all CPUs and RAM by CodeCarbon, which reads
    the GPUs in the same windows beside them. Implements `Meter`. It takes one to three seconds to set up, before the
    first window, which is in PREPARE and begins with the idle power of the GPUs (six seconds; none without GPUs).

    Args:
        share: of the CPU's and the RAM's energy that counts; None: all of it.
        slurm: what Slurm reads of the whole machine; None: nothing.

    Raises:
        BadInput: if a GPU doesn't exist or has no energy counter.
        MeasurementError: if CodeCarbon can't measure here, or a counter stands still.
        StudyInterrupted: if `interrupted` says so during the idle measurement.
    """

    def __init__(
        self,
        gpu_indices: Sequence[int],
        objective: Objective = "all",
        interrupted: Callable[[], bool] = lambda: False,
        share: CoreShare | None = None,
        slurm: StepEnergy | None = None,
    ) -> None:
        sources: dict[str, EnergySource] = {"cpu": "measured" if has_rapl() else "modelled", "ram": "modelled"}
        nothing = Reading(cpu_kwh=0.0, ram_kwh=0.0, objective=objective)
        if gpu_indices:
            sources["gpu"] = "measured"
            nothing = nothing.model_copy(update=dict.fromkeys(OF_GPUS, 0.0))
        super().__init__(nothing, sources, power_models())
        self._share, self._slurm = share, slurm
        self._ended: Reading | None = None
        self._open = Phase.PREPARE
        with ExitStack() as opened:  # CodeCarbon has threads, which end also if one of these fails
            self._counters = opened.enter_context(closing(EnergyCounters(gpu_indices)))
            self._outer_counters = opened.enter_context(closing(EnergyCounters(gpu_indices)))
            self._codecarbon = opened.enter_context(closing(CodeCarbonTotals(gpu_indices)))
            self._latest = self._opened = self._began = self._read()
            self._outer_began_j = self._outer_counters.read()
            if gpu_indices:
                self.idle = measure_idle(self._counters, interrupted)
            self._instruments = opened.pop_all()
        # The last known power of each GPU, for windows that are too short to tell their own.
        self._powers_w = [idle.power_w for idle in self.idle]
        self._start_temperature_c: float | None = None  # of the open window
        self._utilisations: list[float] = []  # likewise
        self._utilisation_at_s = 0.0  # when it was last asked for
        self._used = len(gpu_indices)  # of the GPUs, by the trial

    def use(self, gpus: int) -> None:
        self._used = min(gpus, len(self._counters.indices))

    def enter(self, phase: Phase) -> None:
        self._close_window()
        self._open = phase
        # Of a training: how hot its GPUs were from what was before it.
        self._start_temperature_c = self._counters.temperature_c() if phase is Phase.TRAIN else None

    def running(self, phase: Phase) -> Reading:
        if self._is_open(phase):
            self._refresh()
        return self._so_far(phase)

    def _is_open(self, phase: Phase) -> bool:
        return phase is self._open or (phase is Phase.GAP and self._leaves_some_idle)

    def _so_far(self, phase: Phase) -> Reading:
        """Up to the latest reading."""
        if not self._is_open(phase):
            return self._closed[phase]
        return self._closed[phase] + (self._window() if phase is self._open else self._left_over())

    def outer(self) -> Reading:
        if self._ended is not None:
            return self._ended
        self._refresh()
        return self._whole()

    def account(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        if self._ended is None:
            self._refresh()
        return {phase: self._so_far(phase) for phase in phases}, self._ended or self._whole()

    def _whole(self) -> Reading:
        """Up to the latest reading."""
        used_j = math.fsum(self._outer_counters.read()) - math.fsum(self._outer_began_j)
        gpu = {"gpu_kwh": kwh_from_joules(used_j)} if self._outer_began_j else {}
        slurm = {"slurm_kwh": None if self._slurm is None else self._slurm.kwh()}
        return self._between(self._began, self._latest).model_copy(update={**gpu, **slurm})

    def close(self) -> None:
        if self._ended is not None:
            return
        try:
            self._close_window()
            self._ended = self.outer()
        finally:
            self._open = None
            self._instruments.close()

    def _refresh(self) -> None:
        if time.monotonic() - self._latest.at_s <= FRESH_AFTER_S:
            return
        now_s = self._read().at_s
        # Only while trials train: what they are compared by. A window that is shorter than a second has none.
        asked_s = max(self._opened.at_s, self._utilisation_at_s)
        if self._open is Phase.TRAIN and now_s - asked_s >= UTILISATION_EVERY_S:
            self._utilisation_at_s = now_s
            if (utilisation := self._counters.utilisation(self._used)) is not None:
                self._utilisations.append(utilisation)

    def _read(self) -> CounterSnapshot:
        # The counters first: their reading is the one that is used, and it is the quicker.
        at_s, gpus_j, totals = time.monotonic(), self._counters.read(), self._codecarbon.read()
        cpu_kwh, ram_kwh = totals.cpu_energy, totals.ram_energy
        if self._share is not None:
            self._share.add(cpu_kwh, ram_kwh)
            cpu_kwh, ram_kwh = self._share.cpu_kwh, self._share.ram_kwh
        self._latest = CounterSnapshot(at_s, gpus_j, totals.gpu_energy, cpu_kwh, ram_kwh, time.monotonic())
        return self._latest

    def _close_window(self) -> None:
        self._read()
        if self._open is None:
            return
        window = self._window()
        self._refuse_silence(window)
        differs = disagreement(window.gpu, window.duration_s)
        self._closed[self._open] += window.model_copy(update={"disagreement": differs})
        if self._leaves_some_idle:
            self._closed[Phase.GAP] += self._left_over()
        self._powers_w = self._window_powers_w()
        self._opened, self._utilisations = self._latest, []

    @property
    def _leaves_some_idle(self) -> bool:
        """Whether the open window is a trial's, which doesn't use all GPUs."""
        return self._open in TRIAL_PHASES and self._used < len(self._counters.indices)

    def _window(self) -> Reading:
        """The open window up to the latest reading; of a trial, without the GPUs that it leaves idle."""
        window = self._between(self._opened, self._latest)
        if not self.idle:
            return window
        gpus = slice(self._used) if self._leaves_some_idle else slice(None)
        told = {"utilisation_sum": math.fsum(self._utilisations), "utilisation_readings": len(self._utilisations)}
        start = {"start_temperature_c": self._start_temperature_c}
        return window.model_copy(update={**self._of_gpus(window, gpus), **told, **start})

    def _left_over(self) -> Reading:
        """What the GPUs that the trial leaves idle have drawn in the open window, in no time of its own."""
        whole = self._between(self._opened, self._latest)
        return self._nothing.model_copy(update=self._of_gpus(whole, slice(self._used, None)))

    def _of_gpus(self, whole: Reading, gpus: slice) -> dict[str, float]:
        """The fields of some of the GPUs. CodeCarbon tells but the sum of all, which is shared as the counters say."""
        used_j = [now - before for before, now in zip(self._opened.gpus_j, self._latest.gpus_j, strict=True)]
        share = math.fsum(used_j[gpus]) / (math.fsum(used_j) or 1.0)
        # A counter's last tick is up to tick_s old, evenly: the two ends differ by a variance of tick²/6.
        ticks = zip(self._window_powers_w()[gpus], self.idle[gpus], strict=True)
        variance_j2 = math.fsum((power_w * idle.tick_s) ** 2 / 6 for power_w, idle in ticks)
        idle_j = math.fsum(idle.power_w for idle in self.idle[gpus]) * whole.duration_s
        return {
            "gpu_kwh": kwh_from_joules(math.fsum(used_j[gpus])),
            "codecarbon_gpu_kwh": (whole.codecarbon_gpu_kwh or 0.0) * share,
            "idle_gpu_kwh": kwh_from_joules(idle_j),
            "gpu_variance_kwh2": kwh_from_joules(kwh_from_joules(variance_j2)),
        }

    def _between(self, start: CounterSnapshot, end: CounterSnapshot) -> Reading:
        return Reading(
            gpu_kwh=kwh_from_joules(math.fsum(end.gpus_j) - math.fsum(start.gpus_j)) if end.gpus_j else None,
            # On a machine with GPUs CodeCarbon counts them all when asked for none.
            codecarbon_gpu_kwh=end.codecarbon_gpu_kwh - start.codecarbon_gpu_kwh if end.gpus_j else None,
            cpu_kwh=end.cpu_kwh - start.cpu_kwh,
            ram_kwh=end.ram_kwh - start.ram_kwh,
            duration_s=end.at_s - start.at_s,
            objective=self._nothing.objective,
        )

    def _window_powers_w(self) -> list[float]:
        """Each GPU's mean power in the open window; the last window's where this one is shorter than three ticks."""
        duration_s = self._latest.at_s - self._opened.at_s
        used_j = [b - a for a, b in zip(self._opened.gpus_j, self._latest.gpus_j, strict=True)]
        return [
            energy_j / duration_s if duration_s >= 3 * idle.tick_s else last_w
            for energy_j, idle, last_w in zip(used_j, self.idle, self._powers_w, strict=True)
        ]

    def _refuse_silence(self, window: Reading) -> None:
        # Between the two readings, not with the time that the first one took: a meter that got no core measures late.
        if self._latest.at_s - self._opened.read_by_s <= _LONGEST_ZERO_S:
            return
        silent = [name for name, kwh in (("CPU", window.cpu_kwh), ("RAM", window.ram_kwh)) if not kwh or kwh < 0]
        used_j = zip(self._counters.indices, self._opened.gpus_j, self._latest.gpus_j, strict=True)
        silent += [f"GPU {index}" for index, before_j, now_j in used_j if now_j <= before_j]
        if silent:
            during = f"{window.duration_s:.1f} s of {self._open}. Look at what `carbonopt doctor` says."
            none = f"none was measured for {' and '.join(silent)} during {during}"
            raise MeasurementError(f"a running machine uses energy, but {none}")
