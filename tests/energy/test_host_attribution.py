"""A trial is charged what it uses, whoever works beside it, and all parts add up to the whole."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from carbonopt.core.trial import Phase
from carbonopt.core.units import joules_from_kwh, kwh_from_joules
from carbonopt.energy import cpu_time, host_attribution
from carbonopt.energy.cpu_time import CpuTime, StudyProcesses, StudyTimes
from carbonopt.energy.host_attribution import HostAttribution, HostShares, Powers
from carbonopt.energy.machine_meter import MachineMeter

pytestmark = pytest.mark.timed

SPIN = "import time\nwhile time.process_time() < {s}: pass\n"
MODELLED = Powers(cpu_w=80.0, ram_w=20.0)  # of four cores: 2 W idle and 20 W busy each


class Host:
    """A machine of four cores as its kernel tells of it: an account of CPU time, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quota: float = 4.0) -> None:
        self.now_s = self.trial_s = self.waited_s = self.study_s = 0.0
        self.busy = dict.fromkeys(range(4), 1.0)
        monkeypatch.setattr(host_attribution, "all_cores", lambda: frozenset(range(4)))
        monkeypatch.setattr(host_attribution, "busy_seconds", lambda: dict(self.busy))
        monkeypatch.setattr(host_attribution, "usable_cores", lambda cores: min(cores, quota))

    def read(self) -> StudyTimes:
        return StudyTimes(CpuTime(self.trial_s, self.waited_s), self.study_s)

    def passes(
        self, seconds: float, trial_s: float = 0.0, others_s: float = 0.0, **more: float
    ) -> None:
        """The trial has worked on core 0, others and the study on core 1."""
        self.now_s += seconds
        self.trial_s += trial_s
        self.study_s += more.get("study_s", 0.0)
        self.waited_s += more.get("waited_s", 0.0)
        self.busy[0] += trial_s
        self.busy[1] += others_s + more.get("study_s", 0.0)


def joules(shares: HostShares) -> dict[str, tuple[float, float]]:
    parts = {
        "trial": shares.trial,
        "study": shares.study,
        "other": shares.other,
        "whole": shares.whole,
    }
    return {
        name: tuple(round(joules_from_kwh(kwh), 6) for kwh in part) for name, part in parts.items()
    }


def test_cpu_time_is_charged_to_who_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    attributed = HostAttribution(range(4), host)
    attributed.begin(MODELLED, 0.0, 0.0)
    start = attributed.read(host.now_s, 0.0)
    host.passes(10.0, trial_s=6.0, others_s=3.0, study_s=1.0)
    shares = attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=True)
    assert joules(shares) == {
        "trial": (80.0 + 6 * 18, 200.0),
        "study": (18.0, 0.0),
        "other": (3 * 18.0, 0.0),
        "whole": (80.0 + 10 * 18, 200.0),
    }
    between = joules(attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=False))
    assert between["trial"] == (0.0, 0.0) and between["study"] == (80.0 + 7 * 18, 200.0)


@pytest.mark.parametrize("others_s", [0.0, 5.0, 30.0])
def test_neighbours_change_nothing(others_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """CodeCarbon's own model gives the same trial from 0.1 + 0.9 × 0.15³ of full load to 0.1 + 0.9
    × 0.9³.
    """
    host = Host(monkeypatch)
    attributed = HostAttribution(range(4), host)
    attributed.begin(MODELLED, 0.0, 0.0)
    start = attributed.read(host.now_s, 0.0)
    host.passes(10.0, trial_s=6.0, others_s=others_s)
    shares = joules(attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=True))
    assert shares["trial"] == (188.0, 200.0)
    assert shares["other"] == (others_s * 18, 0.0)


def test_the_time_for_which_others_kept_a_trial_waiting_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six seconds on one core, of which another process has half: twelve seconds, and the energy of
    six.
    """
    host = Host(monkeypatch)
    attributed = HostAttribution([0], host)
    attributed.begin(MODELLED, 0.0, 0.0)
    start = attributed.read(host.now_s, 0.0)
    host.passes(12.0, trial_s=6.0, waited_s=6.0)
    host.busy[0] += 6.0
    shares = joules(attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=True))
    assert shares["trial"] == (6 * 20.0, 6 * 20 / 4)
    assert shares["other"] == (6 * 20.0, 6 * 20 / 4)


def test_a_trial_that_mostly_sleeps_is_not_kept_waiting_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It works for a second, waits for one and sleeps for eight, of which nobody keeps it."""
    host = Host(monkeypatch)
    attributed = HostAttribution([0], host)
    attributed.begin(MODELLED, 0.0, 0.0)
    start = attributed.read(host.now_s, 0.0)
    host.passes(10.0, trial_s=1.0, waited_s=1.0)
    host.busy[0] += 9.0
    shares = joules(attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=True))
    assert shares["trial"] == (9 * 2.0 + 18.0, 9 * 20 / 4)


def test_threads_that_wait_for_each_other_get_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    attributed = HostAttribution(range(4), host)
    attributed.begin(MODELLED, 0.0, 0.0)
    start = attributed.read(host.now_s, 0.0)
    host.passes(10.0, trial_s=40.0, waited_s=300.0)
    assert joules(attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=True))[
        "trial"
    ] == (800.0, 200.0)


def test_cores_that_are_not_reserved_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that may use one core of four, by its quota."""
    host = Host(monkeypatch, quota=1.0)
    attributed = HostAttribution(range(4), host)
    assert attributed.machine_share == 0.25
    attributed.begin(MODELLED, 0.0, 0.0)
    start = attributed.read(host.now_s, 0.0)
    host.passes(10.0, trial_s=10.0)
    shares = joules(attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=True))
    assert shares == {
        "trial": (200.0, 50.0),
        "study": (0.0, 0.0),
        "other": (60.0, 150.0),
        "whole": (260.0, 200.0),
    }


def test_slots_add_up_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured by RAPL: each window's energy is divided by the same weights, to the last bit."""
    host = Host(monkeypatch)
    slots = [HostAttribution(cores, host) for cores in ((0,), (1,), (2, 3))]
    for slot in slots:
        slot.begin(Powers(None, 40.0), 0.0, 1.0)
    starts = [slot.read(0.0, 1.0) for slot in slots]
    for measured_kwh, trial_s, others_s in ((1.5, 3.0, 0.0), (1.5, 0.1, 0.2), (2.5, 0.0, 8.0)):
        host.passes(10.0, trial_s=trial_s, others_s=others_s)
        ends = [slot.read(host.now_s, measured_kwh) for slot in slots]
    wholes = [
        slot.shares(start, end, of_trial=False).whole
        for slot, start, end in zip(slots, starts, ends, strict=True)
    ]
    assert sum(whole.cpu_kwh for whole in wholes) == pytest.approx(1.5, rel=1e-12)
    assert sum(whole.ram_kwh for whole in wholes) == pytest.approx(
        kwh_from_joules(40 * 30), rel=1e-12
    )
    assert wholes[1].cpu_kwh > wholes[0].cpu_kwh > wholes[2].cpu_kwh / 2


def test_a_window_too_short_for_rapl_goes_on_at_its_last_power(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch)
    attributed = HostAttribution(range(4), host)
    attributed.begin(Powers(None, 0.0), 0.0, 5.0)
    host.passes(1.0, trial_s=1.0)
    edges = [attributed.read(host.now_s, 5.0 + kwh_from_joules(100.0))]
    for seconds, read_j in ((0.02, 100.0), (0.02, 100.0), (0.96, 200.0)):
        host.passes(seconds, trial_s=seconds)
        edges.append(attributed.read(host.now_s, 5.0 + kwh_from_joules(read_j)))
    used_j = [
        joules_from_kwh(end.cpu_kwh - start.cpu_kwh) for start, end in itertools.pairwise(edges)
    ]
    assert used_j == pytest.approx([2.0, 2.0, 96.0])


def test_where_the_kernel_tells_nothing_of_cores_what_is_known_was_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch)
    monkeypatch.setattr(host_attribution, "busy_seconds", dict)
    attributed = HostAttribution(range(4), host)
    attributed.begin(MODELLED, 0.0, 0.0)
    start = attributed.read(host.now_s, 0.0)
    host.passes(10.0, trial_s=6.0, study_s=1.0)
    shares = joules(attributed.shares(start, attributed.read(host.now_s, 0.0), of_trial=True))
    assert shares["trial"] == (188.0, 200.0) and shares["other"] == (0.0, 0.0)


# ------------------------------------------------------------------------------------------- with
# real processes


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class Measured:
    """The energy of one trial's processes, in joules, `beside` others that run meanwhile."""

    def __init__(self, script: str, beside: AbstractContextManager[None]) -> None:
        study = StudyProcesses()
        meter = MachineMeter((), host=HostAttribution(os.sched_getaffinity(0), study))
        with beside:
            meter.enter(Phase.SETUP)
            process = subprocess.Popen([sys.executable, "-c", script])
            counted = study.add(process.pid)
            counted.become_trial()
            meter.enter(Phase.TRAIN)
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                meter.running(Phase.TRAIN)  # as a study does, twice a second
                time.sleep(0.1)
            meter.enter(Phase.GAP)
            counted.end()
            process.wait()
        meter.close()
        taken, self.outer_j = meter.take(*Phase), joules_from_kwh(meter.outer().total_kwh)
        train, power_w = taken[Phase.TRAIN], meter._host._powers
        self.cpu_j, self.ram_j = (
            joules_from_kwh(train.cpu_kwh or 0),
            joules_from_kwh(train.ram_kwh or 0),
        )
        self.sum_j = joules_from_kwh(sum(reading.total_kwh for reading in taken.values()))
        self.other_j, self.seconds = joules_from_kwh(taken[Phase.OTHER].total_kwh), train.duration_s
        self.busy_core_w = 0.9 * (power_w.cpu_w or 0.0) / len(cpu_time.all_cores())


TWO_CHILDREN_IN_TURN = (
    "import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-S', '-c',"
    f" {SPIN.format(s=0.5)!r}], check=True)"
)
TWO_AT_ONCE = (
    "import subprocess, sys\nboth = [subprocess.Popen([sys.executable, '-S', '-c',"
    f" {SPIN.format(s=0.5)!r}]) for _ in range(2)]\nfor process in both: process.wait()"
)


# The kernel gives a nice process less of a busy core: beside two others a seventh with nice 5, and
# with nice 10 a twentieth, and the neighbours spin meanwhile. It counts a pool's workers when
# they end.
NICE = "import os\nos.nice(5)\n" + SPIN.format(s=1.0)
POOL = (
    "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(2) as pool:\n"
    f"    pool.map(exec, 2 * [{SPIN.format(s=0.5)!r}], chunksize=1)"
)


@pytest.mark.parametrize(
    "script", [SPIN.format(s=1.0), TWO_CHILDREN_IN_TURN, TWO_AT_ONCE, NICE, POOL]
)
@pytest.mark.slow
def test_a_second_of_work_costs_the_same_beside_busy_neighbours(script: str) -> None:
    """Measured on two cores with a load of ten, where it took up to ten times as long: the CPU's
    energy differed by up to 2 %, with the RAM's by up to 6 %.
    """
    alone = Measured(script, nullcontext())
    beside = Measured(script, neighbours(2 * len(os.sched_getaffinity(0))))
    if not alone.busy_core_w:
        pytest.skip("the CPU's energy is measured here: it is not proportional to CPU time")
    # The energy of one CPU second: a loop that ends after it, and the start of some interpreters.
    second_j = alone.busy_core_w
    for measured in (alone, beside):
        assert measured.sum_j == pytest.approx(measured.outer_j, rel=0.005)
        assert second_j <= measured.cpu_j + 0.05 * second_j
    # The neighbours had half a core at least, however busy the machine was before.
    assert beside.other_j > 0.5 * beside.seconds * beside.busy_core_w
    assert beside.cpu_j == pytest.approx(alone.cpu_j, rel=0.2)
    assert beside.cpu_j + beside.ram_j == pytest.approx(alone.cpu_j + alone.ram_j, rel=0.5)


def test_a_short_evaluation_is_not_measured_as_zero() -> None:
    meter = MachineMeter(())
    for _ in range(3):
        meter.enter(Phase.TRAIN)
        time.sleep(0.1)
        meter.enter(Phase.EVAL)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
    meter.enter(Phase.GAP)
    meter.close()
    evaluation = meter.take(Phase.EVAL)[Phase.EVAL]
    power_w = meter._host._powers
    assert (
        joules_from_kwh(evaluation.ram_kwh or 0.0)
        >= 0.02 * power_w.ram_w * meter._host.machine_share
    )
    if power_w.cpu_w:
        busy_core_w = 0.9 * power_w.cpu_w / len(cpu_time.all_cores())
        assert joules_from_kwh(evaluation.cpu_kwh or 0.0) >= 3 * 0.02 * busy_core_w
