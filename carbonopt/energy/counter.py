"""The GPUs' own energy counters, read through NVML, and the power of idle GPUs."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from carbonopt.core.errors import BEFORE_A_TRIAL, MeasurementError, StudyInterrupted
from carbonopt.energy.hardware import Gpu, answering, open_gpus
from carbonopt.spec.study_data import IdlePower

_IDLE_WINDOWS, _IDLE_WINDOW_S = 5, 1.0
# Below a second: ten ticks of 0.1 s take a little more than a second or, as often, a little less,
# and a window is to end after ten of them in both cases.
_SHORTEST_WINDOW_S = 0.95
_POLL_S = 0.002
# A counter ticks every 0.1 s on an H200; a component whose counter stands still for this long has a
# dead sensor.
DEAD_AFTER_S = 1.0
# A first tick may count the energy of a time before the reading that came before it.
_EARLIER_TICK_S = 1.0
_JOULES_PER_MILLIJOULE = 1e-3
# Two samples of the power that are farther apart say nothing of the time between them.
_SAMPLES_APART_S = 0.1
# Twice the power limit of the largest GPU boards of 2026; a counter that says more has jumped.
_MOST_W = 3000.0


class EnergyCounters:
    """The energy counters of GPUs, in the order of the given NVML indices.

    A reading takes 3 ms a GPU (H200, driver 580). NVML ignores CUDA_VISIBLE_DEVICES. Constructing
    the object raises what `check_gpus` raises.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = tuple(indices)
        self._nvml = ExitStack()  # kept open, since opening NVML takes longer than a reading
        self._gpus = self._nvml.enter_context(open_gpus(indices))
        self._start_mj = self._read_mj()
        self._last_mj, self._last_s = self._start_mj, time.monotonic()

    def read(self) -> tuple[float, ...]:
        """Return the joules of each GPU since this object was made, up to its counter's last tick.

        Raises MeasurementError if a GPU doesn't answer any more, or its counter has gone backwards
        or jumped.
        """
        now_mj, now_s = self._read_mj(), time.monotonic()
        most_mj = _MOST_W * 1000 * (now_s - self._last_s + _EARLIER_TICK_S)
        for index, before, now in zip(self.indices, self._last_mj, now_mj, strict=True):
            went = f"GPU {index} went from {before} to {now} mJ"
            if now < before:
                why = (
                    "its driver was reloaded or the GPU was reset. The same command goes on with"
                    " the study."
                )
                raise MeasurementError(f"an energy counter only grows, but that of {went}: {why}")
            if now - before > most_mj:
                within = f"within {now_s - self._last_s:.1f} s. Run the same command again."
                raise MeasurementError(
                    f"no GPU draws {_MOST_W:g} W, but the counter of {went} {within}"
                )
        self._last_mj, self._last_s = now_mj, now_s
        return tuple(
            (now - start) * _JOULES_PER_MILLIJOULE
            for start, now in zip(self._start_mj, now_mj, strict=True)
        )

    def mean_power_w(self, place: int, since_s: float, until_s: float) -> float | None:
        """Return a GPU's mean power between two moments of `time.monotonic`, by NVML's samples.

        NVML keeps those of about the last two seconds, one every 20 ms (H200, driver 580). A sample
        is taken for the mean since the one before. None: the samples are not of at least half of
        the time, or one is of more than any GPU draws.

        Args:
            place: the GPU's place among those of this object.
        """
        gpu = self._gpus[place]
        to_monotonic_s = time.monotonic() - time.time()
        try:
            samples = gpu.power_samples(since_s - to_monotonic_s - _SAMPLES_APART_S)
        except (gpu.nvml.NVMLError, MeasurementError):
            return None  # the edges of windows are then less exact
        if any(power_w > _MOST_W for _, power_w in samples):
            return None
        ends = [(at_s + to_monotonic_s, power_w) for at_s, power_w in samples]
        ends += [(until_s, power_w) for at_s, power_w in ends[-1:] if at_s < until_s]
        parts = [
            (begin_s, min(end_s, until_s) - max(begin_s, since_s), power_w)
            for (begin_s, _), (end_s, power_w) in itertools.pairwise(ends)
            if end_s - begin_s <= _SAMPLES_APART_S
        ]
        # A sample that began before the window is of another power, too, and left out if it can be.
        for first_s in (since_s, -math.inf):
            within = [part for part in parts if part[0] >= first_s and part[1] > 0]
            covered_s = math.fsum(part_s for _, part_s, _ in within)
            if covered_s >= (until_s - since_s) / 2 > 0:
                return math.fsum(part_s * power_w for _, part_s, power_w in within) / covered_s
        return None

    def utilisation(self, first: int | None = None) -> float | None:
        """Return the share of NVML's last sampling period in which a kernel ran.

        It is the mean of the GPUs, or of the first `first` ones. If one of them doesn't answer, it
        is None, not an error, since no figure of energy depends on it.
        """
        gpus = self._gpus[:first]
        rates = self._mean_answer(
            lambda gpu: getattr(gpu.nvml.nvmlDeviceGetUtilizationRates(gpu.handle), "gpu", None),
            0,
            100,
            gpus,
        )
        return None if rates is None else rates / 100

    def temperature_c(self) -> float | None:
        """Return the mean temperature of the GPUs; None where one of them doesn't answer."""
        coldest_c, hottest_c = -50, 200
        sensor = 0  # NVML_TEMPERATURE_GPU, the only one
        return self._mean_answer(
            lambda gpu: gpu.nvml.nvmlDeviceGetTemperature(gpu.handle, sensor), coldest_c, hottest_c
        )

    def _mean_answer(
        self,
        ask: Callable[[Gpu], Any],
        lowest: int,
        highest: int,
        gpus: Sequence[Gpu] | None = None,
    ) -> float | None:
        """Return the mean of the GPUs' answers; None if one is missing or outside the limits."""
        try:
            with answering():
                answers = [ask(gpu) for gpu in gpus or self._gpus]
        except MeasurementError:
            return None
        known = [
            answer for answer in answers if isinstance(answer, int) and lowest <= answer <= highest
        ]
        return statistics.fmean(known) if known and len(known) == len(answers) else None

    def close(self) -> None:
        self._nvml.close()

    def _read_mj(self) -> tuple[int, ...]:
        with answering():
            return tuple(gpu.energy_mj() for gpu in self._gpus)


def measure_idle(
    counters: EnergyCounters, interrupted: Callable[[], bool]
) -> tuple[IdlePower, ...]:
    """Measure the power of each idle GPU in five windows of a second, cut at its counter's ticks.

    The caller must keep the GPUs idle: a GPU that holds a CUDA context draws more (H200: 124 W
    against 80 W).

    Raises:
        MeasurementError: if a counter stands still.
        StudyInterrupted: as soon as `interrupted` returns true.
    """
    # Seconds and joules at each tick, by GPU.
    ticks: list[list[tuple[float, float]]] = [[] for _ in counters.indices]
    began, last_j = time.monotonic(), counters.read()
    wanted_s = _IDLE_WINDOWS * _IDLE_WINDOW_S
    while not all(
        gpu_ticks and gpu_ticks[-1][0] - gpu_ticks[0][0] >= wanted_s for gpu_ticks in ticks
    ):
        if interrupted():
            raise StudyInterrupted(BEFORE_A_TRIAL)
        now_s, now_j = time.monotonic(), counters.read()
        for index, gpu_ticks, before, energy_j in zip(
            counters.indices, ticks, last_j, now_j, strict=True
        ):
            if energy_j != before:
                gpu_ticks.append((now_s, energy_j))
            elif now_s - (gpu_ticks[-1][0] if gpu_ticks else began) > DEAD_AFTER_S:
                still = f"stood still for {DEAD_AFTER_S:g} s. Look at what `carbonopt doctor` says."
                raise MeasurementError(
                    f"a running GPU uses energy, but the counter of GPU {index} {still}"
                )
        last_j = now_j
        time.sleep(_POLL_S)
    return tuple(
        _idle_power(index, gpu_ticks)
        for index, gpu_ticks in zip(counters.indices, ticks, strict=True)
    )


def _idle_power(index: int, ticks: list[tuple[float, float]]) -> IdlePower:
    edges = [ticks[0]]
    for tick in ticks:
        if tick[0] - edges[-1][0] >= _SHORTEST_WINDOW_S and len(edges) <= _IDLE_WINDOWS:
            edges.append(tick)
    powers_w = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(edges)]
    return IdlePower(
        gpu=index,
        power_w=statistics.fmean(powers_w),
        spread_w=statistics.stdev(powers_w) if len(powers_w) > 1 else 0.0,
        windows=len(powers_w),
        tick_s=statistics.median(b[0] - a[0] for a, b in itertools.pairwise(ticks)),
    )
