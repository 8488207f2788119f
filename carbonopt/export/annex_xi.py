"""Figures for Annex XI of Regulation (EU) 2024/1689, section 1, point 2 (d) and (e).

They are the entries on compute and energy of the Model Documentation Form of the Code of Practice
for general-purpose AI: FLOP, training time in days of the clock and of the hardware, energy in MWh
with two digits or more, and how the energy was found.
"""

import json
from typing import Any

from carbonopt.analysis.confidence import configurations
from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.analysis.study_comparison import ComparedRun, run_of
from carbonopt.analysis.training_work import trained_flop, trained_tokens
from carbonopt.core.format import escape_markdown
from carbonopt.core.units import GRAMS_PER_KG
from carbonopt.export.exported_study import ExportedStudy

_SECONDS_PER_DAY = 86_400.0
_KWH_PER_MWH = 1000.0
_TITLE = (
    "Figures for Annex XI, section 1, point 2 (d) and (e), of Regulation (EU) 2024/1689, and for"
    " the Model Documentation Form of the Code of Practice"
)
_SCOPE = (
    "These are measurements for whoever fills in the form. They do not say that a duty applies, or"
    " that it is met."
)
_ROWS = {
    "energy_mwh": "Training energy (MWh)",
    "emissions_g_co2e": "Emissions (g CO2e, PUE included)",
    "training_flop": "Training FLOP",
    "training_tokens": "Training tokens",
    "wall_clock_days": "Training time (days of the clock)",
    "hardware_days": "Training time (hardware days)",
}


def missing(study: ExportedStudy) -> str | None:
    """Say why a study has no such figures; None if it has."""
    if study.data.provenance.is_replay or study.data.provenance.hardware is None:
        return "hardware days need the hardware, which a replay of recorded runs does not know"
    return None


def annex_xi_json(study: ExportedStudy) -> str:
    """Return the figures as JSON text."""
    return json.dumps(figures(study), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def annex_xi(study: ExportedStudy) -> str:
    """Return the figures as Markdown, with the JSON text at its end."""
    stated = figures(study)
    columns = [stated["recommended_run"], stated["whole_study"]]
    lines = [
        f"| {label} | " + " | ".join(_text(column[key]) for column in columns) + " |"
        for key, label in _ROWS.items()
    ]
    draft = "Draft: the study has not ended.\n\n" if study.status == "draft" else ""
    name, how = escape_markdown(study.data.config.name), escape_markdown(stated["method"])
    return (
        f"# {_TITLE}\n\nStudy: {name}\n\n{draft}{_SCOPE}\n\n"
        "| | recommended run | whole study |\n| --- | ---: | ---: |\n"
        + "\n".join(lines)
        + f"\n\n{stated['hardware_days_of']}\n\n## Method\n\n{how}\n\n"
        f"```json\n{annex_xi_json(study)}```\n"
    )


def figures(study: ExportedStudy) -> dict[str, Any]:
    """Return the figures by name; their units are in the names, and null is not known."""
    work, hardware = study.work, study.data.provenance.hardware
    assert hardware is not None
    what = "GPU" if work.are_gpus else "machine"
    return {
        "figures_for": _TITLE,
        **study.head(),
        "scope": _SCOPE,
        "recommended_run": _recommended(study),
        "whole_study": {
            "energy_mwh": study.spent.energy_kwh / _KWH_PER_MWH,
            "emissions_g_co2e": study.spent.emissions_kg_co2e * GRAMS_PER_KG,
            "training_flop": work.flop,
            "training_tokens": work.tokens,
            "wall_clock_days": work.wall_clock_s / _SECONDS_PER_DAY,
            "hardware_days": None if work.device_s is None else work.device_s / _SECONDS_PER_DAY,
            "waiting_days": work.waited_s / _SECONDS_PER_DAY,
        },
        "hardware": list(work.gpus) or [hardware.cpu] * work.machines,
        "hardware_days_of": f"A hardware day is a day of one {what}.{_waiting(study)}",
        "method": method(study),
    }


def _waiting(study: ExportedStudy) -> str:
    """Say which of the whole study's days have its waits for the hours of a schedule."""
    waited_s = study.work.waited_s
    if not waited_s:
        return ""
    return (
        " The whole study's hardware days, but not its days of the clock, include"
        f" {_text(waited_s / _SECONDS_PER_DAY)} days in which it waited for the hours of its"
        " schedule."
    )


def _recommended(study: ExportedStudy) -> dict[str, Any]:
    """Return the figures of one run of the recommended configuration, means over its seeds."""
    record, run = study.record, _run(study)
    assert record is not None and run is not None
    energy_kwh, duration_s = run.energy_kwh, run.duration_s
    devices = record.params.world_size if study.work.are_gpus else len(record.nodes) or 1
    return {
        "trial": run.trial,
        "runs": run.seeds,
        "energy_mwh": None if energy_kwh is None else energy_kwh / _KWH_PER_MWH,
        "emissions_g_co2e": run.emissions_kg_co2e * GRAMS_PER_KG,
        "training_flop": trained_flop(study.data, record),
        "training_tokens": trained_tokens(study.data, record),
        "wall_clock_days": None if duration_s is None else duration_s / _SECONDS_PER_DAY,
        "hardware_days": None if duration_s is None else devices * duration_s / _SECONDS_PER_DAY,
    }


def _run(study: ExportedStudy) -> ComparedRun | None:
    carbon, intensity = study.data.config.carbon, study.data.provenance.intensity
    return next(
        (
            run_of(tried, (intensity.g_co2e_per_kwh, carbon.pue))
            for tried in configurations(study.data.records)
            if tried.trial == study.recommendation.trial
        ),
        None,
    )


def method(study: ExportedStudy) -> str:
    """Say in about 100 words how energy, FLOP and times were found."""
    data = study.data
    if study.work.flop is not None:
        flop = (
            "FLOP are estimated as 6 × parameters × tokens, without attention and recomputation. "
        )
    elif data.prepared is not None and data.prepared.has_experts:
        flop = (
            "FLOP are not stated: a token meets only some of the model's experts, so that"
            " 6 × parameters × tokens does not hold. "
        )
    else:
        flop = (
            "FLOP are not stated: the formula 6 × parameters × tokens does not hold here, or a part"
            " of it is not known. "
        )
    window = (
        "one whole process of the script"
        if counts_whole_processes(data)
        else "its training window, without set-up and evaluation"
    )
    gpu = "GPU energy is read from the GPUs' own counters; " if study.work.are_gpus else ""
    is_metered = "measured" in data.provenance.energy_source.values()
    how = "metered" if is_metered else "modelled, not metered,"
    return (
        f"Energy was {how} while training ran, by carbonopt with CodeCarbon ({study.counted}):"
        f" {gpu}CPU and RAM energy, where modelled, follows power models and the CPU time of the"
        " training's processes. The energies are those of the computers; the data centre's overhead"
        f" is in the emissions alone. The recommended run is {window}. The whole study adds all"
        " other runs and attempts, probes, stopped and failed ones too, with set-up, evaluation,"
        f" preparation and the time between runs. {flop}Emissions are energy ×"
        f" {data.provenance.intensity.g_co2e_per_kwh:.4g} g CO2e/kWh × a PUE of"
        f" {data.config.carbon.pue:.3g}."
    )


def _text(value: float | None) -> str:
    """Return a figure with four significant digits."""
    return "not known" if value is None else f"{value:.4g}"
