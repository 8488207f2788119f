"""The paper's text: what is filled into the templates. Figures and phrases are those of the report's other pages."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from carbonopt import __version__
from carbonopt.analysis.influence import NotKnown
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.config import Choices, Dimension, Fixed, ReplayLaunch, Workload
from carbonopt.core.format import count_text, emissions_text, energy_text, quality_text, value_text
from carbonopt.core.study import StudyData
from carbonopt.core.trial import COMPONENTS
from carbonopt.core.units import human_duration
from carbonopt.report.energy import is_counted
from carbonopt.report.facts import Facts
from carbonopt.report.paper.bibliography import dataset_key, sampler_key
from carbonopt.report.paper.escape import Tex, escape
from carbonopt.report.savings import at_equal_quality, interval_of, of_it_repeats, pays_back_from_to, trials_and_repeats
from carbonopt.report.study_text import SAMPLERS
from carbonopt.report.view import Table, View
from carbonopt.report.words import confidence

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


def methods(data: StudyData, facts: Facts, view: View) -> str:
    """What was searched, on what, how it was measured, what was found and what it can't tell."""
    rec, config = facts.recommendation, data.config
    return _rendered(
        "methods.tex",
        replayed=isinstance(config.launch, ReplayLaunch),
        version=__version__,
        model=_model(config.workload),
        dataset_key=_key(dataset_key(config.workload.dataset) if config.workload else None),
        sampler=config.search.sampler,
        sampler_key=_key(sampler_key(config)),
        sampler_text=SAMPLERS[config.search.sampler],
        seed=config.search.seed,
        looked_up=config.carbon.intensity_g_co2e_per_kwh is None,
        stated=_stated(view.provenance),
        target=quality_text(rec.target_perplexity),
        trials=_trials(rec),
        space=_listed([f"{name.replace('_', ' ')} {_values(dimension)}" for name, dimension in _space(data)]),
        confirm=config.confirm,
        # The result's own sentence has the spread and the saving's interval already.
        confidence=_beyond_the_result(confidence(rec), rec.confidence and rec.confidence.perplexity_bound),
        closure=view.closure,
        result=view.sentence or f"{view.headline} {view.answer[0]}",
        compared=_beyond_the_result(view.comparison.sentences, interval_of(facts.comparison)),
        learned=is_learned(facts),
        limits=(*view.limits, *_unknown(facts, view)),
    )


def statement(data: StudyData, facts: Facts, view: View) -> str:
    """Energy and emissions of the recommended run and of the search, where, for how long, and how they are known."""
    rec = facts.recommendation
    record = next((record for record in data.records if record.trial == rec.trial), None)
    known = data.provenance.energy_source
    ways = {
        how: [name.upper() for name in COMPONENTS if known.get(name) == how and is_counted(data, name)]
        for how in ("measured", "modelled")
    }
    return _rendered(
        "statement.tex",
        replayed=isinstance(data.config.launch, ReplayLaunch),
        met=rec.met,
        target=quality_text(rec.target_perplexity),
        run_energy=energy_text(rec.energy_kwh),
        run_emissions=emissions_text(rec.emissions_kg_co2e),
        run_took=human_duration(record.duration_s.total) if record and record.duration_s else None,
        confirmed=rec.confidence is None or rec.confidence.confirmed,
        seeds=rec.confidence.seeds if rec.confidence else 1,
        study_energy=energy_text(rec.study_energy_kwh),
        study_emissions=emissions_text(rec.study_emissions_kg_co2e),
        of_it_repeats=of_it_repeats(rec, with_energy=True),
        trials=trials_and_repeats(rec),
        pays_back=None if rec.break_even_runs is None else count_text(rec.break_even_runs, "run"),
        pays_back_from_to=pays_back_from_to(rec.break_even_interval),
        stated=_stated(view.provenance),
        measured=_listed(ways["measured"]),
        modelled=_listed(ways["modelled"]),
        no_gpu="gpu" not in known,
        unmeasured=_listed(list(map(str, facts.spent.unmeasured_trials))),
        baseline=rec.baseline,
        equal_quality=at_equal_quality(facts.comparison),
    )


def is_learned(facts: Facts) -> bool:
    """Whether it is known of an objective what the parameters do to it."""
    return not all(isinstance(one, NotKnown) for one in facts.influence)


def document(view: View, figures: list[str], tables: list[str]) -> str:
    """The document that has them all."""
    captions = {
        "pareto": ("Perplexity over emissions of each trial, and the Pareto front.", view.figure_note),
        "batch": ("An epoch's training over the global batch size.", *view.batch.sentences),
        "influence": ("Importance of each parameter for emissions and for perplexity.", *view.influence.sentences),
        "effects": ("Marginal effect of the parameters that matter most, with intervals.",),
        "returns": ("Diminishing returns inside one run.", *view.returns.sentences),
        "energy": (f"{view.by_phase.caption}.",),
    }
    return _rendered(
        "main.tex",
        name=view.name,
        figures={name: " ".join(part for part in captions[name] if part) for name in figures},
        tables=tables,
    )


def _beyond_the_result(sentences: tuple[str, ...], first_is_in_it: object) -> tuple[str, ...]:
    return sentences[1:] if first_is_in_it else sentences


def _rendered(template: str, **values: Any) -> str:
    return _ENVIRONMENT.get_template(template).render(values)


def _key(key: str | None) -> Tex | None:
    return None if key is None else Tex(key)


def _stated(provenance: Table) -> dict[str, str]:
    """The table of provenance as values by label."""
    return {label.text: value.text for label, value in provenance.rows}


def _model(workload: Workload | None) -> str:
    if workload is None:
        return ""
    if workload.model.name_or_path is not None:
        return workload.model.name_or_path
    settings = {**(workload.model.from_config or {})}
    kind = settings.pop("model_type")
    listed = ", ".join(f"{name} {value_text(value)}" for name, value in settings.items() if value is not None)
    return f"a {kind} of random weights" + (f" ({listed})" if listed else "")


def _space(data: StudyData) -> list[tuple[str, Dimension]]:
    """The dimensions that the study file names."""
    space = data.config.search.space
    return [(name, getattr(space, name)) for name in type(space).model_fields if getattr(space, name) is not None]


def _values(dimension: Dimension) -> str:
    if isinstance(dimension, Fixed):
        return f"{value_text(dimension.value)} (fixed)"
    if isinstance(dimension, Choices):
        return _listed(list(map(value_text, dimension.choices)), "or")
    ends = f"from {value_text(dimension.low)} to {value_text(dimension.high)}"
    return f"{ends}, on a logarithmic scale" if dimension.log else ends


def _trials(rec: Recommendation) -> str:
    """How many trials there were, and what became of them."""
    states = [f"{count:,} {state.value}" for state, count in rec.trials_by_state.items() if count]
    total = count_text(sum(rec.trials_by_state.values()), "trial")
    again = f", {rec.repeats} of them {'a repeat' if rec.repeats == 1 else 'repeats'} with other seeds"
    return f"{total}{again if rec.repeats else ''}" + (f" ({', '.join(states)})" if states else "")


def _unknown(facts: Facts, view: View) -> tuple[str, ...]:
    """Why there is no figure where there is none."""
    return (
        *(view.batch.sentences if facts.batch is None else ()),
        *(view.influence.sentences if not is_learned(facts) else ()),
        *(view.returns.sentences if facts.diminishing_returns is None else ()),
    )


def _listed(words: list[str], last: str = "and") -> str:
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1] if words else "") if part)
