"""The paper's text and its references.

Numbers and phrases are those of the report's other pages.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from carbonopt import __version__
from carbonopt.analysis.confirmation import SAVING_WIDTH, may_try_new
from carbonopt.analysis.influence import NotKnown
from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.core import format as fmt
from carbonopt.core.trial import COMPONENTS, TrialState
from carbonopt.core.units import human_duration
from carbonopt.report.document import Document, Level
from carbonopt.report.paper.references import references
from carbonopt.report.render.latex import Tex, escape
from carbonopt.report.sections.citation_section import sentence
from carbonopt.report.sections.energy_section import is_counted
from carbonopt.report.sections.provenance_section import stated
from carbonopt.report.study_text import SAMPLERS, trials_text, unfinished_texts
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import runs_of_value, runs_text, saving_confidence_text
from carbonopt.spec.space_settings import Choices, Domain, Fixed
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.workload_settings import Model

# `finalize` escapes for LaTeX, which autoescape can't.
_ENVIRONMENT = Environment(  # noqa: S701
    loader=PackageLoader("carbonopt.report.paper"),
    block_start_string="<%",
    block_end_string="%>",
    variable_start_string="<<",
    variable_end_string=">>",
    comment_start_string="<#",
    comment_end_string="#>",
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
    finalize=lambda value: value if isinstance(value, Tex) else escape(value),
)

_OF_SAMPLER = {
    "carbon": "carbonopt",
    "tpe": "bergstra2011tpe",
    "nsga2": "deb2002nsga2",
    "random": "bergstra2012random",
}
_OF_SAMPLER |= dict.fromkeys(("gp", "grid"), "akiba2019optuna")  # their paper is Optuna's
_OF_TRAINING = ("wolf2020transformers", "rasley2020deepspeed", "rajbhandari2020zero")
# References of data sets, by a part of the data set's name.
_OF_DATA = {
    "wikitext": "merity2017wikitext",
    "shakespeare": "karpathy2015unreasonable",
}

_THE = {"gpu": "the GPUs", "cpu": "the CPU", "ram": "RAM"}


def methods(study: StudyView, document: Document) -> str:
    """Return the text on methods and results.

    It says what was searched on what, how it was measured, what was found, and what it can't tell.
    """
    config, domains = study.data.config, study.data.config.search.space.domains()
    return _rendered(
        "methods.tex",
        study,
        version=__version__,
        config=config,
        replayed=config.workload is None,
        model=_model(config.workload.model) if config.workload and config.workload.model else "",
        dataset_key=Tex(_dataset_key(config) or ""),
        sampler_key=Tex(_OF_SAMPLER[config.search.sampler]),
        sampler_text=SAMPLERS[config.search.sampler],
        trials=_trials(study.data),
        space=_listed(
            [f"{name.replace('_', ' ')} {_values(domain)}" for name, domain in domains.items()]
        ),
        result=sentence(study) or f"{document.headline}.",
        learned=is_learned(study),
        may_try_new=may_try_new(config),
        saving_width=SAVING_WIDTH,
        whole_processes=counts_whole_processes(study.data),
        logarithmic=study.quality.value_of_mean == "exp",
        counts_gpus=_counts_gpus(study.data),
        caveats=[caveat.finding for caveat in document.caveats],
    )


def statement(study: StudyView, document: Document) -> str:
    """Return the statement on energy and emissions of the recommended run and of the search.

    It says where and for how long they ran, and how the figures are known.
    """
    data, rec = study.data, study.recommendation
    record, known = study.record(rec.trial), data.provenance.energy_source
    replayed = data.provenance.is_replay  # recorded runs have the time of their steps alone
    counted = [name for name in COMPONENTS if is_counted(data, name)]
    return _rendered(
        "statement.tex",
        study,
        replayed=replayed,
        took=None if record is None else record.duration_s,
        whole_processes=counts_whole_processes(data),
        duration=human_duration,
        confirmed=rec.confidence is None or rec.confidence.confirmed,
        seeds=rec.seeds,
        trials=trials_text(data.records),
        draft=data.ended is None,
        pays_back_interval=runs_text(rec.break_even_interval),
        measured=_listed([_THE[name] for name in counted if known.get(name) == "measured"]),
        modelled=_listed([_THE[name] for name in counted if known.get(name) == "modelled"]),
        no_gpu="gpu" not in known,
        unmeasured=_listed(list(map(str, study.spent.unmeasured_trials))),
        caveats=_critical(document) if rec.met else (),
    )


def _critical(document: Document) -> list[str]:
    return [caveat.finding for caveat in document.caveats if caveat.level is Level.CRITICAL]


def checklist(study: StudyView, document: Document) -> str:
    """Return drafts of the answers on compute, significance and code that NeurIPS asks for."""
    data, rec = study.data, study.recommendation
    runs = (*data.records, *data.probes)
    # Probes of a few steps are no runs.
    took_s = [run.duration_s.total for run in data.records if run.duration_s is not None]
    memory_gib = [run.peak_memory_gib for run in runs if run.peak_memory_gib is not None]
    record, hardware, sure = study.record(rec.trial), data.provenance.hardware, rec.confidence
    return _rendered(
        "checklist.tex",
        study,
        draft=data.ended is None,
        replayed=data.provenance.is_replay,
        gpu_memory_gib=hardware.gpu_memory_gib if hardware else None,
        peak_memory_gib=max(memory_gib, default=None),
        run_s=(min(took_s), max(took_s)) if took_s else None,
        winner_s=record.duration_s.total if record and record.duration_s else None,
        work=study.work,
        duration=human_duration,
        runs=_runs(study),
        reached=(
            None
            if not rec.met
            else runs_of_value(study.quality, rec.seeds, sure.value_bound if sure else None)
        ),
        bounded=sure is not None and sure.value_bound is not None,
        interval=rec.saving_interval and saving_confidence_text(study),
        caveats=_critical(document) if rec.met else (),
    )


def _runs(study: StudyView) -> str:
    """Count the study's runs, its trials and repeats by state, too."""
    data = study.data
    counts = Counter(record.state for record in data.records)
    states = [f"{counts[state]:,} {state.value}" for state in TrialState if counts[state]]
    runs = fmt.run_counts_text(*data.run_counts)
    kinds = "trials and repeats" if study.recommendation.repeats else "trials"
    return f"{runs}; of the {kinds}, {_listed(states)}" if states else runs


def is_learned(study: StudyView) -> bool:
    """Return whether the parameters' effect on any objective is known."""
    return not all(isinstance(part, NotKnown) for part in study.influence)


def main(document: Document, tables: Iterable[str]) -> str:
    return _ENVIRONMENT.get_template("main.tex").render(document=document, tables=tables)


def _rendered(template: str, study: StudyView, **values: Any) -> str:
    return _ENVIRONMENT.get_template(template).render(
        values,
        fmt=fmt,
        rec=study.recommendation,
        quality=study.quality,
        target=study.quality.target_text(study.recommendation.target.value),
        stated=stated(study.data),
    )


def _model(model: Model) -> str:
    if model.name_or_path is not None:
        return fmt.source_text(model.name_or_path)
    settings = dict(model.from_config or {})
    kind = settings.pop("model_type")
    listed = ", ".join(
        f"{name} {fmt.value_text(value)}" for name, value in settings.items() if value is not None
    )
    return f"a {kind} of random weights" + (f" ({listed})" if listed else "")


def _values(domain: Domain) -> str:
    if isinstance(domain, Fixed):
        return f"{fmt.value_text(domain.value)} (fixed)"
    if isinstance(domain, Choices):
        return _listed(list(map(fmt.value_text, domain.choices)), "or")
    ends = f"from {fmt.value_text(domain.low)} to {fmt.value_text(domain.high)}"
    if domain.step is not None:
        return f"{ends} in steps of {fmt.value_text(domain.step)}"
    return f"{ends}, on a logarithmic scale" if domain.log else ends


def _trials(data: StudyData) -> str:
    finished = [record for record in data.records if record.has_finished]
    counts = Counter(record.state for record in finished)
    states = [f"{counts[state]:,} {state.value}" for state in TrialState if counts[state]]
    total = fmt.count_text(len(finished), "trial")
    repeats = sum(record.repeat_of is not None for record in finished)
    again = f", {repeats} of them {'a repeat' if repeats == 1 else 'repeats'} with other seeds"
    text = f"{total}{again if repeats else ''}" + (f" ({', '.join(states)})" if states else "")
    return " and ".join([text, *unfinished_texts(data.records)])


def _listed(words: list[str], last: str = "and") -> str:
    return f" {last} ".join(
        part for part in (", ".join(words[:-1]), words[-1] if words else "") if part
    )


def _dataset_key(config: StudyConfig) -> str | None:
    """Return the reference of a data set that is known by its name, else None."""
    dataset = None if config.workload is None else config.workload.dataset
    if dataset is None:
        return None
    if dataset.builtin is not None:
        return dataset.builtin
    names = [dataset.name_or_path or "", *(Path(file).name for file in dataset.train_files or ())]
    keys = (key for part, key in _OF_DATA.items() if any(part in name.lower() for name in names))
    return next(keys, None)


def _counts_gpus(data: StudyData) -> bool:
    """Return whether NVML's counters gave the energy of the GPUs."""
    return data.provenance.energy_source.get("gpu") == "measured"


def bibliography(data: StudyData, *, learned: bool) -> str:
    """Return the BibTeX file with what the text cites.

    The tools of training are cited where a model was trained, and so not in a replay.

    Args:
        data: The study.
        learned: Whether what each parameter does is known.
    """
    config = data.config
    wanted = {
        "carbonopt",
        "akiba2019optuna",
        "courty2024codecarbon",
        _OF_SAMPLER[config.search.sampler],
    }
    if config.workload is not None and config.workload.model is not None:
        wanted |= {*_OF_TRAINING, _dataset_key(config) or ""}
    if learned:
        wanted.add("pedregosa2011scikit")
    if _counts_gpus(data):
        wanted.add("nvml")
    return references(wanted, data)
