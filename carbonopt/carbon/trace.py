"""Hourly carbon intensities from a CSV file, such as an export of Electricity Maps.

They give the emissions of energy that was used at a certain hour; the search never sees them. They
are read with the standard library alone, so that a bad file is refused at once.
"""

import csv
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean

from carbonopt.core.errors import BadInput
from carbonopt.core.files import read_text
from carbonopt.spec.study_data import CarbonTrace

MAX_HOURS = 10 * 366 * 24  # ten years
MAX_MIB = 64  # a row for each minute of two years
# The bounds are those of carbon.intensity_g_co2e_per_kwh: less than the life cycle of any source,
# and several times the dirtiest grid.
MIN_G_CO2E_PER_KWH, MAX_G_CO2E_PER_KWH = 0.001, 5000.0
_HOUR_S = 3600
# Names of columns in lower case, without punctuation. The first one that a file has is taken.
_TIME_NAMES = ("datetime utc", "timestamp utc", "time utc", "datetime", "timestamp", "time", "date")
_INTENSITY_NAME = re.compile(r"(?<!\b[^\W\d] )\bg ?co2(e|eq)? ?(per )?kwh\b")  # not kg, k g, μg
# Names of columns that have the unit, but not the intensity itself.
_NO_INTENSITY = re.compile(
    r"mwh|\b(change|delta|diff|difference|error|uncertainty|std|stddev|deviation|variance|lower"
    r"|upper|bounds?"
    r"|low|high|(?<!\d )min|max|minimum|maximum|percentile|quantile)\b"
    # emissions that were not made
    r"|\b(avoid\w*|sav(e[ds]?|ings?)|offset\w*|reduc\w+|displac\w+|credit\w*|remov\w+|captur\w+"
    r"|sequest\w+|abat\w+|compensat\w+)\b"
    # of one more kWh, where a footprint needs the mean of all
    r"|\bmarginal\b"
    r"|\b(cumulative|cumulated|index|rank|relative|scaled|normali[sz]ed|percent|lag|lagged|target"
    r"|limit|threshold|price|cost)\b"
    # of another unit; but GWP 100, and means over 10 min
    r"|\b(milli|micro|nano|kilo|mega|tenths?|hundreds?|thousands?|millions?)\b|(?<!\d)10+"
    r" ?g\b|(?<!\d)10+ ?gco2|\bx ?\d|\b1e ?\d|\b10 \d\b"
    r"|(?<!gwp )\b10+k?\b(?! ?(m|min|mins|minutes?|s|h|y|yr|years?)\b)"
)
_LIFE_CYCLE = re.compile(r"\blca\b|\blife ?cycle\b")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_trace(path: Path, key: str = "carbon.trace") -> CarbonTrace:
    """Read the hourly intensities of a CSV file, in g CO2e per kWh.

    The file needs a header with a column of times in ISO 8601 (without an offset they are UTC) and
    a column of intensities, whose name has the unit, such as `g_co2e_per_kwh` or "gCO₂eq/kWh". If
    there are several, the life-cycle one is taken. Rows come in any order, one for each time. Hours
    are those of UTC; rows within one hour are averaged; an hour without a value is None.

    Args:
        key: the key of the study file that names the file, for errors.

    Raises:
        BadInput: for a mistake in the file; the message has the line, the value found and what is
            expected.
    """
    lines = csv.reader(io.StringIO(read_text(path, key, MAX_MIB), newline=""), strict=True)
    try:
        rows = ((lines.line_num, row) for row in lines if any(map(str.strip, row)))
        return _trace(rows, path, f"{key}: {path}")
    except csv.Error as error:
        raise BadInput(f"{key}: {path} must be a CSV file, but is none: {error}.") from error


def _trace(rows: Iterator[tuple[int, list[str]]], path: Path, file: str) -> CarbonTrace:
    """Make a trace from the rows that aren't empty, with their line numbers."""
    _, header = next(rows, (0, []))
    time_column, column = _columns(header, file)
    # Whether UTC is assumed for a time, though neither it nor its column's name says so.
    assumed = False
    # The intensity and its line number, by instant in seconds since 1970.
    intensities: dict[float, tuple[float, int]] = {}
    for line, row in rows:
        where = f"{file}, line {line}"
        if len(row) != len(header):
            raise BadInput(
                f"{where} must have the header's {len(header)} columns, but has {len(row)}."
            )
        time_text, rate_text = row[time_column].strip(), row[column].strip()
        if not rate_text:
            continue  # a gap in the data, like a missing row
        time = _time(time_text, where)
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
            assumed = "utc" not in _words(header[time_column])
        if (
            not _NUMBER.fullmatch(rate_text)
            or not 0 <= (rate := float(rate_text)) <= MAX_G_CO2E_PER_KWH
        ):
            must = (
                f"must be from 0 to {MAX_G_CO2E_PER_KWH:g} g CO2e per kWh, but is"
                f" {rate_text[:40]!r}"
            )
            raise BadInput(f"{where}: the intensity {must}.")
        # 0 is possible: figures may count only the emissions of plants in operation.
        if 0 < rate < MIN_G_CO2E_PER_KWH:
            must = (
                f"must be 0 or at least {MIN_G_CO2E_PER_KWH:g} g CO2e per kWh, but is"
                f" {rate_text[:40]!r}"
            )
            raise BadInput(f"{where}: the intensity {must}.")
        _, first = intensities.setdefault(time.timestamp(), (rate, line))
        # Refused even if both rows have the same value: a date without the hour repeats, as does
        # local time in autumn.
        if first != line:
            same = f"{time_text[:40]!r} is the time of line {first} too"
            advice = (
                "give the rows of one place, with date and hour in one column, in UTC or with their"
                " offset"
            )
            raise BadInput(f"{where}: a time must stand in one row, but {same}; {advice}.")
    first_hour, rates = _by_hour(
        {instant: intensities[instant][0] for instant in sorted(intensities)}, file
    )
    source = f"{path.name}, column {header[column]}{', times read as UTC' if assumed else ''}"
    # One line of text.
    source = " ".join("".join(sign if sign.isprintable() else " " for sign in source).split())
    return CarbonTrace(source=source, start=_iso(first_hour), g_co2e_per_kwh=rates)


def _by_hour(intensities: dict[float, float], file: str) -> tuple[int, tuple[float | None, ...]]:
    """Return the first hour, counted from 1970, and the mean of each hour from there on.

    The instants must be in order.
    """
    hourly = f"{file} must have a row for each hour, but"
    if not intensities:
        raise BadInput(f"{hourly} has none with a value.")
    hours = defaultdict(list)
    for instant, rate in intensities.items():
        hours[int(instant // _HOUR_S)].append(rate)
    begin, end = min(hours), max(hours) + 1
    if end - begin > MAX_HOURS:
        spans = (
            f"goes from {_iso(begin)} to {_iso(end - 1)}; look for a mistyped year, or leave"
            " rows out"
        )
        raise BadInput(f"{file} must span 10 years at most, but {spans}.")
    step_s = min(
        (after - before for before, after in itertools.pairwise(intensities)), default=_HOUR_S
    )
    if step_s > _HOUR_S:
        raise BadInput(
            f"{hourly} no two are less than {step_s / _HOUR_S:g} h apart; give hourly data."
        )
    return begin, tuple(fmean(hours[hour]) if hour in hours else None for hour in range(begin, end))


def _columns(header: list[str], file: str) -> tuple[int, int]:
    """Return the positions of the columns of times and of intensities."""
    names = [_words(name) for name in header]
    must, has = (
        f"{file} must have",
        f"but its first line has {', '.join(header)[:200] or 'none'}",
    )
    time = next((name for name in _TIME_NAMES if name in names), None)
    if time is None:
        raise BadInput(f"{must} a column named datetime, timestamp or time, {has}.")
    if names.count(time) > 1:
        raise BadInput(f"{must} one column {time}, but has {names.count(time)}; rename one.")
    rates = [
        at
        for at, name in enumerate(names)
        if _INTENSITY_NAME.search(name) and not _NO_INTENSITY.search(name)
    ]
    rates = [at for at in rates if _LIFE_CYCLE.search(names[at])] or rates
    if len(rates) != 1:
        unit = "whose name says g CO2e per kWh (of several, one of the life cycle)"
        raise BadInput(f"{must} one column {unit}, {has}; name it g_co2e_per_kwh.")
    return names.index(time), rates[0]


def _words(name: str) -> str:
    """Return a column's name in lower case, without punctuation."""
    return " ".join(re.findall(r"[^\W_]+", name.lower().replace("₂", "2")))


def _time(text: str, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
        # This overflows on the first and the last day that a datetime can have.
        time.astimezone(UTC) + timedelta(hours=1)
    except (ValueError, OverflowError) as error:
        raise BadInput(
            f"{where}: the time must be like 2024-12-31T23:00:00Z, but is {text[:40]!r}."
        ) from error
    return time


def _iso(hour: int) -> str:
    """Return the beginning of an hour, counted from 1970, in ISO 8601."""
    return datetime.fromtimestamp(hour * _HOUR_S, UTC).isoformat(timespec="seconds")
