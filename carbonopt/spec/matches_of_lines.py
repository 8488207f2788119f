"""Find a regular expression in the lines of a file: a program of its own.

It needs nothing but Python. A regular expression can take time that grows exponentially with a
line's length, and Python can't stop it, so whoever wants matches starts this file as a process and
ends that.
"""

import io
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LONGEST_LINE = 10_000  # characters of a line that are looked at
MOST_POINTS = 200  # about the most matches with a step that are returned

# A sign that isn't the hyphen after a word.
_SIGN = r"(?<![\w)\]}+-])[-+\u2212]"
_NUMBER = re.compile(rf"(?:{_SIGN})?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE)
# Signs between the digits of one number, in some country or programming language.
_BETWEEN = "_.'\u2019\u00b7\u22c5\u066b\u066c"
# What makes another number of the digits before it; the first group starts where it does so.
_AFTER = re.compile(
    rf"""(?:\s*(?=[%\u2030])           # percent
    | (?=[^\W\d_])                   # 0x1, 0.93D-01, 1.5k, 12ms
    | (?=[{_BETWEEN}]\w)
    | (?=:[0-5]\d(?!\d))             # 1:30
    | \s*(?=[/*^\u00d7\u2044]\s*[\d(])
    | (?=[+-][\d.]+[ij]\b))""",
    re.VERBOSE,
)
# What makes another number of the digits after it, at the end of a text.
_BEFORE = re.compile(
    rf"""(?:\d(?P<between>[{_BETWEEN}:])
    | \d\s*(?P<operator>[/*^\u00d7\u2044])\s*
    | \d(?P<letter>[^\W\d_])[+-]?
    | (?P<minus>\u2212))$""",
    re.VERBOSE,
)
# A space between digits, but none between columns.
_SPACE = " \u00a0\u2009\u202f"
# A comma or a space after digits, and what may be the rest of the same number.
_REST = re.compile(rf",\d+(?![\d.])|[,{_SPACE}]\d{{3}}(?!\d)")
# A comma or a space before digits, and what may be the beginning of the same number.
_BEGIN = re.compile(rf"(?<![\d.,])[+-]?\d{{1,3}}(?:[,{_SPACE}]\d{{3}})*[,{_SPACE}]$")
_IN_LISTS = "-+.,0123456789"
_LOOKED_AT = 60  # characters before and after a number that are looked at
_NOT_FINITE = re.compile(r"[+-]?\b(?:nan|inf|infinity)\b", re.IGNORECASE)
# What stands in a value's place if there is none; the later ones only where nothing follows them.
_NO_VALUE = re.compile(
    r"""(?<![\w/.-])(?:
    (?:n/a|na|none|null|nil)(?![\w/.-])
    | (?:undefined|unknown|missing|invalid|error|failed|diverged|overflow|-{1,3}|\?+|\*+)
      (?=\s*(?:$|[]),;|}%"'])))""",
    re.IGNORECASE | re.VERBOSE,
)
# A number that a pattern for numbers matches where it does not match NaN.
_IN_ITS_PLACE = "9.87654321"
# What a terminal shows as colours, movements and titles.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_NAMES_ESCAPES = re.compile(r"\x1b|\\x1b|\\u001b|\\0?33", re.IGNORECASE)
# NaN and infinity as C writes them on Windows.
_OF_WINDOWS = re.compile(r"\b1\.#(?:INF|IND|[QS]NAN)\d*", re.IGNORECASE)

# Digits that a pattern itself names, outside of groups and sets, such as those of an epoch.
_OWN_DIGITS = re.compile(r"(?<![A-Za-z_])\d")
_FLEXIBLE = re.compile(r"\\.|\[\^?\]?[^]]*\]|\{[\d,]*\}|\((?!\?[:=!<])[^()]*\)|\(\?P<[^()]*\)")
_ANY_NUMBER = re.compile(
    r"[+-]?(?<![\w.])(?:nan|inf|infinity|n/a|none|null|\.?\d[\d.,'_]*(?:e[+-]?\d+)?)(?![\w])\s*%?",
    re.IGNORECASE,
)

# The match of a pattern: a text, or the part that it took of a number and that number.
Value = str | tuple[str, str]


@dataclass
class Matches:
    """The matches of one step, or all of them where a pattern has no step."""

    step: Any
    values: list[Any] = field(default_factory=list)  # some, of which the last is the last one
    lines: int = 0  # how many lines matched
    first: str = ""  # the first of them
    last: str = ""
    in_last: list[Any] = field(default_factory=list)  # the values in the last line
    # a later line of the last one's form that the pattern does not match
    unmatched: str = ""

    def begin_line(self, *, overwrites: bool) -> None:
        """Begin a line with matches, which a terminal shows in the place of the last one or not."""
        self.in_last = []
        if overwrites and self.lines:
            self.values.pop()
        else:
            self.lines += 1

    def add(self, value: Any, line: str) -> None:
        self.in_last.append(value)
        if len(self.values) > 2:
            self.values[-1] = value
        else:
            self.values.append(value)
        self.last = line
        if self.lines == 1:
            self.first = line


def find(pattern: str, path: Path, begin: int = 0) -> list[Matches]:
    """Return the matches by step from a byte of a file on, in their order, as texts.

    Of steps there are some along the way, and the last one. Where a pattern for numbers alone would
    match a line if NaN were a number, the value is NaN. So it is with words such as None and N/A
    behind the last match: that word is the value then, which is no number. A later line that
    differs from the last match's in its numbers alone is noted. A terminal's escapes are left out
    of the lines, unless the pattern names some.
    """
    expression = re.compile(pattern)
    group = "value" if "value" in expression.groupindex else 1
    keeps_escapes = _NAMES_ESCAPES.search(pattern) is not None
    found: list[Matches] = []
    earlier = _IN_ITS_PLACE  # the last number that the pattern took
    lacking: str | None = None  # the word in the place of a value behind the last match
    names_numbers = _OWN_DIGITS.search(_FLEXIBLE.sub("", pattern)) is not None
    form = unmatched = ""  # the form of the last line that matches, and a later line of that form
    overwrites = False
    with path.open("rb") as file:
        file.seek(begin)
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
        for whole_line in lines:
            if not keeps_escapes and "\x1b" in whole_line:
                whole_line = _ESCAPES.sub("", whole_line)
            # With what follows, so that a number which the end cuts is not taken for another one.
            line = whole_line[: LONGEST_LINE + _LOOKED_AT].rstrip("\r\n")
            line = _OF_WINDOWS.sub("nan", line)
            matches = [
                (match, _whole(match, group))
                for match in expression.finditer(line, 0, LONGEST_LINE)
                if match[group] is not None
            ]
            if matches and isinstance(taken := matches[-1][1], str):
                earlier = taken
            elif not matches and _NOT_FINITE.search(line):
                looked_at = line[:LONGEST_LINE]
                places = _in_place_of(_NOT_FINITE, expression, group, looked_at, earlier)
                matches = [(match, "nan") for match in places]
                if not matches:
                    places = _beside_of(_NOT_FINITE, expression, group, looked_at)
                    matches = [(match, _whole(match, group)) for match in places]
            if matches:
                lacking, form, unmatched = None, "" if names_numbers else _form(line), ""
            elif found and (word := _NO_VALUE.search(line)) is not None:
                places = _in_place_of(_NO_VALUE, expression, group, line[:LONGEST_LINE], earlier)
                # A pattern of a number alone would match a ruler or a title, too.
                if any(re.search(r"\w", _beside(match, group)) for match in places):
                    lacking = word[0]
            if not matches and form:
                first_word = form.partition("#")[0].partition(" ")[0]  # most lines differ there
                if line.startswith(first_word) and _form(line) == form:
                    unmatched = line[:LONGEST_LINE].strip()
            _add(found, line, matches, overwrites=overwrites)
            if len(found) > 2 * MOST_POINTS:
                found = found[:-1:2] + found[-1:]
            # A progress bar's \r ends a line, too, over which the next one is written.
            has_match = bool(matches) or (overwrites and bool(line.strip()))
            overwrites = whole_line.endswith("\r") and has_match
    if found:
        found[-1].unmatched = unmatched
    return found if lacking is None else [*found, Matches(None, [lacking])]


def _form(line: str) -> str:
    """Return what a line has beside its numbers, however many digits and spaces these take."""
    beside = _ANY_NUMBER.sub("#", line[:LONGEST_LINE]) if "#" not in line else line
    return re.sub(r"(?<=\S)\s+", " ", beside)


def _add(
    found: list[Matches],
    line: str,
    matches: list[tuple["re.Match[str]", Value]],
    *,
    overwrites: bool,
) -> None:
    """Add the matches of a line, which may be of numbers in the place of NaN, to their steps'."""
    step_before: Matches | None = None
    for match, value in matches:
        has_step = "step" in match.re.groupindex and match["step"] is not None
        step = _whole(match, "step") if has_step else None
        if not found or found[-1].step != step:
            found.append(Matches(step))
        if found[-1] is not step_before:
            found[-1].begin_line(overwrites=overwrites)
            step_before = found[-1]
        # of a long line what stands beside the match
        begin = max(0, match.start() - _LOOKED_AT)
        found[-1].add(value, line[begin : match.end() + _LOOKED_AT].strip())


def _in_place_of(
    words: re.Pattern[str], expression: re.Pattern[str], group: str | int, line: str, earlier: str
) -> list[re.Match[str]]:
    """Return the matches that take a number which stands where the line has one of the words.

    A pattern may match some numbers alone, such as those below 1 or with a percent sign, so that
    one that it took before is tried as well, and both with that sign.
    """
    numbers = dict.fromkeys((_IN_ITS_PLACE, earlier.strip()))
    for number in [number + unit for unit in ("", "%", " %") for number in numbers]:
        replaced, places, end = "", set(), 0
        for word in words.finditer(line):
            replaced += line[end : word.start()]
            places |= set(range(len(replaced), len(replaced) + len(number)))
            replaced += number
            end = word.end()
        replaced += line[end:]
        found = [
            match
            for match in expression.finditer(replaced)
            if match[group]
            and match[group].strip()
            and places.issuperset(
                range(
                    match.end(group) - len(match[group].lstrip()),
                    match.start(group) + len(match[group].rstrip()),
                )
            )
        ]
        if found:
            return found
    return []


def _beside_of(
    words: re.Pattern[str], expression: re.Pattern[str], group: str | int, line: str
) -> list[re.Match[str]]:
    """Return the matches of a line in which other numbers than the value are such words."""
    replaced = words.sub(_IN_ITS_PLACE, line)
    return [match for match in expression.finditer(replaced) if match[group] is not None]


def _beside(match: re.Match[str], group: str | int) -> str:
    """Return what a match has before and behind a group."""
    line = match.string
    return line[match.start() : match.start(group)] + line[match.end(group) : match.end()]


def _whole(match: "re.Match[str]", group: str | int) -> Value:
    """Return what a group took, with the number that it was taken from where that is another one.

    An example is `3.1` of `3.1e+02`. A sign or a unit beside the group, such as %, is no part of
    the number if the pattern insists on it.
    """
    line, taken = match.string, match[group]
    if re.fullmatch(r"\s*[-+]?\d*\.\d+\.", taken):
        taken = taken[:-1]  # the full stop of a sentence
    begin = match.start(group) + len(taken) - len(taken.lstrip())
    end = begin + len(taken.strip())
    try:
        value = float(taken)
    except ValueError:
        return taken  # refused later
    for number in _NUMBER.finditer(line):
        if number.start() <= begin and end <= number.end():
            if value != float(number[0].replace("\u2212", "-")):
                return taken, number[0]
            begin, end = min(begin, number.start()), number.end()  # such as 5.0 for 5
    after = _joined_after(line, begin, end)
    if after is not None and group == "step" and line[after] == "/":
        after = None  # step 5/100
    if after is not None and not _insists(match, group, after):
        rest = re.match(r"\s?[^\s;|(){}\[\]\"]*", line[after : after + _LOOKED_AT])
        return taken, line[begin:after] + (rest[0] if rest else "")
    before = _joined_before(line, begin, end)
    if before is not None and not _insists(match, group, before):
        first = re.search(r"[\w.,+-]*\s?$", line[max(0, before - _LOOKED_AT) : before])
        return taken, (first[0] if first else "") + line[before:end]
    return taken


def _joined_after(line: str, begin: int, end: int) -> int | None:
    """Return the place after a number's digits that makes them another number; None: none does."""
    digits = line[begin:end].lstrip("+-")
    if line[end : end + 1].isnumeric():  # such as ²
        return end
    if found := _AFTER.match(line, end):
        return found.end()
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+|\d+", digits) is None:
        return None
    if (rest := _REST.match(line, end)) is None or _is_listed(line, end):
        return None
    # After more digits a space begins another column.
    return end if rest[0][0] == "," or len(digits) <= 3 else None


def _joined_before(line: str, begin: int, end: int) -> int | None:
    """Return the place before a number's digits that makes them another number; None: none does."""
    digits, looked_from = line[begin:end], max(0, begin - _LOOKED_AT)
    head = line[looked_from:begin]
    if head[-1:].isnumeric():
        return begin - 1
    found = _BEFORE.search(head)
    if found is not None and found.lastgroup is not None:
        at = looked_from + found.start(found.lastgroup)
        if line[at] != ":" or re.fullmatch(r"[0-5]\d", digits):
            return at
    is_decimals = re.search(r"\d,$", head) and digits.isdecimal()
    is_group = _BEGIN.search(head) and re.fullmatch(r"\d{3}(?:\.\d*)?", digits)
    if not (is_decimals or is_group) or _is_listed(line, begin - 1):
        return None
    return begin - 1


def _insists(match: "re.Match[str]", group: str | int, at: int) -> bool:
    """Return whether the pattern matches no other sign at a place than the one that is there."""
    line = match.string
    others = {"\x01", "q", "Q", "z"} - {line[at], line[at].swapcase()}
    if line[at].isalpha() or line[at] in "%\u2030":  # [,\s] insists, but [%\s] does not
        others.add(" ")
    for other in others:
        again = match.re.match(line[:at] + other + line[at + 1 :], match.start())
        if again is not None and again.span(group) == match.span(group):
            return False
    return True


def _is_listed(line: str, comma: int) -> bool:
    """Return whether a comma separates the numbers of a list, such as [1,2]."""
    return (
        line[comma] == ","
        and line[:comma].rstrip(_IN_LISTS).endswith("[")
        and line[comma:].lstrip(_IN_LISTS).startswith("]")
    )


if __name__ == "__main__":
    found = find(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    json.dump([asdict(step) for step in found], sys.stdout)
