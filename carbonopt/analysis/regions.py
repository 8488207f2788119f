"""The same joules elsewhere: what the recommended run and the whole study would have emitted on other grids."""

from collections.abc import Iterable

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.study import Intensity, StudyData
from carbonopt.core.values import Frozen


class InRegion(Frozen):
    place: str  # of the study's own, where no place is known, what its source says
    g_co2e_per_kwh: float
    source: str  # with its year, as the study's own intensity has it
    run_kg_co2e: float  # the recommended run's training window, the study's PUE in
    study_kg_co2e: float  # the whole study
    is_studys_own: bool  # the study's own reference intensity


def regions(data: StudyData, rec: Recommendation, intensities: Iterable[Intensity]) -> tuple[InRegion, ...]:
    """Prices the recommended run and the study at each of these intensities and at the study's own.

    Emissions are in proportion to the intensity, so that ranks and shares stay. By intensity, then by place; the
    study's own is there once, even where it is among those given. Empty: nothing is recommended.
    """
    if rec.emissions_kg_co2e is None:
        return ()
    own = data.provenance.intensity
    listed = [own, *(intensity for intensity in intensities if intensity != own)]
    return tuple(
        InRegion(
            place=intensity.place or intensity.source,
            g_co2e_per_kwh=intensity.g_co2e_per_kwh,
            source=intensity.source,
            run_kg_co2e=rec.emissions_kg_co2e * (intensity.g_co2e_per_kwh / own.g_co2e_per_kwh),
            study_kg_co2e=rec.study_emissions_kg_co2e * (intensity.g_co2e_per_kwh / own.g_co2e_per_kwh),
            is_studys_own=intensity is own,
        )
        for intensity in sorted(listed, key=lambda intensity: (intensity.g_co2e_per_kwh, intensity.place or ""))
    )
