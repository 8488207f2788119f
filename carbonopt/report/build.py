"""Makes a report from a study's records and writes all of its files."""

from pathlib import Path

from pydantic_core import to_json  # many times as fast as Python's own where lines are indented

from carbonopt.core.files import REPORT_JSON, replaced, write_bytes
from carbonopt.core.study import StudyData
from carbonopt.export import winner
from carbonopt.report import place
from carbonopt.report.assemble import whole
from carbonopt.report.data import EVALUATIONS_CSV, TRIALS_CSV, TRIALS_PARQUET, data_files
from carbonopt.report.document import Level
from carbonopt.report.paper.files import NAMES as PAPER_NAMES
from carbonopt.report.paper.files import paper_files
from carbonopt.report.render import html, json, markdown
from carbonopt.report.study_view import StudyView

INDEX, MARKDOWN = "index.html", "report.md"
DATA_FOLDER, PAPER_FOLDER, WINNER_FOLDER = str(REPORT_JSON.parent), "paper", "winner"
NAMES = frozenset(  # of all that a report may have; whatever else lies in its folder is not ours
    [INDEX, MARKDOWN, str(REPORT_JSON)]
    + [f"{DATA_FOLDER}/{name}" for name in (TRIALS_CSV, TRIALS_PARQUET, EVALUATIONS_CSV)]
    + [f"{PAPER_FOLDER}/{name}" for name in PAPER_NAMES]
    + [f"{WINNER_FOLDER}/{name}" for name in winner.NAMES]
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
    study = StudyView(data)
    document = whole(study)
    paper = paper_files(study, document)
    serious = [caveat.text for caveat in document.caveats if caveat.level is Level.CRITICAL]
    again = winner.winner_files(data, study.recommendation, folder / WINNER_FOLDER, winner_files, serious)
    pictures = {
        figure.name: f"{PAPER_FOLDER}/figure-{figure.name}.png" for figure in document.figures() if figure.paper
    }
    found = {**place.identity(data), **study.results(), "document": json.render(document)}
    files = {
        INDEX: html.render(document).encode(),
        MARKDOWN: markdown.render(document, pictures).encode(),
        str(REPORT_JSON): to_json(found, indent=2) + b"\n",
        **_below(DATA_FOLDER, data_files(data.records)),
        **_below(PAPER_FOLDER, paper),
        **_below(WINNER_FOLDER, {name: text.encode() for name, text in again.items()}),
    }
    with replaced(folder, NAMES) as new:
        for name, content in files.items():
            write_bytes(new / name, content)
        if winner.SCRIPT in again:
            (new / WINNER_FOLDER / winner.SCRIPT).chmod(0o755)
    return folder / INDEX


def _below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}
