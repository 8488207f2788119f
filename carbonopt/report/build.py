"""Makes a report from a study's records and writes all of its files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from carbonopt.analysis.audit import Audit, audit
from carbonopt.analysis.footprint import Footprint, footprint
from carbonopt.analysis.recommend import Recommendation, recommend
from carbonopt.analysis.repeats import Repeats, repeats
from carbonopt.analysis.repricing import Repricing, repricing
from carbonopt.paths import REPORT_JSON, write_bytes, write_json, write_text
from carbonopt.record import StudyData
from carbonopt.report import energy, figure, limits, markdown, page, tables, winner, words
from carbonopt.report.data import data_files
from carbonopt.report.points import Scatter, scatter
from carbonopt.report.provenance import provenance
from carbonopt.report.quantities import count_text
from carbonopt.report.view import View
from carbonopt.trial import Frozen

WINNER_FOLDER = "winner"


class Found(NamedTuple):
    """What the analysis of a study found."""

    rec: Recommendation
    spent: Footprint
    repeated: tuple[Repeats, ...]
    priced: Repricing | None
    audited: Audit | None


def write_report(data: StudyData, folder: Path, *, winner_files: dict[str, str] | None = None) -> Path:
    """Writes the report into `folder` and returns its index.html; an older report there is replaced file by file.

    `winner_files` are texts by file name to stand beside the generated ones in winner/: the recommended trial's
    ds_config.json. The same data gives the same bytes.
    """
    rec = recommend(data)
    found = Found(rec, footprint(data), repeats(data.records), repricing(data, rec), audit(data))
    plot = scatter(data, rec)
    view = build_view(data, found, plot)
    png = figure.render(plot, rec, "png")
    write_bytes(folder / "pareto.png", png)
    write_bytes(folder / "pareto.pdf", figure.render(plot, rec, "pdf"))
    write_json(folder / REPORT_JSON, _as_json(found, view))
    for name, content in data_files(data.records).items():
        write_bytes(folder / REPORT_JSON.parent / name, content)
    write_text(folder / "report.md", markdown.render(view))
    beside = folder / WINNER_FOLDER
    _write_winner(beside, winner.winner_files(data, rec, beside, winner_files))
    index = folder / "index.html"
    write_text(index, page.render(view, data, plot, rec, png))
    return index


def build_view(data: StudyData, found: Found, plot: Scatter) -> View:
    """Everything that the page and the Markdown show."""
    rec, spent, repeated, priced, audited = found
    trials, constant_settings = tables.trials(data, rec)
    return View(
        name=data.config.name,
        headline=words.headline(rec),
        met=rec.met,
        answer=words.answer(data, rec, repeated),
        tiles=words.tiles(rec),
        sentence=words.sentence(data, rec, repeated),
        figure_note=_figure_note(data, plot),
        trade_offs=tables.trade_offs(data, rec),
        configuration=tables.configuration(rec),
        constant_settings=constant_settings,
        trials=trials,
        audit=words.audited(data, audited),
        repeats=tables.repeats(repeated, rec),
        by_phase=energy.by_phase(data, spent),
        by_state=energy.by_state(data, rec, spent),
        closure=words.closure(data, spent),
        by_component=energy.by_component(data, spent),
        readings=energy.readings(spent),
        components=energy.components(data),
        repricing=energy.repricing(data, rec, priced),
        provenance=provenance(data),
        limits=limits.limits(data, rec, spent, repeated, priced),
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


def _as_json(found: Found, view: View) -> dict[str, Any]:
    """Figures in full precision, and `shown`: the texts that the page and the Markdown have."""

    def plain(value: Frozen) -> Any:
        return json.loads(value.model_dump_json())  # which has no infinity

    return {
        "recommendation": found.rec.as_json(),
        "footprint": plain(found.spent),
        "repeats": [plain(one) for one in found.repeated],
        "repricing": plain(found.priced) if found.priced is not None else None,
        "audit": plain(found.audited) if found.audited is not None else None,
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
