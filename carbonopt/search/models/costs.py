"""What a step of a configuration costs, and whether it fits in memory: learned from the trials' first steps, by
settings that leave the quality alone."""

import math
import warnings
from collections.abc import Sequence
from typing import Self

import numpy as np
from scipy.special import ndtr

from carbonopt.core.arrays import Array, Indices

_SPREAD = 0.5  # of ln(cost) between settings
_NOISE = 0.02  # of a measurement; 1 % between identical runs on an H200
_FIT_FROM = 4  # different settings; fewer say nothing about how fast the cost changes
_FIT_TO = 100  # of more, the kernel's parameters are fitted to some: their time goes with the third power
# An out of memory says that at least the capacity was needed, not how much: taken as so much more (logarithm).
_BEYOND_CAPACITY = 0.3


class SettingModel:
    """ln of a positive quantity over system settings: Gaussian process over what is not as expected.

    Args:
        rows: (n, 1 + columns), first what is expected of the logarithm, but for a constant.
        values: (n,), positive.
        disturbance: (n,), standard deviation of each logarithm beside a measurement's own; None: of none.
        before: of an earlier study, but for a constant what is expected instead.
    """

    def __init__(
        self, rows: Array, values: Array, disturbance: Array | None = None, before: Self | None = None
    ) -> None:
        self.known = 0  # different settings
        self._before = before
        if not len(rows):
            return
        # Here, since they take a second to import, and every trial's processes would be started later by that.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern

        settings, which = distinct(rows)
        self.known = len(settings)
        y = np.log(values) - self._expected(rows)
        weights = np.hypot(_NOISE, np.zeros(len(y)) if disturbance is None else disturbance) ** -2.0
        sums = np.bincount(which, weights)
        means = np.bincount(which, weights * y) / sums
        self._level = means.mean()
        kernel = ConstantKernel(_SPREAD**2, (0.05, 4.0)) * Matern(np.full(rows.shape[1] - 1, 2.0), (0.3, 30.0), nu=2.5)
        inputs, targets = settings[:, 1:], means - self._level
        if self.known >= _FIT_FROM:
            some = np.unique(np.linspace(0, self.known - 1, _FIT_TO).round().astype(int))
            fitted = GaussianProcessRegressor(kernel, alpha=1 / sums[some])
            # A length scale at its bound is an answer, too.
            with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
                kernel = fitted.fit(inputs[some], targets[some]).kernel_
        self._process = GaussianProcessRegressor(kernel, alpha=1 / sums, optimizer=None).fit(inputs, targets)

    def _expected(self, rows: Array) -> Array:
        return rows[:, 0] if self._before is None else self._before.predict(rows)[0]

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the logarithm; with nothing known, of the ratio between settings."""
        expected = self._expected(rows)
        if not self.known:
            return expected, np.full(len(rows), _SPREAD)
        mean, spread = self._process.predict(rows[:, 1:], return_std=True)
        return mean + self._level + expected, spread

    def sample(self, rows: Array, count: int, rng: np.random.Generator) -> Array:
        """Joint draws of the logarithm, (rows, count)."""
        settings, which = distinct(rows)
        expected = self._expected(rows)[:, None]
        if not self.known:
            return np.asarray(_SPREAD * rng.standard_normal((len(settings), count))[which] + expected)
        mean, covariance = self._process.predict(settings[:, 1:], return_cov=True)
        root = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(settings)))
        drawn = mean[:, None] + root @ rng.standard_normal((len(settings), count))
        return np.asarray(drawn[which] + self._level + expected)


def distinct(rows: Array) -> tuple[Array, Indices]:
    """Different rows, and for each of the given ones which of these it is."""
    different, which = np.unique(rows.round(9), axis=0, return_inverse=True)
    return different, which.reshape(-1)


def chance_to_fit(rows: Array, known: Array, peaks_gib: Sequence[float | None], capacity_gib: float | None) -> Array:
    """Probability that each of n configurations fits in a device's memory, by m trials (both as `Encoder.memory_rows`)
    and their peaks, None for what ran out of it: that alone speaks against a setting where the capacity isn't known."""
    measured = [peak for peak in peaks_gib if peak is not None]
    if capacity_gib is None and None in peaks_gib:
        capacity_gib = 1.05 * max(measured, default=1.0)
    if capacity_gib is None or not len(known):
        return np.ones(len(rows))
    values = np.array([capacity_gib * math.exp(_BEYOND_CAPACITY) if peak is None else peak for peak in peaks_gib])
    mean, spread = SettingModel(known, values).predict(rows)
    return np.asarray(ndtr((math.log(capacity_gib) - mean) / np.hypot(spread, 0.05)))
