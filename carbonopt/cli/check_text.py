"""Describes what a study will do and roughly cost, before anything is started."""

import os
from pathlib import Path, PurePath
from typing import Any

from carbonopt.analysis.concurrency import price
from carbonopt.analysis.confirmation import may_try_new
from carbonopt.core.format import count_text, quoted_names
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.report.study_text import budget_text, goal_text, pruning_text, sampler_text
from carbonopt.space.auto_space import known_before
from carbonopt.space.search_space import SearchSpace, describe, is_integer
from carbonopt.spec.auto_facts import AutoSpace
from carbonopt.spec.quality_source import QualitySource
from carbonopt.spec.space_settings import Domain, Range
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.study.start_schedule import now_in_utc, schedule_text
from carbonopt.study_file.input_files import input_files
from carbonopt.study_file.study_checks import CheckedStudy

_MOST_NAMED = 8  # largest number of a script's files that are named
_INDENT = "\n" + " " * 14  # begins each line below a label's first line


def describe_study(checked: CheckedStudy, begun: StudyData | None = None) -> str:
    """Describe a study in a few plain lines.

    They say what it searches, on which devices, until when, and the limits of its cost.

    Args:
        begun: the study as an earlier call has left it; None: it is new.
    """
    config, quality, search = checked.config, checked.config.quality, checked.config.search
    nothing_left = "every configuration of the space has been run"
    if search.sampler == "carbon" and search.goal == "recommend":
        nothing_left = (
            "the model gives no configuration that is left a chance to meet the target with less"
            " energy"
        )
    lines = {
        "target": (
            f"{quality.name} {quality.bound_word} {config.target.value:g}, with the least emissions"
        ),
        "measured": _quality_source(config),
        "goal": goal_text(search),
        "workload": _workload(config),
        "reads": _script_inputs(config) or _columns(checked),
        "launch": checked.engine.description,
        "at once": price(config),
        "carbon": _carbon(checked),
        "waits": schedule_text(checked, now_in_utc(), begun),
        "sampler": sampler_text(search),
        "learns from": _earlier(checked),
        "prunes": pruning_text(search, tells_steps=checked.tells_steps),
        "space": _space(checked.space, checked.auto, is_settled=checked.is_settled),
        "left out": _left_out(checked.auto, is_settled=checked.is_settled),
        "stops": f"{budget_text(config.budget)}; earlier if {nothing_left}",
        "confirms": _confirmation(config),
        "begins with": ", ".join(
            f"{name} {value}" for name, value in (checked.start or {}).items()
        ),
        "costs": _cost(checked),
        "mind": _INDENT.join(checked.notes),
    }
    shown = [f"  {label:<11} {text}" for label, text in lines.items() if text]
    return "\n".join([f"{config.name}: the study file is valid.", *shown])


def _earlier(checked: CheckedStudy) -> str:
    """Say how many trials of each prior study can be mapped to this study's space."""
    if not checked.earlier:
        return ""
    lines, folders = [], checked.config.search.learn_from
    for folder, trials, placed in zip(
        folders, checked.earlier, checked.earlier_placed(), strict=True
    ):
        of_all = "" if placed == len(trials) else f"{placed} of "
        lines.append(f"{of_all}{count_text(len(trials), 'trial')} in {folder}")
    return _INDENT.join(lines)


def _workload(config: StudyConfig) -> str:
    workload = config.workload
    if workload is None:
        return "none: recorded runs"
    if workload.is_script:
        settings = workload.model_extra or {}
        return f"{workload.task}{', warm' if settings.get('warm') else ''}: {settings['command']}"
    parts = [workload.task]
    if (model := workload.model) is not None:
        parts.append(
            model.name_or_path
            or f"{(model.from_config or {})['model_type']}, from its configuration"
        )
    if (data := workload.dataset) is not None:
        files = ", ".join(Path(file).name for file in data.train_files or ())
        parts[-1] += f" on {data.builtin or data.name_or_path or files}"
    if workload.sequence_length is not None:
        parts.append(_lengths(workload.sequence_length, workload.model_extra or {}))
    return ", ".join([*parts, f"{count_text(workload.evaluations, 'evaluation')} a trial"])


def _lengths(sequence_length: int, settings: dict[str, Any]) -> str:
    target_length = settings.get("max_target_length")
    if target_length is None:
        return f"{count_text(sequence_length, 'token')} a sequence"
    return f"{count_text(sequence_length, 'token')} a source and {target_length} a target"


def _quality_source(config: StudyConfig) -> str:
    """Say where the quality of a script is read if the script does not report it."""
    source = (
        (config.workload.model_extra or {}).get("quality_from")
        if config.workload is not None
        else None
    )
    return (
        ""
        if source is None
        else f"by workload.quality_from: {QualitySource.model_validate(source)}"
    )


def _script_inputs(config: StudyConfig) -> str:
    """Name the files that a script's trials are known to read, and say what can't be known."""
    if config.workload is None or not config.workload.is_script:
        return ""
    folder = (config.workload.model_extra or {})["folder"]
    names = [os.path.relpath(file.path, folder) for file in input_files(config)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    named = ", ".join(names[:_MOST_NAMED]) or "no file that its command names"
    unknown = "if it opens files whose names it computes, list them in workload.files"
    template = ((config.workload.model_extra or {}).get("config_template") or {}).get("name", "")
    if not names and {".py", ".sh"} & set(PurePath(template).suffixes):  # `python {config}`
        named = template
        unknown = "edits of files that it imports are not noticed: list them in workload.files"
    elif not names:
        unknown = "edits of the script are not noticed: list it and its modules in workload.files"
    return _INDENT.join([f"{named}{more}", unknown])


def _columns(checked: CheckedStudy) -> str:
    """Name the columns of the data files that trials read and those that they don't, if any."""
    columns = checked.columns()
    if not columns.unread:
        return ""
    return f"the columns {quoted_names(columns.read)}; not {quoted_names(columns.unread)}"


def _carbon(checked: CheckedStudy) -> str:
    intensity, carbon = checked.intensity, checked.config.carbon
    source = ", ".join(part for part in (intensity.place, intensity.source) if part)
    counted = (
        "the GPUs' counters alone"
        if carbon.objective == "gpu"
        else "all that is measured and modelled"
    )
    lines = [
        f"{intensity.g_co2e_per_kwh:g} g CO2e/kWh ({source}), PUE {carbon.pue:g}; counts {counted}"
    ]
    if checked.trace is not None:
        length = count_text(len(checked.trace.g_co2e_per_kwh), "hour")
        hours = f"{length} from {checked.trace.start}"
        lines.append(f"prices the same joules at other hours by {checked.trace.source} ({hours})")
    return _INDENT.join(lines)


def _fractional(name: str, domain: Domain) -> str:
    """Say that a range between whole numbers has fractions, too, which a script may refuse."""
    if not isinstance(domain, Range) or is_integer(name, domain):
        return ""
    if domain.low == domain.high:
        return ""
    if domain.step is not None and not domain.step % 1:
        return ""
    return ", fractions too" if not domain.low % 1 and not domain.high % 1 else ""


def _space(space: SearchSpace, auto: AutoSpace | None, *, is_settled: bool) -> str:
    known = space.combinations
    count = (
        "infinitely many configurations"
        if known is None
        else f"{count_text(len(known), 'configuration')} that can exist"
    )
    if auto is None:
        dimensions = [
            f"{name}: {describe(dimension)}{_fractional(name, dimension)}"
            for name, dimension in space.dimensions.domains().items()
        ]
        return _INDENT.join([count, *dimensions])
    chosen = [
        f"{name}: {describe(space.dimensions[name])} ({why})" for name, why in auto.why.items()
    ]
    if is_settled:
        return _INDENT.join([f"{count}, chosen by carbonopt", *chosen])
    sure = known_before(auto.facts)
    shown = [line for name, line in zip(auto.why, chosen, strict=True) if name in sure]
    later = ", ".join(name for name in (*auto.why, *auto.left_out) if name not in sure)
    looked_at = "data, model and GPUs, which the preparation of `carbonopt run` looks at"
    return _INDENT.join(
        [f"chosen by carbonopt: {later} by {looked_at}; `check` shows them then. The rest:", *shown]
    )


def _left_out(auto: AutoSpace | None, *, is_settled: bool) -> str:
    if auto is None:
        return ""
    sure = auto.left_out.keys() if is_settled else known_before(auto.facts)
    return _INDENT.join(f"{name}: {why}" for name, why in auto.left_out.items() if name in sure)


def _confirmation(config: StudyConfig) -> str:
    confirm = config.confirm
    if confirm is None:
        return ""
    runs = count_text(confirm.most_repeats, "more run")
    baseline = ", the start's among them" if confirm.baseline else ""
    new = ", or new ones" if may_try_new(config) else ""
    return (
        f"at most {runs}{baseline}, which budget.trials does not count: the most promising"
        f" configurations again, each with up to {count_text(confirm.seeds, 'seed')}{new}"
    )


def _cost(checked: CheckedStudy) -> str:
    """Return the limit of a study's energy by its budget; only a trial shows what a step costs."""
    budget, power_w = checked.config.budget, checked.engine.max_power_w
    if power_w == 0:
        return "nothing: recorded energy is added up, none is used"
    carbon = checked.config.carbon
    bounds = [] if budget.energy_kwh is None else [(budget.energy_kwh, "")]
    if budget.emissions_kg_co2e is not None:
        of_one_kwh = emissions_kg_co2e(1.0, checked.intensity.g_co2e_per_kwh, carbon.pue)
        bounds.append((budget.emissions_kg_co2e / of_one_kwh, ""))
    if power_w is not None and budget.hours is not None:
        rest = "" if carbon.objective == "gpu" else ", and what the CPU and the RAM use meanwhile"
        of_gpus = f" in GPUs that draw up to {power_w:g} W{rest}"
        bounds.append((budget.hours * power_w / 1000, of_gpus))
    if not bounds:
        return "not known before the first trial: the budget limits the trials, not their energy"
    least_kwh, which = min(bounds)
    return f"at most about {least_kwh:.3g} kWh{which}"
