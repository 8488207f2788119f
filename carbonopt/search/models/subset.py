"""Choose the trials that models are fitted to where a study has more than they can take."""

from collections.abc import Sequence

import numpy as np

from carbonopt.core.arrays import Array, Indices, Mask
from carbonopt.search.models.costs import distinct

# Largest number of trials, or of different settings, that a model is fitted to. A fit's time grows
# with their third power and its memory with their square: with 5,000, a proposal took 147 s and 2.7
# GB.
MOST_FITTED = 500


def spread_out(rows: Array, count: int, first: Sequence[int] = ()) -> Indices:
    """Return the indices of `count` rows, in rising order, that leave no row far from one of them.

    Each next row is the one that lies farthest from those before it (Gonzalez 1985, Clustering to
    Minimize the Maximum Intercluster Distance). Columns count by their ranges. All are returned if
    there are no more than `count`.

    Args:
        rows: (n, columns).
        first: indices of rows that are among them in any case; at most `count` of them.
    """
    if len(rows) <= count:
        return np.arange(len(rows))
    widths = np.ptp(rows, axis=0)
    places = rows[:, widths > 0] / widths[widths > 0]
    chosen = list(first[:count])
    apart = np.full(len(rows), np.inf)
    for index in chosen:
        apart = _nearer(apart, places, index)
    while len(chosen) < count:
        # The first one lies farthest from the middle.
        index = int((apart if chosen else _squares(places, places.mean(0))).argmax())
        chosen.append(index)
        apart = _nearer(apart, places, index)
    return np.sort(np.array(chosen, dtype=int))


def covering(rows: Array, first: Sequence[int] = ()) -> Mask:
    """Return which rows a model of settings is fitted to.

    If there are more than MOST_FITTED, they are those of at most as many different settings, each
    with all its rows.

    Args:
        rows: (n, columns); equal rows are of one setting, however many there are.
        first: indices of rows whose settings are among them, as far as half of MOST_FITTED go.
    """
    if len(rows) <= MOST_FITTED:
        return np.ones(len(rows), dtype=bool)
    settings, which = distinct(rows)
    wanted = list(dict.fromkeys(which[list(first)].tolist()))[: MOST_FITTED // 2]
    return np.isin(which, spread_out(settings, MOST_FITTED, wanted))


def _nearer(apart: Array, places: Array, index: int) -> Array:
    """Return the squared distances to the nearest chosen row, where one more is chosen.

    A chosen row itself is never chosen again, even if all others are equal to chosen ones.
    """
    nearer = np.minimum(apart, _squares(places, places[index]))
    nearer[index] = -1.0
    return np.asarray(nearer)


def _squares(places: Array, centre: Array) -> Array:
    return np.asarray(((places - centre) ** 2).sum(1))
