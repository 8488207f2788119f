"""The Software Carbon Intensity of a study: (E × I + M) ÷ R.

The formula is that of ISO/IEC 21031:2024. The functional unit R follows the Green Software
Foundation's SCI for AI, which scores training by FLOP, training token or parameter.
"""

import json
from typing import Any

from carbonopt.core.units import GRAMS_PER_KG
from carbonopt.core.values import Frozen
from carbonopt.export.exported_study import ExportedStudy

_NO_UNIT = "neither the training tokens nor the parameters are known"
_SECONDS_PER_YEAR = 365.25 * 24 * 3600


class FunctionalUnit(Frozen):
    """The unit R that a score is divided by."""

    unit: str
    amount: int
    why: str


def sci(study: ExportedStudy) -> str:
    """Return the score and its terms as JSON text.

    All runs of the study count, stopped ones too. Without `carbon.embodied` in the study file, and
    for a study without GPUs, the text has only the operational emissions and no score.
    """
    return json.dumps(sci_terms(study), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sci_terms(study: ExportedStudy) -> dict[str, Any]:
    """Return the terms of the score by name; their units are in the names."""
    data, spent = study.data, study.spent
    operational_g = spent.emissions_kg_co2e * GRAMS_PER_KG
    unit, embodied_g = functional_unit(study), _embodied_g(study)
    terms: dict[str, Any] = {
        **study.head(),
        "standard": "ISO/IEC 21031:2024, with the functional units of SCI for AI",
        "boundary": f"{_boundary(study)}; energy counted: {study.counted}",
        "energy_kwh": spent.energy_kwh,
        "pue": data.config.carbon.pue,
        "energy_with_pue_kwh": spent.energy_kwh * data.config.carbon.pue,
        "carbon_intensity_g_co2e_per_kwh": data.provenance.intensity.g_co2e_per_kwh,
        "carbon_intensity_source": data.provenance.intensity.source,
        "operational_g_co2e": operational_g,
        "training_tokens": study.work.tokens,
        "training_tokens_of": _tokens_by_kind(study),
        "functional_unit": None if unit is None else unit.model_dump(),
    }
    if unit is None:
        terms["why_no_functional_unit"] = _NO_UNIT
    if embodied_g is None:
        return {**terms, "scope": f"operational only: {_why_operational(study)}"}
    terms |= {"embodied_g_co2e": embodied_g, "embodied": _embodied_terms(study)}
    if unit is None:
        return {**terms, "scope": f"operational and embodied; no score: {_NO_UNIT}"}
    return {
        **terms,
        "scope": "operational and embodied",
        f"sci_g_co2e_per_{unit.unit.replace(' ', '_')}": (operational_g + embodied_g) / unit.amount,
    }


def _boundary(study: ExportedStudy) -> str:
    if study.data.provenance.is_replay:
        return (
            "the recorded runs that the study replayed, every trial in every state and attempt:"
            " their training and evaluations as recorded; the study trained nothing itself"
        )
    return (
        "the whole study: preparation, every trial in every state and attempt, probes, repeats and"
        " the time between them"
    )


def _tokens_by_kind(study: ExportedStudy) -> dict[str, int | None]:
    """Return the parts of the training tokens; None for what is not known of every run."""
    whole, probes = study.work.tokens, study.work.probe_tokens
    known = whole is not None and probes is not None
    return {"trials": whole - probes if known else None, "probes": probes}  # type: ignore[operator]


def functional_unit(study: ExportedStudy) -> FunctionalUnit | None:
    """Return the unit that a score is divided by; None if none is known."""
    tokens, parameters = study.work.measured_tokens, study.work.parameters
    if tokens:
        # Tokens whose energy is not in the score would make it too low.
        runs = "of all runs" if tokens == study.work.tokens else "of all runs of known energy"
        why = (
            f"the training tokens {runs} are counted; FLOP would only be estimated from them"
            " (6 × parameters × tokens)"
        )
        return FunctionalUnit(unit="training token", amount=tokens, why=why)
    if parameters:
        why = "the training tokens are not known of every run, so neither are their FLOP"
        return FunctionalUnit(unit="parameter", amount=parameters, why=why)
    return None


def _embodied_g(study: ExportedStudy) -> float | None:
    """Return the study's share of the emissions of making its GPUs, by time."""
    embodied, work = study.data.config.carbon.embodied, study.work
    if embodied is None or not work.are_gpus or work.device_s is None:
        return None
    lifetime_s = embodied.lifetime_years * _SECONDS_PER_YEAR
    return embodied.kg_co2e_per_gpu * GRAMS_PER_KG * work.device_s / lifetime_s


def _embodied_terms(study: ExportedStudy) -> dict[str, Any]:
    embodied, work = study.data.config.carbon.embodied, study.work
    assert embodied is not None
    return {
        **embodied.model_dump(),
        "gpus": work.devices,
        "gpu_s": work.device_s,
        "share": "the GPUs' time in the study ÷ their lifetime; CPUs, RAM and disks are not in it",
    }


def _why_operational(study: ExportedStudy) -> str:
    if study.data.config.carbon.embodied is None:
        return "carbon.embodied is not in the study file, and no default is assumed"
    return "carbon.embodied is of GPUs, and no GPU of this study is known"
