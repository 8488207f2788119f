"""Extrapolate a running trial's curve along a straight line, without any other trial."""

import itertools
import math
from collections.abc import Sequence

Curve = Sequence[tuple[float, float]]  # share of all steps, loss; rising shares

LINE_FROM = 1 / 3  # on recorded runs the early rank matches the final one only from there
HALF_WAY = 0.49  # an evaluation in the middle is a step early where the number of steps is odd
STRETCH = 1 / 8  # share of the steps between the points of the line


def straight_line_loss(curve: Curve) -> float | None:
    """Return the loss where the curve would end on the steeper of its last two stretches.

    The result is None if it is too early to say. Loss curves flatten, so that such a line runs
    below a convex curve. From half the way on it is drawn over the logarithm of the steps, over
    which they flatten, too: drawn at half the way, 61 of 485 recorded curves ended below it, and 20
    below the plain line.
    """
    now = curve[-1][0]
    if now < LINE_FROM:
        return None
    last: list[tuple[float, float]] = []
    for share, loss in reversed(curve):
        if not last or last[0][0] - share >= 0.9 * STRETCH:
            last.insert(0, (share, loss))
        if len(last) == 3:
            break
    else:
        return None
    place = math.log if now >= HALF_WAY else float
    slopes = [(b[1] - a[1]) / (place(b[0]) - place(a[0])) for a, b in itertools.pairwise(last)]
    return last[-1][1] + min(0.0, *slopes) * (place(1.0) - place(now))
