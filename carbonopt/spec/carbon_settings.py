"""The part `carbon` of a study file: the reference intensity, and what counts."""

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
)

from carbonopt.core.errors import shortened
from carbonopt.spec.base_settings import Name, Settings


def _three_letters(text: str) -> str:
    if not re.fullmatch("[A-Z]{3}", text):
        must = "must be a country's code of three capital letters (ISO 3166-1), such as USA or DEU"
        raise ValueError(f"{must}, but got {shortened(text)}")
    return text


class Embodied(Settings):
    """The emissions of making the GPUs, of which a study gets its share by time.

    Without it nothing is assumed: exports in the form of the [SCI](exports.md#sci) then speak of
    operational emissions only. It never enters the search.
    """

    kg_co2e_per_gpu: float = Field(gt=0, le=1e6)
    """Emissions of making one GPU, with its share of the server if you count that."""

    lifetime_years: float = Field(gt=0, le=100)
    """Years for which such a GPU is used."""

    source: Name
    """The source of these figures; exports name it."""


class Carbon(Settings):
    """The reference carbon intensity, and the energy that it is applied to.

    A value given here wins. Otherwise the intensity is looked up, for the country and region or for
    the cloud region, in data that CodeCarbon carries.
    """

    country: Annotated[str, AfterValidator(_three_letters)] | None = None
    """Three capital letters, such as `USA`."""

    region: Name | None = None
    """A state, province or zone of that country."""

    cloud_provider: Name | None = None
    """The cloud provider, such as `gcp`; needs `cloud_region`."""

    cloud_region: Name | None = None
    """The provider's region, such as `europe-west1`; needs `cloud_provider`."""

    # The cleanest grids have a few g; 0.001 g is less than the life cycle of any source emits.
    intensity_g_co2e_per_kwh: float | None = Field(default=None, ge=0.001, le=5000)
    """Your own carbon intensity, 0.001 to 5000; it overrides the others."""

    pue: float = Field(default=1.0, ge=1.0, le=5.0)
    """Power usage effectiveness, 1 to 5."""

    objective: Literal["all", "gpu"] = "all"
    """`all`, or `gpu`: only the GPUs' energy counts."""

    trace: Annotated[str, StringConstraints(min_length=1)] | None = None
    """A CSV file of hourly intensities, for [other hours](emissions.md#other-grids-and-hours)."""

    embodied: Embodied | None = None
    """Emissions of making the GPUs, for [SCI exports](exports.md#sci); no default."""

    def violations(self) -> dict[str, bool]:
        country, cloud, intensity = self.country, self.cloud_region, self.intensity_g_co2e_per_kwh
        one_of_two = (self.cloud_provider is None) != (cloud is None)
        unknown = country is None and cloud is None and intensity is None
        return {
            "cloud_provider and cloud_region go together, but only one of them is given": (
                one_of_two
            ),
            "has both country and cloud_region; give the one that the machine is in": bool(
                country and cloud
            ),
            "needs country (three letters, such as USA), cloud_provider and cloud_region, or"
            " intensity_g_co2e_per_kwh": (unknown),
            "region needs country beside it": self.region is not None and country is None,
        }
