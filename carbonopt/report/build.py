"""Makes a report from a study's records and writes all of its files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from carbonopt.analysis.footprint import Footprint, footprint
from carbonopt.analysis.recommend import Recommendation, recommend
from carbonopt.paths import write_bytes, write_json, write_text
from carbonopt.record import StudyData
from carbonopt.report import figure, markdown, page, tables, winner, words
from carbonopt.report.points import Scatter, scatter
from carbonopt.report.provenance import provenance
from carbonopt.report.quantities import count_text
from carbonopt.report.view import View

WINNER_FOLDER = "winner"


def write_report(data: StudyData, folder: Path, *, winner_files: dict[str, str] | None = None) -> Path:
    """Writes the report into `folder` and returns its index.html; an older report there is replaced file by file.

    `winner_files` are texts by file name to stand beside the generated ones in winner/: the recommended trial's
    ds_config.json. The same data gives the same bytes.
    """
    rec, spent = recommend(data), footprint(data)
    plot = scatter(data, rec)
    view = build_view(data, rec, spent, plot)
    png = figure.render(plot, rec, "png")
    write_bytes(folder / "pareto.png", png)
    write_bytes(folder / "pareto.pdf", figure.render(plot, rec, "pdf"))
    write_json(folder / "report.json", _as_json(rec, spent, view))
    write_text(folder / "report.md", markdown.render(view))
    beside = folder / WINNER_FOLDER
    _write_winner(beside, winner.winner_files(data, rec, beside, winner_files))
    index = folder / "index.html"
    write_text(index, page.render(view, data, plot, rec, png))
    return index


def build_view(data: StudyData, rec: Recommendation, spent: Footprint, plot: Scatter) -> View:
    """Everything that the page and the Markdown show."""
    trials, constant_settings = tables.trials(data, rec)
    return View(
        name=data.config.name,
        headline=words.headline(rec),
        met=rec.met,
        answer=words.answer(rec),
        tiles=words.tiles(rec),
        sentence=words.sentence(data, rec),
        figure_note=_figure_note(data, plot),
        trade_offs=tables.trade_offs(data, rec),
        configuration=tables.configuration(rec),
        constant_settings=constant_settings,
        trials=trials,
        by_phase=tables.by_phase(data, spent),
        by_state=tables.by_state(data, rec, spent),
        by_component=tables.by_component(data, spent),
        closure=words.closure(spent),
        provenance=provenance(data),
        limits=words.limits(data, rec, spent),
        study_file=data.provenance.study_file,
    )


def _figure_note(data: StudyData, plot: Scatter) -> str:
    """Which trials the figure does not show, and why."""
    notes = []
    shown = {point.trial for point in plot.points}
    hidden = Counter(record.state.value for record in data.records if record.trial not in shown)
    if hidden:
        listed = ", ".join(f"{count} {state}" for state, count in hidden.items())
        notes.append(f"Without a point, for want of an evaluation or of energy: {listed}.")
    if outside := plot.outside():
        notes.append(f"Outside the frame: {count_text(len(outside), 'stopped trial')}.")
    return " ".join(notes)


def _as_json(rec: Recommendation, spent: Footprint, view: View) -> dict[str, Any]:
    """Figures in full precision, and `shown`: the texts that the page and the Markdown have."""
    return {
        "recommendation": rec.as_json(),
        "footprint": json.loads(spent.model_dump_json()),
        "shown": view.model_dump(mode="json"),
    }


def _write_winner(folder: Path, files: dict[str, str]) -> None:
    for name in winner.NAMES:  # of an older report; whatever else lies there is not ours
        if name not in files:
            (folder / name).unlink(missing_ok=True)
    for name, text in files.items():
        write_text(folder / name, text)
    if winner.SCRIPT in files:
        (folder / winner.SCRIPT).chmod(0o755)
