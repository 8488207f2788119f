"""Formatting of figures and users' names for people.

A figure beyond all bounds is written with a power of ten, such as 1.23e+300.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import partial
from pathlib import Path

from carbonopt.core import units
from carbonopt.core.dimensions import TrialParams, label
from carbonopt.core.errors import shortened
from carbonopt.core.quality import MISSING
from carbonopt.core.values import Frozen, Scalar, Spread

# embeddings, overrides and isolates of Unicode
_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")
_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!$@])")
_NO_DIFFERENCE = 1e-5  # 0.001 %
_SHORT_NAMES = {
    "global_batch_size": "global batch",
    "learning_rate": "learning rate",
    "epochs": "epochs",
    "zero_stage": "ZeRO",
    "optimizer": "optimizer",
    "lr_scheduler": "schedule",
    "dropout": "dropout",
    "weight_averaging": "weight averaging",
    "lora_rank": "LoRA rank",
}
_MOST_DIGITS = 9  # before or after the point; a number that needs more has a power of ten: 1.23e+12


class Scale(Frozen):
    """The unit of a column, chosen by its largest value.

    The column's head names the unit, and its cells leave it out.
    """

    unit: str
    per_base: float  # how many of the unit make a kWh, or a kg CO2e
    # the most decimals: two more than the largest value has, as more digits would mean nothing
    decimals: int

    def label(self, what: str) -> str:
        return f"{what} ({self.unit})"

    def text(self, value: float | None) -> str:
        """Return a value with three significant digits, zeros at the end included."""
        if value is None or not math.isfinite(value):
            return MISSING
        scaled = value * self.per_base
        return _fixed(scaled, min(self.decimals, _decimals(scaled, 3)), 3)


def _scale(unit_of: Callable[[float], tuple[str, float]], values: Iterable[float | None]) -> Scale:
    largest = max(
        (abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0
    )
    unit, per_base = unit_of(largest)
    return Scale(unit=unit, per_base=per_base, decimals=_decimals(largest * per_base, 3) + 2)


def _with_unit(unit_of: Callable[[float], tuple[str, float]], value: float | None) -> str:
    """Return a value and its unit, with three significant digits, as in the tables.

    Zeros at the end are included.
    """
    if value is None or not math.isfinite(value):
        return MISSING
    unit, per_base = unit_of(value)
    rounded = float(f"{value * per_base:.3g}")  # no digits beyond the third: 1,230 and not 1,234
    return f"{rate_text(rounded)} {unit}"


def _known(text: Callable[[float], str], value: float | None) -> str:
    return MISSING if value is None else text(value)


# `*_scale` chooses the unit of a column of energies in kWh, or of emissions in kg CO2e; `*_text`
# formats one such figure with its unit.
energy_scale, emissions_scale = (
    partial(_scale, units.energy_unit),
    partial(_scale, units.emissions_unit),
)
energy_text, emissions_text = (
    partial(_with_unit, units.energy_unit),
    partial(_with_unit, units.emissions_unit),
)

# Formats of figures without a unit. `two_decimals_text` gives a fraction near 1 in percent, where
# the hundredths matter; `uncertainty_text` a relative uncertainty, of which more than two digits
# are never known.
intensity_text, memory_text = partial(_known, "{:.4g}".format), partial(_known, "{:.3g}".format)
# a figure per unit of another, and seconds
rate_text = seconds_text = partial(_known, lambda value: _fixed(value, _decimals(value, 3), 3))
two_decimals_text = partial(_known, lambda fraction: f"{_fixed(100 * fraction, 2, 5)} %")
uncertainty_text = partial(_known, lambda fraction: f"± {_two_digits(100 * fraction)} %")


def percent_text(fraction: float | None) -> str:
    """Return a fraction in percent, with three significant digits, or whole from 100 % on.

    A fraction below 1 is never rounded up to 100 %.
    """
    if fraction is None:
        return MISSING
    # a tiny difference is the rounding of equal figures
    percent = 100 * fraction if abs(fraction) > 1e-12 else 0.0
    if 99.95 <= percent < 100:
        return "over 99.9 %"
    if percent > 1e6:  # a diverged trial's perplexity can be hundreds of digits above the others
        return "over 1,000,000 %"
    if percent < -1e6:  # the lower end of a saving that two short runs leave open
        return "under -1,000,000 %"
    return f"{_fixed(percent, 0, 3)} %" if abs(percent) >= 99.95 else f"{percent:.3g} %"


def less_text(saving: float) -> str:
    """Return a saving, given as a fraction, as in `12 % less`.

    A negative saving is given as in `12 % more`.
    """
    return f"{percent_text(abs(saving))} {'less' if saving >= 0 else 'more'}"


def share_text(fraction: float) -> str:
    """Return a part of a whole that is known roughly, in percent with one decimal."""
    return f"{100 * fraction:.1f} %" if not 0 < fraction < 5e-4 else "under 0.05 %"


def difference_text(fraction: float | None) -> str:
    """Return a relative difference with its sign and two significant digits.

    A difference below 0.001 % is +0 %.
    """
    if fraction is None:
        return MISSING
    return "+0 %" if abs(fraction) < _NO_DIFFERENCE else f"{_two_digits(100 * fraction, '+')} %"


def spread_text(spread: Spread, scale: Scale | None = None) -> str:
    """Return mean ± standard deviation."""
    return plus_minus_text(spread.mean, spread.standard_deviation, scale)


def plus_minus_text(mean: float, deviation: float, scale: Scale | None = None) -> str:
    """Return mean ± deviation, rounded to the deviation's first digit.

    It is rounded to the second digit where the first is 1.
    """
    factor = 1.0 if scale is None else scale.per_base
    mean, deviation = mean * factor, deviation * factor
    decimals = _decimals(mean, 4)
    if deviation:
        digits = 2 if f"{deviation:.1e}".startswith("1") else 1
        # a smaller deviation is the computer's rounding
        decimals = min(_decimals(deviation, digits), _decimals(mean, 6))
    return f"{_fixed(mean, decimals, 4)} ± {_fixed(deviation, decimals, 2)}"


def interval_text(lowest: float, highest: float, text: Callable[[float], str]) -> str:
    """Return an interval, with each of its ends formatted by `text`."""
    return f"{text(lowest)} to {text(highest)}"


def tick_text(value: float) -> str:
    """Return the label of a round number at an axis."""
    return f"{round(value, 12):g}"


def number_from(begin: float, end: float) -> str:
    """Return the shortest number, of four digits or more, from `begin` on and before `end`.

    `end` may be below `begin`. Where `begin` is infinite, the result is the number of four digits
    next to `end`.
    """
    rising = begin < end
    if math.isinf(begin):
        if math.isinf(end) or not end:
            return "0" if end else f"{math.copysign(1, begin):g}"
        begin, end, rising = math.nextafter(end, begin), begin, not rising
    exact, rounding = Decimal(begin), ROUND_CEILING if rising else ROUND_FLOOR
    for digits in range(4, 18):
        rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding)
        if begin <= float(rounded) < end or end < float(rounded) <= begin:
            return f"{rounded.normalize():{'f' if abs(rounded.adjusted()) < _MOST_DIGITS else 'e'}}"
    return repr(begin)


def counted_names(names: Iterable[str]) -> list[str]:
    """Return each name once, with how many there are: 2 × NVIDIA H100."""
    return [f"{count} × {name}" for name, count in Counter(names).items()]


def quoted_names(names: Sequence[str], most: int = 8) -> str:
    """Return names in quotes, at most so many of them, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(shortened, names[:most])) + more


def mean_of_text(seeds: int) -> str:
    """Say after a figure of how many runs it is the mean; empty for a single run."""
    return f", mean of {seeds} seeds" if seeds > 1 else ""


def count_text(count: int, noun: str) -> str:
    """Return a number of things: '1 trial', '12 trials'."""
    return f"{_fixed(count, 0, 3)} {noun}{'' if count == 1 else 's'}"


def run_counts_text(trials: int, repeats: int, probes: int = 0, interrupted: int = 0) -> str:
    """Return the number of a study's runs by kind: '9 trials, 2 repeats and 1 probe'.

    Args:
        trials: The number of trials, without repeats.
        repeats: The number of repeats with other seeds.
        probes: The number of probes.
        interrupted: The number of attempts that were interrupted before later ones of these runs.
    """
    counts = {
        "trial": trials,
        "repeat": repeats,
        "probe": probes,
        "interrupted attempt": interrupted,
    }
    parts = [count_text(count, noun) for noun, count in counts.items() if count or noun == "trial"]
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def visible_text(value: object) -> str:
    """Return a value as text, quoted where it could not be seen.

    It is quoted if it is blank, or has line breaks or marks that turn the direction of a line.
    """
    text = str(value)
    return text if text.strip() and text.isprintable() else repr(text)


def source_text(name: str) -> str:
    """Return the name of a model, a tokenizer or a data set: its hub name or its folder's.

    A study file that was read has folders as absolute paths, which mean nothing on another machine.
    The name of weights in a study's folder is that of the study and the trial.
    """
    path = Path(name)
    if not path.is_absolute():
        return name
    if path.name == "model" and path.parent.parent.name == "trials":
        return f"{path.parents[2].name}, trial {int(path.parent.name)}"
    return path.name


def value_text(value: object) -> str:
    """Return a setting's value as text; numbers have four significant digits.

    The exported record has all digits.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) or (
        isinstance(value, int) and abs(value) >= 10 ** (2 * _MOST_DIGITS)
    ):
        return f"{value:.4g}"
    return visible_text(value)


def params_text(params: TrialParams, varied: Collection[str] = ()) -> str:
    """Return the settings that decide the outcome most, on one line.

    Args:
        params: the settings of a trial.
        varied: other dimensions that the study varies, which are named, too.
    """
    settings = {name: getattr(params, field) for field, name in _SHORT_NAMES.items()}
    settings |= other_settings(params, varied, _SHORT_NAMES)
    # The script gets its own truth values as these words.
    settings |= {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in params.own.items()
    }
    return ", ".join(
        f"{name} {value_text(value)}" for name, value in settings.items() if value is not None
    )


def other_settings(
    params: TrialParams, varied: Collection[str], named: Collection[str]
) -> dict[str, Scalar]:
    """Return the varied settings that are not named yet, by label.

    A micro batch that is all that a rank takes of the batch says nothing more.
    """
    follows = {"micro_batch_size_per_gpu"} if params.gradient_accumulation_steps == 1 else set()
    return {
        label(name): value
        for name in varied
        if name not in {*named, *follows} and (value := getattr(params, name)) is not None
    }


def _fixed(value: float, decimals: int, significant: int) -> str:
    """Return a value with so many decimals, or significant digits and a power of ten."""
    if max(abs(value) / 10**_MOST_DIGITS, decimals / (_MOST_DIGITS + 1)) >= 1:
        return f"{value:.{significant - 1}e}" if value else "0"
    return f"{value:,.{decimals}f}"


def _decimals(value: float, significant: int) -> int:
    """Return how many decimals show so many significant digits."""
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    return max(0, significant - 1 - exponent) if value else 0


def _two_digits(percent: float, sign: str = "") -> str:
    return f"{percent:{sign}.2g}" if abs(percent) < 99.5 else f"{percent:{sign},.0f}"


def shown_directions(text: str) -> str:
    """Replace characters that turn the direction of the text behind them by visible codes.

    An example is [U+202E]: in a user's name it would turn what the report says after it. Letters of
    any script keep their own direction.
    """
    return _DIRECTIONS.sub(lambda match: f"[U+{ord(match.group()):04X}]", text)


def escape_markdown(text: str) -> str:
    """Return text on one line that no Markdown dialect reads as markup, HTML included."""
    one_line = " ".join(shown_directions(text).split())
    entities = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", entities)
