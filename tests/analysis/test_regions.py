"""The same joules at the bundled intensities of countries."""

import time

import pytest
from analysis.test_recommend import INTENSITY_G_PER_KWH, PUE, record, study

from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.repricing import InRegion, regions
from carbonopt.carbon.intensity import countries, reference_intensity
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.spec.carbon_settings import Carbon
from carbonopt.spec.study_data import Intensity, StudyData

DATA = study(record(0, 1.0, 9.0), record(1, 2.0, 8.0))


def priced(data: StudyData) -> tuple[InRegion, ...]:
    return regions(data, recommend(data), countries())


def at(intensity: Intensity) -> StudyData:
    """That study, its emissions at another intensity."""
    factor = intensity.g_co2e_per_kwh / INTENSITY_G_PER_KWH
    records = [
        run.model_copy(update={"emissions_kg_co2e": run.emissions_kg_co2e * factor})
        for run in DATA.records
    ]
    provenance = DATA.provenance.model_copy(update={"intensity": intensity})
    return DATA.model_copy(update={"records": tuple(records), "provenance": provenance})


def test_every_country_is_priced_and_the_own_intensity_too() -> None:
    rec = recommend(DATA)
    priced_regions = priced(DATA)
    assert len(priced_regions) == len(countries()) + 1
    assert [region.g_co2e_per_kwh for region in priced_regions] == sorted(
        region.g_co2e_per_kwh for region in priced_regions
    )
    for region in priced_regions:
        assert region.run_kg_co2e == pytest.approx(
            emissions_kg_co2e(rec.energy_kwh, region.g_co2e_per_kwh, PUE)
        )
        assert region.study_kg_co2e == pytest.approx(
            emissions_kg_co2e(rec.study_energy_kwh, region.g_co2e_per_kwh, PUE)
        )
    (own,) = [region for region in priced_regions if region.is_studys_own]
    assert (own.place, own.g_co2e_per_kwh) == ("given in the study file", INTENSITY_G_PER_KWH)
    assert (own.run_kg_co2e, own.study_kg_co2e) == (
        rec.emissions_kg_co2e,
        rec.study_emissions_kg_co2e,
    )  # to the digit


def test_the_own_country_is_there_once() -> None:
    priced_regions = priced(at(reference_intensity(Carbon(country="FRA"))))
    assert len(priced_regions) == len(countries())
    assert [region.place for region in priced_regions if region.is_studys_own] == ["France"]
    assert [region.place for region in priced_regions].count("France") == 1


def test_the_own_value_for_a_country_stands_beside_the_bundled_one() -> None:
    priced_regions = priced(
        at(Intensity(g_co2e_per_kwh=40.0, source="given in the study file", place="France"))
    )
    assert sorted(
        region.is_studys_own for region in priced_regions if region.place == "France"
    ) == [False, True]


def test_nothing_is_recommended() -> None:
    data = study(record(0, 1.0, 20.0))
    assert regions(data, recommend(data), countries()) == ()


def test_countries_are_those_that_a_study_can_name() -> None:
    by_place = {intensity.place: intensity for intensity in countries()}
    assert len(by_place) == len(countries()) >= 200
    for code in ("USA", "FRA", "POL", "IND", "NOR"):
        own = reference_intensity(Carbon(country=code))
        assert by_place[own.place] == own
    assert all(
        intensity.g_co2e_per_kwh > 0 and intensity.year and str(intensity.year) in intensity.source
        for intensity in countries()
    )


def test_countries_are_read_at_once() -> None:
    start = time.process_time()
    countries()
    assert time.process_time() - start < 0.2
