"""The report's sentences: the answer first, what it cost, and what it can't tell."""

from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.config import ReplayLaunch
from carbonopt.record import StudyData
from carbonopt.report.quantities import (
    count_text,
    emissions_text,
    energy_text,
    params_text,
    percent_text,
    perplexity_text,
)
from carbonopt.report.view import Tile
from carbonopt.trial import TrialState

FEW_TRIALS = 10  # completed; below this the front is a sketch
NEAR_TARGET = 0.01  # of the target: about what another seed changes in perplexity
CLOSURE_TOLERANCE = 0.05


def headline(rec: Recommendation) -> str:
    """The answer in one sentence."""
    target = perplexity_text(rec.target_perplexity)
    if not rec.met:
        if rec.closest is None:
            return f"No trial reached the target perplexity of {target}, and none was evaluated."
        reached = perplexity_text(rec.closest.perplexity)
        return f"No trial reached the target perplexity of {target}. Trial {rec.closest.trial} came closest: {reached}."
    if rec.baseline is None or rec.saving_fraction is None:
        return f"Trial {rec.trial} is the cheapest that reaches the target perplexity of {target}."
    if rec.trial == rec.baseline.trial:
        kind = "start configuration" if rec.baseline.is_start else "most accurate complete trial"
        return f"The {kind}, trial {rec.trial}, is also the cheapest that reaches the target perplexity of {target}."
    return (
        f"Trial {rec.trial} reaches the target perplexity of {target} with "
        f"{_compared(rec.saving_fraction)} {_baseline_name(rec.baseline)}."
    )


def answer(rec: Recommendation) -> tuple[str, ...]:
    """The paragraphs below the headline: what is compared, and whether the study pays back."""
    paragraphs = []
    if rec.met:
        paragraphs.append(_comparison(rec))
    elif rec.closest is not None:
        excess = percent_text(rec.closest.perplexity / rec.target_perplexity - 1)
        paragraphs.append(
            f"Trial {rec.closest.trial} ({rec.closest.why}) is {excess} above the target. Another target needs no new "
            "trial: carbonopt recommend --target. More trials or a wider search space may reach this one."
            if rec.closest.perplexity > rec.target_perplexity
            else f"Trial {rec.closest.trial} ({rec.closest.why}) was below the target, but it did not complete."
        )
    paragraphs.append(f"{_study_cost(rec)} {_pay_back(rec)}")
    return tuple(paragraphs)


def tiles(rec: Recommendation) -> tuple[Tile, ...]:
    """The answer's figures."""
    spent = Tile(
        label="The study itself",
        text=emissions_text(rec.study_emissions_kg_co2e),
        note=f"{energy_text(rec.study_energy_kwh)}, {count_text(sum(rec.trials_by_state.values()), 'trial')}",
    )
    target = f"target: at most {perplexity_text(rec.target_perplexity)}"
    if not rec.met or rec.params is None:
        if rec.closest is None:
            return (spent,)
        nearest = Tile(label="Closest", text=f"Trial {rec.closest.trial}", note=params_text(rec.closest.params))
        return (nearest, Tile(label="Perplexity", text=perplexity_text(rec.closest.perplexity), note=target), spent)
    saving = "no baseline" if rec.baseline is None else f"against trial {rec.baseline.trial}"
    runs = rec.break_even_runs
    return (
        Tile(label="Recommended", text=f"Trial {rec.trial}", note=params_text(rec.params)),
        Tile(label="Perplexity", text=perplexity_text(rec.perplexity), note=target),
        Tile(
            label="Emissions of a run",
            text=emissions_text(rec.emissions_kg_co2e),
            note=f"{energy_text(rec.energy_kwh)} in training",
        ),
        Tile(label="Saving on a run", text=percent_text(rec.saving_fraction), note=saving),
        spent,
        Tile(
            label="Pays back after",
            text="never" if runs is None else count_text(runs, "run"),
            note="a run saves nothing" if runs is None else "in place of the baseline",
        ),
    )


def sentence(data: StudyData, rec: Recommendation) -> str | None:
    """One sentence with its figures, to be pasted into a paper; None without a recommendation."""
    if not rec.met or rec.params is None:
        return None
    intensity = data.provenance.intensity
    compared = (
        f", {_compared(rec.saving_fraction)} {_baseline_name(rec.baseline)}"
        if rec.baseline is not None and rec.saving_fraction is not None and rec.trial != rec.baseline.trial
        else ""
    )
    return (
        f"Of {count_text(sum(rec.trials_by_state.values()), 'trial')} with carbonopt, the configuration with the least "
        f"emissions at a perplexity of at most {perplexity_text(rec.target_perplexity)} ({params_text(rec.params)}) "
        f"reached {perplexity_text(rec.perplexity)} with {energy_text(rec.energy_kwh)} of training energy, or "
        f"{emissions_text(rec.emissions_kg_co2e)} at {intensity.g_co2e_per_kwh:.4g} g CO2e/kWh and a PUE of "
        f"{data.config.carbon.pue:.3g}{compared}; the search itself used {energy_text(rec.study_energy_kwh)}, or "
        f"{emissions_text(rec.study_emissions_kg_co2e)}."
    )


def closure(spent: Footprint) -> str:
    """What the check of the sum by a second tracker says."""
    if spent.closure is None:
        return "The sum was not checked by a second reading of the whole."
    return (
        f"A second tracker that knows no phases read {energy_text(spent.outer_kwh)} for the whole; "
        f"the parts add up to {percent_text(spent.closure)} of it."
    )


def limits(data: StudyData, rec: Recommendation, spent: Footprint) -> tuple[str, ...]:
    """What the figures can't tell, in plain words."""
    return (*_of_the_search(data, rec), *_of_the_measurement(data, spent), *_of_the_scope(data))


def _of_the_search(data: StudyData, rec: Recommendation) -> list[str]:
    found = []
    if data.ended is None:
        found.append("The study has not ended: these figures will change.")
    completed = rec.trials_by_state[TrialState.COMPLETE]
    if completed < FEW_TRIALS:
        found.append(
            f"Few trials: {completed} completed. A cheaper configuration may well be among those that were not tried."
        )
    if rec.baseline is not None and not rec.baseline.is_start:
        found.append(
            "The saving is against the most accurate trial of this study, which is not what you would have run "
            "otherwise. search.start in the study file names a configuration of your own as the baseline."
        )
    if rec.baseline is not None and not rec.baseline.meets_target:
        found.append("The baseline misses the target, so the comparison is between two different qualities.")
    if rec.perplexity is not None and rec.perplexity > rec.target_perplexity * (1 - NEAR_TARGET):
        margin = percent_text(1 - rec.perplexity / rec.target_perplexity)
        found.append(f"The recommended trial is only {margin} below the target: with another seed it may miss it.")
    configurations = {record.params for record in data.records if record.state is TrialState.COMPLETE}
    if completed and len(configurations) == completed:
        found.append("Every configuration ran once, with one seed: how far a repetition would differ is not known.")
    found.append(
        "The evaluation data that judged the trials also chose among them, which flatters the winner a little."
    )
    return found


def _of_the_measurement(data: StudyData, spent: Footprint) -> list[str]:
    found = []
    modelled = [name.upper() for name, how in data.provenance.known.items() if how == "modelled"]
    if modelled:
        found.append(
            f"Modelled, not measured: the energy of {' and '.join(modelled)}. The model goes by time and by the load "
            "of the whole machine, so that other work on it raises these figures and can change which trial is stopped."
        )
    if isinstance(data.config.launch, ReplayLaunch):
        found.append(
            "A replay: energy and perplexity come from a table of recorded runs, and nothing was trained. What the "
            "study spent is what those runs would have cost."
        )
    elif "gpu" not in data.provenance.known:
        found.append("No GPU is in these figures.")
    if spent.unmeasured_trials:
        numbers = ", ".join(map(str, spent.unmeasured_trials))
        found.append(f"What these trials used is not known and not in the study's total: {numbers}.")
    if spent.closure is not None and abs(spent.closure - 1) > CLOSURE_TOLERANCE:
        found.append(f"The parts add up to {percent_text(spent.closure)} of a second reading: the total is uncertain.")
    return found


def _of_the_scope(data: StudyData) -> list[str]:
    found = [
        "Emissions are energy × one fixed carbon intensity × PUE. The grid's hour-to-hour changes, making the hardware "
        "and the network are not counted.",
        "A trial's emissions are those of its training window; start-up and evaluation are in the study's total only.",
    ]
    if data.config.carbon.pue == 1.0:
        found.append("PUE is 1: cooling and power delivery of the building are not counted.")
    return found


def _compared(saving_fraction: float) -> str:
    if saving_fraction > 0:
        return f"{percent_text(saving_fraction)} less emissions than"
    return f"{percent_text(-saving_fraction)} more emissions than" if saving_fraction < 0 else "the same emissions as"


def _baseline_name(baseline: Baseline) -> str:
    kind = "the start configuration" if baseline.is_start else "the most accurate complete trial"
    misses = "" if baseline.meets_target else ", which misses the target"
    return f"{kind} (trial {baseline.trial}{misses})"


def _comparison(rec: Recommendation) -> str:
    own = (
        f"Trial {rec.trial} emits {emissions_text(rec.emissions_kg_co2e)} ({energy_text(rec.energy_kwh)}) in training "
        f"and reaches perplexity {perplexity_text(rec.perplexity)}"
    )
    if rec.baseline is None or rec.perplexity is None:
        return f"{own}."
    if rec.baseline.trial == rec.trial:
        return f"{own}. It is its own baseline: {rec.baseline.why}."
    change = rec.perplexity / rec.baseline.perplexity - 1
    worse = f"{percent_text(abs(change))} {'worse' if change > 0 else 'better'}" if change else "the same"
    return (
        f"{own}. The baseline, trial {rec.baseline.trial}, emits {emissions_text(rec.baseline.emissions_kg_co2e)} and "
        f"reaches {perplexity_text(rec.baseline.perplexity)}: the recommendation's perplexity is {worse}. "
        f"Why this baseline: {rec.baseline.why}."
    )


def _study_cost(rec: Recommendation) -> str:
    return (
        f"The study used {energy_text(rec.study_energy_kwh)}, or "
        f"{emissions_text(rec.study_emissions_kg_co2e)}, every trial and its start-up, evaluation and pauses included."
    )


def _pay_back(rec: Recommendation) -> str:
    if not rec.met:
        return "Without a recommendation there is nothing to pay it back."
    if rec.break_even_runs is None:
        return "A run saves nothing against the baseline, so the study does not pay back."
    return (
        f"It pays back after {count_text(rec.break_even_runs, 'run')} of the recommendation in place of the baseline."
    )
