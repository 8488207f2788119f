"""The geometry of fronts: the points that no other dominates, and the area that these dominate."""

import numpy as np
from scipy.special import ndtr

from carbonopt.core.arrays import Array, Indices


def front(points: Array) -> Indices:
    """Return the indices of the points, (n, 2), that no other point dominates.

    They are sorted by rising first coordinate. Of equal points, one is returned.
    """
    order = np.lexsort((points[:, 1], points[:, 0]))
    seconds = points[order, 1]
    before = np.minimum.accumulate(np.append(np.inf, seconds))[:-1]
    return np.asarray(order[seconds < before])


def nearest_front(points: Array, count: int) -> list[int]:
    """Return the indices of `count` points, (n, 2), that the fewest layers of others dominate.

    The first layer is the front, the next one the front of the rest, and so on (non-dominated
    sorting). The layers come in this order, each by its rising first coordinate.
    """
    left, nearest = np.arange(len(points)), list[int]()
    while len(left) and len(nearest) < count:
        layer = front(points[left])
        if not len(layer):
            break  # the rest has infinite second coordinates
        nearest += left[layer].tolist()
        left = np.delete(left, layer)
    return nearest[:count]


def hypervolume(front: Array, reference: Array) -> float:
    """Return the area that a front dominates up to a reference point.

    Args:
        front: points, (k, 2), by rising first coordinate.
    """
    inside = front[(front < reference).all(1)]
    widths = np.diff(inside[:, 0], append=reference[0])
    return float(widths @ (reference[1] - inside[:, 1]))


def expected_improvement(mean: Array, spread: Array, front: Array, reference: Array) -> Array:
    """Estimate how much normally distributed points, (n, 2), raise a front's hypervolume, (n,).

    What a point adds lies below the front's steps, (k, 2) by rising first coordinate. Each step
    contributes the part of its width that costs more than the point, times the height from the
    point up to the step.
    """
    inside = front[(front < reference).all(1)]
    edges = np.append(inside[:, 0], reference[0])
    heights = np.append(reference[1], inside[:, 1])
    right_of = _expected_excess(edges, mean[:, 0], spread[:, 0])
    widths = np.diff(right_of, prepend=0.0, axis=1)
    return np.asarray((widths * _expected_excess(heights, mean[:, 1], spread[:, 1])).sum(1))


def _expected_excess(limits: Array, mean: Array, spread: Array) -> Array:
    """Return the mean of max(0, limit - X) for normal X, (points, limits)."""
    apart = limits[None, :] - mean[:, None]
    scale = np.maximum(spread, 1e-9)[:, None]
    z = apart / scale
    return np.asarray(
        np.maximum(0.0, scale * np.exp(-z * z / 2) / np.sqrt(2 * np.pi) + apart * ndtr(z))
    )
