"""The meter of this machine.

It reads the GPUs' own counters and CodeCarbon at the edges of the same windows.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from carbonopt.core.errors import MeasurementError
from carbonopt.core.trial import READINGS_APART_S, TRIAL_PHASES, Phase
from carbonopt.core.units import kwh_from_joules
from carbonopt.energy.codecarbon import CodeCarbonTotals, has_rapl, power_models
from carbonopt.energy.counter import DEAD_AFTER_S, EnergyCounters, measure_idle
from carbonopt.energy.host_attribution import HostAttribution, HostUse
from carbonopt.energy.meter import EnergyWindows
from carbonopt.energy.meter_reading import (
    OF_GPUS,
    UTILISATION_EVERY_S,
    Objective,
    Reading,
    disagreement,
)
from carbonopt.energy.slurm_energy import StepEnergy
from carbonopt.spec.study_data import EnergySource

_TICKS_OF_A_POWER = 3  # shortest window, in a counter's ticks, from which power is computed


class CounterSnapshot(NamedTuple):
    """The running totals of all counters at one moment."""

    at_s: float
    counters_j: tuple[float, ...]  # each GPU's energy up to its counter's last tick
    gpus_j: tuple[float, ...]  # the same, never below what closed windows were given
    host: HostUse
    codecarbon_gpu_kwh: float
    codecarbon_cpu_kwh: float  # the whole machine's CPU energy, as CodeCarbon counts it
    codecarbon_ram_kwh: float  # the whole machine's RAM energy, as CodeCarbon counts it
    # End of the reading, a few ms after `at_s`. It is later only if this process had to wait for a
    # core that other programs used.
    read_by_s: float


class MachineMeter(EnergyWindows):
    """The meter of this machine's GPUs, CPU and RAM. Implements `Meter`.

    The GPUs are measured by their own counters, and CPU and RAM by CodeCarbon, which also reads the
    GPUs in the same windows. Setting up takes one to three seconds. Then the first window begins,
    in phase PREPARE, with the measurement of the GPUs' idle power (about six seconds; none without
    GPUs).

    Args:
        gpu_indices: the NVML indices of the GPUs.
        objective: the components that count.
        interrupted: returns whether the study is asked to end.
        host: divides the energy of CPU and RAM by who used it; None: this process with all its
            children is the trial, on the cores that it may use.
        slurm: Slurm's reading of the whole machine; None: there is none.

    Raises:
        BadInput: if a GPU doesn't exist or has no energy counter.
        MeasurementError: if CodeCarbon can't measure here, or a counter stands still.
        StudyInterrupted: if `interrupted` returns true during the idle measurement.
    """

    def __init__(
        self,
        gpu_indices: Sequence[int],
        objective: Objective = "all",
        interrupted: Callable[[], bool] = lambda: False,
        host: HostAttribution | None = None,
        slurm: StepEnergy | None = None,
    ) -> None:
        sources: dict[str, EnergySource] = {
            "cpu": "measured" if has_rapl() else "modelled",
            "ram": "modelled",
        }
        nothing = Reading(cpu_kwh=0.0, ram_kwh=0.0, objective=objective)
        if gpu_indices:
            sources["gpu"] = "measured"
            nothing = nothing.model_copy(update=dict.fromkeys(OF_GPUS, 0.0))
        super().__init__(nothing, sources, power_models())
        self._host, self._slurm = host or HostAttribution(os.sched_getaffinity(0)), slurm
        self._ended: Reading | None = None
        self._phase = Phase.PREPARE
        # Energy of each GPU that has been credited to closed windows.
        self._credited_j = (0.0,) * len(gpu_indices)
        # If one of these fails, the others are closed: CodeCarbon has threads that must end.
        with ExitStack() as instruments:
            self._counters = instruments.enter_context(closing(EnergyCounters(gpu_indices)))
            self._outer_counters = instruments.enter_context(closing(EnergyCounters(gpu_indices)))
            self._codecarbon = instruments.enter_context(closing(CodeCarbonTotals(gpu_indices)))
            self._host.begin(
                self._codecarbon.powers(), time.monotonic(), self._codecarbon.read().cpu_energy
            )
            self._latest = self._window_start = self._session_start = self._read()
            self._outer_began_j = self._outer_j = self._outer_counters.read()
            if gpu_indices:
                self.idle = measure_idle(self._counters, interrupted)
            self._instruments = instruments.pop_all()
        # The last known power of each GPU, for windows that are too short to measure their own.
        self._powers_w = [idle.power_w for idle in self.idle]
        self._start_temperature_c: float | None = None  # temperature when the open window began
        self._utilisations: list[float] = []  # readings of the open window
        self._utilisation_at_s = 0.0  # time of the last reading
        self._used = len(gpu_indices)  # number of GPUs that the trial uses

    def use(self, gpus: int) -> None:
        self._used = min(gpus, len(self._counters.indices))

    def enter(self, phase: Phase) -> None:
        self._close_window()
        self._phase = phase
        # For training: how hot the GPUs are from the work before it.
        self._start_temperature_c = self._counters.temperature_c() if phase is Phase.TRAIN else None

    def running(self, phase: Phase) -> Reading:
        if phase in self._open_phases():
            self._refresh()
        return self._so_far(phase)

    def _open_phases(self) -> tuple[Phase, ...]:
        """Return the phases to which the open window adds energy."""
        if self._phase is None:
            return ()
        return (self._phase, Phase.OTHER, *([Phase.GAP] if self._phase in TRIAL_PHASES else []))

    def _so_far(self, phase: Phase) -> Reading:
        """Return a phase's reading up to the latest snapshot."""
        if phase not in self._open_phases():
            return self._closed[phase]
        total = self._closed[phase] + self._window()[phase]
        # OTHER is what the others leave of the whole: it makes up for the errors of their readings.
        return total if phase is Phase.OTHER else total.at_least_nothing()

    def outer(self) -> Reading:
        if self._ended is not None:
            return self._ended
        self._read(with_outer=True)
        return self._whole()

    def parts_and_outer(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        if self._ended is None:
            self._read(with_outer=True)
        return {phase: self._so_far(phase) for phase in phases}, self._ended or self._whole()

    def _whole(self) -> Reading:
        """Return the total up to the latest snapshot that includes the outer counters."""
        used_j = math.fsum(self._outer_j) - math.fsum(self._outer_began_j)
        gpu = {"gpu_kwh": kwh_from_joules(used_j)} if self._outer_began_j else {}
        others = {
            "slurm_kwh": None if self._slurm is None else self._slurm.kwh(),
            "codecarbon_cpu_kwh": self._latest.codecarbon_cpu_kwh
            - self._session_start.codecarbon_cpu_kwh,
        }
        return self._between(self._session_start, self._latest).model_copy(update={**gpu, **others})

    def close(self) -> None:
        if self._ended is not None:
            return
        try:
            self._close_window(with_outer=True)
            self._ended = self._whole()
        finally:
            self._phase = None
            self._instruments.close()

    def _refresh(self) -> None:
        if time.monotonic() - self._latest.at_s <= READINGS_APART_S:
            return
        now_s = self._read().at_s
        # Utilisation is read only during training, where trials are compared by it. A window that
        # is shorter than a second has no reading.
        asked_s = max(self._window_start.at_s, self._utilisation_at_s)
        if self._phase is Phase.TRAIN and now_s - asked_s >= UTILISATION_EVERY_S:
            self._utilisation_at_s = now_s
            if (utilisation := self._counters.utilisation(self._used)) is not None:
                self._utilisations.append(utilisation)

    def _read(self, *, with_outer: bool = False) -> CounterSnapshot:
        """Read all counters and, with `with_outer`, the outer counters at the same moment."""
        # GPU counters come first: their energy is the one that counts, and they are quicker.
        at_s, counters_j = time.monotonic(), self._counters.read()
        if with_outer:
            self._outer_j = self._outer_counters.read()
        totals = self._codecarbon.read()
        self._latest = CounterSnapshot(
            at_s=at_s,
            counters_j=counters_j,
            gpus_j=tuple(map(max, counters_j, self._credited_j)),
            host=self._host.read(at_s, totals.cpu_energy),
            codecarbon_gpu_kwh=totals.gpu_energy,
            codecarbon_cpu_kwh=totals.cpu_energy,
            codecarbon_ram_kwh=totals.ram_energy,
            read_by_s=time.monotonic(),
        )
        return self._latest

    def _close_window(self, *, with_outer: bool = False) -> None:
        self._read(with_outer=with_outer)
        if self._phase is None:
            return
        self._refuse_silence()
        # The outer counters are read up to their last tick, so that the last window ends there.
        self._credited_j = self._latest.gpus_j if with_outer else self._edges_j()
        self._latest = self._latest._replace(gpus_j=self._credited_j)
        for phase, part in self._window().items():
            differs = disagreement(part.gpu, part.duration_s) if phase is self._phase else None
            self._closed[phase] += part.model_copy(update={"disagreement": differs})
        self._settle(self._phase)
        self._powers_w = self._window_powers_w()
        self._window_start, self._utilisations = self._latest, []

    def _settle(self, phase: Phase) -> None:
        """Set a phase that has fallen below 0 to 0, and take the difference from OTHER.

        It falls below 0 if a part of it was moved to another phase, and a later reading of the same
        window then shows that some of that part was other work's.
        """
        total = self._closed[phase]
        self._closed[phase] = total.at_least_nothing()
        missing = self._closed[phase].part_since(total)
        self._closed[Phase.OTHER] = self._closed[Phase.OTHER].without(missing)

    def _window(self) -> dict[Phase, Reading]:
        """Divide the open window, up to the latest snapshot, among phases.

        Only the window's own phase gets time. GAP gets the energy of the GPUs that a trial leaves
        idle and of the study's own processes beside the trial, OTHER that of other work.
        """
        assert self._phase is not None
        of_trial = self._phase in TRIAL_PHASES
        shares = self._host.shares(self._window_start.host, self._latest.host, of_trial=of_trial)
        whole = self._between(self._window_start, self._latest)
        parts = {
            self._phase: whole.model_copy(
                update=(shares.trial if of_trial else shares.study)._asdict()
            ),
            Phase.OTHER: self._nothing.model_copy(update=shares.other._asdict()),
        }
        if of_trial:
            parts[Phase.GAP] = self._nothing.model_copy(update=shares.study._asdict())
        return self._with_gpus(parts, whole) if self.idle else parts

    def _with_gpus(self, parts: dict[Phase, Reading], whole: Reading) -> dict[Phase, Reading]:
        """Return the window's parts with the energy of the GPUs added.

        In a trial's window its own GPUs count for the trial's phase, also while they idle. Those
        that it does not use count as GAP. In any other window all GPUs count for its phase.

        Args:
            parts: the parts so far, by phase: the shares of the CPU and the RAM.
            whole: the window's whole reading.
        """
        assert self._phase is not None
        of_trial = self._phase in TRIAL_PHASES
        used = slice(self._used) if of_trial else slice(None)
        utilisation = {
            "utilisation_sum": math.fsum(self._utilisations),
            "utilisation_readings": len(self._utilisations),
        }
        start = {"start_temperature_c": self._start_temperature_c}
        own = parts[self._phase].model_copy(
            update={**self._of_gpus(whole, used), **utilisation, **start}
        )
        if not of_trial:
            return {**parts, self._phase: own}
        left_over = parts[Phase.GAP].model_copy(
            update=self._of_gpus(whole, slice(self._used, None))
        )
        return {**parts, self._phase: own, Phase.GAP: left_over}

    def _of_gpus(self, whole: Reading, gpus: slice) -> dict[str, float]:
        """Return the energy fields of some of the GPUs.

        CodeCarbon gives only the sum of all GPUs, which is divided in the proportion of the
        counters.
        """
        used_j = [
            now - before
            for before, now in zip(self._window_start.gpus_j, self._latest.gpus_j, strict=True)
        ]
        share = math.fsum(used_j[gpus]) / (math.fsum(used_j) or 1.0)
        # A counter's last tick is between 0 and tick_s old, uniformly: the difference of the two
        # ends has a variance of tick²/6.
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
            gpu_kwh=(
                kwh_from_joules(math.fsum(end.gpus_j) - math.fsum(start.gpus_j))
                if end.gpus_j
                else None
            ),
            # On a machine with GPUs, CodeCarbon counts them all when asked for none.
            codecarbon_gpu_kwh=(
                end.codecarbon_gpu_kwh - start.codecarbon_gpu_kwh if end.gpus_j else None
            ),
            **self._host.shares(start.host, end.host, of_trial=False).whole._asdict(),
            duration_s=end.at_s - start.at_s,
            objective=self._nothing.objective,
        )

    def _edges_j(self) -> tuple[float, ...]:
        """Return the energy of each GPU at the latest snapshot, also between its counter's ticks.

        A counter stands where it was at its last tick, which is between 0 and a tick old, half a
        tick on average: that time × the power just before the edge is added. Without this, each
        change from a high to a low power would count a part of the high power's energy in the
        second window: eight short evaluations took 2 % from a training of 11 s (H200). A window
        shorter than three ticks ends at its beginning's energy plus its power × its time instead.
        This is clipped to within a tick of the energy that the first rule gives, so that the errors
        of the edges around many such windows don't add up.
        """
        opened, latest = self._window_start, self._latest
        duration_s = latest.at_s - opened.at_s
        edges_j = []
        for place, (idle, last_w) in enumerate(zip(self.idle, self._powers_w, strict=True)):
            opened_j, tick_s = opened.gpus_j[place], idle.tick_s
            # The counter's own reading, not the energy that windows were given so far, which may be
            # ahead of it: errors would add up.
            counter_j = latest.counters_j[place]
            is_short = duration_s < _TICKS_OF_A_POWER * tick_s
            since_s = opened.at_s if is_short else latest.at_s - tick_s
            power_w = self._counters.mean_power_w(place, since_s, latest.at_s)
            if power_w is None:
                since_open_j = counter_j - opened.counters_j[place]
                power_w = last_w if is_short else since_open_j / duration_s
            likely_j, tick_j = counter_j + power_w * tick_s / 2, max(power_w, last_w) * tick_s
            if is_short:
                between_j = opened_j + power_w * duration_s
                likely_j = min(max(between_j, likely_j - tick_j), likely_j + tick_j)
            edges_j.append(max(likely_j, opened_j))
        return tuple(edges_j)

    def _window_powers_w(self) -> list[float]:
        """Return each GPU's mean power in the open window.

        If the window is shorter than three ticks, the last known power is returned.
        """
        duration_s = self._latest.at_s - self._window_start.at_s
        used_j = [
            b - a for a, b in zip(self._window_start.gpus_j, self._latest.gpus_j, strict=True)
        ]
        return [
            energy_j / duration_s if duration_s >= _TICKS_OF_A_POWER * idle.tick_s else last_w
            for energy_j, idle, last_w in zip(used_j, self.idle, self._powers_w, strict=True)
        ]

    def _refuse_silence(self) -> None:
        # Time between the two readings, without the time that the first one took, which is long on
        # a busy machine.
        if self._latest.at_s - self._window_start.read_by_s <= DEAD_AFTER_S:
            return
        opened, latest = self._window_start, self._latest
        silent = ["CPU"] if latest.codecarbon_cpu_kwh <= opened.codecarbon_cpu_kwh else []
        silent += ["RAM"] if latest.codecarbon_ram_kwh <= opened.codecarbon_ram_kwh else []
        # What is credited may be ahead of a counter that ticks.
        used_j = zip(self._counters.indices, opened.counters_j, latest.counters_j, strict=True)
        silent += [f"GPU {index}" for index, before_j, now_j in used_j if now_j <= before_j]
        if silent:
            during = (
                f"{latest.at_s - opened.at_s:.1f} s of {self._phase}. Look at what `carbonopt"
                " doctor` says."
            )
            none = f"none was measured for {' and '.join(silent)} during {during}"
            raise MeasurementError(f"a running machine uses energy, but {none}")
