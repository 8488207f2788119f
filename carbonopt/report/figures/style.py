"""The style that all figures have in common.

They are as wide as a column, their fonts are embedded, and their colours and shapes can be told
apart in grey.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from sys import float_info
from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.format import tick_text
from carbonopt.core.quality import Quality
from carbonopt.report import document

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes  # re-exported for the modules of the figures
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Figure

# Importing matplotlib takes half a second, so that only functions that draw import it.

WIDTH_IN = 3.5  # one column of a two-column paper
DPI = 300
STYLE: dict[Any, Any] = {
    "pdf.fonttype": 42,  # TrueType: text stays text, and publishers' checks pass
    "svg.fonttype": "none",  # text stays text, in the page's own font
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 7.5),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7.0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    "hatch.linewidth": 0.5,
    "text.parse_math": False,
}
# Okabe and Ito's palette, whose colours people with any colour vision can tell apart; shapes say
# the same in grey.
BLUE, SKY_BLUE, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PURPLE, GREY = "#D55E00", "#CC79A7", "#999999"
TARGET: dict[str, Any] = {"color": PURPLE, "linestyle": "--", "linewidth": 0.9, "zorder": 1}
ERROR_BARS: dict[str, Any] = {"fmt": "none", "elinewidth": 0.8, "capsize": 1.8}
MILESTONE: dict[str, Any] = {
    "linestyle": "none",
    "markeredgecolor": "black",
    "markeredgewidth": 0.5,
}
LEGEND: dict[str, Any] = {
    "frameon": False,
    "handletextpad": 0.4,
    "columnspacing": 1.2,
    "borderaxespad": 0.2,
}
# The page's own colours, by the figure's colours that they replace.
IN_PAGE = {
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
    "#cccccc": "var(--line)",
    "#0072b2": "var(--bar)",
}

MARGIN = 0.05  # share of a logarithmic axis on each side
# A target that lies further from the values than this many times their own range is not drawn: an
# axis that reached it would leave the values less than a quarter of its length.
FAR = 3.0
LOG_FROM_RATIO = 8.0  # largest ÷ smallest; from here on a linear axis crowds the small values

Draw = Callable[["Figure"], None]

# The formats that a report's figures are drawn in; a page that is drawn again and again needs few
# of them. Another one is "matplotlib", matplotlib's own figure, which a program can change.
FORMATS = frozenset({"svg", "pdf", "png"})
_formats: ContextVar[frozenset[str]] = ContextVar("formats", default=FORMATS)


@contextmanager
def drawn_as(*formats: Literal["svg", "pdf", "png", "matplotlib"]) -> Iterator[None]:
    """Draw figures within the context in these formats alone; the others stay empty.

    "matplotlib" stands alone.
    """
    token = _formats.set(frozenset(formats))
    try:
        yield
    finally:
        _formats.reset(token)


def drawn(
    draw: Draw, *, height_in: float, name: str, caption: str, alt: str, paper: bool = True
) -> document.Figure:
    """Draw a figure in every format (but see `drawn_as`); the same data gives the same bytes."""
    formats = _formats.get()
    made: dict[str, Any] = _drawn(draw, height_in, name, formats) if formats else {}
    contents = {"svg": "", "pdf": b"", "png": b"", "matplotlib": None, **made}
    return document.Figure(name=name, caption=caption, alt=alt, paper=paper, **contents)


def _drawn(draw: Draw, height_in: float, name: str, formats: frozenset[str]) -> dict[str, Any]:
    """Draw a figure, and return it by format."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.text import Text

    from carbonopt.report.figures.shown_figure import ShownFigure

    made: dict[str, Any] = {}
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = ShownFigure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        draw(figure)
        # The 2 of CO2e is lowered, as in the text around the figure.
        for text in figure.findobj(Text):
            # `isinstance` for the type checker: findobj may return any artist.
            if isinstance(text, Text) and "CO2e" in text.get_text():
                text.set_text(text.get_text().replace("CO2e", "CO₂e"))
        # Not by savefig, which would lay out and draw everything once more for each file. The first
        # drawing lays it out.
        png = io.BytesIO()
        canvas.print_png(png, metadata={"Software": None})
        if "matplotlib" in formats:
            return {"matplotlib": figure}
        if "png" in formats:
            made["png"] = png.getvalue()
        figure.set_layout_engine("none")
        if "pdf" in formats:
            pdf = io.BytesIO()
            vector: Any = FigureCanvasPdf(figure)
            vector.print_pdf(pdf, metadata={"CreationDate": None})
            made["pdf"] = pdf.getvalue()
        if "svg" in formats:
            svg = io.StringIO()
            figure.set_dpi(72)  # the resolution of SVG
            vector = FigureCanvasSVG(figure)
            vector.print_svg(svg, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
            made["svg"] = _inline(svg.getvalue())
    return made


def _inline(svg: str) -> str:
    """Return the SVG element for use inside a page.

    It has the page's colours, font and width. Ids of its groups are removed, because other figures
    in the page have them, too.
    """
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    for size in ("height", "width"):
        element = re.sub(rf'(<svg [^>]*?) {size}="[^"]*"', r"\1", element, count=1)
    for fixed, own in IN_PAGE.items():
        element = element.replace(fixed, own)
    return re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", element)


def standalone(svg: str) -> str:
    """Return the SVG of a figure for use outside a page: with colours, a font and a size."""
    for fixed, own in IN_PAGE.items():
        svg = svg.replace(own, fixed)
    found = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg)
    assert found is not None, "matplotlib gives every SVG a viewBox"
    size = f'width="{found[1]}pt" height="{found[2]}pt"'
    head = f"<svg {size} style=\"font-family: 'DejaVu Sans', Arial, sans-serif\""
    return svg.replace("<svg", head, 1)


def legend(figure: "Figure", axes: "Axes") -> None:
    """Put a legend above the figure, in as many columns as fit.

    It explains what one of the figure's axes holds.
    """
    for columns in (3, 2, 1):
        made = figure.legend(
            *axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns, **LEGEND
        )
        if made.get_window_extent().width <= figure.bbox.width:
            return
        made.remove()


def wants_log(values: Sequence[float]) -> bool:
    """Return whether a linear axis would crowd the small values."""
    return min(values) > 0 and max(values) / min(values) >= LOG_FROM_RATIO


def is_far(target: float, values: Sequence[float]) -> bool:
    """Return whether an axis that reaches a target would crowd the values into one place.

    Distances are those on the values' own scale, which is logarithmic where they are far apart. A
    single value counts as a range of its own size, since nothing lies beside it.
    """
    low, high = min(values), max(values)
    if wants_log(values) and target > 0:
        low, high, target = (math.log10(end) for end in (low, high, target))
    span = high - low or abs(high) or 1.0
    return max(low - target, target - high) > FAR * span


def with_target(values: Sequence[float], target: float) -> list[float]:
    """Return the values that an axis has to hold: the target, too, unless it is far away."""
    return list(values) if values and is_far(target, values) else [*values, target]


def draw_target(axes: "Axes", target: float, values: Sequence[float]) -> None:
    """Draw the target's line or, where it is far from the values, an arrow at the edge."""
    known = axes.get_legend_handles_labels()[1]
    if not is_far(target, values):
        axes.axhline(target, label=None if "target" in known else "target", **TARGET)
        return
    shape, edge, side = ("^", 1, "above") if target > max(values) else ("v", 0, "below")
    label = f"target ({side} this axis)"
    looks: dict[str, Any] = {"color": TARGET["color"], "linestyle": "none", "markersize": 5}
    axes.plot(
        0.98,
        edge,
        shape,
        label=None if label in known else label,
        transform=axes.transAxes,
        clip_on=False,
        **looks,
    )


def far_target_text(target: float, values: Sequence[float], quality: Quality) -> str:
    """Return the end of a caption, which names a target that is not drawn; "" if it is."""
    if not is_far(target, values):
        return ""
    side = "above" if target > max(values) else "below"
    return (
        f" The target, {quality.bound_word} {quality.target_text(target)}, lies far {side} the axis"
        " and is not drawn."
    )


def log_scale(axis: "Axis", values: Sequence[float]) -> None:
    """Make an axis logarithmic, before its values are drawn.

    The margin around the values is as wide as matplotlib's own, which overflows at the ends of the
    range of floats.
    """
    low, high = min(values), max(values)
    margin = 10 ** (MARGIN * (math.log10(high) - math.log10(low)))
    name = axis.axis_name  # type: ignore[attr-defined]  # "x" or "y"; matplotlib's stubs lack it
    limits = max(low / margin, float_info.min), min(high * margin, float_info.max)
    axis.axes.set(**{f"{name}lim": limits})
    axis.axes.set(**{f"{name}scale": "log"})


def plain_ticks(*several: "Axis", most: int = 5) -> None:
    """Set round numbers without powers of ten as ticks, at most `most` per axis.

    Call it after everything is drawn, because it depends on the axes' limits.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

    for axis in several:
        if axis.get_scale() == "log":
            axis.set_major_locator(FixedLocator(_log_ticks(*axis.get_view_interval(), most)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
            axis.set_minor_formatter(NullFormatter())
        else:
            axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return 1, 2 and 5 in each power of ten, or fewer where these are too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [
            tick
            for power in powers
            for digit in digits
            if low <= (tick := float(f"{digit}e{power}")) <= high
        ]
        if len(ticks) <= most:
            break
    return ticks[:: -(-len(ticks) // most) or 1]


def ticks_at(axis: "Axis", values: Sequence[float], texts: Iterable[str]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_ticks(list(values), list(texts))
