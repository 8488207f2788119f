"""The figures of the paper as PDF: one column wide, nothing too small, nothing over another, nothing cut."""

import re
import shutil
import subprocess
import zlib
from itertools import combinations
from pathlib import Path

import pytest
from paper_facts import INFLUENCE, batch_effect, learned, returns
from small_studies import gpu_study, on_gpu, pruned, study, trial

from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.repeats import repeats
from carbonopt.record import StudyData
from carbonopt.report.paper import charts, influence, pareto
from carbonopt.report.paper.style import WIDTH_IN, Draw, pictures
from carbonopt.report.points import scatter
from carbonopt.trial import TrialState

SMALLEST_PT = 6.0
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


DRAWN: dict[str, tuple[Draw | None, float]] = {
    "pareto": (front(FULL, knee=1), pareto.HEIGHT_IN),
    "pareto far apart": (front(FAR), pareto.HEIGHT_IN),
    "pareto one trial": (front(study(trial(0))), pareto.HEIGHT_IN),
    "batch": (charts.batch(batch_effect()), charts.BATCH_HEIGHT_IN),
    "influence": (influence.importance(INFLUENCE), influence.importance_height_in(INFLUENCE)),
    "effects": (influence.effects(INFLUENCE), influence.effects_height_in(INFLUENCE)),
    "one objective": (influence.effects([learned("emissions", 1e-6)]), influence.effects_height_in(INFLUENCE)),
    "returns": (charts.returns(returns(1), 6.0), charts.RETURNS_HEIGHT_IN),
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


def test_where_nothing_is_known_nothing_is_drawn() -> None:
    assert front(study()) is None
    assert charts.batch(None) is None
    assert charts.returns(None, 6.0) is None
    assert charts.energy(footprint(study(sessions=()))) is None
    assert influence.importance([]) is None and influence.effects([]) is None
