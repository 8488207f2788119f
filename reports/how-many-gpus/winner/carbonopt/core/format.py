"""Figures and users' names as people read them. A figure beyond all bounds is a power of ten, such as 1.23e+300."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import partial
from pathlib import Path

from carbonopt.core import units
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import MISSING
from carbonopt.core.values import Frozen, Spread

_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")  # embeddings, overrides and isolates of Unicode
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
_MOST_DIGITS = 9  # before or behind the point; what needs more is a power of ten: 1.23e+12


class Scale(Frozen):
    """The one unit of a column, chosen by its largest value, which its head names and its cells leave out."""

    unit: str
    per_base: float  # how many of the unit make a kWh, or a kg CO2e
    decimals: int  # at most: two more than the largest value has, so that no value has more digits than it is worth

    def label(self, what: str) -> str:
        return f"{what} ({self.unit})"

    def text(self, value: float | None) -> str:
        """Three significant digits, zeros at the end included."""
        if value is None or not math.isfinite(value):
            return MISSING
        scaled = value * self.per_base
        return _fixed(scaled, min(self.decimals, _decimals(scaled, 3)), 3)


def _scale(unit_of: Callable[[float], tuple[str, float]], values: Iterable[float | None]) -> Scale:
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    unit, per_base = unit_of(largest)
    return Scale(unit=unit, per_base=per_base, decimals=_decimals(largest * per_base, 3) + 2)


def _with_unit(unit_of: Callable[[float], tuple[str, float]], value: float | None) -> str:
    """Three significant digits, zeros at the end included, as in the tables."""
    if value is None or not math.isfinite(value):
        return MISSING
    unit, per_base = unit_of(value)
    rounded = float(f"{value * per_base:.3g}")  # no digits beyond the third: 1,230 and not 1,234
    return f"{rate_text(rounded)} {unit}"


def _known(text: Callable[[float], str], value: float | None) -> str:
    return MISSING if value is None else text(value)


# The unit of a column of energies in kWh, or of emissions in kg CO2e; and one such figure with its unit.
energy_scale, emissions_scale = partial(_scale, units.energy_unit), partial(_scale, units.emissions_unit)
energy_text, emissions_text = partial(_with_unit, units.energy_unit), partial(_with_unit, units.emissions_unit)

# Of figures without a unit; or of a fraction, as a percentage near 100, where it is the hundredths that tell, and as a
# relative uncertainty, of which more than two digits are never known.
intensity_text, memory_text = partial(_known, "{:.4g}".format), partial(_known, "{:.3g}".format)
rate_text = seconds_text = partial(
    _known, lambda value: _fixed(value, _decimals(value, 3), 3)
)  # one figure per another
two_decimals_text = partial(_known, lambda fraction: f"{_fixed(100 * fraction, 2, 5)} %")
uncertainty_text = partial(_known, lambda fraction: f"± {_two_digits(100 * fraction)} %")


def percent_text(fraction: float | None) -> str:
    """Three significant digits, whole percents from 100 on; what falls short of all is never rounded up to it."""
    if fraction is None:
        return MISSING
    percent = 100 * fraction if abs(fraction) > 1e-12 else 0.0  # what rounding leaves of equal figures
    if 99.95 <= percent < 100:
        return "over 99.9 %"
    if percent > 1e6:  # a diverged trial's perplexity can be hundreds of digits above the others
        return "over 1,000,000 %"
    if percent < -1000:  # the lower end of a saving that two short runs leave open
        return "under -1,000 %"
    return f"{_fixed(percent, 0, 3)} %" if abs(percent) >= 99.95 else f"{percent:.3g} %"


def less_text(saving: float) -> str:
    """Of a saving as a fraction: `12 % less`; negative, it is so much more."""
    return f"{percent_text(abs(saving))} {'less' if saving >= 0 else 'more'}"


def share_text(fraction: float) -> str:
    """A part of a whole that is known roughly: one decimal."""
    return f"{100 * fraction:.1f} %" if not 0 < fraction < 5e-4 else "under 0.05 %"


def difference_text(fraction: float | None) -> str:
    """A relative difference with its sign, two significant digits; next to nothing is 0."""
    if fraction is None:
        return MISSING
    return "+0 %" if abs(fraction) < _NO_DIFFERENCE else f"{_two_digits(100 * fraction, '+')} %"


def spread_text(spread: Spread, scale: Scale | None = None) -> str:
    """Mean ± standard deviation."""
    return plus_minus_text(spread.mean, spread.standard_deviation, scale)


def plus_minus_text(mean: float, deviation: float, scale: Scale | None = None) -> str:
    """To the deviation's first digit, or its second where the first is 1."""
    factor = 1.0 if scale is None else scale.per_base
    mean, deviation = mean * factor, deviation * factor
    decimals = _decimals(mean, 4)
    if deviation:
        digits = 2 if f"{deviation:.1e}".startswith("1") else 1
        decimals = min(_decimals(deviation, digits), _decimals(mean, 6))  # beyond that a deviation is the computer's
    return f"{_fixed(mean, decimals, 4)} ± {_fixed(deviation, decimals, 2)}"


def interval_text(lowest: float, highest: float, text: Callable[[float], str]) -> str:
    """Its two ends, each by `text`."""
    return f"{text(lowest)} to {text(highest)}"


def tick_text(value: float) -> str:
    """A round number at an axis."""
    return f"{round(value, 12):g}"


def number_from(begin: float, end: float) -> str:
    """The shortest number, of four digits or more, from `begin` on and before `end`, which may be below it. Where
    `begin` is infinite, the one of four digits next to `end`."""
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
    """Each once, with how many there are: 2 × NVIDIA H100."""
    return [f"{count} × {name}" for name, count in Counter(names).items()]


def count_text(count: int, noun: str) -> str:
    """A number of things: '1 trial', '12 trials'."""
    return f"{_fixed(count, 0, 3)} {noun}{'' if count == 1 else 's'}"


def visible_text(value: object) -> str:
    """Quoted where it could not be seen: blanks, line breaks, marks that turn a line around."""
    text = str(value)
    return text if text.strip() and text.isprintable() else repr(text)


def source_text(name: str) -> str:
    """A model's, a tokenizer's or a data set's hub name, or what is left of its folder's path, which a study file that
    was read has from the root on, and which says nothing on another machine. Of weights in a study's folder their trial
    is."""
    path = Path(name)
    if not path.is_absolute():
        return name
    if path.name == "model" and path.parent.parent.name == "trials":
        return f"{path.parents[2].name}, trial {int(path.parent.name)}"
    return path.name


def value_text(value: object) -> str:
    """A setting's value; numbers with four significant digits; all digits are in the exported record."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) >= 10 ** (2 * _MOST_DIGITS)):
        return f"{value:.4g}"
    return visible_text(value)


def params_text(params: TrialParams) -> str:
    """The settings that decide the outcome most, on one line."""
    settings = {name: getattr(params, field) for field, name in _SHORT_NAMES.items()} | params.own
    return ", ".join(f"{name} {value_text(value)}" for name, value in settings.items() if value is not None)


def _fixed(value: float, decimals: int, significant: int) -> str:
    """With so many decimals, or as a power of ten with so many significant digits."""
    if max(abs(value) / 10**_MOST_DIGITS, decimals / (_MOST_DIGITS + 1)) >= 1:
        return f"{value:.{significant - 1}e}" if value else "0"
    return f"{value:,.{decimals}f}"


def _decimals(value: float, significant: int) -> int:
    """How many decimals show so many significant digits."""
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    return max(0, significant - 1 - exponent) if value else 0


def _two_digits(percent: float, sign: str = "") -> str:
    return f"{percent:{sign}.2g}" if abs(percent) < 99.5 else f"{percent:{sign},.0f}"


def shown_directions(text: str) -> str:
    """Characters that turn the text behind them round, such as [U+202E], as people see them: in a user's name they
    would turn round what the report says of it. Letters of any script keep their own direction."""
    return _DIRECTIONS.sub(lambda match: f"[U+{ord(match.group()):04X}]", text)


def escape_markdown(text: str) -> str:
    """Text on one line that no Markdown dialect reads as markup, HTML included."""
    one_line = " ".join(shown_directions(text).split())
    entities = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", entities)
