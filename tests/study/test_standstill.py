"""A trial that stood still, as on a suspended laptop, has trained neither in that time nor with its
energy.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_studies import study, trial

from carbonopt.report.sections.trial_conduct_section import caveats
from carbonopt.report.study_view import StudyView
from carbonopt.study.standstill import Standstill

pytestmark = pytest.mark.timed

STOPPED_S = 6.0
# A trial that keeps a core busy for 3 s of its own, watched by a process that can be stopped.
WATCHES = """
import json, sys
from pathlib import Path
sys.path.insert(0, TESTS)
from test_script_phases import timed
SCRIPT = '''
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
run = carbon.run(total_steps=15)
began = time.monotonic()
waited = 0.0
open("trains", "w").close()
for step in range(15):
    work(0.2); run.step()
    if step == REPORTS_AT:
        asked = time.monotonic()
        with run.evaluation(): pass
        run.report(accuracy=0.4)
        waited = time.monotonic() - asked
open("took", "w").write(str(time.monotonic() - began - waited))
run.report(accuracy=0.5)
'''
record = timed(SCRIPT, Path(sys.argv[1]), timeout_s=TIMEOUT_S)
print(json.dumps([record.state, record.standstill_s, record.duration_s.train, record.energy_kwh.train * 3.6e6]))
"""


def stopped(
    folder: Path, *, whole: bool, study: bool = True, reports_at: int | None = None
) -> tuple[str, float | None, float, float, float]:
    """State, standstill, the training's seconds and joules, and its seconds by the script's own
    clock, of a trial that is stopped for STOPPED_S with its study; not `whole`: the study alone is;
    not `study`: the trial alone is. Its waits for the study after step `reports_at` are not in them.
    """
    program = (
        WATCHES.replace("TESTS", repr(str(Path(__file__).parents[1])))
        .replace("TIMEOUT_S", "4.0" if study else "60.0")
        .replace("REPORTS_AT", str(reports_at))
    )
    watching = subprocess.Popen(
        [sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True
    )
    while not (folder / "trains").exists():
        assert watching.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    processes = [watching.pid]
    if whole:
        processes += [child.pid for child in psutil.Process(watching.pid).children(recursive=True)]
    if not study:
        processes = processes[-1:]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    told = json.loads(watching.communicate(timeout=120)[0])
    return (*told, float((folder / "took").read_text()))


@pytest.mark.slow
def test_a_study_that_was_stopped_with_its_trial_charges_nothing_for_that(tmp_path: Path) -> None:
    state, standstill_s, train_s, train_j, took_s = stopped(tmp_path, whole=True)
    assert state == "complete", "nor is it a trial that hangs"
    assert standstill_s == pytest.approx(STOPPED_S, abs=1.0)
    assert train_s == pytest.approx(train_j, abs=0.01)
    assert train_s == pytest.approx(took_s - STOPPED_S, abs=1.0)


@pytest.mark.slow
def test_a_trial_that_goes_on_while_its_study_is_stopped_has_trained(tmp_path: Path) -> None:
    state, standstill_s, train_s, _, took_s = stopped(tmp_path, whole=False)
    assert state == "complete"
    # By its own clock it trained all the time. It may have waited for the study afterwards, until
    # that went on.
    assert train_s + (standstill_s or 0.0) > took_s - 0.5
    assert (standstill_s or 0.0) < max(2.0, STOPPED_S + 2.0 - took_s)


@pytest.mark.slow
def test_a_trial_that_waits_for_its_stopped_study_loses_no_work(tmp_path: Path) -> None:
    """The wait at its report is left out once, not as a standstill and again as a wait."""
    state, standstill_s, train_s, train_j, took_s = stopped(tmp_path, whole=False, reports_at=7)
    assert state == "complete" and standstill_s is not None
    assert train_s == pytest.approx(took_s, abs=1.0)
    assert train_j > train_s - 0.5


@pytest.mark.slow
def test_a_trial_that_is_stopped_alone_is_charged_nothing_for_that(tmp_path: Path) -> None:
    state, standstill_s, train_s, train_j, took_s = stopped(tmp_path, whole=True, study=False)
    assert state == "complete"
    assert standstill_s == pytest.approx(STOPPED_S, abs=1.2)
    assert train_s == pytest.approx(train_j, abs=0.01)
    assert train_s == pytest.approx(took_s - STOPPED_S, abs=1.2)


class Clock:
    """A process whose clock is set by hand, beside a trial with one busy thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.trial_s = 100.0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.detector = Standstill(lambda: self.trial_s, lambda: None)
        self.pass_s(1.0, trial=True)
        self.detector.begin()

    def pass_s(self, seconds: float, *, trial: bool) -> None:
        """Let time pass, in which the trial runs or is stopped."""
        self.now_s += seconds
        self.trial_s += seconds * trial


@pytest.mark.parametrize(
    ("trial_runs", "trial_waits", "still_s"),
    [(False, False, 6.0), (True, False, 0.0), (False, True, 0.0)],
)
def test_a_study_may_be_stopped_while_it_does_not_wait(
    trial_runs: bool, trial_waits: bool, still_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores something for 6 s, say, or is stopped in it; then it waits for half a second."""
    clock = Clock(monkeypatch)
    clock.pass_s(6.0, trial=trial_runs)
    clock.detector.begin_waiting(trial_waits=trial_waits)
    clock.pass_s(0.5, trial=True)
    assert clock.detector.stood_still_s(0.5) == pytest.approx(still_s, abs=0.51)


def test_a_standstill_is_said() -> None:
    (caveat,) = caveats(StudyView(study(trial(0), trial(1, standstill_s=30.0))))
    assert (caveat.key, caveat.numbers["trials"]) == ("standstill", [1])
    assert "30.0 s" in caveat.text
