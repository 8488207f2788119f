"""Figures as people read them; the units' own formats are in carbonopt.units."""

import math

from carbonopt import units
from carbonopt.trial import TrialParams

MISSING = "–"


def perplexity_text(value: float | None) -> str:
    """Four significant digits: seeds differ by some tenths of a percent, so more would be noise."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.4g}"


def energy_text(energy_kwh: float | None) -> str:
    return MISSING if energy_kwh is None else units.human_energy(energy_kwh)


def emissions_text(kg_co2e: float | None) -> str:
    return MISSING if kg_co2e is None or not math.isfinite(kg_co2e) else units.human_emissions(kg_co2e)


def percent_text(fraction: float | None) -> str:
    """Three significant digits, whole percents from 100 on; what falls short of all is never rounded up to it."""
    if fraction is None:
        return MISSING
    percent = 100 * fraction
    if 99.95 <= percent < 100:
        return "over 99.9 %"
    return f"{percent:,.0f} %" if abs(percent) >= 99.95 else f"{percent:.3g} %"


def count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def value_text(value: object) -> str:
    """A setting's value; numbers with four significant digits; all digits are in the exported record."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def params_text(params: TrialParams) -> str:
    """The settings that decide the outcome most, on one line."""
    shown = {
        "global batch": params.global_batch_size,
        "learning rate": params.learning_rate,
        "epochs": params.epochs,
        "ZeRO": params.zero_stage,
    }
    return ", ".join(f"{label} {value_text(value)}" for label, value in shown.items())
