"""A model card for the Hugging Face hub.

It has emissions, quality and origin as metadata, and the same in words. The metadata's keys:
https://huggingface.co/docs/hub/model-cards-co2 and https://huggingface.co/docs/hub/model-cards.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from carbonopt.analysis.recommend import Recommendation, cheaper_but_unsure
from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.core import format as fmt
from carbonopt.core.format import escape_markdown
from carbonopt.core.trial import COMPONENTS, TrialRecord
from carbonopt.core.units import GRAMS_PER_KG
from carbonopt.export.settings import as_yaml
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import Hardware, StudyData
from carbonopt.spec.workload_settings import Dataset, Workload
from carbonopt.train.tasks.script import Script
from carbonopt.train.tasks.task import Card, task_for


def model_card(
    data: StudyData,
    recommendation: Recommendation,
    record: TrialRecord,
    needed: Sequence[str] | None,
    caveats: Sequence[str],
) -> str:
    """Return the card's text, for the README.md of the trained model.

    Emissions are those of the training window, with PUE, of one run, as recommended. For a
    configuration that was repeated with other seeds they are means over its runs.

    Args:
        record: the trial that train.py repeats.
        needed: the names of the files that train.py reads, as `data/NAME`; None: the card stands
            alone, without train.py and run.sh, and does not say how to train again.
        caveats: sentences on the figures.
    """
    text = _TEMPLATE.render(
        data=data,
        rec=recommendation,
        record=record,
        quality=recommendation.target.quality,
        seeds=recommendation.seeds,
        passed_over=cheaper_but_unsure(data, recommendation),
        stands_alone=needed is None,
        needed=[name.partition("/")[2] for name in needed or ()],
        caveats=caveats,
        command=_command(data.config.workload, record),
        whole_processes=counts_whole_processes(data),
    )
    return f"---\n{as_yaml(_metadata(data, recommendation))}---\n\n{text}"


def _command(workload: Workload | None, record: TrialRecord) -> str | None:
    """Return a script's command with the trial's values; None if there is no script."""
    task = None if workload is None else task_for(workload.model_dump(mode="json"))
    if not isinstance(task, Script):
        return None
    return task.shown(record.params, record.seed, record.trial)


def _metadata(data: StudyData, recommendation: Recommendation) -> dict[str, Any]:
    config, workload = data.config, data.config.workload
    # Which model a script or a recorded run trained, and with which library, is not known.
    of_library = None if config.is_script else workload
    metadata: dict[str, Any] = {}
    if of_library is not None:
        metadata["library_name"] = "transformers"
        metadata["pipeline_tag"] = card_of(of_library).pipeline_tag
        named = {
            key: hub for key, name in of_library.names_or_paths.items() if (hub := hub_name(name))
        }
        metadata |= known(base_model=named.get("model"))
        if "dataset" in named:
            metadata["datasets"] = [named["dataset"]]
    if recommendation.emissions_kg_co2e is not None:
        from_scratch = (
            workload is not None
            and workload.model is not None
            and workload.model.from_config is not None
        )
        training_type = "pre-training" if from_scratch else "fine-tuning"
        metadata["co2_eq_emissions"] = known(
            emissions=_rounded(recommendation.emissions_kg_co2e * GRAMS_PER_KG, 3),
            source=_source(data),
            training_type=training_type if workload and workload.model else None,
            geographical_location=_place(data),
            hardware_used=_hardware(data.provenance.hardware),
        )
    if recommendation.value is not None and of_library is not None:
        metadata["model-index"] = [_results(config, of_library, recommendation.value)]
    return metadata


def card_of(workload: Workload) -> Card:
    """Return the hub's terms for a workload's task."""
    return task_for(workload.model_dump(mode="json")).card


def known(**values: Any) -> dict[str, Any]:
    """Return the values that are known, by name."""
    return {key: value for key, value in values.items() if value is not None}


def _results(config: StudyConfig, workload: Workload, value: float) -> dict[str, Any]:
    card, dataset, quality = card_of(workload), workload.dataset, config.quality
    measured: dict[str, Any] = {"task": {"type": card.pipeline_tag, "name": card.pipeline_name}}
    if dataset is not None:
        content = "image" if card.pipeline_tag.startswith("image") else "text"
        kind, split = (
            hub_name(dataset.name_or_path) or content,
            dataset.eval_split if dataset.name_or_path else None,
        )
        measured["dataset"] = known(
            type=kind, name=_data_set(dataset), config=dataset.config, split=split
        )
    measured["metrics"] = [
        {"type": quality.name, "value": _rounded(value, 4), "name": quality.label}
    ]
    return {"name": config.name, "results": [measured]}


def _source(data: StudyData) -> str:
    """Return how each component's energy is known, and the intensity that multiplies it."""
    carbon, intensity, sources = (
        data.config.carbon,
        data.provenance.intensity,
        data.provenance.energy_source,
    )
    counted = ("gpu",) if carbon.objective == "gpu" else COMPONENTS
    known = ", ".join(f"{name.upper()} {sources[name]}" for name in counted if name in sources)
    measured_by = "carbonopt" if data.provenance.is_replay else "carbonopt with CodeCarbon"
    return (
        f"{measured_by}; energy of the training window: {known or 'as recorded'};"
        f" {fmt.intensity_text(intensity.g_co2e_per_kwh)} g CO2e/kWh ({intensity.source}), PUE"
        f" {carbon.pue:.3g}"
    )


def _place(data: StudyData) -> str | None:
    carbon = data.config.carbon
    given = (
        (carbon.region, carbon.country)
        if carbon.country
        else (carbon.cloud_region, carbon.cloud_provider)
    )
    return data.provenance.intensity.place or ", ".join(part for part in given if part) or None


def _hardware(hardware: Hardware | None) -> str | None:
    if hardware is None:
        return None
    machines = f", on {hardware.nodes} machines" if hardware.nodes > 1 else ""
    if hardware.gpus:
        return ", ".join(fmt.counted_names(hardware.gpus)) + machines
    return f"{hardware.cpu}, {fmt.count_text(hardware.cpu_cores, 'core')}{machines}"


def _data_set(dataset: Dataset) -> str:
    """Return the data set's name for people.

    Files and folders have no path, as it would reveal their maker's machine.
    """
    if dataset.name_or_path is not None:
        return fmt.source_text(dataset.name_or_path)
    return dataset.builtin or ", ".join(Path(file).name for file in dataset.train_files or ())


def hub_name(name: str | None) -> str | None:
    """Return a name, unless it is a local folder's.

    A study file that was read has local folders as absolute paths.
    """
    return None if name is None or Path(name).is_absolute() else name


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


_ENVIRONMENT = Environment(  # noqa: S701 – `finalize` escapes for Markdown, which autoescape can't
    loader=PackageLoader("carbonopt", "export"),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
    finalize=lambda value: escape_markdown(str(value)),
)
_ENVIRONMENT.globals |= {"fmt": fmt, "card": card_of, "data_set": _data_set}
_TEMPLATE = _ENVIRONMENT.get_template("model_card.md")
