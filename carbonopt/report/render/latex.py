"""Tables in LaTeX, by booktabs and tabularx: the report's own, as wide as a column or as the page."""

from collections.abc import Sequence

from carbonopt.report.document import Cell, Column, Document, Table
from carbonopt.report.render.tex import Tex, escape

MOST_ROWS = 30  # a longer table would leave its page
_LINE = 11  # characters of a column's head before it is broken
_LONG_FIGURE = 20  # characters; more is broken into lines
_MOST_FIGURES = 4  # columns of them beside a column of words that fit in a column of text


def tables(document: Document) -> dict[str, Tex]:
    """LaTeX by the name of the table, in the order of the document; those without rows are left out."""
    found: dict[str, list[Table]] = {}
    for table in document.tables():
        if table.paper:
            found.setdefault(table.paper, []).append(table)
    return {
        name: Tex("\n".join(_float(table, f"tab:{name}{i or ''}") for i, table in enumerate(parts)))
        for name, parts in found.items()
    }


def _float(table: Table, label: str) -> str:
    """As wide as a column of text where its figures leave room for words, else as wide as the page."""
    environment = "table" if sum(column.numeric for column in table.columns) <= _MOST_FIGURES else "table*"
    rows, left_out = _fitting(table.rows)
    note = " ".join(part for part in (table.note, left_out) if part)
    return "\n".join(
        [
            rf"\begin{{{environment}}}[htbp]",
            r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{escape(table.caption)}.}}\label{{{label}}}\par\smallskip",
            rf"\begin{{tabularx}}{{\linewidth}}{{@{{}}{_alignment(table)}@{{}}}}",
            r"\toprule",
            rf"{' & '.join(map(_head, table.columns))} \\",
            r"\midrule",
            *(rf"{' & '.join(map(_cell, row))} \\" for row in rows),
            r"\bottomrule",
            r"\end{tabularx}",
            *([rf"\par\smallskip\raggedright {escape(note)}"] if note else []),
            rf"\end{{{environment}}}",
            "",
        ]
    )


def _alignment(table: Table) -> str:
    """Figures at the right; words take what is left. A table of short figures alone is spread over the width."""
    longest = [max(len(row[i].text) for row in table.rows) for i in range(len(table.columns))]
    if all(column.numeric for column in table.columns) and max(longest) <= _LONG_FIGURE:
        return r"@{\extracolsep{\fill}}" + "r" * len(table.columns)
    words, long = r">{\raggedright\arraybackslash}X", r">{\raggedleft\arraybackslash}X"
    return "".join(
        words if not column.numeric else long if length > _LONG_FIGURE else "r"
        for column, length in zip(table.columns, longest, strict=True)
    )


def _head(column: Column) -> str:
    """In as many lines as it takes, where figures are below it."""
    if not column.numeric:
        return str(escape(column.label))
    lines: list[str] = []
    for word in escape(column.label).split(" "):
        if lines and len(lines[-1]) + len(word) < _LINE:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    broken = r" \\ ".join(lines)
    return rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{broken}\end{{tabular}}"


def _cell(cell: Cell) -> str:
    return rf"\textbf{{{escape(cell.text)}}}" if cell.strong else str(escape(cell.text))


def _fitting(rows: Sequence[Sequence[Cell]]) -> tuple[list[Sequence[Cell]], str]:
    """Of a long table evenly spread rows and every marked one, and a sentence that says so."""
    if len(rows) <= MOST_ROWS:
        return list(rows), ""
    spread = {round(k * (len(rows) - 1) / (MOST_ROWS - 1)) for k in range(MOST_ROWS)}
    kept = [row for i, row in enumerate(rows) if i in spread or any(cell.strong for cell in row)]
    return kept, "Some rows are left out here: data/report.json has them all."
