"""Covariance of effects that are linear in a row's columns, for scikit-learn's processes."""

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from carbonopt.core.arrays import Array


class LinearEffects(Kernel):  # type: ignore[misc]  # scikit-learn has no types
    """The covariance of independent linear effects of the columns, without parameters to be fitted.

    Args:
        slopes: (columns,), standard deviation of each effect per unit of its column.
        centre: (columns,), the row at which all effects are zero.
    """

    def __init__(self, slopes: Array, centre: Array) -> None:
        self.slopes, self.centre = slopes, centre

    def __call__(
        self, rows: Array, others: Array | None = None, eval_gradient: bool = False
    ) -> object:
        scaled = self._scaled(rows)
        covariance = scaled @ (scaled if others is None else self._scaled(others)).T
        return (covariance, np.empty((*covariance.shape, 0))) if eval_gradient else covariance

    def diag(self, rows: Array) -> Array:
        """Return the variance at each row."""
        return np.asarray((self._scaled(rows) ** 2).sum(1))

    def is_stationary(self) -> bool:
        """Return False, since the variance grows with the distance from the centre."""
        return False

    def _scaled(self, rows: Array) -> Array:
        return np.asarray((rows - self.centre) * self.slopes)
