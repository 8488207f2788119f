"""The reference carbon intensity of a study: the user's own value, or CodeCarbon's bundled data. Never the network,
never a world average.

The data files are read without importing CodeCarbon, because the command line has to refuse a bad study file at once.
The figures are those of its own trackers (`codecarbon/core/emissions.py`, version 3.3).
"""

import difflib
import json
import string
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from carbonopt.config import Carbon
from carbonopt.errors import BadInput
from carbonopt.record import Intensity
from carbonopt.units import GRAMS_PER_KG

_G_PER_KWH_FROM_LB_PER_MWH = 0.45359237
# Direct emissions of each fuel, kg CO2e per kWh: https://github.com/responsibleproblemsolving/energy-usage
_KG_PER_KWH_BY_FUEL = {"coal": 0.995725971, "petroleum": 0.8166885263, "naturalGas": 0.7438415916}
_NORDIC_ZONES = {"SWE": "SE", "NOR": "NO", "FIN": "FI"}
_GIVE_IT = "give carbon.intensity_g_co2e_per_kwh"

Rates = dict[str, tuple[float, str]]  # by region: g CO2e per kWh, and what that figure is


def reference_intensity(carbon: Carbon) -> Intensity:
    """The intensity that all emissions of a study are computed with. It has no PUE in it.

    Raises:
        BadInput: if the bundled data doesn't know the country or the region, with the nearest names that it knows.
    """
    place = carbon.country and _place(carbon.country, carbon.region)
    if carbon.intensity_g_co2e_per_kwh is not None:
        return Intensity(g_co2e_per_kwh=carbon.intensity_g_co2e_per_kwh, source="given in the study file", place=place)
    if carbon.country is None:
        raise BadInput(f"carbon must have a country, but has none; give one, or {_GIVE_IT}.")
    countries = _data("global_energy_mix.json")
    if carbon.country not in countries:
        raise BadInput(f"carbon.country: no data for {carbon.country}; {_nearest_countries(carbon.country, countries)}")
    if carbon.region is None:
        country = countries[carbon.country]
        place, rate = country["country_name"], country["carbon_intensity"]
        what = f"the country's electricity mix of {country['year']}"
    else:
        rate, what = _regional(carbon.country, carbon.region)
    if not rate > 0:
        raise BadInput(f"carbon: the bundled data says {rate:g} g CO2e per kWh for {place}; {_GIVE_IT} instead.")
    return Intensity(g_co2e_per_kwh=rate, source=f"{what}, from CodeCarbon {version('codecarbon')}", place=place)


def _regional(country: str, region: str) -> tuple[float, str]:
    rates = _region_rates(country)
    if not rates:
        raise BadInput(
            f"carbon.region: there is no data by region for {country}, but got {region!r}; leave region out, "
            f"or {_GIVE_IT}."
        )
    wanted = " ".join(region.lower().split())
    if wanted not in rates:
        near = difflib.get_close_matches(wanted, rates, n=3) or sorted(rates)
        raise BadInput(f"carbon.region: {country} has no {region!r} in the bundled data; known: {', '.join(near)}.")
    return rates[wanted]


def _region_rates(country: str) -> Rates:
    """The regions of a country by lower-case name; empty where only the whole country is known."""
    if country == "USA":
        states = _data("2023/usa_emissions.json")
        what = states["_source"]["name"]
        return {
            name: (state["emissions"] * _G_PER_KWH_FROM_LB_PER_MWH, what)
            for name, state in states.items()
            if not name.startswith("_") and name != "usa"  # notes on the file, and the whole country
        }
    if country == "CAN":
        provinces = _data("2023/canada_energy_mix.json")
        what = "direct emissions of the province's electricity mix of 2023"
        return {name: (_fossil_g_per_kwh(mix), what) for name, mix in provinces.items()}
    if country == "CHN":
        return {
            name: (province["emission_factor"], f"China's provincial factor of {province['year']}")
            for province in _data("2023/china_provincial_emissions.json")["data"].values()
            for name in province["names"]
        }
    if country in _NORDIC_ZONES:
        return {
            zone.lower(): (row["emission_factor"], f"{row['description']}, generation of {row['year']}")
            for zone, row in _data("nordic_emissions.json")["data"].items()
            if zone.startswith(_NORDIC_ZONES[country])
        }
    return {}


def _fossil_g_per_kwh(mix: dict[str, float]) -> float:
    return GRAMS_PER_KG * sum(mix[fuel] / mix["total"] * kg for fuel, kg in _KG_PER_KWH_BY_FUEL.items())


def _nearest_countries(code: str, countries: dict[str, Any]) -> str:
    # Two of three letters in common at the same places: what a mistyped code looks like.
    near = [
        f"{known} ({row['country_name']})"
        for known, row in countries.items()
        if sum(a == b for a, b in zip(known, code, strict=True)) >= 2
    ]
    known = f"near to it: {', '.join(near)}" if near else "it must be a three-letter code of ISO 3166-1, such as USA"
    return f"{known}. Or {_GIVE_IT}."


def _place(country: str, region: str | None) -> str:
    if region is None:
        return country
    name = region.upper() if any(map(str.isdigit, region)) else string.capwords(region)
    return f"{name}, {country}".replace(" And ", " and ").replace(" Of ", " of ")


def _data(name: str) -> Any:
    spec = find_spec("codecarbon")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("codecarbon is not installed; install it with: pip install codecarbon")
    folder = Path(spec.origin).parent / "data" / "private_infra"
    return json.loads((folder / name).read_text(encoding="utf-8"))
