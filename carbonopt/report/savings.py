"""What a run saves and when that pays the study back, in words: never a share without how sure it is."""

from carbonopt.analysis.comparison import AtEqualQuality, Comparison
from carbonopt.analysis.confidence import LEVEL
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.core.format import count_text, emissions_text, energy_text, interval_text, percent_text

WITHIN_NOISE = "within the noise"
SPREAD_UNKNOWN = "run-to-run spread not known"

Interval = tuple[float, float] | None


def compared(saving_fraction: float, sure: str = "") -> str:
    """`sure`: see `sure_of`."""
    said = f" ({sure})" if sure else ""
    if saving_fraction > 0:
        return f"{percent_text(saving_fraction)}{said} lower emissions than"
    return (
        f"{percent_text(-saving_fraction)}{said} higher emissions than"
        if saving_fraction < 0
        else (f"the same emissions{said} as")
    )


def sure_of(saving_fraction: float | None, interval: Interval, seeds: str = "") -> str:
    """How sure a saving is: its interval, turned round where it is none but an excess, and whether that holds 0.

    `seeds`: how many runs it rests on; empty: leave that out.
    """
    if interval is None:
        return SPREAD_UNKNOWN
    lowest, highest = interval if saving_fraction is None or saving_fraction >= 0 else (-interval[1], -interval[0])
    said = f"{interval_text(lowest, highest, percent_text)} with {percent_text(LEVEL)} confidence"
    noise = f": {WITHIN_NOISE}" if is_within_noise(interval) else ""
    return f"{said}{f', {seeds}' if seeds else ''}{noise}"


def is_within_noise(interval: Interval) -> bool:
    return interval is not None and interval[0] <= 0 <= interval[1]


def interval_of(found: Comparison | None) -> str:
    """Of the saving, and how many runs it rests on; empty where no run was repeated."""
    saving = None if found is None else found.saving
    if saving is None or saving.lowest is None or saving.highest is None:
        return ""
    runs = "each" if saving.seeds == saving.baseline_seeds else f"against {saving.baseline_seeds} of the baseline"
    return sure_of(saving.fraction, (saving.lowest, saving.highest), f"{count_text(saving.seeds, 'seed')} {runs}")


def certainty_of(found: Comparison | None) -> str:
    """The same, and where no run was repeated that; empty where nothing is compared."""
    return "" if found is None else interval_of(found) or SPREAD_UNKNOWN


def baseline_name(baseline: Baseline, *, in_brackets: bool = True) -> str:
    """`in_brackets`: its number; not where brackets follow."""
    kind = "the start configuration" if baseline.is_start else "the most accurate complete trial"
    misses = "" if baseline.meets_target else ", which misses the target"
    number = f"trial {baseline.trial}{misses}"
    return f"{kind} ({number})" if in_brackets else f"{kind}, {number}"


def from_to(least: float | None, most: float) -> str:
    """What a saving between these two is, in words; `least` is None against a run that emitted nothing."""
    if least is None:
        return f"at most {percent_text(most)} less" if most > 0 else f"at least {percent_text(-most)} more"
    if most <= 0:
        return f"{interval_text(-most, -least, percent_text)} more"
    if least >= 0:
        return f"{interval_text(least, most, percent_text)} less"
    return f"between {percent_text(-least)} more and {percent_text(most)} less"


def turned(found: Comparison | None) -> AtEqualQuality | None:
    """At equal quality, where that may turn the saving into an excess: a headline without it would be half the truth.

    The baseline's whole run goes on after it has met the target, to a better perplexity than was asked for.
    """
    equal = None if found is None else found.equal_quality
    if found is None or equal is None or found.saving.fraction <= 0:
        return None
    lowest = equal.saving_fraction if equal.saving_fraction_before is None else equal.saving_fraction_before
    return equal if lowest < 0 else None


def but_at_equal_quality(found: Comparison | None) -> str:
    """A clause behind the saving and the baseline's name; empty where equal quality doesn't turn the saving round."""
    equal = turned(found)
    if equal is None:
        return ""
    emits = from_to(equal.saving_fraction_before, equal.saving_fraction)
    return f", but {emits} than that one had emitted when it first met the target"


def at_equal_quality(found: Comparison | None) -> str:
    """The same as a sentence, with what follows for the study's own cost; empty likewise."""
    equal = turned(found)
    if equal is None:
        return ""
    emits = from_to(equal.saving_fraction_before, equal.saving_fraction)
    both = "" if equal.both_stopped is None else _both(equal.both_stopped.saving_fraction)
    never = " and does not pay the study back" if equal.saving_fraction <= 0 else ""
    return (
        f"Against the baseline stopped when it first met the target (step {equal.baseline_step}), a whole run of the "
        f"recommendation emits {emits}{never}{both}."
    )


def _both(saved: float) -> str:
    emits = f"{percent_text(abs(saved))} {'less' if saved > 0 else 'more'}" if saved else "as much"
    return f"; with both stopped there, it emits {emits}"


def pays_back_from_to(interval: tuple[int, int | None] | None) -> str:
    """How many runs it may take, with which confidence; empty where the saving has no interval."""
    if interval is None:
        return ""
    fewest, most = interval
    confidence = f"with {percent_text(LEVEL)} confidence"
    if most is None:
        return f"{fewest:,} or more {confidence}, without an upper end: a run may save nothing"
    return f"{fewest:,} to {most:,} {confidence}"


def pay_back(rec: Recommendation) -> str:
    """A sentence."""
    if not rec.met:
        return "Without a recommendation there is nothing to pay it back."
    if rec.break_even_runs is None:
        if is_within_noise(rec.saving_interval):
            return "Whether a run saves anything is within the noise, so it can't be said that the study pays back."
        return "A run saves nothing against the baseline, so the study does not pay back."
    known = pays_back_from_to(rec.break_even_interval)
    return (
        f"It pays back after {count_text(rec.break_even_runs, 'run')}{f' ({known})' if known else ''} of the "
        "recommendation in place of the baseline."
    )


def study_cost(rec: Recommendation) -> str:
    """A sentence: what the study used, and which part of it the repeats."""
    return (
        f"The study used {energy_text(rec.study_energy_kwh)}, or {emissions_text(rec.study_emissions_kg_co2e)}, every "
        f"trial and its start-up, evaluation and pauses included{of_it_repeats(rec, with_energy=True)}."
    )


def of_it_repeats(rec: Recommendation, *, with_energy: bool = False) -> str:
    """What of the study's own cost the repeats with other seeds were; empty where none ran."""
    if not rec.repeats:
        return ""
    used = f"{energy_text(rec.repeats_energy_kwh)}, or " if with_energy else ""
    return (
        f", of which {used}{emissions_text(rec.repeats_emissions_kg_co2e)} for {count_text(rec.repeats, 'repeat')} "
        "with other seeds"
    )


def trials_and_repeats(rec: Recommendation) -> str:
    """How many trials the search ran, and how many repeats followed."""
    searched = count_text(sum(rec.trials_by_state.values()) - rec.repeats, "trial")
    return f"{searched} and {count_text(rec.repeats, 'repeat')}" if rec.repeats else searched
