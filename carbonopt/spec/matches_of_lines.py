"""Find a regular expression in the lines of a file: a program of its own.

It needs nothing but Python. A regular expression can take time that grows exponentially with a
line's length, and Python can't stop it, so whoever wants matches starts this file as a process and
ends that.
"""

import json
import re
import sys
from pathlib import Path

LONGEST_LINE = 10_000  # characters of a line that are looked at
MOST_POINTS = 200  # about the most matches with a step that are returned

_NUMBER = re.compile(
    r"""(?:(?<![^\s:=(\[,])[+-])?  # a sign, but no hyphen after a word
    (?:\d{1,3}(?:,\d{3})+\.\d+|\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?""",
    re.IGNORECASE | re.VERBOSE,
)
# What may be a number with a decimal comma, or with commas between thousands: neither is read.
_WITH_COMMA = re.compile(r"[+-]?\d+(?:,\d+)+(?![\d.])")
_NOT_FINITE = re.compile(r"[+-]?\b(?:nan|inf|infinity)\b", re.IGNORECASE)
# A number that a pattern for numbers matches where it does not match NaN.
_IN_ITS_PLACE = "9.87654321"
_SAME = 0.01  # relative change of a value by the decimals that a pattern may leave out

# The match of a pattern: a text, or the part that it took of a number and that number.
Value = str | tuple[str, str]


def find(pattern: str, path: Path) -> list[tuple[str | None, Value]]:
    """Return step and value of the matches, as texts.

    Of matches with a step there are some along the way, and the last one. Where a pattern for
    numbers alone would match a line if NaN were a number, the value is NaN.
    """
    expression = re.compile(pattern)
    group = "value" if "value" in expression.groupindex else 1
    has_step = "step" in expression.groupindex
    found: list[tuple[str | None, Value]] = []
    # universal newlines: a progress bar's \r ends a line, too
    with path.open(encoding="utf-8", errors="replace") as lines:
        for whole_line in lines:
            line = whole_line[:LONGEST_LINE].rstrip("\n")
            matches = [
                (match, _whole(match, group))
                for match in expression.finditer(line)
                if match[group] is not None
            ]
            if not matches and _NOT_FINITE.search(line):
                others = expression.finditer(_NOT_FINITE.sub(_IN_ITS_PLACE, line))
                matches = [
                    (match, "nan")
                    for match in others
                    if match[group] and match[group] in _IN_ITS_PLACE
                ]
            for match, value in matches:
                point = (match["step"] if has_step else None, value)
                found = [*found, point] if has_step else [point]
                if len(found) > 2 * MOST_POINTS:
                    found = found[:-1:2] + found[-1:]
    return found


def _whole(match: "re.Match[str]", group: str | int) -> Value:
    """Return a match's value, with the number that it was taken from where that is another one.

    An example is `3.1` of `3.1e+02`.
    """
    begin, end = match.span(group)
    for number in _NUMBER.finditer(match.string):
        if number.start() <= begin and end <= number.end() and number[0] != match[group]:
            try:
                taken, whole = float(match[group]), float(number[0].replace(",", ""))
            except ValueError:
                continue
            if abs(taken - whole) > _SAME * abs(whole):
                return match[group], number[0]
    for number in _WITH_COMMA.finditer(match.string):
        # A comma that the pattern itself matches divides two values.
        cut_before = number.start() < begin and match.start() >= begin
        cut_after = number.end() > end and match.end() <= end
        is_in = number.start() <= begin and end <= number.end()
        if is_in and (cut_before or cut_after) and not _is_listed(number):
            return match[group], number[0]
    return match[group]


def _is_listed(number: "re.Match[str]") -> bool:
    """Return whether commas separate the numbers of a list, such as [1,2]."""
    text = number.string
    return text[: number.start()].endswith(("[", "(")) or text[number.end() :].startswith(
        ("]", ")")
    )


if __name__ == "__main__":
    json.dump(find(sys.argv[1], Path(sys.argv[2])), sys.stdout)
