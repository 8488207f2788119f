"""A model card for the Hugging Face hub: emissions, quality and origin as metadata, and the same in words.

The metadata's keys: https://huggingface.co/docs/hub/model-cards-co2 and https://huggingface.co/docs/hub/model-cards.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.config import Dataset, Model, Workload
from carbonopt.core.format import count_text, emissions_text, energy_text, intensity_text, params_text
from carbonopt.core.format import escape_markdown as escape
from carbonopt.core.study import Hardware, StudyData
from carbonopt.core.trial import COMPONENTS, TrialRecord
from carbonopt.core.units import GRAMS_PER_KG
from carbonopt.export.settings import as_yaml
from carbonopt.train.tasks.base import task_class


def model_card(
    data: StudyData, recommendation: Recommendation, record: TrialRecord, needed: Sequence[str], caveats: Sequence[str]
) -> str:
    """The card's text, for the README.md of the trained model. Emissions are those of the training window, PUE in, of
    one run, as recommended; of a configuration that was repeated with other seeds, means over them.

    `record`: the trial that train.py repeats; `needed`: what it reads, `data/NAME`; `caveats`: on the figures.
    """
    title, *words = map(escape, (data.config.name, *_words(data, recommendation), *caveats))
    words = [f"# {title}", *words, *_again(data, record, needed)]
    return f"---\n{as_yaml(_metadata(data, recommendation))}---\n\n" + "\n\n".join(words) + "\n"


def _metadata(data: StudyData, recommendation: Recommendation) -> dict[str, Any]:
    config, workload = data.config, data.config.workload
    metadata: dict[str, Any] = {"library_name": "transformers"}
    if workload is not None:
        metadata["pipeline_tag"] = task_class(workload.task).card.pipeline_tag
        if base := _hub_name(workload.model.name_or_path):
            metadata["base_model"] = base
        if hub := _hub_name(workload.dataset.name_or_path):
            metadata["datasets"] = [hub]
    if recommendation.emissions_kg_co2e is not None:
        emissions = {
            "emissions": _rounded(recommendation.emissions_kg_co2e * GRAMS_PER_KG, 3),
            "source": _source(data),
            "training_type": None if workload is None else _training_type(workload.model),
            "geographical_location": _place(data),
            "hardware_used": _hardware(data.provenance.hardware),
        }
        metadata["co2_eq_emissions"] = _known(emissions)
    if recommendation.value is not None and workload is not None:
        metadata["model-index"] = [_results(config.name, workload, recommendation.value)]
    return metadata


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _results(name: str, workload: Workload, value: float) -> dict[str, Any]:
    task, dataset = task_class(workload.task), workload.dataset
    judged_on = {
        "type": _hub_name(dataset.name_or_path) or "text",
        "name": _data_set(dataset),
        "config": dataset.config,
    }
    if dataset.name_or_path is not None:
        judged_on["split"] = dataset.eval_split
    measured = {
        "task": {"type": task.card.pipeline_tag, "name": task.card.pipeline_name},
        "dataset": _known(judged_on),
        "metrics": [{"type": task.quality.name, "value": _rounded(value, 4), "name": task.card.metric}],
    }
    return {"name": name, "results": [measured]}


def _words(data: StudyData, recommendation: Recommendation) -> list[str]:
    config, intensity, quality = data.config, data.provenance.intensity, recommendation.target.quality
    assert recommendation.params is not None  # of a study with a winner
    confidence = recommendation.confidence
    seeds = confidence.seeds if confidence else 1
    parts = []
    if config.workload is not None:
        model = config.workload.model.name_or_path
        origin = f"trained from {_shown_name(model) if model else 'random weights'}"
        size = f" of {data.prepared.model_parameters:,} parameters" if data.prepared else ""
        what = task_class(config.workload.task).card.trains
        parts.append(f"{what[0].upper()}{what[1:]}{size}, {origin} on {_data_set(config.workload.dataset)}.")
    mean_name = "geometric mean" if quality.value_of_mean == "exp" else "mean"
    parts.append(
        f"Its configuration ({params_text(recommendation.params)}) was chosen by carbonopt as the one with the lowest "
        f"emissions of training among those whose {quality.name} is {quality.bound_word} "
        f"{quality.text(recommendation.target.value)}, in a study of {count_text(len(data.records), 'trial')}. "
        f"It reached {quality.text(recommendation.value)}"
        + (f" ({mean_name} over {seeds} seeds)." if seeds > 1 else " (one run).")
        + (" That other seeds reach it, too, is not confirmed." if confidence and not confidence.confirmed else "")
    )
    mean = f", means over {seeds} seeds" if seeds > 1 else ""
    counted = "" if config.carbon.objective == "all" else " of the GPUs alone"
    parts.append(
        f"Training it once used {energy_text(recommendation.energy_kwh)}{counted} and emitted "
        f"{emissions_text(recommendation.emissions_kg_co2e)}{mean}: energy × "
        f"{intensity_text(intensity.g_co2e_per_kwh)} g CO2e/kWh × a PUE of {config.carbon.pue:.3g}. Set-up and "
        "evaluation are not in it; the whole study that found it emitted "
        f"{emissions_text(recommendation.study_emissions_kg_co2e)}."
    )
    return parts


def _again(data: StudyData, record: TrialRecord, needed: Sequence[str]) -> list[str]:
    """How to train it once more."""
    if not data.config.launch.trains:
        return ["The study replayed recorded runs and trained nothing itself, so that there is no train.py here: "
                "how those runs read their data and made their model is not known."]  # fmt: skip
    words = "In the folder that this card was written into, with a Python environment of its own:"
    if needed:
        listed = ", ".join(name.partition("/")[2] for name in needed)
        words = escape(
            f"Put the data ({listed}) into data/, in the folder that this card was written into, or give run.sh "
            "another one by --data FOLDER; before it trains it checks each file's size and sha256 (inputs.json has "
            "them). Then, there, with a Python environment of its own:"
        )
    return [
        "## Training it again",
        words,
        "```sh\npip install -r requirements.txt\n./run.sh\n```",
        escape(
            f"That repeats trial {record.trial} with its seed, {record.seed}, which reached "
            f"{record.quality.of.with_article} of {record.quality.of.text(record.value)}. "
            "Another seed gives another one."
        ),
    ]


def _source(data: StudyData) -> str:
    """How the energy is known, component by component, and the intensity that it is multiplied by."""
    config, intensity = data.config, data.provenance.intensity
    counted = ("gpu",) if config.carbon.objective == "gpu" else COMPONENTS
    sources = data.provenance.energy_source
    known = ", ".join(f"{name.upper()} {sources[name]}" for name in counted if name in sources)
    return (
        f"carbonopt with CodeCarbon; energy of the training window: {known or 'as recorded'}; "
        f"{intensity_text(intensity.g_co2e_per_kwh)} g CO2e/kWh ({intensity.source}), PUE {config.carbon.pue:.3g}"
    )


def _training_type(model: Model) -> str:
    return "pre-training" if model.from_config is not None else "fine-tuning"


def _place(data: StudyData) -> str | None:
    carbon = data.config.carbon
    given = (carbon.region, carbon.country) if carbon.country else (carbon.cloud_region, carbon.cloud_provider)
    return data.provenance.intensity.place or ", ".join(part for part in given if part) or None


def _hardware(hardware: Hardware | None) -> str | None:
    if hardware is None:
        return None
    if hardware.gpus:
        return ", ".join(f"{count} × {name}" for name, count in Counter(hardware.gpus).items())
    return f"{hardware.cpu}, {count_text(hardware.cpu_cores, 'core')}"


def _data_set(dataset: Dataset) -> str:
    """Its name for people; of files and folders without their path, which tells of their maker's machine."""
    if dataset.name_or_path is not None:
        return _shown_name(dataset.name_or_path)
    return dataset.builtin or ", ".join(Path(file).name for file in dataset.train_files or ())


def _hub_name(name: str | None) -> str | None:
    """The name, unless it is a local folder's: a study file that was read has those as absolute paths."""
    return None if name is None or Path(name).is_absolute() else name


def _shown_name(name: str) -> str:
    return _hub_name(name) or Path(name).name


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
