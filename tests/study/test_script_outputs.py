"""Which trials' output folders stay."""

import os
from pathlib import Path
from typing import Any

import pytest
from small_studies import script_run, script_study

from carbonopt.core.trial import Failure, StopReason, TrialRecord, TrialState
from carbonopt.spec.search_settings import Confirm
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.script_outputs import remove_outputs

# The front is 0, 1 and 2; the target, at least 20, is met by 1 and 2, of which 1 is the cheaper.
RUNS = (
    *(
        script_run(0, 10.0, 1e-3),
        script_run(1, 25.0, 2e-3),
        script_run(2, 30.0, 3e-3),
        script_run(3, 24.0, 4e-3),
    ),
    *(script_run(4, None), script_run(5, 1.0, state=TrialState.RUNNING)),
    script_run(6, None, state=TrialState.FAILED, failure=Failure(kind="crash", text="it did")),
    script_run(7, None, state=TrialState.FAILED, stop_reason=StopReason.INTERRUPTED),
)


def kept(
    folder: Path,
    runs: tuple[TrialRecord, ...] = RUNS,
    *,
    ended: bool,
    confirm: Confirm | None = None,
    **workload: Any,
) -> list[int]:
    """Return the trials whose outputs are still there."""
    paths = StudyPaths(folder)
    for record in runs:
        output = paths.trial(record.trial) / "output" / "checkpoint"
        output.mkdir(parents=True)
        (output / "weights").write_text("1")
        paths.trial_log(record.trial, 1).write_text("said")
    complaints: list[str] = []
    data = script_study(*runs, workload=workload)
    data = data.model_copy(update={"config": data.config.model_copy(update={"confirm": confirm})})
    remove_outputs(data, paths, complaints.append, ended=ended)
    assert not complaints
    assert all(paths.trial_log(record.trial, 1).exists() for record in runs), (
        "what was measured stays"
    )
    return [
        record.trial
        for record in runs
        if (paths.trial(record.trial) / "output" / "checkpoint" / "weights").exists()
    ]


def test_while_a_study_runs_whatever_may_become_the_answer_stays(tmp_path: Path) -> None:
    assert kept(tmp_path, ended=False) == [0, 1, 2, 5, 7]


def test_until_configurations_are_confirmed_each_complete_one_s_stays(tmp_path: Path) -> None:
    """Trial 1 beats trial 3 in both, but not with another seed: trial 3 is recommended."""
    repeat = script_run(8, 5.0, 2e-3, repeat_of=1, seed=4)
    confirm = Confirm(seeds=2, runners_up=1)
    assert kept(tmp_path, (*RUNS, repeat), ended=False, confirm=confirm) == [0, 1, 2, 3, 5, 7]


def test_at_its_end_the_winner_s_stays(tmp_path: Path) -> None:
    assert kept(tmp_path, ended=True) == [1, 5, 7]  # and what another command may still run


def test_without_an_answer_the_closest_one_s_stays(tmp_path: Path) -> None:
    assert kept(tmp_path, (script_run(0, 10.0, 1e-3), script_run(1, 15.0, 2e-3)), ended=True) == [1]


@pytest.mark.parametrize(("keep", "numbers"), [("all", [0, 1, 2, 3, 4, 5, 6, 7]), ("none", [5, 7])])
def test_all_or_none_stay_where_that_is_said(keep: str, numbers: list[int], tmp_path: Path) -> None:
    assert kept(tmp_path, ended=True, keep_outputs=keep) == numbers


def test_a_link_is_removed_and_what_it_leads_to_is_not(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("1")
    paths = StudyPaths(tmp_path / "study")
    paths.trial(4).mkdir(parents=True)
    (paths.trial(4) / "output").symlink_to(elsewhere)
    remove_outputs(script_study(*RUNS), paths, pytest.fail, ended=True)
    assert not (paths.trial(4) / "output").is_symlink() and (elsewhere / "mine").exists()


def test_a_pipe_in_the_place_of_the_outputs_is_removed(tmp_path: Path) -> None:
    """Nobody ever writes into it, so that whoever opens it waits for ever."""
    paths = StudyPaths(tmp_path / "study")
    paths.trial(4).mkdir(parents=True)
    os.mkfifo(paths.trial(4) / "output")
    remove_outputs(script_study(*RUNS), paths, pytest.fail, ended=True)
    assert not (paths.trial(4) / "output").exists()
