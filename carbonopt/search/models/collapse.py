"""Which trainings come to nothing: those that diverge, and those that end far above all others, as where a learning
rate is too high for a network to learn at all. To a smooth model of the loss they are no points like others: their
distance would drown all differences that matter."""

import math
from collections.abc import Sequence

import numpy as np

from carbonopt.core.arrays import Array, Mask
from carbonopt.search.models.curves import LN_BATCH, LN_RATE, LN_STEPS, RATE_SHARE

_GAP = math.log(2)  # between linked losses, over which what lies beyond has collapsed
# Of the probability: how fast it changes over the logarithms of batch, rate and steps, and over all other columns (a
# dimension's range is four of those), how far it may go, and its slope.
_SCALES = {LN_BATCH: 4.0, LN_RATE: 2.0, LN_STEPS: 4.0}
_OTHER_SCALE, _AMPLITUDE, _SLOPE = 4.0, 2.0, 1.0


def highest_end(ends: Sequence[float]) -> float:
    """Of the linked losses that trainings ended at the highest one that has not collapsed: no gap lies below it that is
    wider than a factor of two and than the whole range below the gap. Infinite without any."""
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
    """Probability that each of n configurations does not collapse, by m trials (both as `Encoder.curve_rows`) and
    whether they have: a Gaussian process classifier (Rasmussen & Williams 2006, section 3.4). 1 where none has
    collapsed, and where all have, as then nothing tells where it is better."""
    if learned.all() or not learned.any():
        return np.ones(len(rows))
    # Here, since they take a second to import, and every trial's processes would be started later by that.
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern

    columns = [column for column in range(rows.shape[1]) if column != RATE_SHARE]
    scales = np.array([_SCALES.get(column, _OTHER_SCALE) for column in columns])
    middle = rows[:, columns].mean(0)
    kernel = ConstantKernel(_AMPLITUDE**2) * Matern(1.0, nu=2.5) + ConstantKernel(_SLOPE**2) * DotProduct(1.0)
    classifier = GaussianProcessClassifier(kernel, optimizer=None)
    classifier.fit((known[:, columns] - middle) / scales, learned)
    return np.asarray(classifier.predict_proba((rows[:, columns] - middle) / scales)[:, 1])
