"""The figures: as PDF one column wide, nothing too small, nothing over another, nothing cut; the
same as SVG.
"""

import html
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from paper_facts import INFLUENCE, batch_effect, learned, returns
from small_studies import (
    HACKED,
    HONEST,
    beside,
    gpu_study,
    on_gpu,
    pruned,
    reward_study,
    rewarded,
    study,
    trial,
)

from carbonopt.analysis.batch import BatchEffect
from carbonopt.analysis.comparison import DiminishingReturns
from carbonopt.analysis.footprint import footprint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.report import document
from carbonopt.report.comparison_report import StudiesView
from carbonopt.report.figures.batch_figure import batch
from carbonopt.report.figures.energy_figure import energy
from carbonopt.report.figures.fronts_figure import fronts
from carbonopt.report.figures.influence_figure import effects, importance
from carbonopt.report.figures.pareto_figure import pareto
from carbonopt.report.figures.points import frame
from carbonopt.report.figures.policy_figure import policy
from carbonopt.report.figures.returns_figure import returns as run
from carbonopt.report.figures.style import WIDTH_IN, with_target
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData

SMALLEST_PT = 6.5
needs_poppler = pytest.mark.skipif(shutil.which("pdftotext") is None, reason="needs poppler-utils")

FULL = gpu_study(
    on_gpu(0, 20e3, perplexity=4.0),
    on_gpu(1, perplexity=5.0),
    on_gpu(2, 10.4e3, perplexity=5.2, repeat_of=1, seed=4, params={"learning_rate": 2e-3}),
    on_gpu(3, 9.6e3, perplexity=4.8, repeat_of=1, seed=5, params={"learning_rate": 2e-3}),
    on_gpu(
        4,
        5e3,
        perplexity=8.0,
        earlier_attempts_energy_kwh=1e-3,
        earlier_attempts_gpu_kwh=8e-4,
        attempt=2,
    ),
    on_gpu(5, 15e3, perplexity=7.0),
    pruned(6, 7.5),
    trial(7, 2e-3, None, state=TrialState.FAILED, evals=pruned(7, 6.5).evals),
)
TWO = trial(0, 1e-3, 5.9), trial(1, 4e-3, 4.0)
ALIKE = trial(0, 1e-3, 5.1), trial(1, 4e-3, 5.0)
FAR = study(trial(0, 1e-6, 5.9), trial(1, 1e2, 2.0), trial(2, 1.0, 1e30))


def front(data: StudyData, knee: int | None = None) -> document.Figure | None:
    looked_at = StudyView(data)
    return pareto(looked_at.plot, looked_at.recommendation, knee, looked_at.quality)


def rewards(*records: TrialRecord, target: float = 0.5) -> document.Figure | None:
    found = StudyView(reward_study(*records)).overoptimisation
    return policy(found, target)


def fronts_of(*targets: float) -> document.Figure | None:
    """The fronts of equal studies with these targets."""
    studies = {f"study {target:g}": StudyView(study(*TWO, target=target)) for target in targets}
    return fronts(StudiesView(studies).comparison, QUALITY)


def batches(*sizes: int) -> BatchEffect:
    smallest_batch = batch_effect().batches[0]
    return BatchEffect(
        batches=tuple(
            smallest_batch.model_copy(update={"global_batch_size": size}) for size in sizes
        ),
        least_energy=sizes[0],
        least_duration=sizes[0],
        least_memory=sizes[0],
    )


def some_stopped() -> BatchEffect:
    """No trial completed with the two largest batches, which have the least time and energy, or
    told its memory.
    """
    effect = batch_effect()
    unfinished = {"only_stopped": True, "peak_memory_gib": None}
    first, *others = effect.batches[2:]
    batches = (first, *(other.model_copy(update=unfinished) for other in others))
    return effect.model_copy(update={"batches": batches, "least_energy": 128, "least_memory": None})


def some_slowed() -> BatchEffect:
    """Other work slowed both trials of the smallest batch, and one of the next."""
    effect = batch_effect()
    both, one, *others = effect.batches
    both, one = both.model_copy(update={"slowed": (0, 1)}), one.model_copy(update={"slowed": (1,)})
    return effect.model_copy(update={"batches": (both, one, *others)})


def reached_together() -> DiminishingReturns:
    """A run whose one evaluation is the first at the target and as good as the lowest."""
    diminishing = returns(1)
    return diminishing.model_copy(update={"first_meeting": diminishing.enough})


QUALITY = StudyView(study()).quality
FIGURES: dict[str, Callable[[], document.Figure | None]] = {
    "pareto": lambda: front(FULL, knee=1),
    "pareto far apart": lambda: front(FAR),
    "pareto one trial": lambda: front(study(trial(0))),
    "batch": lambda: batch(batch_effect(), PERPLEXITY),
    "stopped batches": lambda: batch(some_stopped(), PERPLEXITY),
    "large batches": lambda: batch(batches(*(1024 * k for k in range(1, 9))), PERPLEXITY),
    "influence": lambda: importance(INFLUENCE),
    "effects": lambda: effects(INFLUENCE, QUALITY)[0],
    "effects-2": lambda: effects(INFLUENCE, QUALITY)[1],
    "one objective": lambda: effects([learned("emissions", 1e-6)], QUALITY)[0],
    "returns": lambda: run(returns(1), 6.0, QUALITY),
    "returns together": lambda: run(reached_together(), 6.0, QUALITY),
    "policy": lambda: rewards(HACKED, HONEST),
    "policy without gold": lambda: rewards(
        rewarded(0, (0.2, beside(None, 0.0)), (0.4, beside(None, 0.0)))
    ),
    "policy far away": lambda: rewards(
        *(rewarded(n, (0.1, beside(0.2, 4.0)), (0.6, beside(0.4, n * 1e3))) for n in (1, 2))
    ),
    "slowed batches": lambda: batch(some_slowed(), PERPLEXITY),
    "pareto loose target": lambda: front(study(*TWO, target=1e9)),
    "pareto strict target": lambda: front(study(*ALIKE, target=1.5)),
    "returns loose target": lambda: run(returns(1), 1e9, QUALITY),
    "policy strict target": lambda: rewards(HACKED, HONEST, target=1e9),
    "fronts loose target": lambda: fronts_of(6.0, 5.5, 1e8, 1e9),
    "energy": lambda: energy(footprint(FULL)),
    "energy of GPUs": lambda: energy(footprint(gpu_study(on_gpu(0), on_gpu(1)))),
    "energy of a CPU": lambda: energy(footprint(study(trial(0)))),
}


@cache
def drawn(name: str) -> document.Figure:
    figure = FIGURES[name]()
    assert figure is not None
    return figure


def words(pdf: Path) -> list[tuple[float, float, float, float, str]]:
    """Each word's box in points (left, top, right, bottom) and the word; line by line, so that a
    space parts none.
    """
    boxes = subprocess.run(
        ["pdftotext", "-bbox", pdf, "-"], capture_output=True, text=True, check=True
    ).stdout
    matches = re.findall(
        r'<word xMin="([-\d.]+)" yMin="([-\d.]+)" xMax="([-\d.]+)" yMax="([-\d.]+)">(.*?)<', boxes
    )
    return [
        (float(left), float(top), float(right), float(bottom), text)
        for left, top, right, bottom, text in matches
    ]


@needs_poppler
@pytest.mark.parametrize("name", FIGURES)
def test_texts_are_inside_large_enough_and_apart(tmp_path: Path, name: str) -> None:
    content = drawn(name).pdf
    sheet = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+)", content)
    assert sheet is not None and float(sheet[1]) == 72 * WIDTH_IN
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.DOTALL)
    drawing = b"".join(
        zlib.decompressobj().decompress(stream) for stream in streams if stream[:1] == b"x"
    )
    sizes = [float(size) for size in re.findall(rb"/F\d+ ([\d.]+) Tf", drawing)]
    assert sizes and min(sizes) >= SMALLEST_PT
    file = tmp_path / "figure.pdf"
    file.write_bytes(content)
    boxes = words(file)
    assert len(boxes) > 5
    for left, top, right, bottom, text in boxes:
        assert left >= 0 and top >= 0 and right <= 72 * WIDTH_IN and bottom <= float(sheet[2]), text
    for box, other in combinations(boxes, 2):
        across = min(box[2], other[2]) - max(box[0], other[0])
        up = min(box[3], other[3]) - max(box[1], other[1])
        assert across <= 0.5 or up <= 3.0, (
            box[4],
            other[4],
        )  # a line's box has room above and below its letters


def texts(name: str) -> list[str]:
    """In the SVG, where text stays text."""
    return [
        html.unescape(text)
        for text in re.findall(r"<text [^>]*>(.*?)</text>", drawn(name).svg, re.DOTALL)
    ]


def test_an_evaluation_of_several_milestones_has_one_mark_with_all_their_names() -> None:
    apart, together = texts("returns"), texts("returns together")
    assert {"first at the target", "within 1 % of the best", "best"} <= set(apart)
    assert {"first at the target, within 1 % of the best", "best"} <= set(together)
    assert "first at the target" not in together


def test_batches_of_stopped_trials_are_hollow_and_one_value_is_no_panel() -> None:
    assert "stopped trials only" not in texts("batch") and "stopped trials only" in texts(
        "stopped batches"
    )
    hollow = [
        len(re.findall(r"<use [^>]*fill: var\(--paper\)", drawn(name).svg))
        for name in ("batch", "stopped batches")
    ]
    assert hollow[0] == 0 and hollow[1] > 3
    assert {"Memory is known", "for batch 64 only"} <= set(texts("stopped batches"))


def test_batches_of_slowed_trials_alone_are_marked_and_all_are_named() -> None:
    assert "slowed trials only" not in texts("batch") and "slowed" not in drawn("batch").alt
    assert "slowed trials only" in texts("slowed batches")
    assert "slowed trials of batch size 16, 32." in drawn("slowed batches").alt


def ticks(name: str) -> list[float]:
    return [float(text) for text in texts(name) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text)]


@pytest.mark.parametrize(
    ("name", "target", "side"),
    [
        ("pareto loose target", "at most 1.000e+09", "above"),
        ("pareto strict target", "at most 1.500", "below"),
        ("returns loose target", "at most 1.000e+09", "above"),
        ("policy strict target", "at least 1.000e+09", "above"),
        ("fronts loose target", "at most 1.000e+09", "above"),
    ],
)
def test_a_target_far_from_the_trials_is_named_and_not_drawn(
    name: str, target: str, side: str
) -> None:
    assert f"target ({side} this axis)" in texts(name)
    assert f"The target, {target}, lies far {side} the axis" in drawn(name).caption
    assert ticks(name) and max(ticks(name)) < 1e3


@pytest.mark.parametrize("name", ["pareto", "pareto one trial", "returns", "policy"])
def test_a_target_near_the_trials_is_a_line(name: str) -> None:
    assert "target" in texts(name) and "The target" not in drawn(name).caption


def test_each_study_has_the_targets_that_its_axis_reaches_drawn_under_one_name() -> None:
    said = texts("fronts loose target")
    assert said.count("target") == said.count("target (above this axis)") == 1
    assert "at most 1.000e+08" in drawn("fronts loose target").caption


@pytest.mark.parametrize(
    ("values", "target", "log"),
    [
        ((4.0, 5.9), 1e9, False),
        ((4.0, 5.9), 1e300, False),
        ((40.0, 5.0), 1e9, True),
        ((1e-3, 1e-1), -1e9, True),
        ((0.91, 0.95), 0.1, False),
        ((-0.5, 0.5), -1e9, False),
    ],
)
def test_values_keep_their_axis_whatever_the_target(
    values: tuple[float, ...], target: float, log: bool
) -> None:
    axis = frame(with_target(values, target))
    assert axis == frame(list(values)) and axis.log is log
    assert not axis.holds(target)


@pytest.mark.parametrize(
    ("values", "target"),
    [
        ((4.0, 5.9), 6.0),
        ((4.0, 5.9), 4.0),
        ((5.0,), 6.0),
        ((5.0, 5.0), 2.0),
        ((0.5,), 0.99),
        ((0.0,), 0.5),
        ((5.0, 40.0), 1000.0),
        ((0.1, 1.0), 0.0),
        ((), 6.0),
    ],
)
def test_a_target_that_leaves_the_values_room_is_on_the_axis(
    values: tuple[float, ...], target: float
) -> None:
    axis = frame(with_target(values, target))
    assert axis.holds(target) and all(map(axis.holds, values))
    if len(set(values)) > 1:
        assert axis.share(max(values)) - axis.share(min(values)) > 0.2


def test_a_bar_without_a_part_has_no_line_for_it() -> None:
    svg = drawn("energy of GPUs").svg
    assert (
        len(re.findall(r'style="fill: url\(#', svg)) == 2
    )  # training's part of the CPU and the RAM, and its key


def test_the_unit_has_a_lowered_two_and_stays_text() -> None:
    said = " ".join(texts("pareto"))
    assert "CO₂e)" in said and "CO2e" not in said


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_has_the_same_figure_in_its_own_colours(name: str) -> None:
    svg = drawn(name).svg
    root = ElementTree.fromstring(svg)
    assert (
        root.tag.endswith("svg")
        and root.get("width") is None
        and root.get("viewBox", "").startswith("0 0 252 ")
    )
    assert "currentColor" in svg and "#000000" not in svg and "<!--" not in svg
    named = re.findall(r"<(?!path|clipPath|pattern)\w+ id=", svg)
    assert named == []  # but for what is referred to


def test_figures_have_names_of_their_own() -> None:
    ids = [
        set(re.findall(r'id="([^"]+)"', drawn(name).svg))
        for name in ("pareto", "batch", "returns", "energy")
    ]
    assert all(not figure_ids & other for figure_ids, other in combinations(ids, 2))


def test_all_parameters_have_effects_and_those_that_matter_most_are_the_papers() -> None:
    first, second = effects(INFLUENCE, QUALITY)
    assert (first.name, first.paper, second.name, second.paper) == (
        "effects",
        True,
        "effects-2",
        False,
    )
    assert "weight decay" in second.alt and "weight decay" not in first.alt


def test_where_nothing_is_known_nothing_is_drawn() -> None:
    assert front(study()) is None
    once = returns(1)
    assert run(once.model_copy(update={"points": once.points[:1]}), 6.0, QUALITY) is None
    assert energy(footprint(study(sessions=()))) is None
    assert importance([]) is None and effects([], QUALITY) == []
