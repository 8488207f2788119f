"""Caveats made from the templates of caveats.toml, and the formats of their numbers."""

import string
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from carbonopt.core import format as fmt
from carbonopt.core.quality import Quality
from carbonopt.report.document import Caveat, Level

TEMPLATES: dict[str, tuple[str, str]] = tomllib.loads(
    resources.files("carbonopt.report").joinpath("caveats.toml").read_text("utf-8")
)
MOST_NAMED = 5  # trials that a caveat names; the others are counted


def trials_text(numbers: Sequence[int]) -> str:
    """Name the first few trials and count the others."""
    listed = f"trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:MOST_NAMED]))}"
    return f"{listed} and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else listed


def range_text(ends: tuple[float | None, float | None]) -> str:
    """Describe a range of shares, such as "3 % to 5 %".

    The lower end is None where nothing is certain; the text then is "at most 5 %".
    """
    lowest, highest = map(fmt.percent_text, ends)
    return f"at most {highest}" if ends[0] is None else f"{lowest} to {highest}"


def less_or_more_text(ends: tuple[float | None, float]) -> str:
    """Describe by which share emissions are lower or higher.

    Args:
        ends: The least and the most that is saved, as shares; negative where more is emitted. The
            least is None where nothing is certain.
    """
    lowest, highest = ends
    if highest < 0:
        least, most = (
            fmt.percent_text(-highest),
            None if lowest is None else fmt.percent_text(-lowest),
        )
        return f"at least {least} more" if most is None else f"{least} to {most} more"
    if lowest is None:
        most = fmt.percent_text(highest)
        return f"at most {most} less" if most != "100 %" else f"between far more and {most} less"
    if lowest < 0:
        return f"between {fmt.percent_text(-lowest)} more and {fmt.percent_text(highest)} less"
    return f"{range_text(ends)} less"


class Template(string.Formatter):
    """A `str.format` with the report's own formats, such as `percent`, and `count NOUN`."""

    def __init__(self, quality: Quality) -> None:
        self._formats: dict[str, Any] = {
            "percent": fmt.percent_text,
            "difference": fmt.difference_text,
            "less_or_more": less_or_more_text,
            "less": fmt.less_text,
            "fine_percent": fmt.two_decimals_text,
            "energy": fmt.energy_text,
            "quality": quality.text,
            "loss": quality.loss_text,
            "trials": trials_text,
            "Trials": lambda numbers: trials_text(numbers).capitalize(),
            "value": fmt.value_text,
            "seconds": "{:.2g}".format,
        }

    def format_field(self, value: Any, format_spec: str) -> str:
        kind, _, noun = format_spec.partition(" ")
        if kind == "count":
            return fmt.count_text(value, noun)
        return (
            str(self._formats[kind](value))
            if kind in self._formats
            else str(format(value, format_spec))
        )


def caveat(quality: Quality, key: str, /, **numbers: Any) -> Caveat:
    level, template = TEMPLATES[key]
    finding, _, advice = (
        Template(quality).format(part, then="", **numbers) for part in template.partition("{then}")
    )
    return Caveat(
        key=key, level=Level[level.upper()], text=finding + advice, advice=advice, numbers=numbers
    )
