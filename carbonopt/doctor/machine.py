"""What several checks look at, each found out once: the GPUs, and torch and DeepSpeed in a process of their own."""

import os
import select
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from carbonopt.core.config import LocalLaunch
from carbonopt.core.errors import BadInput, CarbonoptError, MeasurementError
from carbonopt.energy.occupancy import GpuNow, gpus_now
from carbonopt.engines.process import guard
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.extensions import extensions_folder
from carbonopt.engines.process.processes import run_module
from carbonopt.train import probe

_START_S = 180.0  # importing torch and DeepSpeed from a cold network disk
_BUILD_S = 900.0
_END_S = 20.0
SMI_S = 5.0
_NOT_FOUND = 127  # as shells say it


class ProbeError(CarbonoptError):
    """The trials' process doesn't start here."""


class Machine:
    def __init__(self, build: bool = False) -> None:
        self._build = build

    @cached_property
    def gpus(self) -> tuple[GpuNow, ...]:
        """All GPUs; none where there is no driver, or one that doesn't answer."""
        return self._gpus_and_error[0]

    @property
    def driver_error(self) -> CarbonoptError | None:
        """What is wrong on a machine that has NVIDIA GPUs; its cause is what the driver itself says."""
        return self._gpus_and_error[1]

    @cached_property
    def smi_code(self) -> int | None:
        """What `nvidia-smi --help` ends with, which CodeCarbon runs when it is imported; None: it doesn't answer."""
        try:
            process = subprocess.Popen(
                ["nvidia-smi", "--help"],  # noqa: S607, whichever CodeCarbon would find
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return _NOT_FOUND
        try:
            return process.wait(SMI_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # not waited for: one that hangs in the driver doesn't end
            return None

    @cached_property
    def environment(self) -> dict[str, str]:
        """That of a trial on all GPUs."""
        launch = LocalLaunch(gpus=tuple(gpu.index for gpu in self.gpus))
        return work_environment(launch, [gpu.uuid for gpu in self.gpus])

    @property
    def stack(self) -> probe.Stack | None:
        """What the trials' process finds; None where it can't start."""
        return self._stack_and_error[0]

    @property
    def stack_error(self) -> str | None:
        return self._stack_and_error[1]

    @contextmanager
    def load(self) -> Iterator[None]:
        """Keeps all GPUs busy meanwhile.

        Raises:
            ProbeError: if that can't be done.
        """
        with subprocess.Popen(
            _command("load"),
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            try:
                begun = select.select([process.stdout], [], [], _START_S)[0] and process.stdout.readline()
                if not begun:
                    process.kill()
                    raise ProbeError(_last_line(process.stderr.read()) or f"no load within {_START_S:g} s")
                yield
                process.stdin.close()
                process.wait(_END_S)
            finally:
                process.kill()

    @cached_property
    def _gpus_and_error(self) -> tuple[tuple[GpuNow, ...], CarbonoptError | None]:
        try:
            return gpus_now(), None
        except MeasurementError as error:
            return (), error
        except BadInput as error:
            # A GPU's device file without a driver that answers; other machines have no such file.
            has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists()
            return (), error if has_gpu else None

    @cached_property
    def _stack_and_error(self) -> tuple[probe.Stack | None, str | None]:
        try:
            return _ask(self.environment, build=self._build), None
        except ProbeError as error:
            return None, str(error)


def _ask(environment: dict[str, str], *, build: bool) -> probe.Stack:
    with subprocess.Popen(
        _command("build" if build else "stack"),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # one of its own, with the compilers
    ) as process:
        try:
            answer, errors = process.communicate(timeout=_BUILD_S if build else _START_S)
        except subprocess.TimeoutExpired as error:
            raise ProbeError(f"no answer within {error.timeout:g} s") from error
        finally:
            if process.poll() is None:
                guard.end_session(process.pid, str(extensions_folder(environment).resolve()), [], _END_S)
    if process.returncode:
        raise ProbeError(_last_line(errors) or f"ended with code {process.returncode}")
    return probe.Stack.model_validate_json(answer)


def by_hand(what: str) -> str:
    """What to type to see all that the trials' process says."""
    return shlex.join(_command(what))


def _command(what: str) -> list[str]:
    return run_module("carbonopt.train.probe", what)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
