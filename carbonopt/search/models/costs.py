"""What a step of a configuration costs, and whether it fits in memory: learned from the trials' first steps, by
settings that leave the quality alone."""

import warnings

import numpy as np

from carbonopt.core.arrays import Array, Indices

# Before anything is known: a step's cost goes with the batch to this power, since a small batch leaves a GPU idle.
_BATCH_POWER = 0.7
_SPREAD = 0.5  # of ln(cost) between settings
_NOISE = 0.02  # of a measurement; 1 % between identical runs on an H200
_FIT_FROM = 4  # different settings; fewer say nothing about how fast the cost changes


class SettingModel:
    """ln of a positive quantity over system settings: Gaussian process over what the batch's power does not explain.

    Args:
        rows: (n, columns), ln(global batch) first.
        values: (n,), positive; None where there are none.
    """

    def __init__(self, rows: Array, values: Array, power: float = _BATCH_POWER) -> None:
        self._power = power
        self.known = 0
        if not len(rows):
            return
        # Here, since they take a second to import, and every trial's processes would be started later by that.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern

        settings, which = distinct(rows)
        self.known = len(settings)
        y = np.log(values) - power * rows[:, 0]
        means = np.array([y[which == index].mean() for index in range(self.known)])
        counts = np.bincount(which)
        self._level = means.mean()
        width = rows.shape[1]
        lengths = Matern(np.full(width, 2.0), (0.3, 30.0), nu=2.5)
        self._process = GaussianProcessRegressor(
            ConstantKernel(_SPREAD**2, (0.05, 4.0)) * lengths,
            alpha=_NOISE**2 / counts,
            optimizer="fmin_l_bfgs_b" if self.known >= _FIT_FROM else None,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound is an answer, too
            self._process.fit(settings, means - self._level)

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the logarithm; with nothing known, of the ratio between settings."""
        if not self.known:
            return self._power * rows[:, 0], np.full(len(rows), _SPREAD)
        mean, spread = self._process.predict(rows, return_std=True)
        return mean + self._level + self._power * rows[:, 0], spread

    def sample(self, rows: Array, count: int, rng: np.random.Generator) -> Array:
        """Joint draws of the logarithm, (rows, count)."""
        settings, which = distinct(rows)
        if not self.known:
            drawn = _SPREAD * rng.standard_normal((len(settings), count))
            unknown: Array = drawn[which] + self._power * rows[:, :1]
            return unknown
        mean, covariance = self._process.predict(settings, return_cov=True)
        root = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(settings)))
        drawn = mean[:, None] + root @ rng.standard_normal((len(settings), count))
        draws: Array = drawn[which] + self._level + self._power * rows[:, :1]
        return draws


def distinct(rows: Array) -> tuple[Array, Indices]:
    """Different rows, and for each of the given ones which of these it is."""
    different, which = np.unique(rows.round(9), axis=0, return_inverse=True)
    return different, which.reshape(-1)
