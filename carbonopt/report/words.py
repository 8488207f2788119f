"""The report's sentences: the answer first, what it cost, and how sure it is."""

from collections import Counter
from collections.abc import Sequence

from carbonopt.analysis.audit import Audit
from carbonopt.analysis.comparison import Comparison
from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.replicates import Repeats, repeats_of
from carbonopt.core.config import LocalLaunch, ReplayLaunch
from carbonopt.core.format import (
    count_text,
    difference_text,
    emissions_scale,
    emissions_text,
    energy_text,
    intensity_text,
    params_text,
    percent_text,
    plus_minus_text,
    quality_text,
    spread_text,
    two_decimals_text,
    uncertainty_text,
)
from carbonopt.core.study import StudyData
from carbonopt.core.trial import COMPONENTS, GpuEnergy, Phase
from carbonopt.report.energy import NET_UNKNOWN_BECAUSE, difference_of, is_counted
from carbonopt.report.savings import (
    baseline_name,
    but_at_equal_quality,
    certainty_of,
    compared,
    from_to,
    interval_of,
    of_it_repeats,
    pay_back,
    pays_back_from_to,
    study_cost,
    trials_and_repeats,
    turned,
)
from carbonopt.report.unmet import what_is_missing
from carbonopt.report.view import Tile


def headline(rec: Recommendation, found: Comparison | None) -> str:
    """The answer in one sentence; a saving with its interval where one was measured."""
    target = quality_text(rec.target_perplexity)
    if not rec.met:
        if rec.closest is None:
            return f"No trial reached the target perplexity of {target}, and none was evaluated."
        reached = quality_text(rec.closest.perplexity)
        closest = f"Trial {rec.closest.trial} came closest: {reached}{mean_of(rec)}."
        return f"No trial reached the target perplexity of {target}. {closest}"
    if rec.confidence is not None and not rec.confidence.confirmed:
        return (
            f"No configuration is confirmed to meet the target perplexity of {target}; trial {rec.trial} reached it "
            f"with {emissions_text(rec.emissions_kg_co2e)}."
        )
    if rec.baseline is None or rec.saving_fraction is None:
        return f"Trial {rec.trial} is the cheapest that reaches the target perplexity of {target}."
    if rec.trial == rec.baseline.trial:
        kind = "start configuration" if rec.baseline.is_start else "most accurate complete trial"
        return f"The {kind}, trial {rec.trial}, is also the cheapest that reaches the target perplexity of {target}."
    return (
        f"Trial {rec.trial} reaches the target perplexity of {target} with "
        f"{compared(rec.saving_fraction, certainty_of(found))} {baseline_name(rec.baseline)}"
        f"{but_at_equal_quality(found)}."
    )


def answer(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats]) -> tuple[str, ...]:
    """The paragraphs below the headline: what is compared, how sure it is, and whether the study pays back."""
    paragraphs = []
    if rec.met:
        paragraphs += [_comparison(rec), *_certainty(data, rec, repeated)]
    else:
        if missing := what_is_missing(data, rec):
            paragraphs.append(" ".join(missing))
        if rec.closest is not None and rec.closest.perplexity > rec.target_perplexity:
            paragraphs.append(
                f"What counts as closest: {rec.closest.why}. Another target needs no new trial: "
                "carbonopt recommend --target."
            )
    ended = f" The study ended: {data.ended}." if data.ended is not None else ""
    paragraphs.append(f"{study_cost(rec)} {pay_back(rec)}{ended}")
    return tuple(paragraphs)


def ready_to_use(data: StudyData, rec: Recommendation) -> str:
    """What of the recommended configuration lies in winner/."""
    if not rec.met:
        return ""
    again = (
        "run.sh trains with it once more, without carbonopt; " if isinstance(data.config.launch, LocalLaunch) else ""
    )
    return (
        f"Ready to use in the folder winner/ beside this page: {again}training_args.yaml has it in the names of "
        "Hugging Face."
    )


def audited(data: StudyData, found: Audit | None) -> str:
    """How often the audit found the pruning wrong; empty where no audit was asked for."""
    if found is None:
        return ""
    kind = "Audit of the pruning by target"
    if found.lowest_rate is None or found.highest_rate is None:
        none = "none was due" if not found.cut_short else f"{count_text(found.cut_short, 'trial')}, none at its end"
        return f"{kind} ({percent_text(data.config.search.pruning.audit)} of what it would stop): {none}."
    front = data.config.search.goal == "front"
    right = "ended on the Pareto front" if front else f"met perplexity {quality_text(data.config.target.perplexity)}"
    cut = f", {found.cut_short} more did not get there" if found.cut_short else ""
    return (
        f"{kind}: due to be stopped but run to the end: {found.ended}{cut}; of these {right}: {found.mattered} "
        f"({percent_text(found.mattered / found.ended)}; {percent_text(found.level)} confidence: "
        f"{percent_text(found.lowest_rate)} to {percent_text(found.highest_rate)})."
    )


def confidence(rec: Recommendation) -> tuple[str, ...]:
    """What the repeats with other seeds say of the recommendation, a sentence each; nothing where there are none."""
    sure, lost = rec.confidence, list[str]()
    target = f"the target of {quality_text(rec.target_perplexity)}"
    if rec.failed_replicates:
        which = f"trial{'s' if len(rec.failed_replicates) > 1 else ''} {' and '.join(map(str, rec.failed_replicates))}"
        lost.append(f"Repeats of it with other seeds, {which}, ended without a result.")
    if sure is None and not lost:
        return ()
    found = _of_the_repeats(rec, target) + lost
    for one in rec.rejected:
        mean = f"its mean over {count_text(one.seeds, 'seed')} ({quality_text(one.perplexity)}) misses it"
        found.append(
            f"Trial {one.trial} was cheaper and met the target with its first seed, but "
            f"{'with another one it diverged or did not fit in memory' if one.failed_replicate else mean}."
        )
    if sure is not None and (other := sure.safer_alternative) is not None:
        change = other.emissions_difference
        emits = f"{percent_text(abs(change))} {'more' if change > 0 else 'less'}" if change else "as much"
        found.append(
            f"Trial {other.trial} emits {emits} ({emissions_text(other.emissions_kg_co2e)}) and is surer to meet the "
            f"target: its mean is {quality_text(other.perplexity_mean)}, and at most "
            f"{quality_text(other.perplexity_bound)} with the same confidence"
            f"{', which does not confirm it either' if other.perplexity_bound > rec.target_perplexity else ''}."
        )
    if rec.ties:
        which = f"trial{'s' if len(rec.ties) > 1 else ''} {' and '.join(map(str, rec.ties))}"
        found.append(f"A tie with {which}: emissions that differ by less than the error, and the target is met, too.")
    return tuple(found)


def _of_the_repeats(rec: Recommendation, target: str) -> list[str]:
    """What the recommended configuration's own runs say."""
    sure = rec.confidence
    if sure is None or sure.seeds == 1:
        return [f"It ran with one seed only: whether it meets {target} with others is not known."]
    if sure.perplexity_bound is None:
        return [f"Its {sure.seeds} runs differ beyond all bounds: whether it meets {target} is not known."]
    verdict = "meets" if sure.confirmed else "does not prove that it meets"
    return [
        f"Over {sure.seeds} seeds: {_pooled_spreads(rec)}.",
        f"With {percent_text(sure.level)} confidence its mean perplexity is at most "
        f"{quality_text(sure.perplexity_bound)}, which {verdict} {target}.",
    ]


def _pooled_spreads(rec: Recommendation) -> str:
    """Of a recommendation that was confirmed or is in doubt."""
    sure, emissions_kg = rec.confidence, rec.emissions_kg_co2e
    assert sure is not None and emissions_kg is not None
    assert sure.perplexity_deviation is not None and sure.emissions_deviation_kg_co2e is not None
    scale = emissions_scale([emissions_kg])
    return (
        f"{plus_minus_text(emissions_kg, sure.emissions_deviation_kg_co2e, scale)} {scale.unit} and perplexity "
        f"{plus_minus_text(sure.perplexity_mean, sure.perplexity_deviation)} (mean ± standard deviation of one run, "
        "pooled or its own, the larger)"
    )


def mean_of(rec: Recommendation) -> str:
    """Of how many runs the recommended or closest configuration's figures are means; nothing where it ran once."""
    seeds = rec.confidence.seeds if rec.confidence else rec.closest.seeds if rec.closest else 1
    return f", mean of {seeds} seeds" if seeds > 1 else ""


def tiles(rec: Recommendation, found: Comparison | None) -> tuple[Tile, ...]:
    """The answer's figures."""
    again = f"; the repeats: {emissions_text(rec.repeats_emissions_kg_co2e)} of it" if rec.repeats else ""
    spent = Tile(
        label="The study itself",
        text=emissions_text(rec.study_emissions_kg_co2e),
        note=f"{energy_text(rec.study_energy_kwh)}, {trials_and_repeats(rec)}{again}",
    )
    target = f"target: at most {quality_text(rec.target_perplexity)}"
    if not rec.met or rec.params is None:
        if rec.closest is None:
            return (spent,)
        nearest = Tile(label="Closest", text=f"Trial {rec.closest.trial}", note=params_text(rec.closest.params))
        return (nearest, Tile(label="Perplexity", text=quality_text(rec.closest.perplexity), note=target), spent)
    saving = "no baseline" if rec.baseline is None else f"against trial {rec.baseline.trial}"
    if sure := certainty_of(found):
        saving += f": {sure}"
    equal = turned(found)
    if equal is not None:
        emits = from_to(equal.saving_fraction_before, equal.saving_fraction)
        saving += f"; against it stopped when it first met the target: {emits}"
    instead = "in place of the baseline" if equal is None else "in place of the baseline's whole runs"
    runs, known = rec.break_even_runs, pays_back_from_to(rec.break_even_interval)
    return (
        Tile(label="Recommended", text=f"Trial {rec.trial}", note=params_text(rec.params)),
        Tile(label="Perplexity", text=quality_text(rec.perplexity), note=target + mean_of(rec)),
        Tile(
            label="Emissions of a run",
            text=emissions_text(rec.emissions_kg_co2e),
            note=f"{energy_text(rec.energy_kwh)} in training{mean_of(rec)}",
        ),
        Tile(label="Saving on a run", text=percent_text(rec.saving_fraction), note=saving),
        spent,
        Tile(
            label="Pays back after",
            text="never" if runs is None else count_text(runs, "run"),
            note="a run saves nothing" if runs is None else f"{instead}{f': {known}' if known else ''}",
        ),
    )


def sentence(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats], found: Comparison | None) -> str | None:
    """The answer with its figures, how many runs are behind each, the hardware and what is known of the spread, to be
    pasted into a paper; None without a recommendation."""
    if not rec.met or rec.params is None:
        return None
    intensity, known = data.provenance.intensity, data.provenance.energy_source
    parts = [f"{name.upper()} {known[name]}" for name in COMPONENTS if name in known and is_counted(data, name)]
    training = _training(data, rec)
    if training is not None and parts:
        parts[0] += f" {uncertainty_text(training.uncertainty / training.counter)} from the counters' resolution"
    counted = f" ({', '.join(parts)})" if parts else ""
    saved = (
        f", {compared(rec.saving_fraction, interval_of(found))} {baseline_name(rec.baseline, in_brackets=False)}"
        f"{but_at_equal_quality(found)}"
        if rec.baseline is not None and rec.saving_fraction is not None and rec.trial != rec.baseline.trial
        else ""
    )
    return (
        f"Of {trials_and_repeats(rec)} with carbonopt {_where(data)}, the configuration "
        f"with the least emissions at a perplexity of at most {quality_text(rec.target_perplexity)} "
        f"({params_text(rec.params)}) reached {quality_text(rec.perplexity)} with {energy_text(rec.energy_kwh)} of "
        f"training energy{counted}, or {emissions_text(rec.emissions_kg_co2e)} at "
        f"{intensity_text(intensity.g_co2e_per_kwh)} g CO2e/kWh and a PUE of {data.config.carbon.pue:.3g}{saved} "
        f"({_runs_behind(data, rec, repeated)}){_bound(rec)}; the study itself used "
        f"{energy_text(rec.study_energy_kwh)}, or {emissions_text(rec.study_emissions_kg_co2e)}{of_it_repeats(rec)}."
    )


def _where(data: StudyData) -> str:
    hardware = data.provenance.hardware
    if isinstance(data.config.launch, ReplayLaunch):
        return "that replay recorded runs"
    if hardware is None:
        return "on hardware that was not recorded"
    gpus = [f"{count} × {name}" for name, count in Counter(hardware.gpus).items()]
    return f"on {' and '.join(gpus) or f'{hardware.cpu} (no GPU)'}"


def _bound(rec: Recommendation) -> str:
    sure = rec.confidence
    if sure is None or sure.perplexity_bound is None:
        return ""
    bound, level = quality_text(sure.perplexity_bound), percent_text(sure.level)
    unconfirmed = "" if sure.confirmed else ", so that it is not confirmed to meet the target"
    return f", with a mean perplexity of at most {bound} at {level} confidence{unconfirmed}"


def _runs_behind(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats]) -> str:
    """How many complete runs there are of the recommended and of the baseline's configuration, and their spread."""
    again = repeats_of(rec.params, repeated)
    if rec.baseline is None or rec.baseline.trial == rec.trial:
        other, base = None, None
    else:
        other, base = rec.baseline, repeats_of(rec.baseline.params, repeated)
    if again is None and base is None:
        return f"n = 1{' each' if other else ''}, spread not known"
    of_which = {record.repeat_of for record in data.records}  # whose figures are means

    def counted(trial: int | None, runs: Repeats) -> str:
        spreads = _spreads(runs)
        if trial == rec.trial and rec.confidence is not None and rec.confidence.perplexity_bound is not None:
            spreads = f"n = {runs.n}, {_pooled_spreads(rec)}"  # one deviation in one text, that of the confidence
        return f"{'means' if trial in of_which else 'one'} of {spreads}"

    counts = "n = 1, spread not known" if again is None else counted(rec.trial, again)
    if other is None:
        return counts
    return f"{counts}; the baseline {'n = 1' if base is None else f'is {counted(other.trial, base)}'}"


def _spreads(again: Repeats) -> str:
    scale = emissions_scale([again.emissions_kg_co2e.highest])
    return (
        f"n = {again.n}, {spread_text(again.emissions_kg_co2e, scale)} {scale.unit} and perplexity "
        f"{spread_text(again.perplexity)} (mean ± standard deviation)"
    )


def closure(data: StudyData, spent: Footprint) -> str:
    """What the check of the sums by one reading of the whole says, and what it checks."""
    if isinstance(data.config.launch, ReplayLaunch):
        return "A replay takes its energy from a table: there is no reading of the whole to check the sum with."
    checks = []
    when = "read once when each session began and once when it last noted its figures"
    if spent.gpu_closure is not None:
        checks.append(
            f"The GPUs' counters, {when}, say {energy_text(spent.outer_gpu_kwh)}; the parts add up to "
            f"{two_decimals_text(spent.gpu_closure)} of it."
        )
    if spent.closure is not None and (data.config.carbon.objective == "all" or not checks):
        checks.append(
            f"{'With CPU and RAM' if checks else f'The whole, {when}'}: {energy_text(spent.outer_kwh)}; the parts add "
            f"up to {two_decimals_text(spent.closure)} of it."
        )
    if not checks:
        return "The sum was not checked by a reading of the whole."
    modelled = any(how == "modelled" for name, how in data.provenance.energy_source.items() if is_counted(data, name))
    return (
        f"{' '.join(checks)} This checks the book-keeping, that no window was lost or counted twice, not the sensors: "
        f"both sides read the same counters{', and what is modelled is the same model on both' if modelled else ''}."
    )


def _comparison(rec: Recommendation) -> str:
    own = (
        f"Trial {rec.trial} emits {emissions_text(rec.emissions_kg_co2e)} ({energy_text(rec.energy_kwh)}) in training "
        f"and reaches perplexity {quality_text(rec.perplexity)}{mean_of(rec)}"
    )
    if rec.baseline is None or rec.perplexity is None:
        return f"{own}."
    if rec.baseline.trial == rec.trial:
        return f"{own}. It is its own baseline: {rec.baseline.why}."
    change = rec.perplexity / rec.baseline.perplexity - 1
    worse = f"{percent_text(abs(change))} {'worse' if change > 0 else 'better'}" if change else "the same"
    return (
        f"{own}. The baseline, trial {rec.baseline.trial}, emits {emissions_text(rec.baseline.emissions_kg_co2e)} and "
        f"reaches {quality_text(rec.baseline.perplexity)}: the recommendation's perplexity is {worse}. "
        f"This baseline is {rec.baseline.why}."
    )


def _certainty(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats]) -> list[str]:
    """What is known of the recommended run's own spread and uncertainty; nothing where nothing is."""
    known = list(confidence(rec))
    again = repeats_of(rec.params, repeated)
    if again is not None and rec.confidence is None:
        numbers = ", ".join(map(str, again.trials))
        known.append(
            f"Its configuration completed {count_text(again.n, 'time')} (trials {numbers}): {_spreads(again)}."
        )
    training = _training(data, rec)
    if training is not None:
        known.append(
            f"The GPU part of its training energy is {energy_text(training.counter)} "
            f"{uncertainty_text(training.uncertainty / training.counter)} by the counters (one standard uncertainty, "
            f"from their resolution; their own accuracy is not known), {_net_of_idle(training)}. Training is a sum of "
            "windows, one from each evaluation to the next; CodeCarbon's sum over them differs by "
            f"{difference_text(difference_of(training))}."
        )
    return [" ".join(known)] if known else []


def _net_of_idle(gpu: GpuEnergy) -> str:
    if gpu.net_of_idle is None:
        return f"how much of it is net of idle is not known, because {NET_UNKNOWN_BECAUSE}"
    return f"{energy_text(gpu.net_of_idle)} of it net of idle"


def _training(data: StudyData, rec: Recommendation) -> GpuEnergy | None:
    """GPU energy of the recommended run's training; None where its counter was not read or says nothing."""
    split = next((record.gpu_energy_kwh for record in data.records if record.trial == rec.trial), None)
    return split[Phase.TRAIN] if split is not None and split[Phase.TRAIN].counter else None
