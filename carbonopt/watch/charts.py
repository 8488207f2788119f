"""Small line charts that are drawn again every few seconds.

The report's figures take a tenth of a second each, these less than a millisecond.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from carbonopt.core.format import tick_text
from carbonopt.report.figures.style import wants_log

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 336, 8, 168
_MOST_TICKS = 5
_MOST_POINTS = 200  # of one line; of more, every second, third … is drawn, and the last

Point = tuple[float, float]


class Line(NamedTuple):
    """A line of the chart; `style` is the class of its stroke in the page's style sheet."""

    points: Sequence[Point]
    style: str


class Chart(NamedTuple):
    """A chart as SVG.

    Args:
        lines: the lines, drawn one over the other.
        level: a value of the vertical axis that gets a dashed line; None: no such line.
        from_zero: whether the vertical axis begins at zero.
        x_text: formats a tick of the horizontal axis.
    """

    lines: Sequence[Line]
    level: float | None = None
    from_zero: bool = False
    x_text: Callable[[float], str] = tick_text

    def svg(self) -> Markup:
        """Return the chart, empty where no line has a point."""
        points = [point for line in self.lines for point in line.points]
        if not points:
            return Markup("")
        values = [y for _, y in points] + ([] if self.level is None else [self.level])
        x = _Axis.over([x for x, _ in points], _LEFT, _RIGHT, log=False)
        y = _Axis.over(
            [*values, 0.0] if self.from_zero else values,
            _BOTTOM,
            _TOP,
            log=not self.from_zero and wants_log(values),
        )
        drawn = [*self._grid(x, y), *(_path(line, x, y) for line in self.lines if line.points)]
        if self.level is not None:
            at = y.place(self.level)
            drawn.append(f'<line class="level" x1="{_LEFT}" x2="{_RIGHT}" y1="{at}" y2="{at}"/>')
        # Everything in it is a number, or was escaped.
        return Markup(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">\n' + "\n".join(drawn) + "\n</svg>")  # noqa: S704

    def _grid(self, x: "_Axis", y: "_Axis") -> list[str]:
        lines = []
        for tick in y.ticks():
            at = y.place(tick)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{at}" y2="{at}"/>')
            lines.append(
                f'<text x="{_LEFT - 4}" y="{at + 3}" text-anchor="end">{tick_text(tick)}</text>'
            )
        # Ticks within the same second have the same text, which is written once.
        texts = {self.x_text(tick): tick for tick in reversed(x.ticks())}
        for text, tick in texts.items():
            lines.append(
                f'<text x="{x.place(tick)}" y="{_BOTTOM + 14}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
        return lines


class _Axis(NamedTuple):
    low: float
    high: float
    begin: float  # where the low end lies in the picture
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float, *, log: bool) -> "_Axis":
        low, high = min(values), max(values)
        if low == high:
            pad = abs(low) / 2 or 1.0
            low, high = low - (0.0 if log else pad), high + pad
        return cls(low, high, begin, end, log)

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) <= 3 else (1,)
            ticks = [step * 10.0**power for power in powers for step in steps]
            inside = [tick for tick in ticks if self.low <= tick <= self.high]
            return inside[:: -(-len(inside) // _MOST_TICKS) or 1]
        rough = (self.high - self.low) / _MOST_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _path(line: Line, x: _Axis, y: _Axis) -> str:
    points = list(line.points)
    stride = -(-len(points) // _MOST_POINTS)
    # The last point is always one of them, the first need not be.
    chosen = points[::-1][::stride][::-1]
    places = "\n".join(f"{x.place(across)},{y.place(up)}" for across, up in chosen)
    if len(chosen) == 1:
        across, up = chosen[0]
        place = f'cx="{x.place(across)}" cy="{y.place(up)}"'
        return f'<circle class="{escape(line.style)}" {place} r="3"/>'
    return f'<polyline class="{escape(line.style)}" points="\n{places}"/>'
