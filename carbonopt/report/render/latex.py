"""Any text, and the report's tables, as LaTeX.

Nothing that a user named becomes a command, and pdflatex has a glyph for every character. Tables
use booktabs and tabularx, and are as wide as a column or as the page.
"""

import re
import textwrap
import unicodedata
from collections.abc import Sequence

from carbonopt.report.document import Cell, Column, Document, Table

# The characters beside ASCII that T1 and TS1 hold and for which the Times of a stock TeX has
# glyphs; t1enc.dfu and ts1enc.dfu declare them.
_LETTERS = {chr(code) for code in range(0xC0, 0x17F)} - set("ĦħĸĿŀŉŦŧ")
_SIGNS = set("¡¢£¤¥§©ª«¬®°±²³µ¶·¸¹º»¼½¾¿–—‘’‚“”„…‰€×÷†‡•™")
_SHOWN = _LETTERS | _SIGNS

_COMMANDS = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "`": r"\`{}",  # alone it would be a quotation mark
    # A second one behind it would make it a quotation mark or a dash.
    **{sign: sign + "{}" for sign in "'-<>,"},
    # Behind the \\ of a table's row it would belong to that command.
    **{sign: f"{{{sign}}}" for sign in "[*"},
    **{sign: "\\" + sign for sign in "%&$#{}"},
    "_": r"\_\allowbreak{}",
}
_LIGATURES = re.compile(r"([-<>,'])\{\}(?!\1)")  # followed by another sign, it needs no braces
_MINUS = re.compile(r"(?<![\w.}-])-(?=\d)")  # a number's minus sign; a hyphen would be too short
# Characters of one word. A longer word may be broken after each of so many characters, to stay
# inside a column.
_UNBROKEN = 24
_LONG_WORD = re.compile(rf"[^\s-]{{{_UNBROKEN}}}(?=[^\s-])")
_BREAK = "\N{ZERO WIDTH SPACE}"
_UNIT = re.compile(
    r"(?<=\d) (?=(?:\\%|kWh|k?J|[km]?g|GiB|W)(?!\w))|(?<=g) (?=CO2e)|(?<=±) (?=\d)|(?<=\d) (?=±)"
)

MOST_ROWS = 30  # rows; a longer table would leave its page
_LINE = 11  # characters in one line of a column's head
_LONG_FIGURE = 20  # characters; a longer figure is broken into lines
_MOST_FIGURES = 4  # columns of figures that fit in a column of text, beside one of words


class Tex(str):
    """A text that is LaTeX already."""


def escape(text: object) -> Tex:
    """Return a text as LaTeX on one line.

    A figure and its unit stay together. A character that T1 lacks is shown without its accent, else
    by its code point, such as [U+6F22]. Long words may be broken.
    """
    one_line = " ".join(str(text).replace(_BREAK, "").split())
    plain = "".join(map(_shown, one_line))
    breakable = _LONG_WORD.sub(lambda match: match.group() + _BREAK, plain)
    escaped = _LIGATURES.sub(r"\1", "".join(_COMMANDS.get(sign, sign) for sign in breakable))
    signed = _MINUS.sub("$-$", escaped)
    united = re.sub(r"\bCO2e\b", r"CO\\textsubscript{2}e", _UNIT.sub("~", signed))
    return Tex(united.replace(_BREAK, r"\allowbreak{}"))


def _shown(sign: str) -> str:
    if " " <= sign <= "~" or sign in _SHOWN:
        return sign
    simpler = "".join(
        part for part in unicodedata.normalize("NFKD", sign) if not unicodedata.combining(part)
    )
    if simpler and simpler != sign:
        return "".join(map(_shown, simpler))
    return f"[U+{ord(sign):04X}]" if sign.isprintable() else ""


def tables(document: Document) -> dict[str, Tex]:
    """Return the LaTeX of the paper's tables by their names, in the order of the document.

    Tables without rows are left out.
    """
    paper_tables = [table for table in document.tables() if table.paper]
    parts = {
        name: [table for table in paper_tables if table.paper == name]
        for name in (t.paper for t in paper_tables)
    }
    floats = {
        name: [_float(table, f"tab:{name}{i or ''}") for i, table in enumerate(parts[name])]
        for name in parts
    }
    return {name: Tex("\n".join(some)) for name, some in floats.items()}


def _float(table: Table, label: str) -> str:
    """Return a table as a LaTeX float.

    It is as wide as a column of text where its figures leave room for words, else as wide as the
    page.
    """
    environment = (
        "table" if sum(column.numeric for column in table.columns) <= _MOST_FIGURES else "table*"
    )
    rows = _fitting(table.rows)
    left_out = (
        "Some rows are left out here: data/report.json has them all."
        if len(rows) < len(table.rows)
        else ""
    )
    note = f"{table.note} {left_out}".strip()
    lines = [
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
    ]
    return "\n".join(lines) + "\n"


def _alignment(table: Table) -> str:
    """Return the alignment of the columns: figures at the right, words in the space that is left.

    A table of short figures alone is spread over the width.
    """
    longest = [max(len(row[i].text) for row in table.rows) for i in range(len(table.columns))]
    if all(column.numeric for column in table.columns) and max(longest) <= _LONG_FIGURE:
        return r"@{\extracolsep{\fill}}" + "r" * len(table.columns)
    words, long = r">{\raggedright\arraybackslash}X", r">{\raggedleft\arraybackslash}X"
    figures = [long if length > _LONG_FIGURE else "r" for length in longest]
    return "".join(
        figure if column.numeric else words
        for column, figure in zip(table.columns, figures, strict=True)
    )


def _head(column: Column) -> str:
    """Return a column's head, broken into short lines where figures are below it."""
    if not column.numeric:
        return escape(column.label)
    broken = r" \\ ".join(
        textwrap.wrap(escape(column.label), _LINE, break_long_words=False, break_on_hyphens=False)
    )
    return rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{broken}\end{{tabular}}"


def _cell(cell: Cell) -> str:
    return rf"\textbf{{{escape(cell.text)}}}" if cell.strong else escape(cell.text)


def _fitting(rows: Sequence[Sequence[Cell]]) -> list[Sequence[Cell]]:
    """Return the rows that fit on a page.

    These are all rows, or in a long table evenly spread ones and every marked one.
    """
    spread = {round(k * (len(rows) - 1) / (MOST_ROWS - 1)) for k in range(MOST_ROWS)}
    return [row for i, row in enumerate(rows) if i in spread or any(cell.strong for cell in row)]
