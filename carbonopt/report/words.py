"""The report's sentences: the answer first, what it cost, and what it can't tell."""

from collections.abc import Sequence

from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.analysis.repeats import Repeats
from carbonopt.config import ReplayLaunch
from carbonopt.record import StudyData
from carbonopt.report.energy import COMPONENTS, difference_of, is_counted
from carbonopt.report.quantities import (
    count_text,
    difference_text,
    emissions_scale,
    emissions_text,
    energy_text,
    params_text,
    percent_text,
    perplexity_text,
    spread_text,
    two_decimals_text,
    uncertainty_text,
)
from carbonopt.report.view import Tile
from carbonopt.trial import LARGEST_DISAGREEMENT, Phase, TrialState

FEW_TRIALS = 10  # completed; below this the front is a sketch
NEAR_TARGET = 0.01  # of the target: about what another seed changes in perplexity
CLOSURE_TOLERANCE = 0.005


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


def answer(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats]) -> tuple[str, ...]:
    """The paragraphs below the headline: what is compared, how sure it is, and whether the study pays back."""
    paragraphs = []
    if rec.met:
        paragraphs += [_comparison(rec), *_certainty(data, rec, repeated)]
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
    intensity, known = data.provenance.intensity, data.provenance.known
    parts = [f"{name.upper()} {known[name]}" for name in COMPONENTS if name in known and is_counted(data, name)]
    counted = f" ({', '.join(parts)})" if parts else ""
    compared = (
        f", {_compared(rec.saving_fraction)} {_baseline_name(rec.baseline)}"
        if rec.baseline is not None and rec.saving_fraction is not None and rec.trial != rec.baseline.trial
        else ""
    )
    return (
        f"Of {count_text(sum(rec.trials_by_state.values()), 'trial')} with carbonopt, the configuration with the least "
        f"emissions at a perplexity of at most {perplexity_text(rec.target_perplexity)} ({params_text(rec.params)}) "
        f"reached {perplexity_text(rec.perplexity)} with {energy_text(rec.energy_kwh)} of training energy{counted}, or "
        f"{emissions_text(rec.emissions_kg_co2e)} at {intensity.g_co2e_per_kwh:.4g} g CO2e/kWh and a PUE of "
        f"{data.config.carbon.pue:.3g}{compared}; the search itself used {energy_text(rec.study_energy_kwh)}, or "
        f"{emissions_text(rec.study_emissions_kg_co2e)}."
    )


def closure(data: StudyData, spent: Footprint) -> str:
    """What the check of the sums by one reading of the whole says."""
    if isinstance(data.config.launch, ReplayLaunch):
        return "A replay takes its energy from a table: there is no reading of the whole to check the sum with."
    checks = []
    if spent.gpu_closure is not None:
        checks.append(
            f"The GPUs' counters, read once when each session began and once when it ended, say "
            f"{energy_text(spent.outer_gpu_kwh)}; the parts add up to {two_decimals_text(spent.gpu_closure)} of it."
        )
    if spent.closure is not None and (data.config.carbon.objective == "all" or not checks):
        checks.append(
            f"{'With CPU and RAM' if checks else 'The whole, read once when each session began and once when it ended'}"
            f": {energy_text(spent.outer_kwh)}; the parts add up to {two_decimals_text(spent.closure)} of it."
        )
    return " ".join(checks) or "The sum was not checked by a reading of the whole."


def limits(data: StudyData, rec: Recommendation, spent: Footprint, repeated: Sequence[Repeats]) -> tuple[str, ...]:
    """What the figures can't tell, in plain words."""
    return (*_of_the_search(data, rec, repeated), *_of_the_measurement(data, spent), *_of_the_scope(data))


def _of_the_search(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats]) -> list[str]:
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
    if completed and not repeated:
        found.append(
            "One run each, with one seed: no repeat spread is known, so how far a repetition would differ is not known."
        )
    elif rec.met and _repeats_of(rec, repeated) is None:
        found.append(
            "The recommended configuration ran once: how far it would differ when run again is not known. The table of "
            "repeats says it of others."
        )
    if repeated and all(len(one.seeds) == 1 for one in repeated):
        found.append("Repeated runs had the same seed: they don't tell how far another seed changes the perplexity.")
    found.append(
        "The evaluation data that judged the trials also chose among them, which flatters the winner a little."
    )
    return found


def _of_the_measurement(data: StudyData, spent: Footprint) -> list[str]:
    found = []
    modelled = [name.upper() for name, how in data.provenance.known.items() if how == "modelled"]
    if data.config.carbon.objective == "gpu":
        found.append(
            "Only the GPUs are counted (carbon.objective: gpu): the energy of CPU and RAM is shown beside them."
        )
    elif modelled:
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
    found += _disagreements(data)
    for what, fraction in (("GPUs' energy", spent.gpu_closure), ("whole energy", spent.closure)):
        if fraction is not None and abs(fraction - 1) > CLOSURE_TOLERANCE:
            found.append(
                f"The parts of the {what} add up to {two_decimals_text(fraction)} of one reading of the whole: the "
                "study's total is uncertain by that much."
            )
    if spent.gpu_by_phase_kwh:
        found.append(
            "The uncertainty of GPU energy is that of the counters' resolution alone. How true a counter is, only "
            "another instrument can tell: CodeCarbon reads the same sensor."
        )
    return found


def _disagreements(data: StudyData) -> list[str]:
    """Trials whose two readings differ by more than the windows' edges can explain."""
    found = {
        record.trial: record.gpu_disagreement
        for record in data.records
        if record.gpu_disagreement is not None and abs(record.gpu_disagreement) > LARGEST_DISAGREEMENT
    }
    if not found:
        return []
    worst = max(found, key=lambda trial: abs(found[trial]))
    by = percent_text(abs(found[worst]))
    if len(found) == 1:
        return [f"CodeCarbon and the GPUs' counters disagree by {by} on trial {worst}."]
    return [
        f"CodeCarbon and the GPUs' counters disagree by more than {percent_text(LARGEST_DISAGREEMENT)} on "
        f"{count_text(len(found), 'trial')}, most on trial {worst}: by {by}."
    ]


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


def _certainty(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats]) -> list[str]:
    """What is known of the recommended run's own spread and uncertainty; nothing where nothing is."""
    known = []
    again = _repeats_of(rec, repeated)
    if again is not None:
        scale = emissions_scale([again.emissions_kg_co2e.highest])
        known.append(
            f"Its configuration completed {count_text(again.n, 'time')} (trials {', '.join(map(str, again.trials))}): "
            f"n = {again.n}, {spread_text(again.emissions_kg_co2e, scale)} {scale.unit} and perplexity "
            f"{spread_text(again.perplexity)} (mean ± standard deviation)."
        )
    split = next((record.gpu_energy_kwh for record in data.records if record.trial == rec.trial), None)
    training = split[Phase.TRAIN] if split is not None else None
    if training is not None and training.counter:
        known.append(
            f"The GPU part of its training energy is {energy_text(training.counter)} "
            f"{uncertainty_text(training.uncertainty / training.counter)} by the counters (one standard uncertainty, "
            f"from their resolution), {energy_text(training.net_of_idle)} of it net of idle; CodeCarbon's reading of "
            f"the same window differs by {difference_text(difference_of(training))}."
        )
    return [" ".join(known)] if known else []


def _repeats_of(rec: Recommendation, repeated: Sequence[Repeats]) -> Repeats | None:
    """Of the recommended configuration."""
    return next((one for one in repeated if one.params == rec.params), None)


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
