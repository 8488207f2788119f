import inspect
import json
import math
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from carbonopt.core.errors import BadInput, MeasurementError
from carbonopt.core.trial import READINGS_APART_S, Phase
from carbonopt.core.units import joules_from_kwh, kwh_from_joules
from carbonopt.energy import codecarbon, hardware
from carbonopt.energy.machine_meter import MachineMeter
from carbonopt.energy.meter_reading import Reading
from carbonopt.energy.pipeline_meter import PipelineMeter
from carbonopt.energy.replay_meter import ReplayMeter

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[2]
GPU_HERE = shutil.which("nvidia-smi") is not None
STRAY_CONFIG = """[codecarbon]
pue=1.5
force_cpu_power=5000
force_ram_power=5000
tracking_mode=process
electricitymaps_api_token=stray
co2_signal_api_token=stray
emissions_endpoint=http://127.0.0.1:9
save_to_file=true
output_methods=csv,api
gpu_ids=7
log_level=debug
"""


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a measurement must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)


def burn(duration_s: float) -> None:
    until = time.perf_counter() + duration_s
    while time.perf_counter() < until:
        pass


def load_all_cores(duration_s: float) -> None:
    workers = [
        multiprocessing.Process(target=burn, args=(duration_s,)) for _ in range(os.cpu_count() or 1)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


# -------------------------------------------------------------------------------------------------------------
# meter


@pytest.mark.slow
def test_phases_sum_to_what_the_outer_tracker_measured(no_network):
    measured = MachineMeter(())
    began = time.perf_counter()
    # Idle and busy in turn, at times that don't fit CodeCarbon's one-second samples.
    for phase, act, duration_s in (
        (Phase.PREPARE, time.sleep, 0.4),
        (Phase.SETUP, load_all_cores, 0.7),
        (Phase.TRAIN, load_all_cores, 1.3),
        (Phase.EVAL, time.sleep, 0.3),
        (Phase.TRAIN, load_all_cores, 0.8),
        (Phase.EVAL, time.sleep, 0.6),
    ):
        measured.enter(phase)
        act(duration_s)
    measured.enter(Phase.GAP)
    measured.close()
    duration_s = time.perf_counter() - began

    readings = measured.take(*Phase)
    outer = measured.outer()
    assert sum(reading.total_kwh for reading in readings.values()) == pytest.approx(
        outer.total_kwh, rel=0.001
    )
    assert sum(reading.duration_s for reading in readings.values()) == pytest.approx(
        duration_s, rel=0.02
    )
    assert readings[Phase.TRAIN].duration_s >= 2.1
    assert all(
        (readings[phase].cpu_kwh or 0) > 0
        for phase in (Phase.PREPARE, Phase.SETUP, Phase.TRAIN, Phase.EVAL)
    )
    assert {reading.gpu_kwh for reading in readings.values()} == {None}
    assert measured.energy_source.keys() == {"cpu", "ram"}


@pytest.mark.slow
def test_studies_in_turn_and_what_lies_between_them_add_up_to_one_reading(no_network):
    shared = PipelineMeter()
    opened: list[MachineMeter] = []

    def study(seconds: float) -> tuple[float, Reading, float, float]:
        """What a study's own phases add up to, what it reads as the whole, and between which two
        times it read last.
        """
        meter = shared.for_step(lambda: opened.append(MachineMeter(())) or opened[-1])
        began_s = time.perf_counter()
        time.sleep(seconds)
        meter.enter(Phase.TRAIN)
        load_all_cores(seconds)
        meter.enter(Phase.GAP)
        parts = meter.take(Phase.TRAIN)
        time.sleep(seconds)
        asked_s = time.perf_counter()
        parts |= meter.parts_and_outer(Phase.PREPARE, Phase.GAP, Phase.OTHER)[0]
        accounted_s = time.perf_counter()
        parts_s = sum(part.duration_s for part in parts.values())
        assert asked_s - began_s - READINGS_APART_S < parts_s
        load_all_cores(0.3)  # what is after the last reading is the pause's
        meter.close()
        whole = meter.outer()
        time.sleep(0.2)
        assert meter.outer() == whole, "its own end"
        return sum(part.total_kwh for part in parts.values()), whole, asked_s, accounted_s

    assert not shared.runs
    first_kwh, first, asked_s, accounted_s = study(0.4)
    load_all_cores(0.8)
    least_s = time.perf_counter() - accounted_s
    between = shared.between()
    most_s = time.perf_counter() - asked_s
    second_kwh, second, *_ = study(0.3)
    time.sleep(0.4)
    shared.close()

    assert len(opened) == 1
    assert 0 < first_kwh < first.total_kwh and 0 < second_kwh < second.total_kwh
    assert least_s - READINGS_APART_S < between.duration_s < most_s
    assert (
        shared.between().duration_s > between.duration_s + 0.5
        and shared.between().total_kwh > between.total_kwh
    )
    paused_kwh = shared.between().total_kwh + shared.others_between().total_kwh
    assert first_kwh + second_kwh + paused_kwh == pytest.approx(shared.outer().total_kwh, rel=0.005)


def test_a_running_window_grows_and_is_what_is_taken_in_the_end():
    measured = MachineMeter(())
    measured.enter(Phase.TRAIN)
    seen_kwh = [measured.running(Phase.TRAIN).total_kwh]
    for _ in range(3):
        time.sleep(0.1)
        seen_kwh.append(measured.running(Phase.TRAIN).total_kwh)
    with pytest.raises(ValueError, match="train is running"):
        measured.take(Phase.TRAIN)
    measured.enter(Phase.GAP)
    taken = measured.take(Phase.TRAIN, Phase.EVAL)

    assert seen_kwh == sorted(set(seen_kwh))
    # Above or below it: the last part of a window also tells which share of the whole was this
    # process's own.
    assert taken[Phase.TRAIN].total_kwh == pytest.approx(seen_kwh[-1], rel=0.2)
    assert taken[Phase.EVAL] == Reading(cpu_kwh=0.0, ram_kwh=0.0)
    assert measured.running(Phase.TRAIN).total_kwh == 0
    assert measured.take(Phase.TRAIN)[Phase.TRAIN].total_kwh == 0
    measured.close()
    measured.close()
    assert measured.outer().total_kwh >= taken[Phase.TRAIN].total_kwh


def test_a_meter_that_gets_no_core_for_a_while_is_not_taken_for_a_dead_one(monkeypatch):
    measured = MachineMeter(())
    read = measured._codecarbon.read

    def late():
        time.sleep(1.2)
        return read()

    monkeypatch.setattr(measured._codecarbon, "read", late)
    measured.enter(Phase.TRAIN)
    monkeypatch.setattr(measured._codecarbon, "read", read)
    measured.enter(
        Phase.GAP
    )  # so soon after the reading before that CodeCarbon gives the same again
    assert measured.take(Phase.TRAIN)[Phase.TRAIN].duration_s > 1.2
    # The same reading at both ends of the window, however long the first end takes.
    stuck = read()
    monkeypatch.setattr(measured._codecarbon, "read", lambda: stuck)
    measured.enter(Phase.TRAIN)
    time.sleep(1.1)
    with pytest.raises(MeasurementError, match="none was measured for CPU and RAM during 1"):
        measured.enter(Phase.GAP)
    monkeypatch.undo()
    measured.close()


MEASURE_RAM_POWER = """
import json, time
from carbonopt.energy.machine_meter import MachineMeter
from carbonopt.core.trial import READINGS_APART_S, Phase
meter = MachineMeter(())
meter.enter(Phase.GAP)
time.sleep(0.3)
meter.enter(Phase.PREPARE)
reading = meter.take(Phase.GAP)[Phase.GAP]
meter.close()
print(json.dumps({"ram_w": reading.ram_kwh / reading.duration_s * 3.6e6,
                  "cpu_w": reading.cpu_kwh / reading.duration_s * 3.6e6}))
"""


def measure_in_fresh_process(cwd: Path, **environment: str) -> tuple[dict, str]:
    clean = {
        key: value for key, value in os.environ.items() if not key.lower().startswith("codecarbon_")
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_RAM_POWER],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_stray_settings_change_nothing_and_codecarbon_stays_silent(tmp_path):
    clean_dir, stray_dir, home = tmp_path / "clean", tmp_path / "stray", tmp_path / "home"
    for folder in (clean_dir, stray_dir, home):
        folder.mkdir()
    (stray_dir / ".codecarbon.config").write_text(STRAY_CONFIG)
    (home / ".codecarbon.config").write_text(STRAY_CONFIG)
    clean, _ = measure_in_fresh_process(clean_dir, HOME=str(tmp_path))
    stray, stderr = measure_in_fresh_process(
        stray_dir,
        HOME=str(home),
        CODECARBON_PUE="3.0",
        CODECARBON_FORCE_RAM_POWER="900",
        CODECARBON_LOG_LEVEL="debug",
    )

    assert stray["ram_w"] == pytest.approx(clean["ram_w"], rel=0.02)
    assert stray["cpu_w"] < 2000
    assert stderr == ""
    assert [path.name for path in stray_dir.iterdir()] == [".codecarbon.config"]


def test_codecarbon_has_no_setting_that_we_leave_to_stray_files():
    from codecarbon import OfflineEmissionsTracker
    from codecarbon.emissions_tracker import BaseEmissionsTracker

    settings = {
        name
        for init in (BaseEmissionsTracker.__init__, OfflineEmissionsTracker.__init__)
        for name in inspect.signature(init).parameters
    } - {"self", "args", "kwargs"}
    # Older names: not read once output_methods and electricitymaps_api_token are set.
    settings = {name for name in settings if not name.startswith("save_to_")} - {
        "co2_signal_api_token"
    }
    assert settings == {*codecarbon._SETTINGS, "gpu_ids", "output_dir", "output_handlers"}


def test_an_error_that_codecarbon_swallows_becomes_ours(tmp_path, monkeypatch):
    (tmp_path / ".codecarbon.config").write_text("no section header\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeasurementError, match="no section headers"):
        MachineMeter(())


@pytest.mark.skipif(not GPU_HERE, reason="needs an NVIDIA GPU")
def test_gpu_energy_is_that_of_the_gpus_own_counter():
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    measured = MachineMeter((0,))
    measured.enter(Phase.TRAIN)
    before_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    time.sleep(5)
    after_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    measured.close()
    reading = measured.take(Phase.TRAIN)[Phase.TRAIN]

    assert measured.energy_source["gpu"] == "measured"
    assert reading.gpu_kwh == pytest.approx(
        kwh_from_joules((after_mj - before_mj) / 1000), rel=0.05
    )
    assert reading.codecarbon_gpu_kwh == pytest.approx(reading.gpu_kwh, rel=0.05)
    assert 20 < measured.idle[0].power_w < 200


def test_readings_add_by_component_and_keep_what_is_not_measured():
    both = Reading(cpu_kwh=1.0, duration_s=2.0) + Reading(cpu_kwh=0.5, ram_kwh=0.25, duration_s=1.0)
    assert both == Reading(gpu_kwh=None, cpu_kwh=1.5, ram_kwh=0.25, duration_s=3.0)
    assert both.total_kwh == 1.75


def test_replay_meter_adds_up_what_was_recorded():
    replay = ReplayMeter()
    replay.enter(Phase.TRAIN)
    replay.advance(Phase.TRAIN, 2e-6, 3.0)
    replay.advance(Phase.EVAL, 1e-6, 1.0)
    replay.advance(Phase.TRAIN, 2e-6, 3.0)
    assert replay.running(Phase.TRAIN).total_kwh == 4e-6
    with pytest.raises(ValueError, match="train is running"):
        replay.take(Phase.TRAIN)
    replay.enter(Phase.GAP)
    taken = replay.take(Phase.SETUP, Phase.TRAIN)
    assert taken == {
        Phase.SETUP: Reading(gpu_kwh=0.0),
        Phase.TRAIN: Reading(gpu_kwh=4e-6, duration_s=6.0),
    }
    assert replay.running(Phase.EVAL).total_kwh == 1e-6
    assert replay.outer().total_kwh == pytest.approx(5e-6)
    assert replay.energy_source == {"gpu": "recorded"}


# ----------------------------------------------------------------------------------------------------------
# hardware


class NVMLError(Exception):
    pass


class NVMLNotSupported(NVMLError):
    pass


def fake_nvml(counters_mj: list[int | None]) -> SimpleNamespace:
    """NVML as a machine with GPUs would have it: this one may have none."""

    def energy(index: int) -> int:
        counter_mj = counters_mj[index]
        if counter_mj is None:
            raise NVMLError("Not Supported")
        return counter_mj

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(counters_mj),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetName=lambda index: f"GPU model {index}",
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlSystemGetDriverVersion=lambda: "580.1",
        NVMLError_NotSupported=NVMLNotSupported,
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(total=(80 - index) * 2**30),
    )


def test_hardware_without_gpus():
    machine = hardware.describe_hardware(())
    assert machine.cpu
    assert 1 <= machine.cpu_cores <= (os.cpu_count() or 1)
    assert machine.ram_gib > 0.1
    assert machine.gpus == ()
    assert machine.driver is None
    assert hardware.gpu_uuids(()) == ()


def test_gpus_are_described_in_the_launch_order(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([100, 100, 100]))
    machine = hardware.describe_hardware((2, 0))
    assert machine.gpus == ("GPU model 2", "GPU model 0")
    assert machine.driver == "580.1"
    assert machine.gpu_memory_gib == 78  # of the smallest: each rank must fit
    assert hardware.gpu_uuids((2, 0)) == ("GPU-2", "GPU-0")


def test_gpus_that_share_the_hosts_memory_have_none_of_their_own(monkeypatch):
    def not_supported(_):
        raise NVMLNotSupported("Not Supported")

    shared = SimpleNamespace(**{**vars(fake_nvml([100])), "nvmlDeviceGetMemoryInfo": not_supported})
    monkeypatch.setitem(sys.modules, "pynvml", shared)
    assert hardware.describe_hardware((0,)).gpu_memory_gib is None


def test_gpus_that_are_absent_or_uncounted_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([100, None]))
    with pytest.raises(
        BadInput, match=r"GPU 3 not found: NVML sees 0, 1; to run on the CPU, set launch.gpus: \[\]"
    ):
        hardware.check_gpus((0, 3))
    with pytest.raises(
        BadInput, match=r"GPU 1 \(GPU model 1\) must have an energy counter.*Not Supported"
    ):
        hardware.check_gpus((0, 1))


@pytest.mark.parametrize("found", [None, math.nan, b"580"])
@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlSystemGetDriverVersion",
    ],
)
def test_gpus_of_which_nvml_says_what_it_does_not_promise_are_refused(monkeypatch, name, found):
    monkeypatch.setitem(
        sys.modules, "pynvml", SimpleNamespace(**{**vars(fake_nvml([100])), name: lambda *_: found})
    )
    with pytest.raises(
        MeasurementError, match=f"NVML must give the .*, but gave {found}.*reinstall nvidia-ml-py"
    ):
        (hardware.describe_hardware((0,)), hardware.gpu_uuids((0,)))


@pytest.mark.skipif(GPU_HERE, reason="needs a machine without an NVIDIA driver")
def test_gpus_without_a_driver_are_refused():
    with pytest.raises(BadInput, match=r"driver can't be reached.*launch.gpus: \[\]"):
        MachineMeter((0,))


def test_gpus_without_nvidia_smi_are_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([100]))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MeasurementError, match="nvidia-smi must be on PATH"):
        MachineMeter((0,))


# -------------------------------------------------------------------------------------------------------------
# models


def test_how_cpu_and_ram_are_modelled_is_what_they_are_charged_with(monkeypatch):
    """The words come from CodeCarbon's own model; the RAM's watts are those of a window."""
    from codecarbon.core import cpu

    models = codecarbon.power_models()
    watts, words = models["ram"].split(" W ", 1)
    measured = MachineMeter(())
    measured.enter(Phase.GAP)
    time.sleep(0.3)
    measured.close()
    reading = measured.take(Phase.GAP)[Phase.GAP]
    assert ("cpu" in models) == (measured.energy_source["cpu"] == "modelled")
    if "cpu" in models:
        assert float(models["cpu"].split(" W ")[0]) == pytest.approx(
            measured._host._powers.cpu_w, abs=0.5
        )
    assert joules_from_kwh(reading.ram_kwh) / reading.duration_s == pytest.approx(
        float(watts), rel=0.05
    )
    assert words.startswith("by its size, ")

    monkeypatch.setattr(codecarbon, "has_rapl", lambda: False)
    for model, guessed in (
        ("Intel(R) Xeon(R) Gold 6154 CPU @ 3.00GHz", False),
        ("No such CPU 1", True),
    ):
        monkeypatch.setattr(cpu, "detect_cpu_model", lambda model=model: model)
        assert ("CodeCarbon's table lacks this CPU" in codecarbon.power_models()["cpu"]) == guessed


def test_codecarbon_is_told_the_cpu_that_it_would_find() -> None:
    import cpuinfo
    from codecarbon.core.util import detect_cpu_model

    asked = cpuinfo.get_cpu_info
    detect_cpu_model.cache_clear()
    codecarbon.power_models()
    assert cpuinfo.get_cpu_info is asked
    assert detect_cpu_model.cache_info().currsize == 1
    assert detect_cpu_model() == cpuinfo.get_cpu_info()["brand_raw"]
