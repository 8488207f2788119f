"""Recognize trainings that fail to learn, and estimate the chance that a configuration learns.

A training fails to learn if it diverges, or if it ends far above all others, as it does where a
learning rate is too high for a network to learn at all. A smooth model of the loss can't treat such
ends as points like others: their distance would drown all differences that matter.
"""

import math
from collections.abc import Sequence

import numpy as np

from carbonopt.core.arrays import Array, Mask
from carbonopt.search.models.curves import LN_BATCH, LN_RATE, LN_STEPS, RATE_SHARE

_GAP = math.log(2)  # least gap between linked losses that separates trainings that failed to learn
# Parameters of the probability to learn: how fast it changes over the logarithms of batch, rate and
# steps, and over all other columns (a dimension's range is four of those), how far it may go, and
# its slope.
_SCALES = {LN_BATCH: 4.0, LN_RATE: 2.0, LN_STEPS: 4.0}
_OTHER_SCALE, _AMPLITUDE, _SLOPE = 4.0, 2.0, 1.0


def highest_end(ends: Sequence[float]) -> float:
    """Return the highest linked loss at which a training that learned ended; infinite without any.

    It lies below the first gap that is wider than a factor of two and than the whole range of
    losses below the gap.
    """
    ordered = sorted(ends)
    if not ordered:
        return math.inf
    highest = ordered[0]
    for end in ordered[1:]:
        if end - highest > max(_GAP, highest - ordered[0]):
            break
        highest = end
    return highest


def chance_to_learn(rows: Array, known: Array, learned: Mask) -> Array:
    """Return the probability that each of n configurations learns, from whether m trials learned.

    The model is a Gaussian process classifier (Rasmussen & Williams 2006, section 3.4). The
    probability is 1 if all trials learned. It is also 1 if all failed, since nothing shows then
    where it is better.

    Args:
        rows: the configurations, as `SpaceEncoder.curve_rows`.
        known: the trials, as `SpaceEncoder.curve_rows`.
        learned: whether each trial learned.
    """
    if learned.all() or not learned.any():
        return np.ones(len(rows))
    # Imported here, since they take a second to import, by which every trial's processes would
    # start later.
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern

    columns = [column for column in range(rows.shape[1]) if column != RATE_SHARE]
    scales = np.array([_SCALES.get(column, _OTHER_SCALE) for column in columns])
    middle = rows[:, columns].mean(0)
    kernel = ConstantKernel(_AMPLITUDE**2) * Matern(1.0, nu=2.5) + ConstantKernel(
        _SLOPE**2
    ) * DotProduct(1.0)
    classifier = GaussianProcessClassifier(kernel, optimizer=None)
    classifier.fit((known[:, columns] - middle) / scales, learned)
    return np.asarray(classifier.predict_proba((rows[:, columns] - middle) / scales)[:, 1])
