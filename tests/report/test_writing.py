"""How a report comes into its folder: whole or not at all, beside what the user keeps there; and
what its pages do with figures and names beyond all bounds.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from browser import browser
from facts_by_hand import BATCH, INFLUENCE, RETURNS
from small_studies import HACKED, HONEST, gpu_study, on_gpu, pruned, reward_study, study, trial

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.files import replaced
from carbonopt.core.format import (
    emissions_text,
    energy_text,
    number_from,
    params_text,
    plus_minus_text,
)
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import StopReason, TrialState
from carbonopt.report.assemble import whole
from carbonopt.report.caveats import less_or_more_text
from carbonopt.report.paper.paper_files import NAMES as PAPER_NAMES
from carbonopt.report.paper.paper_files import paper_files
from carbonopt.report.sections.trials_section import end_text
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import short_params
from carbonopt.report.writing import NAMES, write_report
from carbonopt.spec.study_data import StudyData

MET = study(trial(0), trial(1, 2e-3, 4.0))
# A process that fills the folder of its first argument again and again, or dies over it at the
# second.
WRITER = """
import os, signal, sys
from pathlib import Path
from carbonopt.core.files import replaced
folder, end = Path(sys.argv[1]), sys.argv[2]
for turn in range(60):
    with replaced(folder, ["a.txt", "b/c.txt"]) as part:
        (part / "b").mkdir()
        for name in ("a.txt", "b/c.txt"):
            (part / name).write_text(f"{os.getpid()} {turn}" if end == "well" else "half")
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(MET, tmp_path_factory.mktemp("once") / "report").parent


@pytest.fixture
def met_report(written_once: Path, tmp_path: Path) -> Path:
    """The folder of MET's report, for one test, with nothing beside it."""
    return shutil.copytree(written_once, tmp_path / "report")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)


def test_a_new_report_takes_the_place_of_the_old_one_beside_the_users_files(met_report, tmp_path):
    folder = met_report
    folder.chmod(0o750)
    notes = {
        "notes.md": b"mine",
        "paper/figure-mine.pdf": b"%PDF",
        "paper/sections/intro.tex": b"x",
        "winner/data/a": b"",
    }
    for name, content in notes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("nowhere")
    write_report(study(pruned(0)), folder)
    assert (
        contents(folder).items() >= notes.items()
        and (folder / "empty").is_dir()
        and (folder / "link").is_symlink()
    )
    assert sorted(path.name for path in (folder / "winner").iterdir()) == ["data"]
    assert not (folder / "paper" / "table-pareto.tex").exists()
    only = tmp_path / "only"
    write_report(study(pruned(0)), only)
    assert contents(folder) == contents(only) | notes
    assert folder.stat().st_mode & 0o777 == 0o750 and beside(folder) == ["only"]


@pytest.mark.slow
def test_all_files_of_a_report_are_known_by_name(tmp_path):
    data = gpu_study(on_gpu(0), on_gpu(1, 11e3, seed=4), on_gpu(2, 20e3, perplexity=4.0))
    looked_at = StudyView(data, influence=INFLUENCE, batch=BATCH, diminishing_returns=RETURNS)
    rewards = StudyView(reward_study(HACKED, HONEST))
    assert {
        *paper_files(looked_at, whole(looked_at)),
        *paper_files(rewards, whole(rewards)),
    } == set(PAPER_NAMES)
    write_report(data, tmp_path / "report", winner_files={"ds_config.json": "{}"})
    folders = tuple(name for name in NAMES if name.endswith("/"))
    assert {name for name in contents(tmp_path / "report") if not name.startswith(folders)} <= NAMES
    assert set(folders) == {"winner/carbonopt/", "winner/config/"}


def test_a_killed_report_leaves_the_old_one_and_nothing_in_the_way(met_report, tmp_path):
    folder = met_report
    before = contents(folder)
    killed = subprocess.run([sys.executable, "-c", WRITER, folder, "killed"], check=False)
    assert killed.returncode == -signal.SIGKILL and beside(folder) == [".report.part"]
    assert contents(folder) == before
    folder.rename(tmp_path / ".report.old")  # as if killed between the two renames
    with pytest.raises(KeyError), replaced(folder, NAMES):
        raise KeyError
    assert contents(folder) == before and beside(folder) == []


def test_two_reports_at_once_never_mix(tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, folder, "well"]) for _ in range(2)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        try:
            opened = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            texts = [
                Path(f"/proc/self/fd/{opened}", name).read_text() for name in ("a.txt", "b/c.txt")
            ]
        except FileNotFoundError:  # the folder was replaced meanwhile
            continue
        finally:
            os.close(opened)
        assert texts[0] == texts[1]
        seen.add(texts[0].split()[0])
    assert [writer.returncode for writer in writers] == [0, 0] and len(seen) == 2
    assert (folder / "a.txt").read_text() == (folder / "b" / "c.txt").read_text()
    assert (folder / "notes.md").read_text() == "mine" and beside(folder) == []


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("index.html", lambda path: path.mkdir(), "index.html has to be a file, but is a folder"),
        (
            "winner/run.sh",
            lambda path: path.mkdir(parents=True),
            "run.sh has to be a file, but is a folder",
        ),
        ("paper", lambda path: path.write_text(""), "paper has to be a folder, but is a file"),
        ("paper", lambda path: path.symlink_to("/usr"), "paper has to be a folder, but is a link"),
        (".", lambda path: path.rmdir() or path.write_text(""), "is a file; give a folder"),
    ],
)
def test_what_is_in_the_way_is_said_and_nothing_is_written(name, make, said, tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    make(folder / name)
    before = sorted(folder.rglob("*"))
    with pytest.raises(BadInput, match=re.escape(said)):
        write_report(MET, folder)
    assert sorted(folder.rglob("*")) == before and beside(folder) == []


def test_a_file_on_the_way_to_the_reports_folder_is_named(tmp_path):
    (tmp_path / "notes").write_text("x")
    with pytest.raises(BadInput, match=re.escape(f"{tmp_path / 'notes'} has to be a folder")):
        write_report(MET, tmp_path / "notes" / "report")


def test_a_folder_is_not_taken_away_from_under_the_user(met_report, monkeypatch):
    folder = met_report
    monkeypatch.chdir(folder / "paper")
    with pytest.raises(BadInput, match="while you are in it; change to another folder first"):
        write_report(MET, folder)
    assert Path.cwd().is_dir()


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "report").symlink_to("real")
    assert write_report(MET, tmp_path / "report") == tmp_path / "report" / "index.html"
    assert (tmp_path / "report").is_symlink() and (tmp_path / "real" / "index.html").exists()


# ----------------------------------------------------------------------------------------------
# beyond all bounds


EXTREMES = {
    "huge": study(
        trial(0, params={"epochs": 1e20}),
        trial(1, 2e-3, 1e300),
        trial(2, 1e-310, 1e308),
        trial(3, 1e18, 4.0),
    ),
    "tiny": study(trial(0, 1e-300, 5.0), trial(1, 2e-300, 4.0)),
}


@pytest.mark.parametrize("data", EXTREMES.values(), ids=EXTREMES)
def test_figures_beyond_all_bounds_are_powers_of_ten(data: StudyData, tmp_path):
    index = write_report(data, tmp_path / "report")
    markdown = (index.parent / "report.md").read_text()
    latex = "".join(path.read_text() for path in (index.parent / "paper").glob("*.tex"))
    page = re.sub(r"<script.*?</script>|base64,[^\"]*", "", index.read_text(), flags=re.DOTALL)
    for text in (markdown, latex, page):
        assert max(map(len, re.findall(r"[\d.,]+", text))) <= 18  # of a float with all its digits
    assert re.search(r"\d\.\d\de[+-]\d{3}", markdown) and re.search(
        r"\$\d\.\d\d\\times10\^\{-?\d{2,3}\}\$", latex
    )
    assert not re.search(r"\de[+-]?\d", latex)
    report = json.loads((index.parent / "data" / "report.json").read_text())
    chosen = data.records[report["recommendation"]["trial"]]
    assert report["recommendation"]["emissions_kg_co2e"] == chosen.emissions_kg_co2e  # all digits


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX")
def test_powers_of_ten_are_set_as_such(tmp_path):
    folder = write_report(EXTREMES["huge"], tmp_path / "report").parent / "paper"
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main"],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_names_and_paths_that_hold_a_number_stay_as_they_are(tmp_path):
    data = study(trial(0), trial(1, 2e-3, 4.0), name="lr-1e-5/run1e5 v1.5e3x")
    paper = write_report(data, tmp_path / "report").parent / "paper"
    assert any("lr-1e-5/run1e5 v1.5e3x" in path.read_text() for path in paper.glob("*.tex"))


FIGURES = {
    PERPLEXITY.text(4.35): "4.350",
    PERPLEXITY.text(4.3474): "4.347",
    PERPLEXITY.text(18): "18.00",
    PERPLEXITY.text(1234.5): "1234",
    PERPLEXITY.text(1e300): "1.000e+300",
    number_from(1e300, 2e300): "1.001e+300",
    plus_minus_text(5.1, 0.141): "5.10 ± 0.14",
    plus_minus_text(1e300, 0.0): "1.000e+300 ± 0",
    emissions_text(0.00023): "0.230 g CO2e",
    emissions_text(0.000999999): "1.00 g CO2e",
    emissions_text(0.999999): "1,000 g CO2e",
    emissions_text(12345.0): "12,300 kg CO2e",
    emissions_text(1e300): "1.00e+300 kg CO2e",
    emissions_text(0.0): "0 mg CO2e",
    energy_text(1.0): "1.00 kWh",
    energy_text(1234.0): "1,230 kWh",
    energy_text(10e3 / 3.6e6): "10.0 kJ",
}


@pytest.mark.parametrize(("text", "expected"), FIGURES.items())
def test_figures(text, expected):
    assert text == expected


def test_a_searched_optimizer_is_named_with_what_decides_most():
    params = trial(0, params={"optimizer": "muon", "zero_stage": 0}).params
    assert short_params(params) == "batch 16, lr 1e-3, 2 epochs, ZeRO 0, Muon"
    assert params_text(params).endswith("ZeRO 0, optimizer muon")
    assert short_params(trial(0).params) == "batch 16, lr 1e-3, 2 epochs, ZeRO 1"


@pytest.mark.parametrize(
    ("rate", "said"), [(1.5, "1.5"), (1.0, "1"), (0.03, "3e-2"), (12.0, "1.2e1")]
)
def test_a_rate_of_one_to_ten_has_no_power(rate: float, said: str) -> None:
    assert f", lr {said}, " in short_params(trial(0, params={"learning_rate": rate}).params)


def test_every_dimension_that_the_study_varies_is_named() -> None:
    decayed = trial(0, params={"weight_decay": 0.1}).params
    varied = ("weight_decay", "learning_rate")
    assert short_params(decayed, varied) == "batch 16, lr 1e-3, 2 epochs, ZeRO 1, weight decay 0.1"
    assert params_text(decayed, varied).endswith(", ZeRO 1, weight decay 0.1")
    assert "decay" not in short_params(decayed) + params_text(decayed)


def test_a_script_s_truth_value_is_shown_as_it_gets_it() -> None:
    params = TrialParams(learning_rate=1e-3, shuffle=True)
    assert params_text(params).endswith("shuffle true")


def test_a_micro_batch_is_named_where_it_is_a_part_of_the_batch() -> None:
    varied = ("global_batch_size", "micro_batch_size_per_gpu")
    part = trial(0, params={"global_batch_size": 32, "micro_batch_size_per_gpu": 8}).params
    whole = trial(0, params={"global_batch_size": 8, "micro_batch_size_per_gpu": 8}).params
    assert short_params(part, varied).endswith(", micro batch 8")
    assert "micro" not in short_params(whole, varied) + params_text(whole, varied)


def test_impossible_batches_are_damage_and_said_with_their_trial():
    odd = trial(7).model_copy(
        update={"params": trial(7).params.model_copy(update={"global_batch_size": 7})}
    )
    with pytest.raises(
        BadInput, match=r"^trial 7: global_batch_size must be a multiple of .* got 7 and 8 × 1$"
    ):
        study(trial(0), odd)


# ---------------------------------------------------------------------------------------------------
# directions


TURNED = "run \N{RIGHT-TO-LEFT OVERRIDE}abc \N{POP DIRECTIONAL ISOLATE}"
HEBREW = "12 \N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
@pytest.mark.slow
def test_names_do_not_turn_round_what_stands_beside_them(tmp_path):
    index = write_report(study(trial(0), name=f"{HEBREW}{TURNED}"), tmp_path / "report")
    with browser(tmp_path / "profile") as tab:
        tab.open(index)
        text = tab.run(
            "document.documentElement.textContent + JSON.stringify(content) + document.title"
        )
        assert "[U+202E]" in tab.run("document.title") and "[U+2069]" in tab.run("document.title")
        assert not re.search("[\u202a-\u202e\u2066-\u2069]", text)
        # A Hebrew name reads from the right, its figure first, and all of it stands right of the
        # words before it.
        edge = (
            "(node => (from => { const range = document.createRange(); range.setStart(node, from);"
            " range.setEnd(node, from + 1); return range.getBoundingClientRect().x; }))"
        )
        name = f"{edge}(document.querySelector('.eyebrow bdi').firstChild)"
        assert tab.run(f"{name}(3) < {name}(0)")
        assert tab.run(f"{edge}(document.querySelector('.eyebrow').firstChild)(0) < {name}(3)")
    for line in (index.parent / "report.md").read_text().splitlines():
        assert not re.search("[\u202a-\u202e\u2066-\u2069]", line)


def test_an_interrupted_trial_is_not_called_failed() -> None:
    interrupted = trial(0, state=TrialState.FAILED, stop_reason=StopReason.INTERRUPTED)
    assert end_text(interrupted) == "interrupted"
    assert end_text(pruned(1)) == "pruned: target out of reach"
    assert end_text(trial(2)) == "complete"


def test_an_interval_without_an_end_states_no_saving_of_everything() -> None:
    assert less_or_more_text((None, 1.0)) == "between far more and 100 % less"
    assert less_or_more_text((None, 0.3)) == "at most 30 % less"
