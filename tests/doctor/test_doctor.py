"""The doctor: whole machines with one thing wrong each, and the checks of GPUs and of what
compiles.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import compiler_with_cache, within

from carbonopt.core.builds import is_whole
from carbonopt.core.errors import CarbonoptError, MeasurementError
from carbonopt.doctor import _checks, before_run, compiler_checks, gpu_checks
from carbonopt.doctor.check_result import Finding, Status
from carbonopt.doctor.machine_facts import Machine
from carbonopt.energy.occupancy import GpuNow, gpus_now
from carbonopt.engines.process import extensions
from carbonopt.engines.process.environment import work_environment
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.study_file.reader import load_study, parse_study
from carbonopt.train.probe import Op, Stack, TorchGpu

ROOT = Path(__file__).parents[2]

# Two GPUs. Their counters rise by 100 W each, by 400 W while the file BUSY is there; number 1 can
# be DEAD. A process works on number 0.
NVML = """
import os, time
from types import SimpleNamespace
class NVMLError(Exception): pass
NVMLError_NotSupported = NVMLError_NoPermission = NVMLError
nvmlMemory_v2 = 2
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda index: "Stand-in"
nvmlDeviceGetUUID = lambda index: f"GPU-{index}aaa"
nvmlDeviceGetCudaComputeCapability = lambda index: (9, 0)
nvmlDeviceGetMemoryInfo = lambda index, version: SimpleNamespace(used=0)
nvmlDeviceGetComputeRunningProcesses = lambda index: [SimpleNamespace(pid=os.getppid())] if index == 0 else []
energy_mj, read_at = 0.0, time.monotonic()
def nvmlDeviceGetTotalEnergyConsumption(index):
    global energy_mj, read_at
    now = time.monotonic()
    energy_mj += (400_000 if os.path.exists(os.environ["BUSY"]) else 100_000) * (now - read_at)
    read_at = now
    return 0 if index == 1 and "DEAD" in os.environ else int(energy_mj)
"""

# As much of torch as it takes to keep two GPUs busy.
TORCH = """
import os, time
from types import SimpleNamespace
float16 = None
cuda = SimpleNamespace(device_count=lambda: 2, synchronize=lambda device: time.sleep(0.01))
randn = lambda *size, device, dtype: SimpleNamespace(device=device)
matmul = lambda a, b: open(os.environ["BUSY"], "w").close()
"""


def carbonopt(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().startswith("codecarbon_")
    }
    return subprocess.run(
        [sys.executable, "-m", "carbonopt", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment},
        timeout=380,
    )


def diagnosis(*arguments: str, cwd: Path, **environment: str) -> tuple[int, dict[str, dict]]:
    """Exit code and checks of `carbonopt doctor --json`, of which the shape is looked at here."""
    done = carbonopt("doctor", "--json", *arguments, cwd=cwd, **environment)
    answer = json.loads(done.stdout)
    assert set(answer) == {"ok", "checks"}
    for check in answer["checks"]:
        assert set(check) == {"name", "status", "found", "advice"}
        assert check["status"] in ("ok", "warning", "failure")
        assert (check["advice"] is None) == (check["status"] == "ok")
    assert (
        answer["ok"]
        == (done.returncode == 0)
        == all(check["status"] != "failure" for check in answer["checks"])
    )
    checks = {check["name"]: check for check in answer["checks"]}
    assert len(checks) == len(answer["checks"])
    return done.returncode, checks


@pytest.fixture
def two_gpus(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with the two stand-in GPUs."""
    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / "pynvml.py").write_text(NVML)
    (folder / "torch.py").write_text(TORCH)
    (folder / "nvidia-smi").write_text("#!/bin/sh\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "BUSY": str(folder / "busy"),
    }


# ------------------------------------------------------------------------------------------------------
# whole machines


@pytest.mark.slow
def test_a_build_mends_an_operator_that_a_killed_one_has_locked(tmp_path: Path) -> None:
    extensions = tmp_path / "extensions"
    operator = extensions / "deepspeed_shm_comm"
    operator.mkdir(parents=True)
    (operator / "lock").touch()
    os.utime(operator / "lock", (0, 0))
    environment = {
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "0",
    }
    environment["CXX"] = compiler_with_cache(tmp_path)
    code, checks = diagnosis(cwd=tmp_path, **environment)
    assert (code, checks["DeepSpeed operators"]["advice"]) == (0, "carbonopt doctor --build")
    assert (
        checks["GPUs"]["found"] == "no NVIDIA driver: studies run on the CPU with launch.gpus: []"
    )

    code, checks = diagnosis("--build", cwd=tmp_path, **environment)
    assert (code, checks["DeepSpeed operators"]["found"]) == (0, "compiled: deepspeed_shm_comm")
    assert (operator / "deepspeed_shm_comm.so").exists()
    told = carbonopt("doctor", cwd=tmp_path, **environment)
    assert told.returncode == 0
    assert "ok       DeepSpeed operators  compiled: deepspeed_shm_comm\n" in told.stdout
    assert "\x1b" not in told.stdout


@pytest.mark.slow
def test_gpus_are_counted_idle_and_under_load(tmp_path: Path, two_gpus: dict[str, str]) -> None:
    code, checks = diagnosis(
        cwd=tmp_path,
        **two_gpus,
        CUDA_VISIBLE_DEVICES="GPU-1",
        TORCH_CUDA_ARCH_LIST="9.0a",
        HOME=str(tmp_path),
    )
    powers_w = [
        float(power) for power in re.findall(r"(\d+) W", checks["energy counters"]["found"])
    ]
    assert powers_w == pytest.approx([100, 400, 100, 400], rel=0.2)
    assert checks["GPUs given"]["advice"] == "launch: {gpus: [1]}"
    assert checks["other processes"]["found"].startswith(f"GPU 0: process {os.getpid()} (")
    assert checks["other processes"]["advice"] == "launch: {gpus: [1]}"
    assert (
        checks["CUDA architectures"]["found"]
        == "TORCH_CUDA_ARCH_LIST='9.0a' makes DeepSpeed crash; trials get '9.0'"
    )
    assert checks["CUDA architectures"]["advice"] == 'export TORCH_CUDA_ARCH_LIST="9.0"'
    # The stand-in is no torch to train with.
    assert (code, checks["versions"]["status"]) == (1, "failure")
    assert "GPUs in torch" not in checks


def test_run_refuses_a_dead_counter_before_anything_is_there(
    tmp_path: Path, two_gpus: dict[str, str], tiny_study: dict, write_study
) -> None:
    tiny_study["launch"]["gpus"] = [0, 1]
    done = carbonopt("run", write_study(tiny_study), cwd=tmp_path, **two_gpus, DEAD="1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "the counter of GPU 1 stood still for 0.5 s → launch: {gpus: [0]}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_does_not_answer_is_no_traceback(monkeypatch) -> None:
    class Lost(Exception):
        pass

    def lost(index: int) -> None:
        raise Lost("GPU is lost")

    nvml = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "NVMLError": Lost,
    }
    monkeypatch.setitem(
        sys.modules, "pynvml", SimpleNamespace(**nvml, nvmlDeviceGetHandleByIndex=lost)
    )
    with pytest.raises(MeasurementError, match="GPU is lost"):  # which `run` tells once
        gpus_now()
    assert advised(gpu_checks.seen(Machine())) == ("failure", "sudo reboot")


def test_without_nvidia_smi_run_refuses(
    tmp_path: Path, two_gpus: dict[str, str], tiny_study: dict, write_study
) -> None:
    tiny_study["launch"]["gpus"] = [1]
    done = carbonopt(
        "run", write_study(tiny_study), cwd=tmp_path, **{**two_gpus, "PATH": str(tmp_path)}
    )
    assert done.returncode == 2
    assert "nvidia-smi: not on PATH" in done.stderr
    assert "energy counters" not in done.stderr  # which are well


def test_a_replay_trains_nothing_and_needs_only_the_disk(
    tmp_path: Path, replay_study: dict, write_study
) -> None:
    config = load_study(write_study(replay_study))
    assert [check.name for check in before_run(config, tmp_path)] == ["disk for runs"]


def test_run_refuses_a_configuration_that_codecarbon_cannot_parse(
    tmp_path: Path, tiny_study: dict, write_study
) -> None:
    (tmp_path / ".codecarbon.config").write_text("no section\n")
    done = carbonopt("run", write_study(tiny_study), cwd=tmp_path)
    assert done.returncode == 2
    assert f"mv {tmp_path}/.codecarbon.config {tmp_path}/.codecarbon.config.bad" in done.stderr


# -------------------------------------------------------------------------------------------------------
# single checks


def gpus(*used_gib: float | None) -> tuple[GpuNow, ...]:
    return tuple(
        GpuNow(
            index=index,
            name="G",
            uuid=f"GPU-{index}bcd",
            compute_capability="8.0",
            memory_used_gib=used,
            processes=(),
        )
        for index, used in enumerate(used_gib)
    )


def advised(finding: Finding | None) -> tuple[str, str | None]:
    assert finding is not None
    return finding.status.value, finding.advice


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ("ok", None)),
        ("0,1", ("ok", None)),
        ("GPU-0,GPU-1bcd", ("ok", None)),
        ("1", ("warning", "launch: {gpus: [1]}")),
        ("GPU-0b", ("warning", "launch: {gpus: [0]}")),
        ("", ("warning", "launch: {gpus: []}")),
        ("-1", ("warning", "launch: {gpus: []}")),
        ("MIG-7f", ("warning", "launch: {gpus: []}")),
        ("1,-1,0", ("warning", "launch: {gpus: [1]}")),
        ("²,0", ("warning", "launch: {gpus: []}")),
    ],
)
def test_gpus_that_a_scheduler_gave_to_others(
    monkeypatch, value: str | None, expected: tuple
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert advised(gpu_checks.hidden(gpus(0, 0), [0, 1])) == expected


def test_a_gpu_in_use_by_processes_that_cannot_be_seen() -> None:
    in_use = gpu_checks.others(gpus(9.5, 0.01, None), [0])
    assert advised(in_use) == ("warning", "launch: {gpus: [1]}")
    assert "GPU 0: 9.5 GiB used" in in_use.found
    assert advised(gpu_checks.others(gpus(9.5, 0.01, None), [1, 2])) == ("ok", None)
    assert gpu_checks.others(gpus(9.5), [0]).advice.startswith("nvidia-smi ")
    begun = gpu_checks.others(gpus(9.5, 0.01), [0], begun=True)
    assert begun.advice.startswith("nvidia-smi ")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, "ok"),
        ("", "ok"),
        ("8.0", "ok"),
        ("8.0;9.0+PTX", "ok"),
        ("8.0 9.0", "ok"),
        ("9.0a", "warning"),
        ("8.0;10.0f+PTX", "warning"),
        ("Hopper", "failure"),
        ("8.0,9.0", "failure"),
        ("8.0;;9.0", "failure"),
        ("90", "failure"),
        ("٨.٠", "failure"),
    ],
)
def test_architectures_that_deepspeed_reads(monkeypatch, value: str | None, status: str) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    environment = work_environment(LocalLaunch(gpus=(0,)), ["GPU-0bcd"], os.environ)
    verdict = advised(compiler_checks.arch_list(gpus(0), environment))
    assert verdict == (status, None if status == "ok" else 'export TORCH_CUDA_ARCH_LIST="8.0"')


def test_tools_that_are_missing(monkeypatch, tmp_path: Path) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    assert compiler_checks.ninja(needed=True).found == str(
        Path(sys.executable).with_name("ninja")
    ), "beside this Python"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert advised(compiler_checks.compilers(needed=True)) == (
        "failure",
        "sudo apt-get install g++",
    )
    assert advised(compiler_checks.compilers(needed=False)) == (
        "warning",
        "sudo apt-get install g++",
    )
    assert compiler_checks.ninja(needed=True).status == Status.FAILURE
    assert compiler_checks.ninja(needed=False).status == Status.WARNING
    (tmp_path / "extensions").mkdir()
    (tmp_path / "extensions" / "op.so").touch()
    assert compiler_checks.compilers(needed=True).status == Status.WARNING


def machine(**stack: object) -> SimpleNamespace:
    """One with two GPUs, whose trials' process found this."""
    both = tuple(TorchGpu(name="G", uuid=gpu_now.uuid) for gpu_now in gpus(0, 0))
    given = {
        "versions": {"torch": "2.13"}, "torch_cuda": "13.0", "gpus": both, "gpu_error": None, "nvcc": "13.0",
        "nvcc_error": None, "ops": (Op(name="cpu_adam", built=True, lock=None),),
    }  # fmt: skip
    return SimpleNamespace(gpus=gpus(0, 0), stack=Stack(**{**given, **stack}))


def test_torch_and_nvml_see_the_same_gpus() -> None:
    assert advised(gpu_checks.torch_sees(machine())) == ("ok", None)
    second_gpu_only = (TorchGpu(name="G", uuid="GPU-1bcd"),)
    assert advised(gpu_checks.torch_sees(machine(gpus=second_gpu_only))) == (
        "failure",
        "launch: {gpus: [1]}",
    )
    cpu_build = machine(torch_cuda=None, gpus=(), nvcc=None)
    assert advised(gpu_checks.torch_sees(cpu_build)) == (
        "failure",
        "pip install --force-reinstall torch",
    )
    assert compiler_checks.nvcc(cpu_build) is None
    old_driver = gpu_checks.torch_sees(
        machine(gpus=(), gpu_error="The NVIDIA driver on your system is too old")
    )
    assert old_driver.status == Status.FAILURE
    assert "too old" in old_driver.found


def test_another_cuda_than_torchs_only_warns_because_no_trial_needs_it() -> None:
    assert advised(compiler_checks.nvcc(machine())) == ("ok", None)
    other = compiler_checks.nvcc(
        machine(torch_cuda="99.9", nvcc="13.0", nvcc_error="13.0 does not match")
    )
    assert advised(other) == ("warning", "sudo apt-get install cuda-nvcc-99-9")


HOLDING = (
    "import os, sys, time; os.open(sys.argv[1], os.O_CREAT); print('held', flush=True);"
    " time.sleep(60)"
)


def test_a_lock_is_waited_for_while_somebody_may_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    locked = machine(ops=(Op(name="cpu_adam", built=False, lock=str(lock)),))
    with subprocess.Popen([sys.executable, "-c", HOLDING, lock], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        os.utime(lock, (0, 0))
        held = compiler_checks.ops(locked)
        assert advised(held) == ("warning", "sleep 60; carbonopt doctor")
        assert f"being compiled now by process {process.pid}, since" in held.found
        process.kill()
    assert advised(compiler_checks.ops(locked)) == (
        "warning",
        "carbonopt doctor --build",
    ), "which takes it away"

    monkeypatch.setattr(
        extensions, "_LOCAL", set()
    )  # as on a network file system, where another machine may hold it
    assert advised(compiler_checks.ops(locked)) == ("failure", f"rm {lock}")
    lock.touch()
    fresh = compiler_checks.ops(locked)
    assert advised(fresh) == ("warning", "sleep 60; carbonopt doctor")
    assert "perhaps being compiled by what can't be seen from here" in fresh.found
    lock.unlink()
    assert advised(compiler_checks.ops(locked)) == ("warning", "carbonopt doctor --build")


@pytest.mark.slow
def test_a_study_goes_on_after_a_build_that_was_killed(
    tmp_path: Path, tiny_study: dict, write_study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of an operator that this study doesn't load is none of its business."""
    folder = tmp_path / "my extensions"
    lock, other = (folder / name / "lock" for name in ("deepspeed_shm_comm", "cpu_adam"))
    for lock_file in (lock, other):
        lock_file.parent.mkdir(parents=True)
        lock_file.touch()
        (lock_file.parent / f"{lock_file.parent.name}.so").write_bytes(b"half")
    environment = {"TORCH_EXTENSIONS_DIR": str(folder), "CXX": compiler_with_cache(tmp_path)}
    monkeypatch.chdir(tmp_path)
    done = within("run", write_study(tiny_study), "--trials", "1", **environment)
    assert done.returncode in (0, 3), done.stderr
    assert not lock.exists() and is_whole(lock.with_name("deepspeed_shm_comm.so"))
    assert other.exists() and other.with_name("cpu_adam.so").exists()


def test_a_script_study_needs_no_operator(
    tmp_path: Path, tiny_study: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a compiler or ninja, and a lock doesn't hold it."""
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(extensions, "_LOCAL", set())
    trained = {finding.name for finding in before_run(parse_study(tiny_study, "here"), tmp_path)}
    assert {"ninja", "compilers", "DeepSpeed operators"} <= trained
    script = {
        **tiny_study,
        "workload": {"task": "script", "command": "python train.py --lr {learning_rate}"},
        "target": {"accuracy": 0.5},
        "search": {"space": {"learning_rate": {"choices": [0.1, 0.2]}}},
    }
    needed = {finding.name for finding in before_run(parse_study(script, "here"), tmp_path)}
    assert not needed & {"ninja", "compilers", "DeepSpeed operators"}


def test_operators_that_are_not_compiled() -> None:
    assert advised(compiler_checks.ops(machine())) == ("ok", None)
    missing = compiler_checks.ops(machine(ops=(Op(name="cpu_adam", built=False, lock=None),)))
    assert advised(missing) == ("warning", "carbonopt doctor --build")
    assert "cpu_adam (for offload)" in missing.found


@pytest.mark.parametrize(
    ("script", "cpu", "gpu_advice"),
    [
        ("sleep 60", ("failure", "sudo reboot"), "sudo reboot"),
        ("exit 9", None, "{} --help"),
        ("exit 0", None, None),
    ],
)
@pytest.mark.slow
def test_an_nvidia_smi_that_codecarbon_would_trip_over(
    monkeypatch, tmp_path: Path, script: str, cpu: tuple | None, gpu_advice: str | None
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    finding = gpu_checks.nvidia_smi(here := Machine(), ())
    assert (finding and advised(finding)) == cpu
    assert gpu_checks.nvidia_smi(here, gpus(0)).advice == (gpu_advice and gpu_advice.format(smi))


def raising(error: Exception) -> Finding:
    raise error


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on() -> None:
    findings = list(
        _checks(
            {
                "broken": lambda: raising(ZeroDivisionError("by nought")),
                "ours": lambda: raising(CarbonoptError("no such thing")),
                "nothing": lambda: None,
                "well": lambda: Finding(status=Status.OK, found="fine"),
            }
        )
    )
    assert names(findings) == [("broken", "failure"), ("ours", "failure"), ("well", "ok")]
    assert "ZeroDivisionError: by nought" in findings[0].found


def names(checks: Iterable) -> list[tuple[str, str]]:
    return [(check.name, check.status.value) for check in checks]
