"""Models of what a step of a configuration costs, and of whether it fits in memory.

Both learn from the trials' first steps, by settings that leave the quality alone.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from scipy.special import ndtr

from carbonopt.core.arrays import Array, Indices

_SPREAD = 0.5  # standard deviation of ln(cost) between settings
_NOISE = 0.02  # standard deviation of ln(measurement); 1 % between identical runs on an H200
# Weight of the assumption that measurements scatter by _NOISE, as a number of measurements that
# would show it. On a busy machine the same setting was measured at 9.5 and at 0.65 mg CO2e:
# with this weight, each of two such measurements is uncertain by a factor of two.
_NOISE_FROM = 4
# Share of the draws in which one measurement is taken to be wrong, and the largest number of
# measurements with which this is done: among so few, a single wrong one decides. The cost of a
# first trial beside other work can be measured 15 times too high, and no other measurement shows
# it.
_DOUBT, _DOUBTED_TO = 0.1, 8
_FIT_FROM = 4  # different settings; fewer say nothing about how fast the cost changes
# Largest number of settings that the kernel's parameters are fitted to: the time grows with their
# third power.
_FIT_TO = 100
# A trial that ran out of memory shows that it needed at least the capacity, not how much: it counts
# as having needed the capacity times the exponential of this.
_BEYOND_CAPACITY = 0.3
# Standard deviation of ln(measured memory ÷ estimated memory): from 0.93 to 1.05 between OPT-1.3B
# and Llama 7B (reports/real-sizes.md).
_ESTIMATE_ERROR = 0.05


class SettingModel:
    """A Gaussian process of the logarithm of a positive quantity over system settings.

    The process models the difference from what is expected.

    Args:
        rows: (n, 1 + columns); the first column is the expected logarithm, up to a constant.
        values: (n,), positive.
        disturbance: (n,), standard deviation of each logarithm beside a measurement's own; None: 0.
        before: the model of a prior study, whose predictions are expected instead, up to a
            constant.
        slopes: (columns,), standard deviation of a linear effect of each column, per unit, beside
            the differences between settings that the process assumes. It is wide where nothing is
            expected, so that a value that no trial has had may cost several times as much or as
            little. None: no such effects.
        kernel: kernel of the process, fitted before; None: it is fitted here.
    """

    def __init__(
        self,
        rows: Array,
        values: Array,
        disturbance: Array | None = None,
        before: Self | None = None,
        slopes: Array | None = None,
        kernel: Any = None,
    ) -> None:
        self.known = 0  # number of different settings that were measured
        self._before, self._slopes = before, slopes
        self._rows, self._values = rows, values
        self._disturbance = np.zeros(len(rows)) if disturbance is None else disturbance
        if not len(rows):
            return
        # Imported here, since it takes a second to import, by which every trial's processes would
        # start later.
        from sklearn.gaussian_process import GaussianProcessRegressor

        settings, which = distinct(rows)
        self.known = len(settings)
        y = np.log(values) - self._expected(rows)
        weights = np.hypot(_NOISE, self._disturbance) ** -2.0
        sums = np.asarray(np.bincount(which, weights), dtype=float)
        means = np.bincount(which, weights * y) / sums
        sums /= _times_as_noisy(weights * (y - means[which]) ** 2, len(y) - self.known)
        self._level = means.mean()
        inputs, targets = settings[:, 1:], means - self._level
        if kernel is None:
            kernel = _fitted_kernel(inputs, targets, 1 / sums, slopes)
        self._kernel = kernel
        self._process = GaussianProcessRegressor(kernel, alpha=1 / sums, optimizer=None).fit(
            inputs, targets
        )

    def _expected(self, rows: Array) -> Array:
        return rows[:, 0] if self._before is None else self._before.predict(rows)[0]

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the logarithm.

        While nothing is known, the standard deviation is that of the ratio between settings.
        """
        expected = self._expected(rows)
        if not self.known:
            return expected, np.full(len(rows), _SPREAD)
        mean, spread = self._process.predict(rows[:, 1:], return_std=True)
        return mean + self._level + expected, spread

    def sample(self, rows: Array, count: int, rng: np.random.Generator) -> Array:
        """Draw the logarithm jointly, (rows, count)."""
        settings, which = distinct(rows)
        expected = self._expected(rows)[:, None]
        if not self.known:
            return np.asarray(
                _SPREAD * rng.standard_normal((len(settings), count))[which] + expected
            )
        mean, covariance = self._process.predict(settings[:, 1:], return_cov=True)
        root = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(settings)))
        drawn = mean[:, None] + root @ rng.standard_normal((len(settings), count))
        return np.asarray(drawn[which] + self._level + expected)

    def sample_doubting(self, rows: Array, count: int, rng: np.random.Generator) -> Array:
        """Draw the logarithm jointly, (rows, count), leaving out a measurement in some draws.

        If there are only a few measurements, any of them may be wrong.
        """
        drawn, measured = self.sample(rows, count, rng), len(self._rows)
        if not 1 < measured <= _DOUBTED_TO:
            return drawn
        doubted = np.where(rng.random(count) < _DOUBT, rng.integers(measured, size=count), -1)
        for trial in range(measured):
            draws = np.flatnonzero(doubted == trial)
            if len(draws):
                drawn[:, draws] = self._without(trial).sample(rows, len(draws), rng)
        return drawn

    def _without(self, trial: int) -> "SettingModel":
        others = np.arange(len(self._rows)) != trial
        measured = self._rows[others], self._values[others], self._disturbance[others]
        return SettingModel(*measured, self._before, self._slopes, self._kernel)


def _fitted_kernel(inputs: Array, targets: Array, variances: Array, slopes: Array | None) -> Any:
    """Return the covariance of the settings, fitted if there are enough of them."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    from carbonopt.search.models.linear_effects import LinearEffects

    kernel = ConstantKernel(_SPREAD**2, (0.05, 4.0)) * Matern(
        np.full(inputs.shape[1], 2.0), (0.3, 30.0), nu=2.5
    )
    if slopes is not None and slopes.any():
        kernel += LinearEffects(slopes, inputs.mean(0))
    if len(inputs) < _FIT_FROM:
        return kernel
    some = np.unique(np.linspace(0, len(inputs) - 1, _FIT_TO).round().astype(int))
    fitted = GaussianProcessRegressor(kernel, alpha=variances[some])
    # A length scale at its bound is a valid answer.
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return fitted.fit(inputs[some], targets[some]).kernel_


def _times_as_noisy(squares: Array, degrees: int) -> float:
    """Return the factor, at least 1, by which the variance of measurements exceeds the assumed one.

    Args:
        squares: (n,), squared residuals of repeated settings, in units of the assumed variance.
        degrees: degrees of freedom of the residuals.
    """
    return max(1.0, (_NOISE_FROM + float(squares.sum())) / (_NOISE_FROM + degrees))


def distinct(rows: Array) -> tuple[Array, Indices]:
    """Return the different rows, and for each given row the index of its different row."""
    different, which = np.unique(rows.round(9), axis=0, return_inverse=True)
    return different, which.reshape(-1)


def chance_to_fit(
    rows: Array, known: Array, peaks_gib: Sequence[float | None], capacity_gib: float | None
) -> Array:
    """Return the probability that each of n configurations fits in a device's memory.

    Args:
        rows: the configurations, as `SpaceEncoder.memory_rows`.
        known: m trials, as `SpaceEncoder.memory_rows`.
        peaks_gib: the trials' peaks; None for a trial that ran out of memory.
        capacity_gib: the device's memory; None: not known. Then only trials that ran out of memory
            speak against a setting.
    """
    measured = [peak for peak in peaks_gib if peak is not None]
    if capacity_gib is None and None in peaks_gib:
        capacity_gib = 1.05 * max(measured, default=1.0)
    if capacity_gib is None or not len(known):
        return np.ones(len(rows))
    values = np.array(
        [capacity_gib * math.exp(_BEYOND_CAPACITY) if peak is None else peak for peak in peaks_gib]
    )
    mean, spread = SettingModel(known, values).predict(rows)
    return np.asarray(ndtr((math.log(capacity_gib) - mean) / np.hypot(spread, 0.05)))


def chance_by_estimate(
    estimates_gib: Array,
    known_gib: Array,
    peaks_gib: Sequence[float | None],
    capacity_gib: float,
) -> Array:
    """Return the probability that configurations fit in a device's memory, by their estimates.

    What trials needed beyond their own estimates is expected of all.

    Args:
        estimates_gib: (n,), each configuration's estimate, with the margin that it needs.
        known_gib: (m,), the estimates of trials whose memory is known.
        peaks_gib: the trials' peaks; None for a trial that ran out of memory.
        capacity_gib: the device's memory.
    """
    beyond = [
        math.log((capacity_gib if peak is None else peak) / estimate)
        for peak, estimate in zip(peaks_gib, known_gib, strict=True)
    ]
    room = math.log(capacity_gib) - np.log(estimates_gib)
    if beyond:
        room -= max(beyond) + _ESTIMATE_ERROR
    return np.where(room >= 0, 1.0, ndtr(room / _ESTIMATE_ERROR))
