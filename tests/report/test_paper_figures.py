"""The figures of the paper as PDF: one column wide, nothing too small, nothing over another, nothing cut; and the
page's small charts, whose labels have the same to fulfil."""

import re
import shutil
import subprocess
import zlib
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from carbonopt.report.paper.figures import typeset
from carbonopt.report.paper.style import WIDTH_IN, Draw, pictures
from carbonopt.report.points import scatter
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from paper_facts import INFLUENCE, batch_effect, learned, returns
from small_studies import gpu_study, on_gpu, pruned, study, trial

from carbonopt.analysis.batch import BatchEffect
from carbonopt.analysis.diminishing_returns import DiminishingReturns
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.replicates import repeats
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialState
from carbonopt.report import charts as page_charts
from carbonopt.report.paper import charts, influence, pareto

SMALLEST_PT = 6.5
needs_poppler = pytest.mark.skipif(shutil.which("pdftotext") is None, reason="needs poppler-utils")

FULL = gpu_study(
    on_gpu(0, 20e3, perplexity=4.0),
    on_gpu(1, perplexity=5.0),
    on_gpu(2, 10.4e3, perplexity=5.2, repeat_of=1, seed=4, params={"learning_rate": 2e-3}),
    on_gpu(3, 9.6e3, perplexity=4.8, repeat_of=1, seed=5, params={"learning_rate": 2e-3}),
    on_gpu(4, 5e3, perplexity=8.0, earlier_attempts_energy_kwh=1e-3, earlier_attempts_gpu_kwh=8e-4, attempt=2),
    on_gpu(5, 15e3, perplexity=7.0),
    pruned(6, 7.5),
    trial(7, 2e-3, None, state=TrialState.FAILED, evals=pruned(7, 6.5).evals),
)
FAR = study(trial(0, 1e-6, 5.9), trial(1, 1e2, 2.0), trial(2, 1.0, 1e30))


def front(data: StudyData, knee: int | None = None) -> Draw | None:
    rec, again = recommend(data), repeats(data.records)
    return pareto.pareto(scatter(data, rec, again), rec, knee)


def batches(*sizes: int) -> BatchEffect:
    one = batch_effect().batches[0]
    return BatchEffect(
        batches=tuple(one.model_copy(update={"global_batch_size": size}) for size in sizes),
        least_energy=sizes[0],
        least_duration=sizes[0],
        least_memory=sizes[0],
    )


def some_stopped() -> BatchEffect:
    """No trial completed with the two largest batches, which have the least time and energy, or told its memory."""
    found = batch_effect()
    unfinished = {"only_stopped": True, "peak_memory_gib": None}
    first, *others = found.batches[2:]
    batches = (first, *(one.model_copy(update=unfinished) for one in others))
    return found.model_copy(update={"batches": batches, "least_energy": 128, "least_memory": None})


def reached_together() -> DiminishingReturns:
    """A run whose one evaluation is the first at the target and as good as the lowest."""
    found = returns(1)
    return found.model_copy(update={"first_meeting": found.enough})


DRAWN: dict[str, tuple[Draw | None, float]] = {
    "pareto": (front(FULL, knee=1), pareto.HEIGHT_IN),
    "pareto far apart": (front(FAR), pareto.HEIGHT_IN),
    "pareto one trial": (front(study(trial(0))), pareto.HEIGHT_IN),
    "batch": (charts.batch(batch_effect()), charts.BATCH_HEIGHT_IN),
    "stopped batches": (charts.batch(some_stopped()), charts.BATCH_HEIGHT_IN),
    "large batches": (charts.batch(batches(*(1024 * k for k in range(1, 9)))), charts.BATCH_HEIGHT_IN),
    "influence": (influence.importance(INFLUENCE), influence.importance_height_in(INFLUENCE)),
    "effects": (influence.effects(INFLUENCE), influence.effects_height_in(INFLUENCE)),
    "one objective": (influence.effects([learned("emissions", 1e-6)]), influence.effects_height_in(INFLUENCE)),
    "returns": (charts.returns(returns(1), 6.0), charts.RETURNS_HEIGHT_IN),
    "returns together": (charts.returns(reached_together(), 6.0), charts.RETURNS_HEIGHT_IN),
    "energy": (charts.energy(footprint(FULL)), charts.ENERGY_HEIGHT_IN),
    "energy of GPUs": (charts.energy(footprint(gpu_study(on_gpu(0), on_gpu(1)))), charts.ENERGY_HEIGHT_IN),
    "energy of a CPU": (charts.energy(footprint(study(trial(0)))), charts.ENERGY_HEIGHT_IN),
}


def words(pdf: Path) -> list[tuple[float, float, float, float, str]]:
    """Each word's box in points (left, top, right, bottom) and the word; line by line, so that a space parts none."""
    boxes = subprocess.run(["pdftotext", "-bbox", pdf, "-"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r'<word xMin="([-\d.]+)" yMin="([-\d.]+)" xMax="([-\d.]+)" yMax="([-\d.]+)">(.*?)<', boxes)
    return [(float(left), float(top), float(right), float(bottom), text) for left, top, right, bottom, text in found]


@needs_poppler
@pytest.mark.parametrize("name", DRAWN)
def test_texts_are_inside_large_enough_and_apart(tmp_path: Path, name: str) -> None:
    draw, height_in = DRAWN[name]
    assert draw is not None
    content = pictures(draw, height_in)["pdf"]
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.DOTALL)
    drawing = b"".join(zlib.decompressobj().decompress(one) for one in streams if one[:1] == b"x")
    sizes = [float(size) for size in re.findall(rb"/F\d+ ([\d.]+) Tf", drawing)]
    assert sizes and min(sizes) >= SMALLEST_PT
    file = tmp_path / "figure.pdf"
    file.write_bytes(content)
    found = words(file)
    assert len(found) > 5
    for left, top, right, bottom, text in found:
        assert left >= 0 and top >= 0 and right <= 72 * WIDTH_IN and bottom <= 72 * height_in, text
    for one, other in combinations(found, 2):
        across = min(one[2], other[2]) - max(one[0], other[0])
        up = min(one[3], other[3]) - max(one[1], other[1])
        assert across <= 0.5 or up <= 3.0, (one[4], other[4])  # a line's box has room above and below its letters


def drawn(draw: Draw | None) -> Figure:
    assert draw is not None
    figure = Figure()
    draw(figure)
    return figure


def named(figure: Figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def test_an_evaluation_of_several_milestones_has_one_mark_with_all_their_names() -> None:
    apart, together = (named(drawn(charts.returns(found, 6.0))) for found in (returns(1), reached_together()))
    assert apart[1:4] == ["first at the target", "within 1 % of the lowest", "lowest"]
    assert together[1:3] == ["first at the target, within 1 % of the lowest", "lowest"]
    assert len(apart) == len(together) + 1


def test_batches_of_stopped_trials_are_hollow_and_one_value_is_no_panel() -> None:
    assert "stopped trials only" not in named(drawn(charts.batch(batch_effect())))
    figure = drawn(charts.batch(some_stopped()))
    assert "stopped trials only" in named(figure)
    time, memory, energy, _ = figure.axes
    assert [text.get_text() for text in memory.texts] == ["Memory is known\nfor batch 64 only"]
    assert not memory.axison and not memory.lines
    for axes, least in ((time, 256), (energy, 128)):
        hollow = [line for line in axes.lines if to_rgb(line.get_markerfacecolor()) == (1, 1, 1)]
        assert [np.asarray(line.get_xdata()).tolist() for line in hollow] == [[128, 256], [least]]  # the star, too


def test_the_page_says_which_batches_only_stopped_trials_tell_of() -> None:
    assert {chart.x_title for chart in page_charts.batch(batch_effect())} == {"Global batch size"}
    time, memory, *_ = page_charts.batch(some_stopped())
    assert time.x_title == memory.x_title == "Global batch size (128, 256: stopped trials only)"
    assert memory.title == "Memory: known for batch 64 only" and len(memory.marks) == 1
    assert [mark.hint.endswith(", of stopped trials") for mark in time.marks] == [False, True, True]
    many = batches(*(1024 * k for k in range(1, 9)))
    stopped = tuple(one.model_copy(update={"only_stopped": True}) for one in many.batches[1:])
    for chart in page_charts.batch(many.model_copy(update={"batches": (many.batches[0], *stopped)})):
        assert chart.x_title == "Global batch size (7 of 8: stopped trials only)"
        assert len(chart.x_title) * page_charts.LETTER < page_charts.WIDTH


def test_a_bar_without_a_part_has_no_line_for_it() -> None:
    figure = drawn(charts.energy(footprint(gpu_study(on_gpu(0)))))
    bars = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle) and bar.get_hatch()]
    assert len(bars) == 1 and bars[0].get_width() > 0  # training alone has a part of the CPU and the RAM


@needs_poppler
def test_the_unit_has_a_lowered_two_and_stays_text(tmp_path: Path) -> None:
    draw, height_in = DRAWN["pareto"]
    assert draw is not None
    (tmp_path / "figure.pdf").write_bytes(pictures(typeset(draw), height_in)["pdf"])
    said = " ".join(text for *_, text in words(tmp_path / "figure.pdf"))
    assert "CO₂e)" in said and "CO2e" not in said


@pytest.mark.parametrize("found", [returns(1), reached_together()])
def test_labels_of_the_page_are_apart_and_above_their_marks(found: DiminishingReturns) -> None:
    (chart,) = page_charts.returns(found, 6.0)
    boxes = []
    for mark in chart.marks:
        for line in mark.label:
            width = page_charts.LETTER * len(line.text)
            left = mark.x - width if mark.anchor == "end" else mark.x
            boxes.append((left, left + width, line.at))
            assert left >= 0 and left + width <= page_charts.WIDTH and line.at < mark.y
    assert len(boxes) == 3
    heights = sorted(at for _, _, at in boxes)
    assert all(b - a >= page_charts.LINE for a, b in pairwise(heights))


def test_the_minimum_of_the_page_stands_between_its_mark_and_the_axis() -> None:
    for chart in page_charts.batch(batch_effect()):
        (mark,) = (one for one in chart.marks if one.label)
        assert mark.ends is not None and mark.ends[0] < mark.label[0].at - 8 and mark.label[0].at < page_charts.BOTTOM


def test_long_names_below_an_axis_take_two_rows_and_are_not_cut() -> None:
    (scheduler,) = (chart for chart in page_charts.influence(INFLUENCE)["emissions"] if chart.title == "lr_scheduler")
    assert [tick.text for tick in scheduler.x_ticks] == ["linear", "cosine_with_min_lr"]
    for charted in page_charts.influence(INFLUENCE)["emissions"]:
        for row in (0, 1):
            ticks = [tick for tick in charted.x_ticks if tick.row == row]
            ends = [(tick.at, page_charts.LETTER * len(tick.text) / 2) for tick in ticks]
            assert all(at + half <= page_charts.WIDTH for at, half in ends)
            assert all(b[0] - b[1] >= a[0] + a[1] for a, b in pairwise(ends))


def test_where_nothing_is_known_nothing_is_drawn() -> None:
    assert front(study()) is None
    assert charts.batch(None) is None
    assert charts.returns(None, 6.0) is None
    once = returns(1)
    assert charts.returns(once.model_copy(update={"points": once.points[:1]}), 6.0) is None
    assert charts.energy(footprint(study(sessions=()))) is None
    assert influence.importance([]) is None and influence.effects([]) is None
