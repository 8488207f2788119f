"""CodeCarbon's emissions.csv, one row for each trial.

The columns and their order are those of CodeCarbon 3.3.2 (`codecarbon/output_methods/
emissions_data.py`). As in CodeCarbon, energies and powers include the PUE, and
`energy_consumed` is the sum of the components.
"""

import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from carbonopt.core.csv_table import csv_table
from carbonopt.core.trial import COMPONENTS, TrialRecord
from carbonopt.core.units import joules_from_kwh
from carbonopt.export.exported_study import ExportedStudy

COLUMNS = (
    *("timestamp", "project_name", "run_id", "experiment_id", "duration"),
    *("emissions", "emissions_rate", "cpu_power", "gpu_power", "ram_power"),
    *("cpu_energy", "gpu_energy", "ram_energy", "energy_consumed", "water_consumed"),
    *("country_name", "country_iso_code", "region", "cloud_provider", "cloud_region"),
    *("os", "python_version", "codecarbon_version", "cpu_count", "cpu_model"),
    *("gpu_count", "gpu_model", "longitude", "latitude", "ram_total_size", "tracking_mode"),
    *("cpu_utilization_percent", "gpu_utilization_percent", "ram_utilization_percent"),
    *("ram_used_gb", "on_cloud", "pue", "wue"),
)


def emissions_csv(studies: Iterable[ExportedStudy], *, of_draft: bool = False) -> str:
    """Return the table: the training window of each trial of these studies, in every state.

    What is not known is empty, never 0.

    Args:
        of_draft: whether they are the studies of a pipeline that has not ended.
    """
    rows = [
        {
            **_of_study(study, is_draft=of_draft or study.status == "draft"),
            **_of_trial(study, record),
        }
        for study in studies
        for record in study.data.records
    ]
    return csv_table(COLUMNS, rows)


def _of_study(study: ExportedStudy, *, is_draft: bool) -> dict[str, Any]:
    data = study.data
    carbon, is_replay = data.config.carbon, data.provenance.is_replay
    # Where a replay's runs were recorded, and with what, is not known.
    versions = {} if is_replay else data.provenance.versions
    replay, draft = " (replay)" if is_replay else "", " (draft)" if is_draft else ""
    return {
        "project_name": f"{data.config.name}{replay}{draft}",
        "experiment_id": study.id,
        "country_name": _country_name(study),
        "country_iso_code": carbon.country,
        "region": carbon.region,
        "cloud_provider": carbon.cloud_provider,
        "cloud_region": carbon.cloud_region,
        "on_cloud": "Y" if carbon.cloud_region is not None else None,
        "python_version": versions.get("python"),
        "codecarbon_version": versions.get("codecarbon"),
        "tracking_mode": None if is_replay else "process",
        "pue": carbon.pue,
    }


def _country_name(study: ExportedStudy) -> str | None:
    """Return the country's name; None where the intensity's place is a region or a code."""
    carbon, intensity = study.data.config.carbon, study.data.provenance.intensity
    names_country = carbon.region is None and intensity.place != carbon.country
    return intensity.place if carbon.country is not None and names_country else None


def _of_trial(study: ExportedStudy, record: TrialRecord) -> dict[str, Any]:
    run_id, replays = uuid.uuid5(study.id, str(record.trial)), study.data.provenance.is_replay
    return {
        # When a replay's run was recorded is not known.
        "timestamp": None if replays else _timestamp(record.counted_from),
        "run_id": run_id,
        **_measured(study, record),
        **_machine(study, record),
        "gpu_utilization_percent": (
            None if record.gpu_utilisation is None else 100 * record.gpu_utilisation
        ),
    }


def _timestamp(started_at: str | None) -> str | None:
    """Return the time as CodeCarbon writes it, in UTC."""
    if started_at is None:
        return None
    return datetime.fromisoformat(started_at).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _measured(study: ExportedStudy, record: TrialRecord) -> dict[str, Any]:
    """Return energy and emissions of the training window; empty where they were not measured."""
    energy, duration = record.energy_kwh, record.duration_s
    if energy is None:
        return {}
    carbon = study.data.config.carbon
    seconds = duration.train if duration is not None and duration.train > 0 else None
    emissions_kg = study.data.emissions_kg_co2e(energy.train)
    row: dict[str, Any] = {
        "duration": duration.train if duration is not None else None,
        "emissions": emissions_kg,
        "emissions_rate": None if seconds is None else emissions_kg / seconds,
        "energy_consumed": energy.train * carbon.pue,
    }
    # Components that don't count would not add up to the energy.
    for name in ("gpu",) if carbon.objective == "gpu" else COMPONENTS:
        kwh = getattr(energy, f"train_{name}")
        if kwh is not None:
            row[f"{name}_energy"] = with_pue_kwh = kwh * carbon.pue
            power_w = None if seconds is None else joules_from_kwh(with_pue_kwh) / seconds
            row[f"{name}_power"] = power_w
    return row


def _machine(study: ExportedStudy, record: TrialRecord) -> dict[str, Any]:
    """Return the machines that a trial ran on; empty where they are not known."""
    hardware = study.data.provenance.hardware
    if hardware is None:
        return {}
    machines = len(record.nodes) or hardware.nodes
    row = {
        "cpu_count": hardware.cpu_cores * machines,
        "cpu_model": hardware.cpu,
        "ram_total_size": hardware.ram_gib * machines,
    }
    devices = sum(device != "cpu" for node in record.nodes for device in node.devices)
    gpus = min(devices, record.params.world_size)  # a trial may leave some of them idle
    # Which of different GPUs a trial had is not known.
    if gpus and len(set(hardware.gpus)) == 1:
        row["gpu_model"] = f"{gpus} x {hardware.gpus[0]}"
    if record.nodes:
        row["gpu_count"] = gpus
    return row
