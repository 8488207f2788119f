"""What a call of `carbonopt run` leaves in the storage, however it ends."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from replays import study_over, write_table
from search.test_study import Silent

from carbonopt.core.errors import BadInput, MachineLost, StudyInterrupted
from carbonopt.spec.study_data import PlannedStart, StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url
from carbonopt.study.account import EarlySessions
from carbonopt.study.run_study import run_study
from carbonopt.study.session import Session
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import CheckedStudy, check


def called(checked: CheckedStudy, folder: Path) -> StudyData:
    return run_study(Session(checked, "", StudyPaths(folder), Silent(), Silent(), lambda: False))


@pytest.mark.parametrize(
    ("error", "is_read"), [(MachineLost("h2: gone."), False), (StudyInterrupted("asked"), True)]
)
def test_a_preparation_that_ends_early_is_in_the_ledger(
    error: Exception, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a machine, its meter is lost: how long nothing was read is stored instead."""
    raw = study_over(write_table(tmp_path))
    folder = tmp_path / "out"
    folder.mkdir()
    called(check(parse_study(raw | {"budget": {"trials": 2}}, "test")), folder)

    checked = check(parse_study(raw | {"budget": {"trials": 3}}, "test"))
    engine = checked.engine

    def prepare(interrupted: object) -> None:
        if not is_read:
            monkeypatch.setattr(engine.meter, "parts_and_outer", raised)
        raise error

    def raised(*arguments: object) -> None:
        raise MachineLost("h2: its meter can't be read.")

    monkeypatch.setattr(engine, "prepare", prepare)
    with pytest.raises(type(error), match=str(error)):
        called(checked, folder)

    paths = StudyPaths(folder)
    *_, session = StudyStorage.of_folder(connect(storage_url(paths, None)), paths).read().sessions
    assert session.duration_s > 0
    assert session.unread_s == (0.0 if is_read else session.duration_s)


def test_plan_of_an_earlier_call_is_gone_before_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule may have been changed or removed since."""
    raw = study_over(write_table(tmp_path))
    folder = tmp_path / "out"
    folder.mkdir()
    called(check(parse_study(raw | {"budget": {"trials": 2}}, "test")), folder)
    paths = StudyPaths(folder)
    stored = StudyStorage.of_folder(connect(storage_url(paths, None)), paths)
    at = "2026-06-04T02:00:00+00:00"
    stored.set_planned_start(PlannedStart(at=at, finish_by=at, expected_saving=0.8, rule="made"))

    checked = check(parse_study(raw | {"budget": {"trials": 3}}, "test"))
    seen: list[PlannedStart | None] = []
    prepare = checked.engine.prepare

    def looked_at(interrupted: Callable[[], bool]) -> object:
        seen.append(stored.read().planned_start)
        return prepare(interrupted)

    monkeypatch.setattr(checked.engine, "prepare", looked_at)
    assert called(checked, folder).planned_start is None
    assert seen == [None]


def test_calls_that_ended_before_the_study_are_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have prepared is used by the call that begins the study."""
    raw = study_over(write_table(tmp_path)) | {"budget": {"trials": 1}}
    folder = tmp_path / "out"
    folder.mkdir()

    def asked(*arguments: object) -> None:
        raise StudyInterrupted("asked")

    for reads_inputs in (True, False):
        checked = check(parse_study(raw, "test"))
        with monkeypatch.context() as patched, pytest.raises(StudyInterrupted):
            if reads_inputs:
                patched.setattr(checked.engine, "prepare", asked)
            else:  # their sha256 take long
                patched.setattr("carbonopt.study.run_study.with_sha256", asked)
            called(checked, folder)
    assert StudyPaths(folder).foreign_files() == []
    data = called(check(parse_study(raw, "test")), folder)
    assert [session.before_study for session in data.sessions] == [True, True, False]
    assert all(session.duration_s > 0 for session in data.sessions)
    assert len({session.worker for session in data.sessions}) == 3
    assert not StudyPaths(folder).early_sessions.exists()
    again = called(check(parse_study(raw | {"budget": {"trials": 2}}, "test")), folder)
    assert len(again.sessions) == 4


@pytest.mark.parametrize("damage", ["2026-11-29T15:48:31", "yesterday", "", "link"])
def test_a_damaged_ledger_of_an_early_call_is_refused_before_anything_runs(
    damage: str, tmp_path: Path
) -> None:
    raw = study_over(write_table(tmp_path)) | {"budget": {"trials": 1}}
    folder, foreign = tmp_path / "out", tmp_path / "foreign"
    early = StudyPaths(folder).early_sessions
    folder.mkdir()
    foreign.mkdir()
    if damage == "link":
        early.symlink_to(foreign)
    else:
        early.mkdir()
        (early / "a.json").write_text(json.dumps({"worker": "a", "started_at": damage}))
    checked = check(parse_study(raw, "test"))
    with pytest.raises(BadInput, match=str(early)):
        called(checked, folder)
    assert early.exists()


def test_a_study_that_has_ended_takes_up_early_calls(tmp_path: Path) -> None:
    raw = study_over(write_table(tmp_path)) | {"budget": {"trials": 1}}
    folder = tmp_path / "out"
    folder.mkdir()
    data = called(check(parse_study(raw, "test")), folder)
    late = data.sessions[0].model_copy(update={"worker": "late", "gap_kwh": 1e-5})
    EarlySessions(StudyPaths(folder).early_sessions).set_session(late)
    again = called(check(parse_study(raw, "test")), folder)
    assert again.spent_kwh() == pytest.approx(data.spent_kwh() + late.prepare_kwh + 1e-5)


def test_hours_of_a_call_under_a_clock_that_was_ahead_count(tmp_path: Path) -> None:
    raw = study_over(write_table(tmp_path)) | {"budget": {"trials": 1}}
    folder = tmp_path / "out"
    folder.mkdir()
    data = called(check(parse_study(raw, "test")), folder)
    ahead = {
        "worker": "ahead",
        "started_at": (datetime.now(UTC) + timedelta(hours=3)).isoformat(),
        "duration_s": 7200.0,
    }
    early = EarlySessions(StudyPaths(folder).early_sessions)
    early.set_session(data.sessions[0].model_copy(update=ahead))
    more = raw | {"budget": {"trials": 9, "hours": 1}}
    assert called(check(parse_study(more, "test")), folder).ended == (
        "the budget of 1 hours is used up"
    )


def test_the_display_knows_what_the_study_has_used(tmp_path: Path) -> None:
    """With its preparation and gaps, of earlier calls too, while trials run."""
    used: list[tuple[float, float]] = []
    running: list[float] = []

    class Noting(Silent):
        def used(self, hours: float, energy_kwh: float) -> None:
            used.append((hours, energy_kwh))

        def still_running(self, spent_kwh: float) -> None:
            running.append(spent_kwh)

    raw = study_over(write_table(tmp_path))
    for trials in (2, 3):
        checked = check(parse_study(raw | {"budget": {"trials": trials}}, "test"))
        paths = StudyPaths(tmp_path)
        data = run_study(Session(checked, "", paths, Noting(), Silent(), lambda: False))
    assert len(used) == 3 and [hours for hours, _ in used] == sorted(hours for hours, _ in used)
    *_, (hours, spent_kwh) = used
    assert 3600 * hours >= data.sessions[0].duration_s
    *_, last = data.records
    assert spent_kwh == pytest.approx(data.spent_kwh() - last.spent_kwh, rel=1e-9)
    assert 0 < running[-1] <= last.spent_kwh
