"""Reference intensities: CodeCarbon's own figures, each with its source; refusals that name what is
near.
"""

import csv
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from carbonopt.carbon import intensity
from carbonopt.carbon.intensity import reference_intensity
from carbonopt.core.errors import BadInput
from carbonopt.spec.carbon_settings import Carbon

ROOT = Path(__file__).resolve().parents[2]


def codecarbon_g_per_kwh(**place: str | None) -> float:
    """What CodeCarbon's offline tracker multiplies energy with at that place."""
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        **place,
        allow_multiple_runs=True,
        api_call_interval=-1,
        electricitymaps_api_token="",
        force_cpu_power=100,
        gpu_ids=[],
        log_level="error",
        output_methods=[],
    )
    tracker.start_task("a")
    time.sleep(0.06)
    data = tracker.stop_task("a")
    return data.emissions / data.energy_consumed * 1000


@pytest.mark.parametrize(
    ("country", "region"),
    [
        ("USA", None),
        ("FRA", None),
        ("IND", None),
        ("POL", None),
        ("USA", "California"),
        ("USA", "west virginia"),
        ("CAN", "Quebec"),
        ("CAN", "alberta"),
        ("SWE", "SE3"),
        ("CHN", "Inner Mongolia"),
    ],
)
def test_intensity_is_codecarbons_own(country, region):
    reference = reference_intensity(Carbon(country=country, region=region))
    assert reference.g_co2e_per_kwh == pytest.approx(
        codecarbon_g_per_kwh(country_iso_code=country, region=region), rel=1e-9
    )
    assert "CodeCarbon" in reference.source


@pytest.mark.parametrize(
    "region", ["europe-west1", "us-central1", "northamerica-northeast1", "me-west1"]
)
def test_intensity_of_a_cloud_region_is_codecarbons_own(region):
    reference = reference_intensity(Carbon(cloud_provider="gcp", cloud_region=region))
    expected = codecarbon_g_per_kwh(cloud_provider="gcp", cloud_region=region)
    assert reference.g_co2e_per_kwh == pytest.approx(expected, rel=1e-9)


def test_every_cloud_region_of_the_data_can_be_used():
    import codecarbon

    table = Path(codecarbon.__file__).parent / "data" / "cloud" / "impact.csv"
    rows = list(csv.DictReader(table.read_text(encoding="utf-8-sig").splitlines()))
    references = [
        reference_intensity(Carbon(cloud_provider=row["provider"], cloud_region=row["region"]))
        for row in rows
    ]
    assert [reference.g_co2e_per_kwh for reference in references] == [
        float(row["impact"]) for row in rows
    ]
    assert len(rows) >= 40


def test_intensity_of_a_cloud_region_names_its_place_and_source():
    reference = reference_intensity(Carbon(cloud_provider="GCP", cloud_region="Europe-West1"))
    assert (reference.place, reference.year) == ("Belgium (GCP europe-west1)", None)
    assert (
        reference.source == "Google Cloud Platform's published figure"
        " (https://cloud.google.com/sustainability/region-carbon#data), year not given, from"
        f" CodeCarbon {version('codecarbon')}"
    )


@pytest.mark.parametrize(
    ("country", "region", "year"),
    [
        ("USA", None, 2023),
        ("AGO", None, 2022),
        ("USA", "ohio", 2023),
        ("CAN", "ontario", 2023),
        ("CHN", "beijing", 2023),
        ("NOR", "NO1", 2025),
    ],
)
def test_the_year_is_that_of_the_data(country, region, year):
    reference = reference_intensity(Carbon(country=country, region=region))
    assert reference.year == year
    assert str(year) in reference.source


def test_intensity_names_its_place_and_source():
    california = reference_intensity(Carbon(country="USA", region="california"))
    assert california.place == "California, USA"
    assert california.source.startswith("EPA eGRID2023")
    assert reference_intensity(Carbon(country="USA")).place == "United States"
    assert reference_intensity(Carbon(country="SWE", region="se3")).place == "SE3, SWE"


def test_intensity_of_the_study_file_wins():
    given = reference_intensity(
        Carbon(country="USA", region="california", intensity_g_co2e_per_kwh=230)
    )
    assert (given.g_co2e_per_kwh, given.source, given.place) == (
        230,
        "given in the study file",
        "California, USA",
    )
    assert given.year is None
    assert reference_intensity(Carbon(intensity_g_co2e_per_kwh=12)).place is None
    cloud = Carbon(cloud_provider="aws", cloud_region="us-east-1", intensity_g_co2e_per_kwh=12)
    assert (
        reference_intensity(cloud).place == "AWS us-east-1"
    )  # a provider that the bundled data doesn't know


@pytest.mark.parametrize(
    ("country", "region", "message"),
    [
        ("GRM", None, r"no data for GRM; near to it: .*GRC \(Greece\)"),
        ("QQQ", None, r"no data for QQQ; it must be a three-letter code"),
        ("USA", "Califrnia", "USA has no 'Califrnia'.*did you mean california"),
        ("USA", "_source", "USA has no '_source'.*alabama, alaska"),
        ("DEU", "bayern", "no data by region for DEU, but got 'bayern'"),
        ("CAF", None, "says 0 g CO2e per kWh"),
    ],
)
def test_unknown_places_are_refused_with_the_nearest_known(country, region, message):
    with pytest.raises(BadInput, match=message):
        reference_intensity(Carbon(country=country, region=region))


@pytest.mark.parametrize(
    ("provider", "region", "message"),
    [
        (
            "aws",
            "us-east-1",
            "cloud_provider: no data for 'aws'; known here: gcp. Else give the carbon.country",
        ),
        ("gcpp", "us-east1", "cloud_provider: no data for 'gcpp'; did you mean gcp?"),
        (
            "gcp",
            "europe-west-1",
            "cloud_region: gcp has no 'europe-west-1' in the bundled data; did you mean europe-west1 or",
        ),
        ("gcp", "Mars", "gcp has no 'Mars' in the bundled data; known: africa-south1, asia-east1"),
    ],
)
def test_unknown_cloud_regions_are_refused_with_the_nearest_known(provider, region, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        reference_intensity(Carbon(cloud_provider=provider, cloud_region=region))


def test_a_cloud_region_without_a_figure_is_refused(monkeypatch, tmp_path):
    (tmp_path / "cloud").mkdir()
    (tmp_path / "cloud" / "impact.csv").write_text(
        "provider,providerName,region,country_name,impact,source\nazure,Azure,north,Norway,,a"
        " page\n"
    )
    monkeypatch.setattr(intensity, "_folder", lambda: tmp_path)
    with pytest.raises(
        BadInput, match=r"no figure for Norway \(AZURE north\); give carbon.intensity"
    ):
        reference_intensity(Carbon(cloud_provider="azure", cloud_region="north"))


def test_intensity_needs_no_heavy_import():
    script = (
        "import sys\n"
        "from carbonopt.spec.carbon_settings import Carbon\n"
        "from carbonopt.carbon.intensity import reference_intensity\n"
        "reference_intensity(Carbon(country='USA', region='california'))\n"
        "print(sorted({'codecarbon', 'pandas', 'torch', 'psutil'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
