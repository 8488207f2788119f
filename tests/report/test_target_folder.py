"""Where a report is refused: over another study's, and where nothing can be written."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from small_studies import study, trial

from carbonopt.core.errors import BadInput
from carbonopt.report.writing import refuse_folder, write_report
from carbonopt.spec.study_data import SessionLedger

MET = study(trial(0), trial(1, 2e-3, 4.0))
LATER = "2026-01-02T00:00:00+00:00"


def begun(*moments: str) -> dict:
    return {
        "sessions": tuple(SessionLedger(started_at=moment, duration_s=70.0) for moment in moments)
    }


@pytest.fixture(scope="module")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(MET, tmp_path_factory.mktemp("report")).parent


@pytest.fixture
def met_report(written_once: Path, tmp_path: Path) -> Path:
    """The folder of MET's report, for one test."""
    return shutil.copytree(written_once, tmp_path / "report")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (study(trial(0), name="other"), "('small', begun 2026-01-01T00:00:00+00:00)"),
        (
            study(trial(0), **begun(LATER)),
            (
                "('small', begun 2026-01-01T00:00:00+00:00; this one, of the same name, began"
                f" {LATER})"
            ),
        ),
    ],
    ids=["another name", "the same name"],
)
def test_another_studys_report_is_not_replaced(other, said, met_report):
    (met_report / "winner" / "output").mkdir()
    before = contents(met_report)
    words = f"{met_report} holds the report of another study {said}; give another folder."
    with pytest.raises(BadInput, match=f"^{re.escape(words)}$"):
        write_report(other, met_report)
    assert contents(met_report) == before


def test_a_name_can_not_write_to_the_terminal(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "report.json").write_text(
        json.dumps({"study": {"name": "x\x1b[2J", "began": "\x1b[2J"}})
    )
    with pytest.raises(BadInput) as refused:
        write_report(MET, tmp_path)
    assert str(refused.value).isprintable()


def test_a_pipe_in_place_of_a_report_holds_nothing_up(tmp_path):
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "report.json")
    refuse_folder(tmp_path, MET)


def test_the_same_study_is_written_again_whatever_ran_since(tmp_path):
    write_report(study(trial(0), **begun(LATER)), tmp_path)
    write_report(
        study(trial(0), trial(1), **begun("2026-01-03T00:00:00Z", "2026-01-02T00:00:00Z")), tmp_path
    )
    assert json.loads((tmp_path / "data/report.json").read_text())["study"] == {
        "name": "small",
        "began": LATER,
    }


def test_a_report_from_before_it_said_so_has_a_name_to_tell_it_by(met_report):
    path = met_report / "data" / "report.json"
    facts = json.loads(path.read_text())
    del facts["study"]
    path.write_text(json.dumps(facts))
    write_report(study(trial(0), **begun(LATER)), met_report)
    path.write_text(json.dumps({**facts, "shown": {"name": "other"}}))
    with pytest.raises(BadInput, match=re.escape("another study ('other'); give")):
        write_report(MET, met_report)


def test_what_says_nothing_of_its_study_is_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    for damaged in ("{", "[1]", '{"study": 1}', '{"shown": {}}', "[" * 100_000):
        (tmp_path / "data" / "report.json").write_text(damaged)
        refuse_folder(tmp_path, MET)
    write_report(MET, tmp_path)


@pytest.fixture
def nobody():
    """Without root's rights, which no folder is closed to."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    yield
    os.setresuid(0, 0, 0)


def test_a_closed_folder_is_said_before_anything_is_computed(tmp_path, nobody):
    closed = Path("/usr/share")
    for folder in (closed / "report", closed / "deep" / "report"):
        with pytest.raises(BadInput) as refused:
            write_report(MET, folder)
        assert str(refused.value) in {
            f"the report can't be written to {folder}: {why}; give another folder."
            for why in ("permission denied", "read-only file system")
        }
