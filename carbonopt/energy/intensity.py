"""The reference carbon intensity of a study: the user's own value, or CodeCarbon's bundled data. Never the network,
never a world average.

The data files are read without importing CodeCarbon, because the command line has to refuse a bad study file at once.
The figures are those of its own trackers (`codecarbon/core/emissions.py`, version 3.3).
"""

import csv
import difflib
import json
import string
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from carbonopt.core.config import Carbon
from carbonopt.core.errors import BadInput, hint
from carbonopt.core.study import Intensity
from carbonopt.core.units import GRAMS_PER_KG

_G_PER_KWH_FROM_LB_PER_MWH = 0.45359237
# Direct emissions of each fuel, kg CO2e per kWh: https://github.com/responsibleproblemsolving/energy-usage
_KG_PER_KWH_BY_FUEL = {"coal": 0.995725971, "petroleum": 0.8166885263, "naturalGas": 0.7438415916}
_NORDIC_ZONES = {"SWE": "SE", "NOR": "NO", "FIN": "FI"}
_GIVE_IT = "give carbon.intensity_g_co2e_per_kwh"


class _Figure(NamedTuple):
    """One of the bundled data's figures."""

    g_co2e_per_kwh: float
    what: str  # a phrase that says what is counted, and for which year
    year: int | None


def reference_intensity(carbon: Carbon) -> Intensity:
    """The intensity that all emissions of a study are computed with. It has no PUE in it.

    Raises:
        BadInput: if the bundled data doesn't know the country, the region or the cloud region, with the nearest names
            that it knows.
    """
    given = carbon.intensity_g_co2e_per_kwh
    if given is not None:
        return Intensity(g_co2e_per_kwh=given, source="given in the study file", place=_place(carbon))
    place, figure = _bundled(carbon)
    rate = figure.g_co2e_per_kwh
    if not rate > 0:
        raise BadInput(f"carbon: the bundled data says {rate:g} g CO2e per kWh for {place}; {_GIVE_IT} instead.")
    return _intensity(place, figure, version("codecarbon"))


def countries() -> tuple[Intensity, ...]:
    """Of every country whose mix the bundled data has, as `reference_intensity` has it for that country alone."""
    release = version("codecarbon")
    every = (_mix(row) for row in _data("global_energy_mix.json").values())
    return tuple(_intensity(place, figure, release) for place, figure in every if figure.g_co2e_per_kwh > 0)


def _intensity(place: str, figure: _Figure, release: str) -> Intensity:
    source = f"{figure.what}, from CodeCarbon {release}"
    return Intensity(g_co2e_per_kwh=figure.g_co2e_per_kwh, source=source, place=place, year=figure.year)


def _mix(row: dict[str, Any]) -> tuple[str, _Figure]:
    """A country's name and figure."""
    what = f"the country's electricity mix of {row['year']}"
    return row["country_name"], _Figure(row["carbon_intensity"], what, row["year"])


def _bundled(carbon: Carbon) -> tuple[str, _Figure]:
    """The place, in words, and the bundled figure for it."""
    if carbon.cloud_provider is not None and carbon.cloud_region is not None:
        return _cloud(carbon.cloud_provider, carbon.cloud_region)
    if carbon.country is None:
        raise BadInput(f"carbon must have a country or a cloud region, but has neither; give one, or {_GIVE_IT}.")
    mixes = _data("global_energy_mix.json")
    if carbon.country not in mixes:
        raise BadInput(f"carbon.country: no data for {carbon.country}; {_nearest_countries(carbon.country, mixes)}")
    if carbon.region is not None:
        return _region_name(carbon.country, carbon.region), _regional(carbon.country, carbon.region)
    return _mix(mixes[carbon.country])


def _cloud(provider: str, region: str) -> tuple[str, _Figure]:
    """Providers' own figures; most publish none."""
    with (_folder() / "cloud" / "impact.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = {(row["provider"], row["region"]): row for row in csv.DictReader(file)}
    name, wanted = provider.lower(), region.lower()
    providers = sorted({known for known, _ in rows})
    if name not in providers:
        raise BadInput(
            f"carbon.cloud_provider: no data for {provider!r}; {hint(name, providers)} Else give the carbon.country "
            f"that the machine is in, or {_GIVE_IT}."
        )
    if (name, wanted) not in rows:
        known = sorted(known for one, known in rows if one == name)
        near = difflib.get_close_matches(wanted, known, n=3) or known
        raise BadInput(
            f"carbon.cloud_region: {name} has no {region!r} in the bundled data; known: {', '.join(near)}. "
            f"Or {_GIVE_IT}."
        )
    row = rows[name, wanted]
    place = f"{row['country_name']} ({_cloud_name(provider, region)})"
    if not row["impact"]:
        raise BadInput(f"carbon: the bundled data has no figure for {place}; {_GIVE_IT} instead.")
    what = f"{row['providerName']}'s published figure ({row['source']}), year not given"
    return place, _Figure(float(row["impact"]), what, None)


def _regional(country: str, region: str) -> _Figure:
    figures = _regions(country)
    if not figures:
        raise BadInput(
            f"carbon.region: there is no data by region for {country}, but got {region!r}; leave region out, "
            f"or {_GIVE_IT}."
        )
    wanted = " ".join(region.lower().split())
    if wanted not in figures:
        near = difflib.get_close_matches(wanted, figures, n=3) or sorted(figures)
        raise BadInput(f"carbon.region: {country} has no {region!r} in the bundled data; known: {', '.join(near)}.")
    return figures[wanted]


def _regions(country: str) -> dict[str, _Figure]:
    """The regions of a country by lower-case name; empty where only the whole country is known."""
    if country == "USA":
        states = _data("2023/usa_emissions.json")
        source = states["_source"]
        return {
            name: _Figure(state["emissions"] * _G_PER_KWH_FROM_LB_PER_MWH, source["name"], source["year"])
            for name, state in states.items()
            if not name.startswith("_") and name != "usa"  # notes on the file, and the whole country
        }
    if country == "CAN":
        provinces = _data("2023/canada_energy_mix.json")
        what = "direct emissions of the province's electricity mix of 2023"
        return {name: _Figure(_fossil_g_per_kwh(mix), what, 2023) for name, mix in provinces.items()}
    if country == "CHN":
        return {
            name: _Figure(row["emission_factor"], f"China's provincial factor of {row['year']}", row["year"])
            for row in _data("2023/china_provincial_emissions.json")["data"].values()
            for name in row["names"]
        }
    if country in _NORDIC_ZONES:
        return {
            zone.lower(): _Figure(
                row["emission_factor"], f"{row['description']}, generation of {row['year']}", row["year"]
            )
            for zone, row in _data("nordic_emissions.json")["data"].items()
            if zone.startswith(_NORDIC_ZONES[country])
        }
    return {}


def _fossil_g_per_kwh(mix: dict[str, float]) -> float:
    return GRAMS_PER_KG * sum(mix[fuel] / mix["total"] * kg for fuel, kg in _KG_PER_KWH_BY_FUEL.items())


def _nearest_countries(code: str, mixes: dict[str, Any]) -> str:
    # Two of three letters in common at the same places: what a mistyped code looks like.
    near = [
        f"{known} ({row['country_name']})"
        for known, row in mixes.items()
        if sum(a == b for a, b in zip(known, code, strict=True)) >= 2
    ]
    known = f"near to it: {', '.join(near)}" if near else "it must be a three-letter code of ISO 3166-1, such as USA"
    return f"{known}. Or {_GIVE_IT}."


def _place(carbon: Carbon) -> str | None:
    """What the study file says of the place."""
    if carbon.cloud_provider is not None and carbon.cloud_region is not None:
        return _cloud_name(carbon.cloud_provider, carbon.cloud_region)
    if carbon.country is None or carbon.region is None:
        return carbon.country
    return _region_name(carbon.country, carbon.region)


def _cloud_name(provider: str, region: str) -> str:
    return f"{provider.upper()} {region.lower()}"


def _region_name(country: str, region: str) -> str:
    name = region.upper() if any(map(str.isdigit, region)) else string.capwords(region)
    return f"{name}, {country}".replace(" And ", " and ").replace(" Of ", " of ")


def _data(name: str) -> Any:
    return json.loads((_folder() / "private_infra" / name).read_text(encoding="utf-8"))


def _folder() -> Path:
    """Of CodeCarbon's data files."""
    spec = find_spec("codecarbon")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("codecarbon is not installed; install it with: pip install codecarbon")
    return Path(spec.origin).parent / "data"
