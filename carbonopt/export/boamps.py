"""A report in Boavizta's format BoAmps 1.1.0, of the whole study as one computing task.

The format: https://github.com/Boavizta/BoAmps. Energies are in kWh, `parametersNumber` in billions,
`dataSize` and `memorySize` in GB. A field whose value is not known is left out.
"""

import json
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from carbonopt import __version__
from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.core import format as fmt
from carbonopt.core.quality import (
    ACCURACY,
    CANONICAL_MATCH,
    EXACT_MATCH,
    EXECUTION_MATCH,
    PREFERENCE_ACCURACY,
)
from carbonopt.core.units import BYTES_PER_GIB, kwh_from_joules
from carbonopt.export.exported_study import ExportedStudy
from carbonopt.export.model_card import card_of, hub_name, known
from carbonopt.spec.study_data import Hardware, union_s
from carbonopt.spec.workload_settings import Dataset, Workload

_BYTES_PER_GB = 1e9
_TRAINING_TYPES = {
    **dict.fromkeys(("sft", "seq2seq", "classification", "reward"), "supervisedLearning"),
    "rlhf": "reinforcementLearning",
}
# Shares of examples that were right, which the format calls an accuracy.
_ACCURACIES = (ACCURACY, EXACT_MATCH, CANONICAL_MATCH, EXECUTION_MATCH, PREFERENCE_ACCURACY)


def missing(study: ExportedStudy) -> str | None:
    """Say why a study has no report in this format; None if it has."""
    if study.data.provenance.is_replay or study.data.provenance.hardware is None:
        return "the format needs the hardware, which a replay of recorded runs does not know"
    workload = study.data.config.workload
    if workload is None or workload.model is None or workload.dataset is None:
        return "the format needs the algorithm and the data, which only a script's author knows"
    return None


def boamps(study: ExportedStudy) -> str:
    """Return the report as JSON text."""
    return json.dumps(report(study), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def report(study: ExportedStudy) -> dict[str, Any]:
    """Return the report: the study's training as the task, its whole energy as the measure."""
    versions, hardware = study.data.provenance.versions, study.data.provenance.hardware
    workload = study.data.config.workload
    assert hardware is not None and workload is not None
    found: dict[str, Any] = {
        "header": _header(study),
        "task": _task(study, workload),
        "measures": [_measure(study)],
        "infrastructure": _infrastructure(study, hardware),
    }
    if "python" in versions:
        found["software"] = {"language": "python", "version": versions["python"]}
    if (country := study.data.config.carbon.country) is not None:
        found["environment"] = known(
            country=country,
            location=study.data.config.carbon.region,
            powerSourceCarbonIntensity=study.data.provenance.intensity.g_co2e_per_kwh,
        )
    return {key: part for key, part in found.items() if part}


def _header(study: ExportedStudy) -> dict[str, Any]:
    """Return the header; empty if the study has no session, whose end is the report's time."""
    last = study.last_active
    if last is None:
        return {}
    return {
        "formatVersion": "1.1.0",
        "formatVersionSpecificationUri": "https://github.com/Boavizta/BoAmps/tree/main/model",
        "reportId": str(study.id),
        "reportDatetime": _time(last),
        "reportStatus": study.status,
    }


def _task(study: ExportedStudy, workload: Workload) -> dict[str, Any]:
    data, rec = study.data, study.recommendation
    assert workload.model is not None and workload.dataset is not None
    quality, runs = rec.target.quality, fmt.run_counts_text(*data.run_counts)
    counts_whole = counts_whole_processes(data)
    window = "with start-up and evaluations" if counts_whole else "in its training alone"
    recommended = (
        f"one run of its recommended configuration, trial {rec.trial}, takes"
        f" {fmt.energy_text(rec.energy_kwh)} {window} and emits"
        f" {fmt.emissions_text(rec.emissions_kg_co2e)}, with the data centre's overhead"
        f"{fmt.mean_of_text(rec.seeds)}"
        if rec.met
        else "no configuration is recommended"
    )
    return known(
        taskStage="training" if workload.model.from_config is not None else "finetuning",
        taskFamily=card_of(workload).pipeline_name,
        algorithms=[_algorithm(study, workload)],
        dataset=[_dataset(study, workload.dataset)],
        measuredAccuracy=rec.value if quality in _ACCURACIES else None,
        taskDescription=(
            f"The study {data.config.name} of carbonopt: a search of {runs}"
            f" for the configuration with the lowest emissions whose {quality.name} is"
            f" {quality.bound_word} {quality.target_text(rec.target.value)}. The energy is that of"
            f" all runs and all between them; {recommended}. Energy counted: {study.counted};"
            f" energies are without the data centre's overhead (PUE {data.config.carbon.pue:.3g})."
        ),
    )


def _algorithm(study: ExportedStudy, workload: Workload) -> dict[str, Any]:
    versions, parameters = study.data.provenance.versions, study.work.parameters
    assert workload.model is not None
    name = hub_name(workload.model.name_or_path)
    return known(
        trainingType=_TRAINING_TYPES.get(workload.task),
        algorithmType="neural network",
        algorithmName=(workload.model.from_config or {}).get("model_type"),
        foundationModelName=name,
        foundationModelUri=name and f"https://huggingface.co/{name}",
        parametersNumber=None if parameters is None else parameters / 1e9,
        framework="torch" if "torch" in versions else None,
        frameworkVersion=versions.get("torch"),
    )


def _dataset(study: ExportedStudy, dataset: Dataset) -> dict[str, Any]:
    workload, prepared = study.data.config.workload, study.data.prepared
    assert workload is not None
    image = card_of(workload).pipeline_tag.startswith("image")
    hub = hub_name(dataset.name_or_path)
    files = {*(dataset.train_files or ()), *(dataset.eval_files or ())}
    read = [file.bytes for file in study.data.inputs or () if file.path in files]
    return known(
        dataUsage="input",
        dataType="image" if image else "text",
        dataSize=sum(read) / _BYTES_PER_GB if files and len(read) == len(files) else None,
        dataQuantity=None if prepared is None else prepared.train_examples,
        source="public" if hub or dataset.builtin else None,
        sourceUri=hub and f"https://huggingface.co/datasets/{hub}",
    )


def _measure(study: ExportedStudy) -> dict[str, Any]:
    data, sources = study.data, study.data.provenance.energy_source
    begins = [datetime.fromisoformat(session.started_at) for session in data.sessions]
    return known(
        measurementMethod="carbonopt with CodeCarbon",
        version=__version__,
        cpuTrackingMode=sources.get("cpu"),
        gpuTrackingMode="nvml" if sources.get("gpu") == "measured" else sources.get("gpu"),
        **_idle_window(study),
        powerConsumption=study.spent.energy_kwh,
        # As the energy does, it includes waits for the hours of a schedule.
        measurementDuration=union_s(session.span for session in data.sessions),
        measurementDateTime=_time(min(begins)) if begins else None,
    )


def _idle_window(study: ExportedStudy) -> dict[str, Any]:
    """Return energy and duration of the first measurement of the idle GPUs; empty without one.

    Each window is a second, and the GPUs' windows run at the same time.
    """
    idle = next((session.idle for session in study.data.sessions if session.idle), ())
    if not idle:
        return {}
    return {
        "powerCalibrationMeasurement": kwh_from_joules(
            sum(gpu.power_w * gpu.windows for gpu in idle)
        ),
        "durationCalibrationMeasurement": max(gpu.windows for gpu in idle),
    }


def _infrastructure(study: ExportedStudy, hardware: Hardware) -> dict[str, Any]:
    provider = study.data.config.carbon.cloud_provider
    gb = BYTES_PER_GIB / _BYTES_PER_GB
    alike = len(set(hardware.gpus)) == 1 and hardware.gpu_memory_gib is not None
    gpus = [
        known(
            componentName=name,
            componentType="gpu",
            nbComponent=count,
            memorySize=hardware.gpu_memory_gib * gb if alike and hardware.gpu_memory_gib else None,
        )
        for name, count in Counter(study.work.gpus).items()
    ]
    machines = study.work.machines
    cpu = {"componentName": hardware.cpu, "componentType": "cpu", "nbComponent": machines}
    ram = {
        "componentType": "ram",
        "nbComponent": machines,
        "memorySize": hardware.ram_gib * gb,
    }
    return known(
        # Where the machine stands is known of a cloud alone.
        infraType="other" if provider is None else "publicCloud",
        cloudProvider=provider,
        components=[*gpus, cpu, ram],
    )


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
