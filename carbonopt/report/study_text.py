"""A study's settings in words."""

from collections.abc import Iterable

from carbonopt.core import format as fmt
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.spec.search_settings import Budget, Search

SAMPLERS = {
    "carbon": "tries the configuration with the best chance of winning per unit of energy",
    "tpe": "Optuna's multivariate TPE",
    "nsga2": "Optuna's NSGA-II",
    "gp": "Optuna's Gaussian process",
    "random": "at random",
    "grid": "every configuration once, in random order",
}


def trials_text(records: Iterable[TrialRecord]) -> str:
    """Count trials, repeats and their interrupted attempts that a later one followed.

    Say also how many trials and repeats are interrupted now, and how many run.
    """
    records = list(records)
    repeats = sum(record.repeat_of is not None for record in records)
    interrupted = sum(record.attempt - 1 for record in records)
    counted = fmt.run_counts_text(len(records) - repeats, repeats, interrupted=interrupted)
    unfinished = ", ".join(unfinished_texts(records))
    return f"{counted} ({unfinished})" if unfinished else counted


def unfinished_texts(records: Iterable[TrialRecord]) -> list[str]:
    """Say how many trials and repeats were interrupted, and how many run."""
    unfinished = [record for record in records if not record.has_finished]
    interrupted = sum(record.stop_reason is StopReason.INTERRUPTED for record in unfinished)
    running = sum(record.state is TrialState.RUNNING for record in unfinished)
    counts = {"interrupted": interrupted, "running": running}
    return [f"{count} {state}" for state, count in counts.items() if count]


def goal_text(search: Search) -> str:
    if search.goal == "front":
        return "front: the whole trade-off; nothing is stopped that could be on the Pareto front"
    return "recommend: the cheapest configuration that meets the target"


def sampler_text(search: Search) -> str:
    return f"{search.sampler}: {SAMPLERS[search.sampler]}; seed {search.seed}"


def pruning_text(search: Search, *, tells_steps: bool = True) -> str:
    """Say what stops a trial before its end.

    Args:
        tells_steps: False for a script that does not call carbonopt: nothing is known about its
            trials before their end.
    """
    if not tells_steps:
        return "nothing, because the script does not tell its steps"
    pruning, front = search.pruning, search.goal == "front"
    rules = []
    if pruning.target:
        rules.append("what can't be on the front" if front else "what can't reach the target")
    if pruning.cap and not front:
        rules.append(
            "what emits more, or is expected to emit more, than the best trial that meets the"
            " target"
        )
    if pruning.target and pruning.audit:
        rules[0] += f" ({100 * pruning.audit:g} % of it runs to its end all the same, as an audit)"
    return "; ".join(rules) or "nothing: every trial runs to its end"


def budget_text(budget: Budget) -> str:
    units = {
        "trials": "trial",
        "hours": "hour",
        "energy_kwh": "kWh",
        "emissions_kg_co2e": "kg CO2e",
    }
    given = [
        (getattr(budget, key), unit)
        for key, unit in units.items()
        if getattr(budget, key) is not None
    ]
    limits = [_limit_text(limit, unit) for limit, unit in given]
    ends = [f"after {' or '.join(limits)}"] if limits else []
    if budget.until is not None:
        runs = "one run" if budget.reuses == 1 else f"{budget.reuses} runs"
        ends.append(
            f"when another trial is expected to cost more energy than it saves in {runs} of the"
            " recommendation"
        )
    several = len(limits) > 1 or len(ends) > 1
    return " or ".join(ends) + (", whichever comes first" if several else "")


def _limit_text(limit: float, unit: str) -> str:
    """Return a limit with its unit, such as '1 hour', '12 trials' or '2 kWh'."""
    number = f"{limit:g}"
    plural = "s" if unit in ("trial", "hour") and number != "1" else ""
    return f"{number} {unit}{plural}"
