"""When a running trial costs too much to become the recommendation."""

# Before this share of its steps, a trial's cost per step says little about the whole.
PROBE = 0.05
# By how much, as a share, the steps that are left may turn out cheaper than those so far: on an H200 host the same
# configuration's first steps differed by a tenth from run to run.
MARGIN = 0.25


def passes_cap(emissions_kg_co2e: float, cap_kg_co2e: float | None) -> bool:
    """Energy only grows: a trial above the best feasible one's emissions can't become the recommendation."""
    return cap_kg_co2e is not None and emissions_kg_co2e > cap_kg_co2e


def will_pass_cap(share: float, projected_kg_co2e: float, cap_kg_co2e: float | None) -> bool:
    """The same, told from the cost of the steps so far.

    Args:
        share: of the trial's steps that are done.
        projected_kg_co2e: emissions at its end, if every step costs what those so far have cost.
    """
    if cap_kg_co2e is None or share < PROBE:
        return False
    return projected_kg_co2e * (1 - MARGIN * (1 - share)) > cap_kg_co2e
