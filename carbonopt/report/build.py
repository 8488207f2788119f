"""Makes a report from a study's records and writes all of its files."""

from collections import Counter
from pathlib import Path

from pydantic_core import to_json  # many times as fast as Python's own where lines are indented

from carbonopt.analysis.amortisation import amortisation
from carbonopt.analysis.audit import audit
from carbonopt.analysis.batch import batch_effect
from carbonopt.analysis.by_target import recommendation_by_target
from carbonopt.analysis.comparison import comparison
from carbonopt.analysis.confidence import by_means
from carbonopt.analysis.diminishing_returns import diminishing_returns
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.front import knee
from carbonopt.analysis.influence import influence
from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.regions import regions
from carbonopt.analysis.replicates import repeats
from carbonopt.analysis.repricing import repricing
from carbonopt.analysis.stages import stages
from carbonopt.core.files import REPORT_JSON, replaced, write_bytes
from carbonopt.core.format import count_text
from carbonopt.core.study import StudyData
from carbonopt.energy.intensity import countries
from carbonopt.export import winner
from carbonopt.report import energy, influence_tables, limits, markdown, page, place, sections, tables, words
from carbonopt.report import stages as stage_tables
from carbonopt.report.cpu_contention import doubted, doubts_of_winner
from carbonopt.report.data import EVALUATIONS_CSV, TRIALS_CSV, TRIALS_PARQUET, data_files
from carbonopt.report.facts import Facts
from carbonopt.report.paper.files import NAMES as PAPER_NAMES
from carbonopt.report.paper.files import paper_files
from carbonopt.report.points import GROUPS, Scatter, scatter
from carbonopt.report.provenance import provenance
from carbonopt.report.targets import target_steps
from carbonopt.report.view import View

INDEX, MARKDOWN = "index.html", "report.md"
DATA_FOLDER, PAPER_FOLDER, WINNER_FOLDER = str(REPORT_JSON.parent), "paper", "winner"
NAMES = frozenset(  # of all that a report may have; whatever else lies in its folder is not ours
    [INDEX, MARKDOWN, str(REPORT_JSON)]
    + [f"{DATA_FOLDER}/{name}" for name in (TRIALS_CSV, TRIALS_PARQUET, EVALUATIONS_CSV)]
    + [f"{PAPER_FOLDER}/{name}" for name in PAPER_NAMES]
    + [f"{WINNER_FOLDER}/{name}" for name in winner.NAMES]
)


def facts_of(data: StudyData) -> Facts:
    """Runs every analysis, each once."""
    rec, found = recommend(data), stages(data)
    return Facts(
        recommendation=rec,
        recommendation_by_target=recommendation_by_target(data),
        knee=knee(by_means(data.records)),
        comparison=comparison(data, rec),
        influence=influence(data),
        batch=batch_effect(data),
        diminishing_returns=diminishing_returns(data, rec),
        spent=footprint(data),
        stages=found,
        amortisation=amortisation(data, rec, found),
        repeated=repeats(data.records),
        priced=repricing(data, rec),
        regions=regions(data, rec, countries()),
        audited=audit(data),
    )


def write_report(data: StudyData, folder: Path, *, winner_files: dict[str, str] | None = None) -> Path:
    """Writes the report into `folder` and returns its index.html; it takes the place of an older report there, whole,
    and files that are not a report's stay.

    `winner_files` are texts by file name to stand beside the generated ones in winner/: the recommended trial's
    ds_config.json. The same data gives the same bytes.

    Raises:
        BadInput: if the folder can't be replaced, or holds another study's report.
    """
    place.refuse(folder, data)
    facts = facts_of(data)
    rec = facts.recommendation
    plot = scatter(data, rec, facts.repeated)
    view = build_view(data, facts, plot)
    shown = view.model_dump(mode="json", exclude_defaults=True)
    paper = _below(PAPER_FOLDER, paper_files(data, facts, view, plot))
    again = winner.winner_files(
        data, rec, folder / WINNER_FOLDER, winner_files, doubts_of_winner(data, rec) if rec.trial is not None else ()
    )
    picture = f"{PAPER_FOLDER}/figure-pareto.png" if plot.points else None
    files = {
        INDEX: page.render(view, data, plot, facts, paper[picture] if picture else None).encode(),
        MARKDOWN: markdown.render(view, picture).encode(),
        str(REPORT_JSON): to_json({**place.identity(data), **facts.as_json(), "shown": shown}, indent=2) + b"\n",
        **_below(DATA_FOLDER, data_files(data.records)),
        **paper,
        **_below(WINNER_FOLDER, {name: text.encode() for name, text in again.items()}),
    }
    with replaced(folder, NAMES) as new:
        for name, content in files.items():
            write_bytes(new / name, content)
        if winner.SCRIPT in again:
            (new / WINNER_FOLDER / winner.SCRIPT).chmod(0o755)
    return folder / INDEX


def build_view(data: StudyData, facts: Facts, plot: Scatter) -> View:
    """Everything that the page and the Markdown show."""
    rec, spent, repeated, priced = facts.recommendation, facts.spent, facts.repeated, facts.priced
    trials, constant_settings = tables.trials(data, rec)
    return View(
        name=data.config.name,
        headline=words.headline(rec, facts.comparison),
        lead=" ".join((sections.lead(rec, facts.comparison), *doubted(data, rec))),
        met=rec.met,
        answer=(
            *words.answer(data, rec, repeated),
            *stage_tables.longer_runs_in_the_answer(facts.amortisation),
        ),
        tiles=words.tiles(rec, facts.comparison),
        sentence=words.sentence(data, rec, repeated, facts.comparison),
        figure_note=_figure_note(data, plot),
        targets=target_steps(data, facts.recommendation_by_target),
        influence=influence_tables.influence(facts.influence),
        batch=sections.batch(facts.batch),
        returns=sections.returns(facts.diminishing_returns),
        regions=sections.regions(facts.regions),
        comparison=sections.comparison(rec, facts.comparison),
        trade_offs=tables.trade_offs(data, rec),
        configuration=tables.configuration(rec),
        ready_to_use=words.ready_to_use(data, rec),
        constant_settings=constant_settings,
        trials=trials,
        audit=words.audited(data, facts.audited),
        repeats=tables.repeats(repeated, rec),
        by_phase=energy.by_phase(data, spent),
        by_state=energy.by_state(data, rec, spent),
        closure=words.closure(data, spent),
        by_stage=stage_tables.by_stage(facts.stages),
        longer_runs=stage_tables.longer_runs(facts.amortisation),
        speeds=stage_tables.speeds(facts.stages),
        stopped_early=stage_tables.stopped_early(facts.stages),
        by_component=energy.by_component(data, spent),
        readings=energy.readings(spent),
        components=energy.components(data),
        repricing=energy.repricing(data, rec, priced),
        no_repricing=energy.no_repricing(data, rec, priced),
        provenance=provenance(data),
        limits=limits.limits(data, rec, spent, repeated, priced),
        study_file=data.provenance.study_file,
    )


def _figure_note(data: StudyData, plot: Scatter) -> str:
    """Which trials the figure does not show, and why."""
    notes = []
    shown = {point.trial for point in plot.points} | {trial for trial, _ in plot.no_perplexity}
    without = Counter(record.state.value for record in data.records if record.trial not in shown)
    if without:
        listed = ", ".join(f"{count} {state}" for state, count in without.items())
        notes.append(f"Without a point, for want of an evaluation or of energy: {listed}.")
    if outside := plot.outside():
        notes.append(f"Outside the frame: {count_text(len(outside), 'trial')} that did not complete.")
    if hidden := sum(len(plot.of(group)) - len(plot.drawn(group)) for group in GROUPS):
        notes.append(
            f"Not drawn, because they would lie under other marks of their kind: {count_text(hidden, 'trial')}."
        )
    return " ".join(notes)


def _below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}
