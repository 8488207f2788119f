"""Conversions between the units that appear in names, so that no factor is written twice."""

import datetime

JOULES_PER_KWH = 3.6e6
BYTES_PER_GIB = 1024**3
GRAMS_PER_KG = 1000.0


def kwh_from_joules(energy_j: float) -> float:
    """Return an energy in kWh."""
    return energy_j / JOULES_PER_KWH


def joules_from_kwh(energy_kwh: float) -> float:
    """Return an energy in J."""
    return energy_kwh * JOULES_PER_KWH


def emissions_kg_co2e(energy_kwh: float, intensity_g_co2e_per_kwh: float, pue: float) -> float:
    """Return emissions in kg CO2e: energy × carbon intensity of the grid × PUE.

    The power usage effectiveness (PUE) is the facility's overhead. The formula is the operational
    term of the Software Carbon Intensity (ISO/IEC 21031).
    """
    return energy_kwh * intensity_g_co2e_per_kwh / GRAMS_PER_KG * pue


def now_utc(timespec: str = "seconds") -> str:
    """Return the time now as ISO 8601, UTC.

    Args:
        timespec: the precision, as in `datetime.isoformat`.
    """
    return datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)


def energy_unit(energy_kwh: float) -> tuple[str, float]:
    """Return the unit that people read an energy in, and how many make a kWh.

    The unit is kWh from 0.01 kWh on, else kJ or J.
    """
    if abs(energy_kwh) >= 0.01:
        return "kWh", 1.0
    return (
        ("kJ", JOULES_PER_KWH / 1000)
        if abs(joules_from_kwh(energy_kwh)) >= 999.5
        else ("J", JOULES_PER_KWH)
    )


def emissions_unit(kg_co2e: float) -> tuple[str, float]:
    """Return the unit that people read emissions in, and how many make a kg."""
    if kg_co2e >= 1:
        return "kg CO2e", 1.0
    return (
        ("g CO2e", GRAMS_PER_KG)
        if kg_co2e * GRAMS_PER_KG >= 0.1
        else ("mg CO2e", GRAMS_PER_KG * 1000)
    )


def human_duration(duration_s: float) -> str:
    """Return a duration for people: '8.2 s', '3 min 20 s', '2 h 05 min'."""
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    seconds = round(duration_s)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
