"""Where the figures come from: hardware, versions, seeds, data and the carbon profile.

Files by name only: a report is for others, a path tells of its maker's machine.
"""

import json
from pathlib import Path

from carbonopt.core.config import Carbon, Workload
from carbonopt.core.format import count_text, intensity_text
from carbonopt.core.study import CarbonTrace, Hardware, IdlePower, SessionLedger, StudyData
from carbonopt.core.trial import COMPONENTS, Prepared
from carbonopt.core.units import human_duration
from carbonopt.report.document import Code, Section, Table, table, word
from carbonopt.report.study_text import budget_text, goal_text, pruning_text, sampler_text
from carbonopt.report.study_view import StudyView


def section(study: StudyView) -> Section:
    file = Code(title="The study file", text=study.data.provenance.study_file, language="yaml")
    return Section(key="provenance", title="Provenance", blocks=(_table(study.data), file))


def stated(data: StudyData) -> dict[str, str]:
    """What is known, by its label."""
    rows = [
        *_workload(data.config.workload),
        *_prepared(data.prepared),
        *_machine(data),
        *_search(data),
        *_carbon(data),
        *_trace(data.trace),
        *_energy(data),
        ("Versions", ", ".join(f"{name} {version}" for name, version in data.provenance.versions.items())),
    ]
    return {label: text for label, text in rows if text}


def _table(data: StudyData) -> Table:
    makers = [word("What", lambda row: row[0]), word("Value", lambda row: row[1])]
    return table("provenance", "Where the figures come from", stated(data).items(), makers)


def _workload(workload: Workload | None) -> list[tuple[str, str]]:
    if workload is None:
        return [("Workload", "as in the table of recorded runs")]
    model, dataset, tokenizer = workload.model, workload.dataset, workload.tokenizer
    source = dataset.builtin or dataset.name_or_path or ", ".join(Path(file).name for file in dataset.train_files or ())
    rows = [
        ("Model", model.name_or_path or f"random weights, {json.dumps(model.from_config)}"),
        ("Data set", f"{source}, {dataset.config}" if dataset.config else source),
        ("Sequence length", f"{workload.sequence_length} tokens"),
    ]
    if tokenizer is not None:
        bpe = f"byte-level BPE of {tokenizer.train_bpe} tokens" if tokenizer.train_bpe else None
        rows.append(("Tokenizer", tokenizer.name_or_path or bpe or f"one token a {tokenizer.kind}"))
    return rows


def _prepared(prepared: Prepared | None) -> list[tuple[str, str]]:
    if prepared is None:
        return []
    return [
        ("Parameters", f"{prepared.model_parameters:,}"),
        ("Training data", f"{prepared.train_tokens:,} tokens in {prepared.train_sequences:,} sequences"),
        ("Evaluation data", f"{prepared.eval_tokens:,} target tokens"),
    ]


def _machine(data: StudyData) -> list[tuple[str, str]]:
    hardware, table = data.provenance.hardware, getattr(data.config.launch, "table", None)
    if table is not None:
        return [("Hardware", "none: a replay of recorded runs"), ("Table", Path(table).name)]
    if hardware is None:
        return [("Hardware", "not recorded")]
    ranks = max((record.params.world_size for record in data.records), default=0)
    where = "" if hardware.gpus else " on the CPU"
    return [("Hardware", _hardware(hardware)), ("Ranks", f"{count_text(ranks, 'rank')}{where}" if ranks else "")]


def _hardware(hardware: Hardware) -> str:
    parts = [*hardware.gpus, f"{hardware.cpu}, {hardware.cpu_cores} cores", f"{hardware.ram_gib:.3g} GiB of RAM"]
    return ", ".join(parts) + (f", driver {hardware.driver}" if hardware.driver else "")


def _search(data: StudyData) -> list[tuple[str, str]]:
    search = data.config.search
    seeds = sorted({record.seed for record in data.records})
    rows = [
        ("Goal", goal_text(search)),
        ("Sampler", sampler_text(search)),
        ("Pruned", pruning_text(search)),
        ("Was to end", budget_text(data.config.budget)),
        ("Seeds of trials", ", ".join(map(str, seeds))),
    ]
    if data.sessions:
        total_s = sum(session.duration_s for session in data.sessions)
        sessions = count_text(len(data.sessions), "session")
        rows.append(("Ran", f"from {data.sessions[0].started_at}, {human_duration(total_s)} in {sessions}"))
    rows.append(("Ended", data.ended or "not yet"))
    return rows


def _energy(data: StudyData) -> list[tuple[str, str]]:
    """How each component is known, what counts of them, and what the GPUs draw idle."""
    known = data.provenance.energy_source
    names = [name for name in COMPONENTS if name in known]
    twice = any(record.gpu_energy_kwh for record in data.records)
    by_counter = " by its own energy counter, and beside it by CodeCarbon"
    models = {name: f" ({text})" for name, text in data.provenance.models.items()}
    if twice:
        models["gpu"] = by_counter
    how = [f"{name.upper()} {known[name]}{models.get(name, '')}" for name in names]
    counts = ", ".join(name.upper() for name in names)
    if data.config.carbon.objective == "gpu":
        counts = "the GPUs alone (carbon.objective: gpu)"
    return [("Energy of", ", ".join(how)), ("Emissions count", counts), *_idle(data.sessions)]


def _idle(sessions: tuple[SessionLedger, ...]) -> list[tuple[str, str]]:
    found: dict[int, list[IdlePower]] = {}
    for session in sessions:
        for idle in session.idle:
            found.setdefault(idle.gpu, []).append(idle)
    return [
        (
            f"Idle power of GPU {gpu}",
            ", then ".join(f"{one.power_w:.1f} ± {one.spread_w:.1f} W" for one in measured)
            + f" (mean ± standard deviation of {count_text(measured[0].windows, 'window')} of a second)",
        )
        for gpu, measured in sorted(found.items())
    ]


def _carbon(data: StudyData) -> list[tuple[str, str]]:
    intensity, carbon = data.provenance.intensity, data.config.carbon
    place = intensity.place or ", ".join(part for part in (carbon.region, carbon.country) if part)
    source = ", ".join(part for part in (place, intensity.source) if part)
    default = Carbon.model_fields["pue"].default
    year = str(intensity.year or "not given")
    return [
        ("Carbon intensity", f"{intensity_text(intensity.g_co2e_per_kwh)} g CO2e/kWh ({source})"),
        ("Year of that intensity", year),
        ("PUE", f"{carbon.pue:.3g} ({'given or the default' if carbon.pue == default else 'given'}, not measured)"),
    ]


def _trace(trace: CarbonTrace | None) -> list[tuple[str, str]]:
    if trace is None:
        return []
    hours = trace.g_co2e_per_kwh
    without = hours.count(None)
    holes = f", {without:,} of them without a value" if without else ""
    return [("Carbon trace", f"{trace.source}: {count_text(len(hours), 'hour')} from {trace.start} on{holes}")]
