"""Whether a configuration fits in a device's memory."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from carbonopt.core.arrays import Array
from carbonopt.search.models.costs import SettingModel

# An out of memory says that at least the capacity was needed, not how much: taken as so much more (logarithm).
_BEYOND_CAPACITY = 0.3


def chance_to_fit(rows: Array, known: Array, peaks_gib: Sequence[float | None], capacity_gib: float | None) -> Array:
    """Probability that each configuration fits in the device's memory.

    Args:
        rows: (n, columns) of the configurations, from `Encoder.memory_rows`.
        known: (m, columns) of trials; their peak memory, None for those that ran out of it.
        capacity_gib: of a device; None: it is not known, and only what ran out of memory speaks against a setting.
    """
    measured = [peak for peak in peaks_gib if peak is not None]
    if capacity_gib is None and None in peaks_gib:
        capacity_gib = 1.05 * max(measured, default=1.0)
    if capacity_gib is None or not len(known):
        return np.ones(len(rows))
    values = np.array([capacity_gib * math.exp(_BEYOND_CAPACITY) if peak is None else peak for peak in peaks_gib])
    mean, spread = SettingModel(known, values).predict(rows)
    chances: Array = ndtr((math.log(capacity_gib) - mean) / np.hypot(spread, 0.05))
    return chances
