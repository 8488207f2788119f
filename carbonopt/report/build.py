"""Makes a report from a study's records and writes all of its files."""

from pathlib import Path

from pydantic_core import to_json  # many times as fast as Python's own where lines are indented

from carbonopt.core.files import REPORT_JSON, replaced, write_bytes
from carbonopt.core.study import StudyData
from carbonopt.export import winner
from carbonopt.report import place
from carbonopt.report.assemble import whole
from carbonopt.report.data import NAMES as DATA_NAMES
from carbonopt.report.data import data_files
from carbonopt.report.document import Level
from carbonopt.report.paper.files import NAMES as PAPER_NAMES
from carbonopt.report.paper.files import paper_files
from carbonopt.report.render import html, markdown
from carbonopt.report.study_view import StudyView

INDEX, MARKDOWN = "index.html", "report.md"
DATA_FOLDER, PAPER_FOLDER, WINNER_FOLDER = str(REPORT_JSON.parent), "paper", "winner"
FOLDERS = {DATA_FOLDER: DATA_NAMES, PAPER_FOLDER: PAPER_NAMES, WINNER_FOLDER: winner.NAMES}
# Of all that a report may have; whatever else lies in its folder is not ours.
NAMES = frozenset({INDEX, MARKDOWN, str(REPORT_JSON)} | {f"{at}/{name}" for at in FOLDERS for name in FOLDERS[at]})


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
    serious = [caveat.text for caveat in document.caveats if caveat.level is Level.CRITICAL]
    winner_texts = winner.winner_files(data, study.recommendation, folder / WINNER_FOLDER, winner_files, serious)
    folders = {
        DATA_FOLDER: data_files(data.records),
        PAPER_FOLDER: paper_files(study, document),
        WINNER_FOLDER: {name: text.encode() for name, text in winner_texts.items()},
    }
    pictures = {figure.name: f"{PAPER_FOLDER}/figure-{figure.name}.png" for figure in document.paper_figures()}
    results = {"study": place.identity(data), **study.results(), "document": document.as_json()}
    files = {
        INDEX: html.render(document).encode(),
        MARKDOWN: markdown.render(document, pictures).encode(),
        str(REPORT_JSON): to_json(results, indent=2) + b"\n",
        **{f"{at}/{name}": content for at, contents in folders.items() for name, content in contents.items()},
    }
    with replaced(folder, NAMES) as new:
        for name, content in files.items():
            write_bytes(new / name, content)
        if winner.SCRIPT in winner_texts:
            (new / WINNER_FOLDER / winner.SCRIPT).chmod(0o755)
    return folder / INDEX
