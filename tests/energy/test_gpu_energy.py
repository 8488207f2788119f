"""GPU energy without a GPU: a stand-in NVML plays back what a real H200's counter did, and real
trial processes run.
"""

import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from carbonopt.core.errors import BEFORE_A_TRIAL, MeasurementError
from carbonopt.core.trial import GpuEnergy, Phase
from carbonopt.core.units import joules_from_kwh
from carbonopt.doctor.gpu_checks import seen
from carbonopt.doctor.machine_facts import Machine
from carbonopt.energy.hardware import REINSTALL_NVML
from carbonopt.energy.meter_reading import Reading, disagreement
from carbonopt.energy.occupancy import gpus_now

pytestmark = pytest.mark.timed

TESTS = Path(__file__).resolve().parents[1]
LOAD_AT_S, IDLE_W, LOAD_W = 28.0, 77.0, 690.0  # of GPU 0 in the recording
RECORDED = "h200-counter.csv:0"
OTHER = "h200-counter.csv:1"

PRELUDE = """
import json, os, socket, sys, time
class Offline(socket.socket):
    def connect(self, address):
        raise AssertionError(f"a measurement must not use the network, but connects to {address}")
    connect_ex = connect
socket.socket = Offline
from carbonopt.energy.machine_meter import MachineMeter
from carbonopt.core.trial import Phase, TrialState
import pynvml
def joules(gpu, since_s, until_s):  # what the recording says, read without any of our code
    recording = pynvml._gpus[gpu]
    return (recording.energy_mj(until_s) - recording.energy_mj(since_s)) / 1000
"""


def with_gpus(
    gpus: list, script: str, folder: Path, nvidia_smi: str = "exit 0", **environment: str
) -> list:
    """Runs a script on a machine that has these GPUs (see tests/nvml); returns the JSON lines that
    it prints.
    """
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    (folder / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env={
            **os.environ,
            "STAND_IN_GPUS": json.dumps(gpus),
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS / "nvml", TESTS, TESTS.parent))),
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_each(name: str, values: Sequence[str | None], script: str) -> str:
    """The script once with each value of an environment variable; None: without it."""
    return f"""
for value in {values!r}:
    os.environ.pop({name!r}, None)
    if value is not None:
        os.environ[{name!r}] = value
{textwrap.indent(script, "    ")}"""


# ------------------------------------------------------------------------------------------------
# which GPUs, how often

MEASURE = """
meter = MachineMeter(json.loads(os.environ["LAUNCH"]))
meter.enter(Phase.TRAIN)
time.sleep(1.1)
meter.close()
reading, outer = meter.take(Phase.TRAIN)[Phase.TRAIN], meter.outer()
watts = lambda kwh: kwh and kwh / reading.duration_s * 3.6e6
print(json.dumps([watts(reading.gpu_kwh), watts(reading.codecarbon_gpu_kwh), sorted(meter.energy_source)]))
"""


@pytest.mark.slow
def test_the_launchs_gpus_are_measured_whatever_is_visible(tmp_path: Path) -> None:
    visible = ("0", "1,0", "7", "", "GPU-00000001-0000-0000-0000-000000000000", None)
    script = with_each("CUDA_VISIBLE_DEVICES", visible, MEASURE)
    measured = with_gpus([100, 300], script, tmp_path, LAUNCH="[1]")
    expected = [pytest.approx(300, rel=0.02), pytest.approx(300, rel=0.1), ["cpu", "gpu", "ram"]]
    assert dict(zip(visible, measured, strict=True)) == dict.fromkeys(visible, expected)


@pytest.mark.slow
def test_two_gpus_are_summed_and_none_is_none(tmp_path: Path) -> None:
    script = with_each("LAUNCH", ("[0, 1]", "[]"), MEASURE)
    both, none = with_gpus([100, 300], script, tmp_path)
    assert both[:2] == [pytest.approx(400, rel=0.02), pytest.approx(400, rel=0.1)]
    assert none == [None, None, ["cpu", "ram"]]


def test_a_dead_counter_is_an_error_before_the_first_trial(tmp_path: Path) -> None:
    script = """
from carbonopt.core.errors import MeasurementError
try:
    MachineMeter([0, 1])
except MeasurementError as error:
    print(json.dumps(str(error)))
"""
    (said,) = with_gpus([300, 0], script, tmp_path)
    assert "the counter of GPU 1 stood still for 1 s" in said


@pytest.mark.slow
def test_a_counter_that_dies_goes_back_jumps_or_is_lost_is_an_error(tmp_path: Path) -> None:
    script = """
from carbonopt.core.errors import MeasurementError
meter = MachineMeter([0, 1])
pynvml._gpus[1].energy_mj = lambda at_s, last=pynvml._gpus[1].energy_mj(pynvml.elapsed_s()): last
meter.enter(Phase.TRAIN)
time.sleep(1.1)
def gone(at_s):
    raise pynvml.NVMLError("GPU is lost")
healthy = pynvml._gpus[0].energy_mj
for energy in (healthy, lambda at_s: 5, lambda at_s: 2**62, gone, lambda at_s: None, lambda at_s: float("nan")):
    pynvml._gpus[0].energy_mj = energy
    try:
        meter.enter(Phase.GAP)
    except MeasurementError as error:
        print(json.dumps(str(error)))
"""
    dead, backwards, jumped, lost, none, nan = with_gpus([300, 300], script, tmp_path)
    assert "none was measured for GPU 1 during 1.1 s of train" in dead
    assert "an energy counter only grows, but that of GPU 0 went from" in backwards
    assert "no GPU draws 3000 W, but the counter of GPU 0 went from" in jumped
    assert "NVIDIA's driver must answer for the GPUs, but says: GPU is lost." in lost
    assert (
        "NVML must give the energy of GPU 0 as int, but gave None" in none and "but gave nan" in nan
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nvmlDeviceGetCount", None),
        ("nvmlDeviceGetName", b"H200"),
        ("nvmlDeviceGetUUID", None),
        ("nvmlDeviceGetCudaComputeCapability", None),
        ("nvmlDeviceGetComputeRunningProcesses", None),
        ("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=math.nan)),
    ],
)
def test_answers_that_nvml_does_not_promise_are_told_and_not_used(
    monkeypatch, name: str, found: object
) -> None:
    nvml = {
        "NVMLError": OSError, "NVMLError_NotSupported": OSError, "NVMLError_NoPermission": OSError, "nvmlMemory_v2": 2,
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index, "nvmlDeviceGetName": lambda _: "H200",
        "nvmlDeviceGetUUID": lambda _: "GPU-0", "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [],
        "nvmlDeviceGetMemoryInfo": lambda *_: SimpleNamespace(used=0),
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    assert [gpu.name for gpu in gpus_now()] == ["H200"]
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**{**nvml, name: lambda *_: found}))
    with pytest.raises(
        MeasurementError, match=r"NVML must give the .*, but gave .*reinstall nvidia-ml-py"
    ):
        gpus_now()
    told = seen(Machine())
    assert (told.status, told.advice) == ("failure", REINSTALL_NVML)


@pytest.mark.slow
def test_the_idle_measurement_can_be_interrupted(tmp_path: Path) -> None:
    script = """
import threading
from carbonopt.core.errors import StudyInterrupted
began = time.monotonic()
try:
    MachineMeter([0], "all", lambda: time.monotonic() > began + 3)
except StudyInterrupted as error:
    took_s = time.monotonic() - began
    while threading.active_count() > 1 and time.monotonic() < began + 30:
        time.sleep(0.05)  # a reading that CodeCarbon has begun
    print(json.dumps([took_s, str(error), threading.active_count()]))
"""
    ((took_s, said, threads),) = with_gpus([300], script, tmp_path)
    assert took_s < 15
    assert threads == 1, "CodeCarbon has ended too"
    assert said == BEFORE_A_TRIAL


# -------------------------------------------------------------------------------------------------
# the recorded counter

WINDOWS = """
meter = MachineMeter([0])
print(json.dumps([one.model_dump() for one in meter.idle]))
time.sleep(max(0, LOAD_AT_S - pynvml.elapsed_s()))
windows = []
for phase, duration_s in ((Phase.TRAIN, 2.0), (Phase.EVAL, 0.15), (Phase.TRAIN, 3.0), (Phase.GAP, 0.3)):
    windows.append((phase, pynvml.elapsed_s()))
    meter.enter(phase)
    time.sleep(duration_s)
meter.close()
windows.append((None, pynvml.elapsed_s()))
for phase, reading in meter.take(Phase.TRAIN, Phase.EVAL).items():
    parts = [(a[1], b[1]) for a, b in zip(windows, windows[1:]) if a[0] == phase]
    print(json.dumps([sum(joules(0, *part) for part in parts), len(parts), reading.model_dump()]))
"""


@pytest.mark.slow
def test_windows_of_a_recorded_counter_and_their_uncertainty(tmp_path: Path) -> None:
    """EnergyWindows over a real H200's load, against the recording itself."""
    idle, train, evaluation = with_gpus(
        [RECORDED], WINDOWS.replace("LOAD_AT_S", str(LOAD_AT_S)), tmp_path
    )
    # A reading that waits for a core beside other tests sees a tick late, by up to a tick of the
    # ten in a window.
    assert idle == [
        {"gpu": 0, "windows": 5, "tick_s": pytest.approx(0.1, rel=0.1), "power_w": pytest.approx(IDLE_W, rel=0.02),
         "spread_w": pytest.approx(0, abs=IDLE_W / 10)}
    ]  # fmt: skip
    for truth_j, count, dumped in (train, evaluation):
        reading = Reading(**dumped)
        gpu = reading.gpu
        tick_j = 0.1 * LOAD_W
        assert joules_from_kwh(gpu.counter) == pytest.approx(truth_j, abs=tick_j * count)
        assert joules_from_kwh(gpu.codecarbon) == pytest.approx(truth_j, abs=2 * tick_j * count)
        assert joules_from_kwh(gpu.idle) == pytest.approx(IDLE_W * reading.duration_s, rel=0.02)
        assert gpu.net_of_idle == pytest.approx(gpu.counter - gpu.idle)
        # A tick at each end of each window, evenly late: tick · power / √6, windows independent.
        assert joules_from_kwh(gpu.uncertainty) == pytest.approx(
            tick_j / 6**0.5 * count**0.5, rel=0.25
        )


SHORT_WINDOWS = """
meter = MachineMeter([0])
meter.enter(Phase.TRAIN)
time.sleep(1.0)
evaluations = []
for _ in range(20):
    meter.enter(Phase.EVAL)
    time.sleep(0.03)
    meter.enter(Phase.TRAIN)
    evaluations.append(meter.take(Phase.EVAL)[Phase.EVAL])
    time.sleep(0.3)
meter.enter(Phase.GAP)
meter.close()
parts = meter.take(*Phase)
whole_j = 3.6e6 * sum(part.gpu_kwh for part in [*parts.values(), *evaluations])
outer_j = 3.6e6 * meter.outer().gpu_kwh
print(json.dumps([[[3.6e6 * one.gpu_kwh, one.duration_s] for one in evaluations], whole_j, outer_j]))
"""


@pytest.mark.slow
def test_a_window_between_two_ticks_has_its_power_and_not_nothing(tmp_path: Path) -> None:
    """A GPU of 300 W, whose counter ticks every 0.1 s: evaluations of 30 ms hold no tick, or a
    whole one of 30 J.
    """
    ((evaluations, whole_j, outer_j),) = with_gpus([300], SHORT_WINDOWS, tmp_path)
    assert len(evaluations) == 20 and min(energy_j for energy_j, _ in evaluations) > 0
    total_j, total_s = (sum(column) for column in zip(*evaluations, strict=True))
    assert total_j / total_s == pytest.approx(300, rel=0.35)
    short = [energy_j / duration_s for energy_j, duration_s in evaluations if duration_s < 0.08]
    assert all(100 < power_w < 700 for power_w in short), (
        "not the tick's 30 J, which are up to 1,000 W"
    )
    assert whole_j == pytest.approx(outer_j, abs=31), "within one tick"


CHANGING_POWER = """
import bisect
class Ticking:
    # a GPU whose power the test sets, and whose counter ticks every 0.1 s
    def __init__(self):
        self.edges = [(0.0, 100.0)]  # since when which power
    def set(self, power_w):
        self.edges.append((pynvml.elapsed_s(), power_w))
    def true_j(self, at_s):
        ends = [since for since, _ in self.edges[1:]] + [float("inf")]
        return sum(
            power_w * max(0.0, min(at_s, end) - since)
            for (since, power_w), end in zip(self.edges, ends)
        )
    def energy_mj(self, at_s):
        return int(1000 * self.true_j((at_s // 0.1) * 0.1))
    def power_mw(self, at_s):
        return int(1000 * (self.true_j(at_s + 0.01) - self.true_j(at_s - 0.01)) / 0.02)

gpu = pynvml._gpus[0] = Ticking()
meter = MachineMeter([0])
time.sleep(1.0)
truth = {Phase.TRAIN: 0.0, Phase.EVAL: 0.0}
for _ in range(10):
    for phase, power_w, duration_s in ((Phase.TRAIN, 600.0, 0.537), (Phase.EVAL, 250.0, 0.123)):
        gpu.set(power_w)
        meter.enter(phase)
        began_s = pynvml.elapsed_s()
        time.sleep(duration_s)
        truth[phase] += power_w * (pynvml.elapsed_s() - began_s)
meter.enter(Phase.GAP)
gpu.set(100.0)
time.sleep(1.0)
meter.close()
parts = meter.take(Phase.TRAIN, Phase.EVAL)
print(json.dumps([[truth[phase], 3.6e6 * parts[phase].gpu_kwh] for phase in truth]))
"""


@pytest.mark.slow
def test_short_evaluations_take_nothing_from_the_training_between_them(tmp_path: Path) -> None:
    """The counter's last tick is up to 0.1 s old, so that at each change of power a part of the
    energy before it is read as if it came after it: 3.3 kJ of training, 0.3 kJ of evaluations.
    """
    (((train_j, measured_j), (evaluation_j, of_evaluations_j)),) = with_gpus(
        [100], CHANGING_POWER, tmp_path
    )
    # The first and the last edge may each be off by half a tick, those between by a sample.
    within_j = 2 * 0.05 * 600 + 19**0.5 * 0.01 * 350
    assert measured_j == pytest.approx(train_j, abs=within_j)
    assert of_evaluations_j == pytest.approx(evaluation_j, abs=within_j)


@pytest.mark.slow
def test_short_windows_without_samples_stay_near_the_counter(tmp_path: Path) -> None:
    """They take the power of the training before them, eight times their own, again and again."""
    script = """
def no_samples(*_):
    raise pynvml.NVMLError("Not Found")
pynvml.nvmlDeviceGetSamples = no_samples
class Falling:
    def energy_mj(self, at_s):
        tick_s = at_s // 0.1 * 0.1
        return int(1000 * (90 * tick_s + 610 * max(0.0, min(tick_s, until_s) - since_s)))
since_s = until_s = math.inf
pynvml._gpus[0] = Falling()
meter = MachineMeter([0])
since_s = pynvml.elapsed_s()
meter.enter(Phase.TRAIN)
time.sleep(0.5)
until_s = pynvml.elapsed_s()
for _ in range(10):
    meter.enter(Phase.EVAL)
    time.sleep(0.1)
    meter.enter(Phase.TRAIN)
    time.sleep(0.1)
meter.enter(Phase.GAP)
ahead_j = 3.6e6 * sum(reading.gpu_kwh for reading in meter._closed.values()) - 3.6e6 * meter.outer().gpu_kwh
time.sleep(1.1)
meter.close()
print(json.dumps(ahead_j))
"""
    (ahead_j,) = with_gpus([100], f"import math{script}", tmp_path)
    # 1.5 ticks of a power that is known from 0.5 s of a counter's ticks
    assert abs(ahead_j) <= 1.5 * 0.1 * 700 * (1 + 0.1 / 0.5) * 1.1


def test_samples_count_in_any_order_and_none_beyond_a_gpus_power(tmp_path: Path) -> None:
    script = """
from carbonopt.energy.counter import EnergyCounters
counters, samples = EnergyCounters([0]), pynvml.nvmlDeviceGetSamples
time.sleep(0.3)
def with_one_of(milliwatts):
    def changed(*question):
        kind, answered = samples(*question)
        answered[-1].sampleValue.uiVal = milliwatts
        return kind, answered[::-1]
    return changed
for milliwatts in (300_000, 2**32 - 1):
    pynvml.nvmlDeviceGetSamples = with_one_of(milliwatts)
    now_s = time.monotonic()
    print(json.dumps(counters.mean_power_w(0, now_s - 0.1, now_s)))
"""
    assert with_gpus([300], script, tmp_path) == [pytest.approx(300), None]


# -----------------------------------------------------------------------------------------------
# every trial is charged

STUDY = """
import math
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import PERPLEXITY
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trial_watch import Rules, TrialWatch, begun_record
from study.test_trial_watch import SPEAKING

def watched(number, script, ranks=1, timeout_s=60.0, cap=None):
    params = TrialParams(global_batch_size=8, micro_batch_size_per_gpu=8, learning_rate=1e-3, epochs=1)
    here = os.environ["FOLDER"]
    spec = TrialSpec(number=number, attempt=1, seed=0, params=params, workload={}, prepared_dir=here, trial_dir=here)
    rules = Rules(lambda kwh: kwh, lambda: False, lambda: False, timeout_s, cap_kg_co2e=cap)
    meter.enter(Phase.SETUP)
    rank = "import os, time\\nif os.environ['RANK'] != '0':\\n    time.sleep(600)\\n" + SPEAKING + script
    processes = WorkProcesses(
        [sys.executable, "-c", rank], [{"RANK": str(index)} for index in range(ranks)],
        {**os.environ, "PYTHONPATH": ""}, __import__("pathlib").Path(here) / f"log-{number}.txt",
    )
    so_far = begun_record(spec, PERPLEXITY, 'worker', None)
    return TrialWatch(spec, so_far, processes, meter, rules, [], lambda *_: None, lambda record: None).run()

meter = MachineMeter([0, 1])
done = 'evaluated(50, 3.0)\\ntime.sleep(0.4)\\nevaluated(100, 1.5)\\nsay("Finished", summary={})'
records = [
    watched(0, "time.sleep(0.5)\\n" + done),
    watched(1, "time.sleep(0.5)\\n" + done, ranks=2),
    watched(2, 'time.sleep(0.5)\\nsay("Failed", kind="out_of_memory", text="full")'),
    watched(3, "time.sleep(0.5)\\nos.kill(os.getpid(), 9)"),
    watched(4, "time.sleep(600)", timeout_s=2.0),
    watched(5, "time.sleep(600)", cap=1e-7),
    watched(6, "sys.exit(3)"),
]
meter.close()
rest = meter.take(Phase.PREPARE, Phase.GAP, Phase.OTHER)
print(json.dumps({
    "states": [record.state for record in records],
    "gpu_kwh": [record.spent_gpu_kwh for record in records],
    "train_kwh": [record.energy_kwh.train for record in records],
    "utilisation": [record.gpu_utilisation for record in records],
    "total_kwh": [record.spent_kwh for record in records],
    "rest_gpu_kwh": [reading.gpu_kwh for reading in rest.values()],
    "rest_kwh": [reading.total_kwh for reading in rest.values()],
    "outer_gpu_kwh": meter.outer().gpu_kwh, "outer_kwh": meter.outer().total_kwh,
}))
"""


@pytest.mark.slow
def test_every_trial_is_charged_and_the_parts_are_the_whole(tmp_path: Path) -> None:
    """Complete, on two ranks, out of memory, killed, silent, capped, crashed: the sum is one outer
    reading.
    """
    (study,) = with_gpus([RECORDED, OTHER], STUDY, tmp_path, FOLDER=str(tmp_path))
    assert study["states"] == [
        "complete",
        "complete",
        "infeasible",
        "failed",
        "timeout",
        "pruned",
        "failed",
    ]
    assert min(study["gpu_kwh"]) > 0
    assert min(study["train_kwh"][:6]) > 0
    assert (study["utilisation"][0], study["utilisation"][4]) == (
        None,
        0.5,
    ), "None where no stretch took a second"
    # The counters may be behind what was used by half a tick when the last trial ends.
    half_a_tick_kwh = 2 * 0.05 * LOAD_W / 3.6e6
    assert sum(study["gpu_kwh"] + study["rest_gpu_kwh"]) == pytest.approx(
        study["outer_gpu_kwh"], abs=half_a_tick_kwh
    )
    assert sum(study["total_kwh"] + study["rest_kwh"]) == pytest.approx(
        study["outer_kwh"], abs=half_a_tick_kwh
    )


# ------------------------------------------------------------------------------------------------------
# two readings

GPU_ONLY = """
meter = MachineMeter([0], os.environ["OBJECTIVE"])
meter.enter(Phase.TRAIN)
time.sleep(1.2)
meter.close()
reading, outer = meter.take(Phase.TRAIN)[Phase.TRAIN], meter.outer()
print(json.dumps([reading.total_kwh, reading.gpu_kwh, reading.cpu_kwh, reading.ram_kwh, reading.gpu.codecarbon]))
"""


@pytest.mark.slow
def test_the_objective_chooses_what_counts(tmp_path: Path) -> None:
    script = with_each("OBJECTIVE", ("all", "gpu"), GPU_ONLY)
    (total, gpu, cpu, ram, _), of_gpu = with_gpus([300], script, tmp_path)
    assert total == pytest.approx(gpu + cpu + ram)
    total, gpu, cpu, ram, _ = of_gpu
    assert total == gpu > 0
    assert cpu > 0 and ram > 0, "not counted, and still told"


@pytest.mark.slow
def test_codecarbon_that_sees_no_gpu_disagrees_and_changes_no_figure(tmp_path: Path) -> None:
    """CodeCarbon takes every GPU for absent when nvidia-smi fails, and says nothing."""
    ((_, gpu, _, _, codecarbon),) = with_gpus(
        [300], GPU_ONLY, tmp_path, nvidia_smi="exit 9", OBJECTIVE="all"
    )
    assert joules_from_kwh(gpu) == pytest.approx(300 * 1.2, rel=0.05)
    assert codecarbon == 0.0


def test_disagreement_is_that_of_single_long_windows() -> None:
    def gpu(codecarbon: float) -> GpuEnergy:
        return GpuEnergy(counter=1.0, codecarbon=codecarbon, idle=0.2, uncertainty=0.01)

    assert disagreement(gpu(0.97), 10.0) == pytest.approx(-0.03)
    assert disagreement(gpu(0.97), 9.9) is None
    assert disagreement(None, 60.0) is None
    long, longer = Reading(disagreement=-0.03), Reading(disagreement=0.01)
    assert (long + Reading() + longer).disagreement == -0.03
    assert (Reading() + Reading()).disagreement is None


# --------------------------------------------------------------------------------------------------------
# utilisation

UTILISATION = """
meter = MachineMeter(json.loads(os.environ["LAUNCH"]))
def spend(phase, duration_s, *percents):
    pynvml.busy_percent[:] = percents
    if phase:
        meter.enter(phase)
    until = time.monotonic() + duration_s
    while time.monotonic() < until:
        for one in Phase:
            meter.running(one)
        time.sleep(0.02)
spend(Phase.SETUP, 1.2, 7, 7)
spend(Phase.TRAIN, 1.5, 80, 40)
spend(None, 1.0, 100, 60)
spend(Phase.EVAL, 1.2, 7, 7)
spend(Phase.TRAIN, 0.2, 7, 7)
spend(Phase.EVAL, 0.3, 7, 7)
spend(Phase.TRAIN, 1.1, 7, None)
meter.enter(Phase.EVAL)
taken = meter.take(*(phase for phase in Phase if phase is not Phase.EVAL))
spend(Phase.TRAIN, 1.1, 0, 0)
spend(Phase.EVAL, 0.1, 7, 7)
spend(Phase.TRAIN, 0.95, 100, 100)
spend(Phase.EVAL, 0.1, 7, 7)
spend(Phase.TRAIN, 0.95, 100, 100)
meter.close()
taken |= meter.take(Phase.EVAL)
short = meter.take(Phase.TRAIN)[Phase.TRAIN]
print(json.dumps([[one.gpu_utilisation, one.utilisation_readings] for one in (*map(taken.get, Phase), short)]))
"""


@pytest.mark.slow
def test_utilisation_is_the_mean_of_readings_a_second_apart_while_it_trains(tmp_path: Path) -> None:
    """None within a window's first second, which would tell of what was before, and none where a
    GPU doesn't tell.
    """
    script = with_each("LAUNCH", ("[0, 1]", "[]"), UTILISATION)
    measured, none = with_gpus([100, 300], script, tmp_path)
    assert measured.pop() == [None, 1], "of a third of the time"
    train = list(Phase).index(Phase.TRAIN)
    assert measured.pop(train) == [pytest.approx((0.6 + 0.8) / 2), 2]
    assert measured == [[None, 0]] * (len(Phase) - 1)
    assert none == [[None, 0]] * (len(Phase) + 1)


@pytest.mark.slow
def test_the_temperature_is_that_of_the_trainings_begin(tmp_path: Path) -> None:
    script = """
meter = MachineMeter([0, 1])
for phase, *degrees in ((Phase.SETUP, 30, 30), (Phase.TRAIN, 40, 50), (Phase.EVAL, 60, 60), (Phase.TRAIN, 70, 70)):
    pynvml.celsius[:] = degrees
    meter.enter(phase)
    time.sleep(0.2)
meter.close()
train = meter.take(Phase.TRAIN)[Phase.TRAIN]
print(json.dumps([train.start_temperature_c, meter.take(Phase.EVAL)[Phase.EVAL].start_temperature_c]))
pynvml.celsius[:] = [40, None]
print(json.dumps(EnergyCounters([0, 1]).temperature_c()))
"""
    script = f"from carbonopt.energy.counter import EnergyCounters\n{script}"
    assert with_gpus([100, 300], script, tmp_path) == [[45.0, None], None]


def test_utilisation_that_is_none_is_not_used(tmp_path: Path) -> None:
    script = """
from carbonopt.energy.counter import EnergyCounters
counters = EnergyCounters([0, 1])
for percent in (0, 100, 101, -1, float("nan"), "50", None):
    pynvml.busy_percent[:] = [100, percent]
    print(json.dumps(counters.utilisation()))
pynvml.nvmlDeviceGetUtilizationRates = lambda handle: None
print(json.dumps(counters.utilisation()))
counters.close()
print(json.dumps(counters.utilisation()))
"""
    assert with_gpus([100, 300], script, tmp_path) == [0.5, 1.0, *[None] * 7]


@pytest.mark.slow
def test_gpus_that_a_trial_leaves_idle_are_the_studys(tmp_path: Path) -> None:
    """One of 100 W and one of 300 W, of which a trial has the first; the parts are the whole."""
    script = """
from carbonopt.core.trial import TRIAL_PHASES
meter = MachineMeter([0, 1])
meter.enter(Phase.SETUP)
meter.use(1)
meter.enter(Phase.TRAIN)
time.sleep(1.2)
so_far = [meter.running(Phase.TRAIN).gpu_kwh, meter.running(Phase.GAP).gpu_kwh]
meter.enter(Phase.GAP)
one = meter.take(*TRIAL_PHASES)
meter.enter(Phase.SETUP)
meter.use(2)
meter.enter(Phase.TRAIN)
time.sleep(1.2)
meter.enter(Phase.GAP)
both = meter.take(*TRIAL_PHASES)
meter.close()
rest = meter.take(Phase.PREPARE, Phase.GAP, Phase.OTHER)
outer = meter.outer()
parts = [*one.values(), *both.values(), *rest.values()]
w = lambda reading: 3.6e6 * reading.gpu_kwh / reading.duration_s
gpu = one[Phase.TRAIN].gpu
print(json.dumps([w(one[Phase.TRAIN]), w(both[Phase.TRAIN]), so_far[1] / so_far[0],
        gpu.codecarbon / gpu.counter, gpu.idle / gpu.counter,
    sum(part.gpu_kwh for part in parts) / outer.gpu_kwh, sum(part.total_kwh for part in parts) / outer.total_kwh]))
"""
    ((one_w, both_w, ratio, differs, idle, gpu_closure, closure),) = with_gpus(
        [100, 300], script, tmp_path
    )
    assert one_w == pytest.approx(100, rel=0.1)
    assert both_w == pytest.approx(400, rel=0.1)
    assert ratio > 2, "what the other draws is in GAP, beside what was there before"
    assert differs == pytest.approx(1.0, rel=0.1), "as far as the sum does"
    assert idle == pytest.approx(1.0, rel=0.1), "of its own GPU alone"
    assert gpu_closure == pytest.approx(1.0, rel=0.005)
    assert closure == pytest.approx(1.0, rel=0.005)
