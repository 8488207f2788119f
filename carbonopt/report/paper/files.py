"""All files of the paper's folder."""

from carbonopt.record import StudyData
from carbonopt.report.facts import Facts
from carbonopt.report.paper.bibliography import bibliography
from carbonopt.report.paper.figures import figures
from carbonopt.report.paper.tables import tables
from carbonopt.report.paper.text import document, is_learned, methods, statement
from carbonopt.report.view import View


def paper_files(data: StudyData, facts: Facts, view: View) -> dict[str, bytes]:
    """Contents by file name: figure-*.pdf and .png, table-*.tex, methods.tex, statement.tex, references.bib, main.tex.

    What a study can't show has no file. The same data gives the same bytes.
    """
    drawn, tabled = figures(data, facts), tables(view)
    texts = {
        **{f"table-{name}.tex": text for name, text in tabled.items()},
        "methods.tex": methods(data, facts, view),
        "statement.tex": statement(data, facts, view),
        "references.bib": bibliography(data.config, learned=is_learned(facts)),
        "main.tex": document(view, list(drawn), list(tabled)),
    }
    pictures = {f"figure-{name}.{kind}": made for name, kinds in drawn.items() for kind, made in kinds.items()}
    return {**pictures, **{name: text.encode() for name, text in texts.items()}}
