"""All files of the paper's folder."""

import re

from carbonopt.record import StudyData
from carbonopt.report.facts import Facts
from carbonopt.report.paper.bibliography import bibliography
from carbonopt.report.paper.figures import figures
from carbonopt.report.paper.tables import tables
from carbonopt.report.paper.text import document, is_learned, methods, statement
from carbonopt.report.points import Scatter
from carbonopt.report.view import View

_FIGURES = ("pareto", "batch", "influence", "effects", "returns", "energy")
_TABLES = ("configuration", "pareto", "energy", "influence")
NAMES = (  # all that there may be
    *(f"figure-{name}.{kind}" for name in _FIGURES for kind in ("pdf", "png")),
    *(f"table-{name}.tex" for name in _TABLES),
    "methods.tex",
    "statement.tex",
    "references.bib",
    "main.tex",
)

# A number as Python writes it, standing by itself: not a part of a name, a path or a command.
_POWER = re.compile(
    r"(?<![\w.\\/-])(?P<sign>-?|\$-\$)(?P<digits>\d(?:\.\d+)?)e(?P<minus>-?)\+?0*(?P<power>\d+)(?![\w/-]|\.\d)"
)


def paper_files(data: StudyData, facts: Facts, view: View, plot: Scatter) -> dict[str, bytes]:
    """Contents by file name: figure-*.pdf and .png, table-*.tex, methods.tex, statement.tex, references.bib, main.tex.

    What a study can't show has no file. The same data gives the same bytes.
    """
    drawn, tabled = figures(facts, plot), tables(view)
    texts = {
        **{f"table-{name}.tex": text for name, text in tabled.items()},
        "methods.tex": methods(data, facts, view),
        "statement.tex": statement(data, facts, view),
        "references.bib": bibliography(data.config, learned=is_learned(facts)),
        "main.tex": document(view, list(drawn), list(tabled)),
    }
    pictures = {f"figure-{name}.{kind}": made for name, kinds in drawn.items() for kind, made in kinds.items()}
    return {**pictures, **{name: _with_powers(name, text).encode() for name, text in texts.items()}}


def _with_powers(name: str, text: str) -> str:
    """Numbers such as 1e-05 as powers of ten."""
    if not name.endswith(".tex"):
        return text
    return _POWER.sub(r"\g<sign>$\g<digits>\\times10^{\g<minus>\g<power>}$", text)
