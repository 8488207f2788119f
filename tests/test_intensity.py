"""Reference intensities: CodeCarbon's own figures, each with its source; refusals that name what is near."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from carbonopt.config import Carbon
from carbonopt.energy.intensity import reference_intensity
from carbonopt.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent


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
    found = reference_intensity(Carbon(country=country, region=region))
    assert found.g_co2e_per_kwh == pytest.approx(
        codecarbon_g_per_kwh(country_iso_code=country, region=region), rel=1e-9
    )
    assert "CodeCarbon" in found.source


def test_intensity_names_its_place_and_source():
    california = reference_intensity(Carbon(country="USA", region="california"))
    assert california.place == "California, USA"
    assert california.source.startswith("EPA eGRID2023")
    assert reference_intensity(Carbon(country="USA")).place == "United States"
    assert reference_intensity(Carbon(country="SWE", region="se3")).place == "SE3, SWE"


def test_intensity_of_the_study_file_wins():
    given = reference_intensity(Carbon(country="USA", region="california", intensity_g_co2e_per_kwh=230))
    assert (given.g_co2e_per_kwh, given.source, given.place) == (230, "given in the study file", "California, USA")
    assert reference_intensity(Carbon(intensity_g_co2e_per_kwh=12)).place is None


@pytest.mark.parametrize(
    ("country", "region", "message"),
    [
        ("GRM", None, r"no data for GRM; near to it: .*GRC \(Greece\)"),
        ("QQQ", None, r"no data for QQQ; it must be a three-letter code"),
        ("USA", "Califrnia", "USA has no 'Califrnia'.*known: california"),
        ("USA", "_source", "USA has no '_source'.*alabama, alaska"),
        ("DEU", "bayern", "no data by region for DEU, but got 'bayern'"),
        ("CAF", None, "says 0 g CO2e per kWh"),
    ],
)
def test_unknown_places_are_refused_with_the_nearest_known(country, region, message):
    with pytest.raises(BadInput, match=message):
        reference_intensity(Carbon(country=country, region=region))


def test_intensity_needs_no_heavy_import():
    script = (
        "import sys\n"
        "from carbonopt.config import Carbon\n"
        "from carbonopt.energy.intensity import reference_intensity\n"
        "reference_intensity(Carbon(country='USA', region='california'))\n"
        "print(sorted({'codecarbon', 'pandas', 'torch', 'psutil'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
