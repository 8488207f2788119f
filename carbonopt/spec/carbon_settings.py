"""The part `carbon` of a study file: the reference intensity, and what counts."""

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
)

from carbonopt.spec.base_settings import Name, Settings


def _three_letters(text: str) -> str:
    if not re.fullmatch("[A-Z]{3}", text):
        raise ValueError(f"must be three capital letters, such as USA, but got {text!r}")
    return text


class Carbon(Settings):
    """The reference carbon intensity, and the energy that it is applied to.

    A value given here wins. Otherwise the intensity is looked up, for the country and region or for
    the cloud region, in data that CodeCarbon carries.
    """

    # an ISO 3166-1 alpha-3 code
    country: Annotated[str, AfterValidator(_three_letters)] | None = None
    region: Name | None = None  # state, province or zone, where the bundled data has it
    # a provider in the bundled data (gcp), or any where the intensity is given
    cloud_provider: Name | None = None
    cloud_region: Name | None = None  # as the provider names it, such as europe-west1
    # The cleanest grids have a few g; 0.001 g is less than the life cycle of any source emits.
    intensity_g_co2e_per_kwh: float | None = Field(default=None, ge=0.001, le=5000)
    pue: float = Field(default=1.0, ge=1.0, le=5.0)
    # energy that counts: all that is measured or modelled, or the GPUs' energy counters alone
    objective: Literal["all", "gpu"] = "all"
    # a CSV file with the intensities of other hours
    trace: Annotated[str, StringConstraints(min_length=1)] | None = None

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
