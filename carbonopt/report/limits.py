"""What the report's figures can't tell, in plain words."""

from collections.abc import Sequence

from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.replicates import Repeats, repeats_of
from carbonopt.analysis.repricing import Repricing
from carbonopt.core.config import ReplayLaunch
from carbonopt.core.format import count_text, percent_text, two_decimals_text
from carbonopt.core.study import StudyData
from carbonopt.core.trial import LARGEST_DISAGREEMENT, TrialState
from carbonopt.export.settings import OWN_STEP, has_own_step
from carbonopt.report.cpu_contention import cpu_contention

FEW_TRIALS = 10  # completed; below this the front is a sketch
# Of the target. A rule of thumb for what another seed can change, from recorded runs on an H200 (SEEDS_CHANGE).
NEAR_TARGET = 0.01
SEEDS_CHANGE = "in recorded runs of a small GPT on an H200, seeds changed the perplexity by 0.2 to 0.8 %"
CLOSURE_TOLERANCE = 0.005


def limits(
    data: StudyData, rec: Recommendation, spent: Footprint, repeated: Sequence[Repeats], priced: Repricing | None
) -> tuple[str, ...]:
    return (*_of_the_search(data, rec, repeated), *_of_the_measurement(data, rec, spent), *_of_the_scope(data, priced))


def modelled_components(data: StudyData) -> str:
    """Of which the energy is not measured, such as 'CPU and RAM'; empty where all of it is."""
    return " and ".join(name.upper() for name, how in data.provenance.energy_source.items() if how == "modelled")


def _of_the_search(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats]) -> list[str]:
    found = []
    if data.ended is None:
        found.append("The study has not ended: these figures will change.")
    completed = rec.trials_by_state[TrialState.COMPLETE]
    if completed < FEW_TRIALS:
        found.append(
            f"Few trials: {completed} completed. A cheaper configuration may well be among those that were not tried."
        )
    if rec.met and rec.baseline is not None and not rec.baseline.is_start:
        found.append(
            "The saving is against the most accurate trial of this study, which is not what you would have run "
            "otherwise. search.start in the study file names a configuration of your own as the baseline."
        )
    if rec.met and rec.baseline is not None and not rec.baseline.meets_target:
        found.append("The baseline misses the target, so the comparison is between two different qualities.")
    sure = rec.confidence
    if sure is not None and sure.confirmed:
        tried = len({record.repeat_of for record in data.records} - {None})
        found.append(
            f"The confidence is that of one configuration; {tried} ran with several seeds, and each that is tried is "
            "one more that can pass by luck; so can one whose runs spread much more than those of the others."
        )
    elif rec.perplexity is not None and rec.perplexity > rec.target_perplexity * (1 - NEAR_TARGET):
        margin = percent_text(1 - rec.perplexity / rec.target_perplexity)
        if sure is not None and sure.perplexity_deviation is not None:
            spread = percent_text(sure.perplexity_deviation / sure.perplexity_mean)
            found.append(
                f"The recommendation's mean is only {margin} below the target, and its runs spread by {spread} "
                "(standard deviation) from seed to seed, so that a single rerun may miss it."
            )
        else:
            found.append(
                f"The recommended trial is only {margin} below the target. As a rule of thumb another seed may miss "
                f"it: {SEEDS_CHANGE}, which need not hold here."
            )
    if completed and not repeated:
        found.append(
            "One run each, with one seed: no repeat spread is known, so how far a repetition would differ is not known."
        )
    elif rec.met and repeats_of(rec.params, repeated) is None:
        found.append(
            "The recommended configuration ran once: how far it would differ when run again is not known. The table of "
            "repeats says it of others."
        )
    candidates = sum(record.meets(rec.target_perplexity) for record in data.records if record.repeat_of is None)
    if rec.met and candidates > 1 and repeats_of(rec.params, repeated) is None:
        found.append(
            f"The recommended trial emits the least of {candidates} that reached the target, and ran once: its energy "
            "is likely to be a little lucky, and a repetition's a little higher."
        )
    if rec.saving_interval and rec.baseline and repeats_of(rec.baseline.params, repeated) is None:
        found.append(
            "The baseline ran once: the interval of the saving takes its runs to spread as the repeated ones do, but "
            "other settings can spread more."
        )
    if repeated and all(len(one.seeds) == 1 for one in repeated):
        found.append("Repeated runs had the same seed: they don't tell how far another seed changes the perplexity.")
    found.append(
        "The evaluation data that judged the trials also chose among them, so that the winner's perplexity is a "
        "little optimistic."
    )
    return found


def _of_the_measurement(data: StudyData, rec: Recommendation, spent: Footprint) -> list[str]:
    found = []
    modelled = modelled_components(data)
    if data.config.carbon.objective == "gpu":
        found.append(
            "Only the GPUs are counted (carbon.objective: gpu): the energy of CPU and RAM is shown beside them."
        )
    elif modelled:
        found.append(
            f"Modelled, not measured: the energy of {modelled}. The model goes by time and by the load "
            "of the whole machine, so that other work on it raises these figures and can change which trial is stopped."
        )
    if rec.params is not None and has_own_step(data.config, rec.params):
        found.append(
            f"The optimizer step of bf16 without ZeRO is carbonopt's (winner/{OWN_STEP}), not DeepSpeed's own, which "
            "took more time and energy where both were measured and leads to another perplexity: the recommended "
            "configuration is what it is with that file."
        )
    if isinstance(data.config.launch, ReplayLaunch):
        found.append(
            "A replay: energy and perplexity come from a table of recorded runs, and nothing was trained. What the "
            "study spent is what those runs would have cost."
        )
    elif "gpu" not in data.provenance.energy_source:
        found.append("No GPU is in these figures.")
    if spent.unmeasured_trials:
        numbers = ", ".join(map(str, spent.unmeasured_trials))
        found.append(f"What these trials used is not known and not in the study's total: {numbers}.")
    if not isinstance(data.config.launch, ReplayLaunch):
        found.append(
            "The meter's own set-up, 1 to 3 s at each start of carbonopt run before its first window, is not counted."
        )
    found += cpu_contention(data, rec)
    found += _disagreements(data)
    for what, fraction in (("GPUs' energy", spent.gpu_closure), ("whole energy", spent.closure)):
        if fraction is not None and abs(fraction - 1) > CLOSURE_TOLERANCE:
            found.append(
                f"The parts of the {what} add up to {two_decimals_text(fraction)} of one reading of the whole: the "
                "study's total is uncertain by that much."
            )
    if spent.gpu_by_phase_kwh:
        found.append(
            "The uncertainty of GPU energy is that of the counters' resolution alone. How accurate the counters are is "
            "not known: they were not checked against another instrument, no specification of NVIDIA's is assumed, and "
            "CodeCarbon reads the same sensors."
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


def _of_the_scope(data: StudyData, priced: Repricing | None) -> list[str]:
    hourly = "The grid's hour-to-hour changes are not counted"
    if priced is not None:
        hourly = "The grid's hour-to-hour changes are in the table of other hours alone"
    found = [
        f"Emissions are energy × one fixed carbon intensity × PUE. {hourly}; making the hardware and the network are "
        "not counted.",
        "A trial's emissions are those of its training window; start-up and evaluation are in the study's total only.",
    ]
    if data.config.carbon.pue == 1.0:
        found.append("PUE is 1: cooling and power delivery of the building are not counted.")
    return found
