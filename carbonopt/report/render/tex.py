"""Any text as LaTeX that shows it: nothing that a user named becomes a command, and pdflatex has a glyph for it."""

import re
import unicodedata

# What T1 and TS1 hold and the Times of a stock TeX has glyphs for, beside ASCII; declared in t1enc.dfu and ts1enc.dfu.
_LETTERS = {chr(code) for code in range(0xC0, 0x17F)} - set("ĦħĸĿŀŉŦŧ")
_SIGNS = set("¡¢£¤¥§©ª«¬®°±²³µ¶·¸¹º»¼½¾¿–—‘’‚“”„…‰€×÷†‡•™")
_SHOWN = _LETTERS | _SIGNS

_COMMANDS = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "`": r"\`{}",  # by itself it would be a quotation mark
    "'": r"'{}",  # a second one would make it a quotation mark
    "-": r"-{}",  # likewise a dash
    "<": r"<{}",
    ">": r">{}",
    ",": r",{}",
    "[": "{[}",  # after a table's row \\ it would begin an argument
    "*": "{*}",  # likewise a star
    **{sign: "\\" + sign for sign in "%&$#{}"},
    "_": r"\_\allowbreak{}",
}
_LIGATURES = re.compile(r"([-<>,'])\{\}(?!\1)")  # followed by something else, it can stay alone
_MINUS = re.compile(r"(?<![\w.}-])-(?=\d)")  # of a number; a hyphen would be too short
_UNBROKEN = 24  # characters of one word; from here on it may be broken after each of so many, to stay inside a column
_LONG_WORD = re.compile(rf"[^\s-]{{{_UNBROKEN}}}(?=[^\s-])")
_BREAK = "\N{ZERO WIDTH SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:\\%|kWh|k?J|[km]?g|GiB|W)(?!\w))|(?<=g) (?=CO2e)|(?<=±) (?=\d)|(?<=\d) (?=±)")


class Tex(str):
    """A text that is LaTeX already."""


def escape(text: object) -> Tex:
    """The text on one line. A figure and its unit stay together; what T1 lacks is shown without its accent, else by its
    code point, such as [U+6F22]; long words may be broken."""
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
    simpler = "".join(part for part in unicodedata.normalize("NFKD", sign) if not unicodedata.combining(part))
    if simpler and simpler != sign:
        return "".join(map(_shown, simpler))
    return f"[U+{ord(sign):04X}]" if sign.isprintable() else ""
