"""The source of a script's quality where the script doesn't report it.

It is read in the script's output, or in a file that the script writes.
"""

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import parsed_json, repeated_key
from carbonopt.core.quality import Quality
from carbonopt.core.script_reports import (
    Lines,
    Readings,
    Reported,
    check_data,
    check_steps,
    evaluation,
    whole,
    without_missing,
)
from carbonopt.core.values import Frozen
from carbonopt.spec import matches_of_lines

_MATCHING_LIMIT_S = 20.0
_LARGEST_FILE = 2**26  # bytes
_PIECE = 2**20  # bytes that are hashed at once


# What says of a value that it is a perplexity, or an exponential.
_EXPONENTIAL = re.compile(
    r"ppl|perplexity|(?<![a-z])exp(?![a-z0-9])|\be\\?(?:\^|\*\*)", re.IGNORECASE
)
# What says that it is a loss, if no other number is between that and the value.
_LOSS = re.compile(r"(?:loss|nll|cross.?entropy)(?!.*(?:\\d|0-9))", re.IGNORECASE)


@dataclass(frozen=True)
class FileState:
    """The state of a file when a trial begins."""

    changed: tuple[int, int, int]  # time of the last change in ns, size in bytes, and inode
    # SHA-256 of what other trials may have left in it; None: the file is the trial's own
    left_by_others: bytes | None

    def added_from(self, path: Path) -> int:
        """Return the byte from which on a file has what was appended since; 0: it is all new.

        Who appends ends each line. A file that is written anew may begin as before, with 0.9 of
        0.91, but seldom up to a line's end.
        """
        _, size, _ = self.changed
        if self.left_by_others is None or path.stat().st_size <= size:
            return 0
        return size if _sha256(path, size) == self.left_by_others and _ends_line(path, size) else 0


class NoQuality(Exception):
    """The error that no quality was found; its text says where it was looked for."""


class QualitySource(Frozen, allow_inf_nan=False):
    """The setting `workload.quality_from`.

    It is a regular expression over the output, or a JSON file and a key in it.
    """

    pattern: str | None = Field(default=None, min_length=1, max_length=1000)
    """A regular expression that finds the quality [in the output](script.md#without-the-lines). Its
    group is the value; a group called `step` is the step."""

    file: str | None = Field(default=None, min_length=1)
    """A JSON or JSON lines file that has the quality; with `pattern`, a text file."""

    key: str | None = Field(default=None, min_length=1)
    """The key of the quality in that JSON file; dots lead into nested objects."""

    scale: float = 1.0
    """A factor for the value, such as 0.01 for percentages."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pattern is None and self.file is None:
            raise ValueError("needs pattern, a regular expression over the output, or file and key")
        if self.pattern is None and self.key is None:
            raise ValueError(f"file needs key, the value's name in it, but got {self.file!r} alone")
        if self.pattern is not None and self.key is not None:
            raise ValueError("has both pattern and key; give one of them")
        if self.scale == 0:
            raise ValueError("scale must not be 0")
        if self.pattern is not None:
            _check_pattern(self.pattern)
        return self

    def __str__(self) -> str:
        where = "the output" if self.file is None else self.file
        how = f"key {self.key}" if self.pattern is None else f"pattern '{self.pattern}'"
        return f"{how} in {where}" + ("" if self.scale == 1 else f", times {self.scale:g}")

    def check_quality(self, quality: Quality) -> None:
        """Check that the value isn't a loss where its exponential is the quality.

        Raises:
            BadInput: if what stands before the value names a loss, and no exponential.
        """
        before = self.key or (self.pattern or "").partition("(?P<value>")[0]
        if self.pattern is not None and before == self.pattern:
            before = re.split(r"(?<!\\)\((?!\?)", self.pattern)[0]
        if quality.value_of_mean != "exp" or _EXPONENTIAL.search(before) is not None:
            return
        if (found := _LOSS.search(before)) is not None:
            raise BadInput(
                f"workload.quality_from must find the {quality.name} itself, but finds what is"
                f" called {found[0]}; let the script write exp({found[0]}), or set target:"
                " {quality: NAME, at_most: VALUE} for the loss."
            )

    def state(self, folder: Path, own: Path) -> FileState | None:
        """Return the state of the file in a script's folder, which a trial that writes it changes.

        None: the quality is in the output, or there is no file yet. An earlier attempt may have
        left a file in `own`, the trial's folder, to go on with.
        """
        path = folder / (self.file or "")
        if self.file is None or not path.is_file():
            return None
        changed = _changed(path)
        is_own = path.resolve().is_relative_to(own.resolve())
        return FileState(changed, None if is_own else _sha256(path, changed[1]))

    def read(
        self,
        log: Path,
        folder: Path,
        quality: Quality,
        steps: int,
        before: FileState | None = None,
    ) -> Readings:
        """Return the evaluations that a script which has ended left, the last one at its end.

        Args:
            log: the file with the script's output.
            folder: the folder in which it ran, from where a file's relative path leads.
            quality: the quality of the target.
            steps: the steps of the training, where nothing else gives the step.
            before: the file's `state` when the trial began; what others have left is not read.

        Raises:
            NoQuality: if nothing is there, or the trial has not written the file.
            BadInput: for a value that is no number, or can't be one of the quality; for several
                values in the line that counts; and as `check_steps` and `check_data`.
        """
        path = log if self.file is None else folder / self.file
        if not path.is_file():
            why = f"{path} is a folder, not a file" if path.is_dir() else None
            why = why or f"the script has written no file {path}"
            raise NoQuality(f"workload.quality_from: {why}")
        if before is not None and _changed(path) == before.changed:
            raise NoQuality(
                f"workload.quality_from: {path} was there before the trial, which has not written"
                " it; let the script write one of its own into {output_dir}"
            )
        begin = before.added_from(path) if before is not None else 0
        read = self._matches if self.pattern is not None else self._values
        found = read(path, begin)
        points: list[Reported] = []
        for each in found:
            # Without steps, what stands before the last value may be no evaluation.
            for value in each.values if each.step is not None else each.values[-1:]:
                qualities: dict[str, object] = {quality.name: self._number(value)}
                mend = f"set workload.quality_from.scale: {self.scale / 100:g}"
                step = _step(each.step, steps)
                points.append(evaluation(quality, qualities, None, step, of_percent=mend))
        if any(each.step is not None for each in found):
            points = without_missing(points)
            check_steps("workload.quality_from must find", points)
        last = found[-1]
        differ = len(set(map(str, last.values))) > 1
        lines = Lines.of(last.lines, last.first, last.last) if differ else None
        # A step may be evaluated again: the later evaluation counts.
        return Readings(list({point.step: point for point in points}.values()), lines)

    def _number(self, value: object) -> float:
        try:
            # Python's own numbers may have _ between digits
            if isinstance(value, bool) or "_" in str(value):
                raise ValueError
            # Multiply decimals as they were written, so that 94.2 × 0.01 is 0.942.
            number = float(value)  # type: ignore[arg-type]
            return float(Decimal(str(number)) * Decimal(str(self.scale)))
        except (TypeError, ValueError, OverflowError, InvalidOperation) as error:
            raise BadInput(
                f"workload.quality_from must find a number, but found {shortened(value)}."
            ) from error

    def _matches(self, path: Path, begin: int) -> list[matches_of_lines.Matches]:
        assert self.pattern is not None
        arguments = self.pattern, str(path), str(begin)
        program = [sys.executable, "-I", "-S", matches_of_lines.__file__, *arguments]
        try:
            done = subprocess.run(
                program, capture_output=True, text=True, timeout=_MATCHING_LIMIT_S, check=True
            )
        except subprocess.TimeoutExpired as error:
            slow = f"took more than {_MATCHING_LIMIT_S:g} s over {path}"
            must = (
                "workload.quality_from.pattern must have no repetitions within repetitions, such as"
                " (a+)+"
            )
            raise BadInput(f"{must}, which take too long: it {slow}.") from error
        matches = [matches_of_lines.Matches(**step) for step in json.loads(done.stdout)]
        if not matches:
            where = "the script's output" if self.file is None else str(path)
            where = f"what the trial has added to {where}" if begin else where
            raise NoQuality(
                f"workload.quality_from.pattern, '{self.pattern}', matches nothing in {where};"
                " give one that matches a line there"
            )
        for each in matches:
            _check_whole(each.step)
            for value in each.values if each.step is not None else each.values[-1:]:
                _check_whole(value)
        last = matches[-1]
        if last.unmatched:
            raise BadInput(
                "workload.quality_from.pattern must match the last value, but matches"
                f" {shortened(last.last)} and not {shortened(last.unmatched)}, which comes later"
                " and has the same form; give one that matches both, such as ([-+0-9.eE]+) for any"
                " number and \\s+ for any spaces."
            )
        if last.step is None and len(values := dict.fromkeys(last.in_last)) > 1:
            listed = " and ".join(map(str, values))
            raise BadInput(
                f"workload.quality_from.pattern must find one value in a line, but finds {listed}"
                f" in {shortened(last.last)}; write before the group what stands before the value"
                " that counts, or begin with .* for the line's last one."
            )
        return matches

    def _values(self, path: Path, begin: int) -> list[matches_of_lines.Matches]:
        assert self.key is not None
        if path.stat().st_size > _LARGEST_FILE:
            raise BadInput(
                f"workload.quality_from.file must have at most {_LARGEST_FILE} bytes, but {path}"
                " has more."
            )
        objects = _objects(path, begin)
        of_step: list[Any] = []  # the objects of one step, or those without steps
        found: list[matches_of_lines.Matches] = []
        for each in objects:
            if (value := _looked_up(each, self.key)) is None:
                continue
            # A file with one object has the end of the training, whatever it calls a step.
            step = _looked_up(each, "step") if len(objects) > 1 else None
            if not found or found[-1].step != step:
                found.append(matches_of_lines.Matches(step))
                of_step = []
            if value == value:  # else null, which is a missing value if its step has another
                of_step.append(each)
            found[-1].begin_line(overwrites=False)
            found[-1].add(value, json.dumps(each))
        if not found:
            raise NoQuality(
                f"workload.quality_from.key: {path} has no {self.key}, but {_names(objects[-1])}"
            )
        if of_step:
            check_data(of_step)
        return found


def _names(value: Any) -> str:
    """Return the names in an object of JSON, or what it is instead."""
    if isinstance(value, dict):
        return ", ".join(map(str, value))[:500] or "no names"
    if isinstance(value, list):
        return (
            f"a list of {len(value)}; begin the key with a place in it, such as -1. for the last"
            " one"
        )
    return f"only {shortened(value)}"


def _check_pattern(pattern: str) -> None:
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"pattern must be a regular expression, but {pattern!r} is none: {error}"
        ) from error
    values = expression.groups - ("step" in expression.groupindex)
    if "value" not in expression.groupindex and (
        values != 1 or expression.groupindex.get("step") == 1
    ):
        must = "pattern must have one group in brackets, the value, or one called (?P<value>...)"
        raise ValueError(f"{must}, but {pattern!r} has {values}")


def _check_whole(value: matches_of_lines.Value | None) -> None:
    """Refuse a number that a pattern took only in part."""
    if value is None or isinstance(value, str):
        return
    taken, of = value
    if of.endswith("%"):
        how = "write % behind the group, as in ([0-9.]+) *%, and scale: 0.01"
    elif of.startswith(f"{taken}/"):
        how = "for the first of two numbers write / behind the group, as in ([0-9.]+)/"
    else:
        how = (
            "the group for any number is ([-+0-9.eE]+); where that is not enough, write behind or"
            " before the group what stands there, such as its unit or a comma, and set"
            " workload.quality_from.scale for a unit"
        )
    raise BadInput(
        f"workload.quality_from.pattern must take each number whole, but takes {taken} of"
        f" {shortened(of)}; {how}."
    )


def _changed(path: Path) -> tuple[int, int, int]:
    """Return what differs once a file has been written: its time, size and inode."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _ends_line(path: Path, size: int) -> bool:
    """Return whether the first bytes of a file end with a line, or there are none."""
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        return size == 0 or file.read(1) in (b"\n", b"\r")


def _sha256(path: Path, size: int) -> bytes:
    """Return the SHA-256 of a file's first bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (piece := file.read(min(size, _PIECE))):
            digest.update(piece)
            size -= len(piece)
    return digest.digest()


def _objects(path: Path, begin: int) -> Sequence[Any]:
    """Return the objects in a file of JSON or JSON lines, from a byte on."""
    text = path.read_bytes()[begin:].decode("utf-8-sig", errors="replace")
    try:
        return [_parsed(text)]
    except ValueError as error:
        wrong = str(error)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    objects: list[Any] = []
    for number, line in lines:
        try:
            objects.append(_parsed(line))
        except ValueError as error:
            if objects:  # it is JSON lines, and this one is wrong
                wrong = f"line {number}: {error}"
            break
    else:
        if objects:
            return objects
    raise BadInput(
        f"workload.quality_from.file must be JSON or JSON lines, but {path} is not: {wrong}."
    )


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, with null read as NaN.

    Loggers write NaN, the quality of a training that diverged, as null.
    """

    def with_nan(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (twice := repeated_key(pairs)) is not None:
            raise BadInput(
                "workload.quality_from.file must have each key of an object once, but has"
                f" {shortened(twice)} twice; write it once."
            )
        return {
            name: math.nan if value is None and name != "step" else value for name, value in pairs
        }

    return parsed_json(text, with_nan)


def _looked_up(value: Any, key: str) -> Any:
    """Return the value at a key, as it is or by its parts between dots; None if there is none."""
    if (whole_key := _item(value, key)) is not None:
        return whole_key
    for place in (place for place, sign in enumerate(key) if sign == "."):
        inner = _item(value, key[:place])
        if inner is not None and (inner_value := _looked_up(inner, key[place + 1 :])) is not None:
            return inner_value
    return None


def _item(value: Any, name: str) -> Any:
    """Return a dictionary's value, or a list's by its number; None if there is none."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and re.fullmatch("-?[0-9]{1,9}", name):
        return value[int(name)] if -len(value) <= int(name) < len(value) else None
    return None


def _step(step: object, steps: int) -> int:
    if step is None:
        return max(1, steps)
    text = str(step).replace(",", "").removesuffix(".0")
    return whole(
        "step", int(text) if text.isascii() and text.isdigit() and len(text) < 20 else step, 0
    )
