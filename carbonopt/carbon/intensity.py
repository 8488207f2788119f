"""The reference carbon intensity of a study: the user's own value, or CodeCarbon's bundled data.

It never comes from the network and is never a world average. The data files are read without
importing CodeCarbon, because the command line has to refuse a bad study file at once. The figures
are those of CodeCarbon's own trackers (`codecarbon/core/emissions.py`, version 3.3).
"""

import csv
import difflib
import json
import operator
import string
from collections.abc import Collection
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from carbonopt.core.errors import BadInput
from carbonopt.core.refusals import hint
from carbonopt.core.units import GRAMS_PER_KG
from carbonopt.spec.carbon_settings import Carbon
from carbonopt.spec.study_data import Intensity

_G_PER_KWH_FROM_LB_PER_MWH = 0.45359237
# Direct emissions of each fuel, kg CO2e per kWh:
# https://github.com/responsibleproblemsolving/energy-usage
_KG_PER_KWH_BY_FUEL = {"coal": 0.995725971, "petroleum": 0.8166885263, "naturalGas": 0.7438415916}
_NORDIC_ZONES = {"SWE": "SE", "NOR": "NO", "FIN": "FI"}
_GIVE_IT = "give carbon.intensity_g_co2e_per_kwh"


def reference_intensity(carbon: Carbon) -> Intensity:
    """Return the carbon intensity with which all emissions of a study are computed, without PUE.

    Raises:
        BadInput: if the bundled data doesn't know the country, the region or the cloud region, with
            the nearest names that it knows.
    """
    given, place = carbon.intensity_g_co2e_per_kwh, _place(carbon)
    if given is not None:
        return Intensity(g_co2e_per_kwh=given, source="given in the study file", place=place)
    if carbon.cloud_provider is not None and carbon.cloud_region is not None:
        looked_up = _cloud(carbon.cloud_provider, carbon.cloud_region, place)
    else:
        # The study file has an intensity, a cloud region or a country.
        assert carbon.country is not None and place is not None
        looked_up = _of_country(carbon.country, carbon.region, place)
    if not (rate := looked_up.g_co2e_per_kwh) > 0:
        says = f"the bundled data says {rate:g} g CO2e per kWh for {looked_up.place}"
        raise BadInput(f"carbon: {says}; {_GIVE_IT} instead.")
    return looked_up


def countries() -> tuple[Intensity, ...]:
    """Return the intensity of every country whose electricity mix the bundled data has.

    They are those of `reference_intensity` for the whole country.
    """
    mixes = map(_mix, _data("global_energy_mix.json").values())
    return tuple(intensity for intensity in mixes if intensity.g_co2e_per_kwh > 0)


def country_code(name: str) -> str | None:
    """Return a country's code by its code or English name in any case; None: it isn't known."""
    wanted = name.strip().casefold()
    mixes = _data("global_energy_mix.json")
    named = (code for code, row in mixes.items() if row["country_name"].casefold() == wanted)
    return next(named, wanted.upper() if wanted.upper() in mixes else None)


def _intensity(g_co2e_per_kwh: float, what: str, year: int | None, place: str) -> Intensity:
    """Make an intensity from a figure of the bundled data; `what` says what the figure counts."""
    source = f"{what}, from CodeCarbon {_release()}"
    return Intensity(g_co2e_per_kwh=g_co2e_per_kwh, source=source, place=place, year=year)


@cache
def _release() -> str:
    return version("codecarbon")


def _mix(row: dict[str, Any]) -> Intensity:
    what = f"the country's electricity mix of {row['year']}"
    return _intensity(row["carbon_intensity"], what, row["year"], row["country_name"])


def _cloud(provider: str, region: str, name: str | None) -> Intensity:
    """Return a cloud provider's own figure for a region; most providers publish none."""
    with (_folder() / "cloud" / "impact.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = {(row["provider"], row["region"]): row for row in csv.DictReader(file)}
    wanted = provider.lower(), region.lower()
    providers = sorted({known for known, _ in rows})
    if wanted[0] not in providers:
        advice = (
            f"{hint(wanted[0], providers)} Else give the carbon.country that the machine is in, or"
            f" {_GIVE_IT}"
        )
        raise BadInput(f"carbon.cloud_provider: no data for {provider!r}; {advice}.")
    if wanted not in rows:
        near = _near(wanted[1], [known for by, known in rows if by == wanted[0]])
        raise BadInput(f"carbon.cloud_region: {wanted[0]} has no {region!r} {near} Or {_GIVE_IT}.")
    row = rows[wanted]
    place = f"{row['country_name']} ({name})"
    if not row["impact"]:
        raise BadInput(f"carbon: the bundled data has no figure for {place}; {_GIVE_IT} instead.")
    what = f"{row['providerName']}'s published figure ({row['source']}), year not given"
    return _intensity(float(row["impact"]), what, None, place)


def _of_country(country: str, region: str | None, place: str) -> Intensity:
    mixes = _data("global_energy_mix.json")
    if country not in mixes:
        # A mistyped code has two of three letters right, at the same places.
        alike = (known for known in mixes if sum(map(operator.eq, known, country)) >= 2)
        near = ", ".join(f"{known} ({mixes[known]['country_name']})" for known in alike)
        advice = (
            f"near to it: {near}"
            if near
            else "it must be a three-letter code of ISO 3166-1, such as USA"
        )
        raise BadInput(f"carbon.country: no data for {country}; {advice}. Or {_GIVE_IT}.")
    if region is None:
        return _mix(mixes[country])
    if not (figures := _regions(country)):
        has = f"there is no data by region for {country}, but got {region!r}"
        raise BadInput(f"carbon.region: {has}; leave region out, or {_GIVE_IT}.")
    name = " ".join(region.lower().split())
    if name not in figures:
        raise BadInput(f"carbon.region: {country} has no {region!r} {_near(name, figures)}")
    return _intensity(*figures[name], place)


def _near(name: str, known: Collection[str]) -> str:
    if near := difflib.get_close_matches(name, known, n=3):
        return f"in the bundled data; did you mean {' or '.join(near)}?"
    return f"in the bundled data; known: {', '.join(sorted(known))}."


def _regions(country: str) -> dict[str, tuple[float, str, int]]:
    """Return g CO2e per kWh, what it counts, and its year, by a region's lower-case name.

    Empty where only the whole country is known.
    """
    if country == "USA":
        states = _data("2023/usa_emissions.json")
        source = states["_source"]
        return {
            name: (state["emissions"] * _G_PER_KWH_FROM_LB_PER_MWH, source["name"], source["year"])
            for name, state in states.items()
            if not name.startswith("_")
            and name != "usa"  # leaves out notes on the file, and the whole country
        }
    if country == "CAN":
        what = "direct emissions of the province's electricity mix of 2023"
        provinces = _data("2023/canada_energy_mix.json").items()
        return {name: (_fossil_g_per_kwh(mix), what, 2023) for name, mix in provinces}
    if country == "CHN":
        return {
            name: (
                row["emission_factor"],
                f"China's provincial factor of {row['year']}",
                row["year"],
            )
            for row in _data("2023/china_provincial_emissions.json")["data"].values()
            for name in row["names"]
        }
    zones = _data("nordic_emissions.json")["data"].items() if country in _NORDIC_ZONES else ()
    return {
        zone.lower(): (
            row["emission_factor"],
            f"{row['description']}, generation of {row['year']}",
            row["year"],
        )
        for zone, row in zones
        if zone.startswith(_NORDIC_ZONES[country])
    }


def _fossil_g_per_kwh(mix: dict[str, float]) -> float:
    return GRAMS_PER_KG * sum(
        mix[fuel] / mix["total"] * kg for fuel, kg in _KG_PER_KWH_BY_FUEL.items()
    )


def _place(carbon: Carbon) -> str | None:
    """Return the place as the study file names it; None if it names none."""
    if carbon.cloud_provider is not None and carbon.cloud_region is not None:
        return f"{carbon.cloud_provider.upper()} {carbon.cloud_region.lower()}"
    if carbon.country is None or (region := carbon.region) is None:
        return carbon.country
    name = region.upper() if any(map(str.isdigit, region)) else string.capwords(region)
    return f"{name}, {carbon.country}".replace(" And ", " and ").replace(" Of ", " of ")


def _data(name: str) -> Any:
    return json.loads((_folder() / "private_infra" / name).read_text(encoding="utf-8"))


def _folder() -> Path:
    """Return the folder of CodeCarbon's data files."""
    return Path(str(distribution("codecarbon").locate_file("codecarbon/data")))
