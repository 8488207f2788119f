"""What several values say together."""

from carbonopt.core.values import Frozen


class Spread(Frozen):
    """Of two or more values."""

    mean: float
    standard_deviation: float  # of a sample: n − 1
    lowest: float
    highest: float
