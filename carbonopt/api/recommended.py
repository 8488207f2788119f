"""The recommendation of a study as a value for Python programs."""

from typing import Any

from carbonopt.analysis.recommend import Baseline, Closest, Recommendation
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import EXIT_NOT_MET, CarbonoptError
from carbonopt.report.document import Caveat, with_caveats


class TargetNotMet(CarbonoptError, ValueError):
    """The error that no configuration is recommended for the target.

    It is a `ValueError`, too, as Optuna raises it where a study has no best trial.

    Attributes:
        closest: The trial that came closest: its number, state, parameters, quality, emissions, and
            why it is the closest. None if no trial has been evaluated, or in a pipeline.
    """

    exit_code = EXIT_NOT_MET

    def __init__(self, text: str, closest: Closest | None = None) -> None:
        super().__init__(text)
        self.closest = closest


class Recommended(Recommendation):
    """The configuration that is recommended for a target, with all that speaks against it.

    Figures of a repeated configuration are means over its seeds.

    Attributes:
        trial: Number of the recommended trial.
        params: Its parameters by name, such as `params.learning_rate`. For one of your own
            dimensions: `params.value(name)`.
        value: Its quality.
        emissions_kg_co2e: Emissions of its training window in kg CO2e, PUE included.
        energy_kwh: Energy of its training window in kWh, without PUE.
        baseline: The trial that it is compared with, and why.
        saving_fraction: 1 − its emissions ÷ the baseline's. Negative if the baseline is cheaper.
        saving_interval: The interval of the saving; None if nothing was repeated.
        break_even_runs: Runs that pay back what the study used; None if a run saves nothing.
        pareto_front: Numbers of the trials on the Pareto front.
        study_energy_kwh: Energy of the whole study in kWh, stopped and failed trials included.
        study_emissions_kg_co2e: Emissions of the whole study in kg CO2e.
        caveats: The warnings about this answer, the most serious first; each has a `key`, a `level`
            and a `text`.
    """

    trial: int
    params: TrialParams
    value: float
    emissions_kg_co2e: float
    energy_kwh: float
    baseline: Baseline
    caveats: tuple[Caveat, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what `carbonopt recommend --json` prints, as plain values."""
        return with_caveats(super().as_json(), self.caveats)
