"""What several checks look at, each found out once: the GPUs, and torch and DeepSpeed in a process of their own."""

import os
import select
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

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
    """The trials' process can't load the GPUs."""


class Machine:
    driver_error: CarbonoptError | None = None  # of a machine that has NVIDIA GPUs, once it was asked for `gpus`
    stack_error: str | None = None  # why the trials' process can't start, once it was asked for `stack`

    def __init__(self, build: bool = False) -> None:
        self._build = build

    @cached_property
    def gpus(self) -> tuple[GpuNow, ...]:
        """All GPUs; none where there is no driver, or one that doesn't answer: the cause of `driver_error` says why."""
        try:
            return gpus_now()
        except MeasurementError as error:
            self.driver_error = error
        except BadInput as error:
            # A GPU's device file without a driver that answers; other machines have no such file.
            if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists():
                self.driver_error = error
        return ()

    @cached_property
    def smi_code(self) -> int | None:
        """What `nvidia-smi --help` ends with, which CodeCarbon runs when it is imported; None: it doesn't answer."""
        command = ["nvidia-smi", "--help"]  # whichever CodeCarbon would find
        try:
            process = Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
        except OSError:
            return _NOT_FOUND
        try:
            return process.wait(SMI_S)
        except TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # not waited for: one that hangs in the driver doesn't end
            return None

    @cached_property
    def launch(self) -> LocalLaunch:
        """Of trials on all GPUs."""
        return LocalLaunch(gpus=tuple(gpu.index for gpu in self.gpus))

    @cached_property
    def _environment(self) -> dict[str, str]:
        return work_environment(self.launch, [gpu.uuid for gpu in self.gpus])

    @cached_property
    def stack(self) -> probe.Stack | None:
        """What the trials' process finds; None where it can't start."""
        what, patience_s = ("build", _BUILD_S) if self._build else ("stack", _START_S)
        with self._probe(what, DEVNULL, own=True) as process:
            try:
                answer, errors = process.communicate(timeout=patience_s)
            except TimeoutExpired:
                self.stack_error = f"no answer within {patience_s:g} s"
                return None
            finally:
                if process.poll() is None:
                    folder = str(extensions_folder(self._environment).resolve())
                    guard.end_session(process.pid, folder, [], _END_S)
        if process.returncode:
            self.stack_error = _last_line(errors) or f"ended with code {process.returncode}"
            return None
        return probe.Stack.model_validate_json(answer)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Keeps all GPUs busy meanwhile. Raises ProbeError if that can't be done."""
        with self._probe("load", PIPE) as process:
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

    def _probe(self, what: str, stdin: int, *, own: bool = False) -> Popen[str]:
        """`own`: in a session of its own, with the compilers."""
        command, env = run_module("carbonopt.train.probe", what), self._environment
        return Popen(command, stdin=stdin, stdout=PIPE, stderr=PIPE, env=env, text=True, start_new_session=own)


def by_hand(what: str) -> str:
    """What to type to see all that the trials' process says."""
    return shlex.join(run_module("carbonopt.train.probe", what))


def _last_line(text: str) -> str:
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), "")
