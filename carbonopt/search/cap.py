"""When a running trial costs too much to become the recommendation."""

# Before this share of its steps, a trial's cost per step says little about the whole.
PROBE = 0.05
# By how much, as a share, the steps that are left may turn out cheaper than those so far: on an H200 host the same
# configuration's first steps differed by a tenth from run to run.
MARGIN = 0.25


def passes_cap(
    cap_kg_co2e: float | None, spent_kg_co2e: float, share: float = 0.0, projected_kg_co2e: float = 0.0
) -> bool:
    """Whether a trial can't become the recommendation: energy only grows, so one above the best feasible one's
    emissions can't, nor one that is sure to get there.

    Args:
        cap_kg_co2e: the best feasible one's; None: there is none yet.
        share: of the trial's steps, those that `projected_kg_co2e` is told from.
        projected_kg_co2e: emissions at its end, if every step costs what those so far have cost.
    """
    likely_kg_co2e = projected_kg_co2e * (1 - MARGIN * (1 - share)) if share >= PROBE else 0.0
    return cap_kg_co2e is not None and max(spent_kg_co2e, likely_kg_co2e) > cap_kg_co2e
