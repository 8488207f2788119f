"""The paper's text: what is filled into the templates. Figures and phrases are those of the report's other pages."""

from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from carbonopt import __version__
from carbonopt.analysis.influence import NotKnown
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core import format as fmt
from carbonopt.core.config import Choices, Domain, Fixed, Workload
from carbonopt.core.study import StudyData
from carbonopt.core.trial import COMPONENTS
from carbonopt.core.units import human_duration
from carbonopt.report.document import Document, Level
from carbonopt.report.paper.bibliography import dataset_key, sampler_key
from carbonopt.report.render.tex import Tex, escape
from carbonopt.report.sections.citation import sentence
from carbonopt.report.sections.energy import is_counted
from carbonopt.report.sections.provenance import stated
from carbonopt.report.study_text import SAMPLERS
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import runs_text, trials_text

_ENVIRONMENT = Environment(  # noqa: S701 - `finalize` escapes for LaTeX, which autoescape can't
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


def methods(study: StudyView, document: Document) -> str:
    """What was searched, on what, how it was measured, what was found and what it can't tell."""
    data, rec, quality = study.data, study.recommendation, study.quality
    config = data.config
    return _rendered(
        "methods.tex",
        replayed=config.workload is None,
        version=__version__,
        model=_model(config.workload),
        dataset_key=_key(dataset_key(config.workload.dataset) if config.workload else None),
        quality=quality,
        definition=quality.definition,
        sampler=config.search.sampler,
        sampler_key=_key(sampler_key(config)),
        sampler_text=SAMPLERS[config.search.sampler],
        seed=config.search.seed,
        looked_up=config.carbon.intensity_g_co2e_per_kwh is None,
        stated=stated(data),
        target=quality.text(rec.target.value),
        trials=_trials(rec),
        space=_listed([f"{name.replace('_', ' ')} {_values(dimension)}" for name, dimension in _space(data)]),
        confirm=config.confirm,
        result=sentence(study) or f"{document.headline}.",
        learned=is_learned(study),
        caveats=[caveat.text for caveat in document.caveats],
    )


def statement(study: StudyView, document: Document) -> str:
    """Energy and emissions of the recommended run and of the search, where, for how long, and how they are known."""
    data, rec = study.data, study.recommendation
    record, known = study.record(rec.trial), data.provenance.energy_source
    ways = {
        how: [name.upper() for name in COMPONENTS if known.get(name) == how and is_counted(data, name)]
        for how in ("measured", "modelled")
    }
    repeated = f"{fmt.energy_text(rec.repeats_energy_kwh)}, or {fmt.emissions_text(rec.repeats_emissions_kg_co2e)}"
    return _rendered(
        "statement.tex",
        replayed=data.provenance.is_replay,
        met=rec.met,
        quality=study.quality,
        target=study.quality.text(rec.target.value),
        run_energy=fmt.energy_text(rec.energy_kwh),
        run_emissions=fmt.emissions_text(rec.emissions_kg_co2e),
        run_took=human_duration(record.duration_s.total) if record and record.duration_s else None,
        confirmed=rec.confidence is None or rec.confidence.confirmed,
        seeds=rec.confidence.seeds if rec.confidence else 1,
        study_energy=fmt.energy_text(rec.study_energy_kwh),
        study_emissions=fmt.emissions_text(rec.study_emissions_kg_co2e),
        repeated=f"{repeated} for {fmt.count_text(rec.repeats, 'repeat')} with other seeds" if rec.repeats else "",
        trials=trials_text(rec),
        pays_back=None if rec.break_even_runs is None else fmt.count_text(rec.break_even_runs, "run"),
        pays_back_interval=runs_text(rec.break_even_interval),
        stated=stated(data),
        measured=_listed(ways["measured"]),
        modelled=_listed(ways["modelled"]),
        no_gpu="gpu" not in known,
        unmeasured=_listed(list(map(str, study.spent.unmeasured_trials))),
        baseline=rec.baseline,
        caveats=[caveat.text for caveat in document.caveats if caveat.level is Level.CRITICAL and rec.met],
    )


def is_learned(study: StudyView) -> bool:
    """Whether it is known of an objective what the parameters do to it."""
    return not all(isinstance(part, NotKnown) for part in study.influence)


def main(document: Document, tables: Iterable[str]) -> str:
    """The document that has all figures and tables."""
    figures = {figure.name: figure.caption for figure in document.figures() if figure.paper}
    return _rendered("main.tex", name=document.name, figures=figures, tables=tables)


def _rendered(template: str, **values: Any) -> str:
    return _ENVIRONMENT.get_template(template).render(values)


def _key(key: str | None) -> Tex | None:
    return None if key is None else Tex(key)


def _model(workload: Workload | None) -> str:
    if workload is None:
        return ""
    if workload.model.name_or_path is not None:
        return workload.model.name_or_path
    settings = {**(workload.model.from_config or {})}
    kind = settings.pop("model_type")
    listed = ", ".join(f"{name} {fmt.value_text(value)}" for name, value in settings.items() if value is not None)
    return f"a {kind} of random weights" + (f" ({listed})" if listed else "")


def _space(data: StudyData) -> list[tuple[str, Domain]]:
    """The dimensions that the study file names."""
    space = data.config.search.space
    return list(space.domains().items())


def _values(dimension: Domain) -> str:
    if isinstance(dimension, Fixed):
        return f"{fmt.value_text(dimension.value)} (fixed)"
    if isinstance(dimension, Choices):
        return _listed(list(map(fmt.value_text, dimension.choices)), "or")
    ends = f"from {fmt.value_text(dimension.low)} to {fmt.value_text(dimension.high)}"
    return f"{ends}, on a logarithmic scale" if dimension.log else ends


def _trials(rec: Recommendation) -> str:
    """How many trials there were, and what became of them."""
    states = [f"{count:,} {state.value}" for state, count in rec.trials_by_state.items() if count]
    total = fmt.count_text(sum(rec.trials_by_state.values()), "trial")
    again = f", {rec.repeats} of them {'a repeat' if rec.repeats == 1 else 'repeats'} with other seeds"
    return f"{total}{again if rec.repeats else ''}" + (f" ({', '.join(states)})" if states else "")


def _listed(words: list[str], last: str = "and") -> str:
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1] if words else "") if part)
