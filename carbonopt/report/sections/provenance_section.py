"""The origin of the figures: hardware, versions, seeds, data and the carbon profile.

Files are given by name only: a report is for others, and a path tells of its maker's machine.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from carbonopt.analysis.concurrency import price
from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.core import format as fmt
from carbonopt.core.format import count_text, intensity_text
from carbonopt.core.trial import COMPONENTS
from carbonopt.core.units import human_duration
from carbonopt.report.document import Code, Section, table, word
from carbonopt.report.study_text import budget_text, goal_text, pruning_text, sampler_text
from carbonopt.report.study_view import StudyView
from carbonopt.spec.carbon_settings import Carbon
from carbonopt.spec.study_data import StudyData, wall_clock_s


def section(study: StudyView) -> Section:
    rows, columns = stated(study.data).items(), [word("What", 0), word("Value", 1)]
    stated_here = table("provenance", "Where the figures come from", rows, columns)
    file = Code(title="The study file", text=study.data.provenance.study_file, language="yaml")
    return Section(key="provenance", title="Provenance", blocks=(stated_here, file))


def stated(data: StudyData) -> dict[str, str]:
    return _rows(data, _workload, _machine, _search, _carbon, _energy, _versions)


def stated_of_machine(data: StudyData) -> dict[str, str]:
    """Return what is the same for all studies that one meter read on one machine."""
    return _rows(data, _machine, _carbon, _energy, _versions)


def _rows(data: StudyData, *parts: Callable[[StudyData], dict[str, str]]) -> dict[str, str]:
    return {label: text for part in parts for label, text in part(data).items() if text}


def _versions(data: StudyData) -> dict[str, str]:
    return {
        "Versions": ", ".join(
            f"{name} {version}" for name, version in data.provenance.versions.items()
        )
    }


def _workload(data: StudyData) -> dict[str, str]:
    workload = data.config.workload
    if workload is None:
        return {"Workload": "as in the table of recorded runs"}
    model, dataset, tokenizer = workload.model, workload.dataset, workload.tokenizer
    rows = {"Task": workload.task}
    if model is not None:
        named = model.name_or_path and fmt.source_text(model.name_or_path)
        rows["Model"] = named or f"random weights, {json.dumps(model.from_config)}"
    if dataset is not None:
        files = ", ".join(Path(file).name for file in dataset.train_files or ())
        source = dataset.builtin or fmt.source_text(dataset.name_or_path or files)
        rows["Data set"] = f"{source}, {dataset.config}" if dataset.config else source
    extra = workload.model_extra or {}
    rows["Algorithm"] = extra.get("algorithm", "")
    for key, label in {"reward": "Reward", "gold_reward": "Gold reward"}.items():
        if (given := extra.get(key)) is not None:
            rows[label] = (
                fmt.source_text(given["model"])
                if given.get("model")
                else Path(given["python"]).name
            )
    if (command := extra.get("command")) is not None:
        rows["Command"] = command
    if workload.sequence_length is not None:
        ragged = data.prepared is not None and data.prepared.sequence_length is None
        rows["Sequence length"] = f"{'at most ' if ragged else ''}{workload.sequence_length} tokens"
    if tokenizer is not None:
        bpe = f"byte-level BPE of {tokenizer.train_bpe} tokens" if tokenizer.train_bpe else None
        named = tokenizer.name_or_path and fmt.source_text(tokenizer.name_or_path)
        rows["Tokenizer"] = named or bpe or f"one token a {tokenizer.kind}"
    if (prepared := data.prepared) is not None:
        if prepared.model_parameters is not None:
            rows["Parameters"] = f"{prepared.model_parameters:,}"
        noun = "examples" if prepared.sequence_length is None else "sequences"
        rows["Training data"] = _amount(
            prepared.train_tokens,
            "tokens",
            prepared.train_examples,
            "packed rows" if data.config.packs else noun,
        )
        rows["Evaluation data"] = _amount(
            prepared.eval_tokens, "target tokens", prepared.eval_examples, noun
        )
        rows["Data left out or cut"] = " ".join(prepared.notes)
    return rows


def _amount(tokens: int | None, unit: str, examples: int, noun: str) -> str:
    return f"{examples:,} {noun}" if tokens is None else f"{tokens:,} {unit} in {examples:,} {noun}"


def _machine(data: StudyData) -> dict[str, str]:
    hardware, runs = data.provenance.hardware, getattr(data.config.launch, "table", None)
    if runs is not None:
        return {"Hardware": "none: a replay of recorded runs", "Table": Path(runs).name}
    if hardware is None:
        return {"Hardware": "not recorded"}
    parts = [f"{hardware.cpu}, {hardware.cpu_cores} cores", f"{hardware.ram_gib:.3g} GiB of RAM"]
    if hardware.nodes > 1:
        parts = [
            f"{hardware.nodes} machines",
            *fmt.counted_names(hardware.gpus),
            *(f"{part} each" for part in parts),
        ]
    else:
        parts = [*fmt.counted_names(hardware.gpus), *parts]
    parts += [f"driver {hardware.driver}"] if hardware.driver else []
    ranks = max((record.params.world_size for record in data.records), default=0)
    where = "" if hardware.gpus else " on the CPU"
    rows = {
        "Hardware": ", ".join(parts),
        "Ranks": f"{count_text(ranks, 'rank')}{where}" if ranks else "",
    }
    if (launch := data.config.launch).side_by_side > 1:
        counted = "CPU and RAM energy is counted by the cores' share"
        rows["Trials side by side"] = (
            f"up to {launch.side_by_side} (launch.max_concurrent_trials:"
            f" {launch.max_concurrent_trials}); {counted}"
        )
        rows["What that costs a search"] = price(data.config)
    return rows


def _minute(time: str) -> str:
    return f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _search(data: StudyData) -> dict[str, str]:
    search, ran = data.config.search, ""
    if data.sessions:
        took = human_duration(wall_clock_s(data.sessions))
        ran = (
            f"from {_minute(data.sessions[0].started_at)}, {took} in"
            f" {count_text(len(data.sessions), 'session')}"
        )
    return {
        "Goal": goal_text(search),
        "Sampler": sampler_text(search),
        "Pruned": pruning_text(search, tells_steps=not counts_whole_processes(data)),
        "Planned end": budget_text(data.config.budget),
        "Seeds of trials": ", ".join(map(str, sorted({record.seed for record in data.records}))),
        "Ran": ran,
        "Ended": data.ended or "not yet",
    }


def _carbon(data: StudyData) -> dict[str, str]:
    intensity, carbon = data.provenance.intensity, data.config.carbon
    place = intensity.place or ", ".join(part for part in (carbon.region, carbon.country) if part)
    source = ", ".join(part for part in (place, intensity.source) if part)
    given = "given or the default" if carbon.pue == Carbon.model_fields["pue"].default else "given"
    rows = {
        "Carbon intensity": f"{intensity_text(intensity.g_co2e_per_kwh)} g CO2e/kWh ({source})",
        "Year of that intensity": str(intensity.year or "not given"),
        "PUE": f"{carbon.pue:.3g} ({given}, not measured)",
    }
    if (trace := data.trace) is not None:
        hours, without = trace.g_co2e_per_kwh, trace.g_co2e_per_kwh.count(None)
        holes = f", {without:,} of them without a value" if without else ""
        rows["Carbon trace"] = (
            f"{trace.source}: {count_text(len(hours), 'hour')} from {trace.start} on{holes}"
        )
    return rows


def _energy(data: StudyData) -> dict[str, str]:
    """Say how each component is known, which of them count, and what the GPUs draw idle."""
    known = data.provenance.energy_source
    names = [name for name in COMPONENTS if name in known]
    models = {name: f" ({text})" for name, text in data.provenance.models.items()}
    if any(record.gpu_energy_kwh for record in data.records):
        models["gpu"] = " by its own energy counter, and beside it by CodeCarbon"
    counts = ", ".join(name.upper() for name in names)
    if data.config.carbon.objective == "gpu":
        counts = "the GPUs alone (carbon.objective: gpu)"
    how = [f"{name.upper()} {known[name]}{models.get(name, '')}" for name in names]
    rows = {"Energy sources": ", ".join(how), "Emissions count": counts}
    measured = [idle for session in data.sessions for idle in session.idle]
    for gpu in sorted({idle.gpu for idle in measured}):
        idles = [idle for idle in measured if idle.gpu == gpu]
        powers = ", then ".join(f"{idle.power_w:.1f} ± {idle.spread_w:.1f} W" for idle in idles)
        windows = count_text(idles[0].windows, "window")
        rows[f"Idle power of GPU {gpu}"] = (
            f"{powers} (mean ± standard deviation of {windows} of a second)"
        )
    return rows
