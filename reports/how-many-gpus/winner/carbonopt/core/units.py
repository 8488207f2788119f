"""Conversions between the units that appear in names. One home, so that no factor is written twice."""

import datetime

JOULES_PER_KWH = 3.6e6
BYTES_PER_GIB = 1024**3
GRAMS_PER_KG = 1000.0


def kwh_from_joules(energy_j: float) -> float:
    """Energy in kWh."""
    return energy_j / JOULES_PER_KWH


def joules_from_kwh(energy_kwh: float) -> float:
    """Energy in J."""
    return energy_kwh * JOULES_PER_KWH


def emissions_kg_co2e(energy_kwh: float, intensity_g_co2e_per_kwh: float, pue: float) -> float:
    """Emissions in kg CO2e: energy × carbon intensity of the grid × power usage effectiveness (PUE), as the Software
    Carbon Intensity's operational term (ISO/IEC 21031), with the facility's overhead as PUE."""
    return energy_kwh * intensity_g_co2e_per_kwh / GRAMS_PER_KG * pue


def now_utc(timespec: str = "seconds") -> str:
    """The time now as ISO 8601, UTC, to the second or what else `datetime.isoformat` can cut it to."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)


def energy_unit(energy_kwh: float) -> tuple[str, float]:
    """The unit that people read such an energy in (kWh from 0.01 kWh on, else kJ or J), and how many make a kWh."""
    if abs(energy_kwh) >= 0.01:
        return "kWh", 1.0
    return ("kJ", JOULES_PER_KWH / 1000) if abs(joules_from_kwh(energy_kwh)) >= 999.5 else ("J", JOULES_PER_KWH)


def emissions_unit(kg_co2e: float) -> tuple[str, float]:
    """The unit that people read such emissions in, and how many make a kg."""
    if kg_co2e >= 1:
        return "kg CO2e", 1.0
    return ("g CO2e", GRAMS_PER_KG) if kg_co2e * GRAMS_PER_KG >= 0.1 else ("mg CO2e", GRAMS_PER_KG * 1000)


def human_duration(duration_s: float) -> str:
    """A duration for people: '8.2 s', '3 min 20 s', '2 h 05 min'."""
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    seconds = round(duration_s)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
