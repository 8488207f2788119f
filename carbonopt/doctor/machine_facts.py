"""Facts about the machine that several checks use: its GPUs, torch and DeepSpeed.

Each is found out once; torch and DeepSpeed are looked at in a process of their own.
"""

import os
import select
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

from carbonopt.core.errors import BadInput, CarbonoptError, MeasurementError
from carbonopt.energy.occupancy import GpuNow, gpus_now
from carbonopt.engines.process import guard
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.extensions import CPU_ADAM, SHM_COMM, extensions_folder, mend
from carbonopt.engines.process.processes import run_module
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.train import probe

_START_S = 180.0  # enough to import torch and DeepSpeed from a cold network disk
_BUILD_S = 900.0
_END_S = 20.0
SMI_S = 5.0
_NOT_FOUND = 127  # exit code of shells for a command that doesn't exist


class ProbeError(CarbonoptError):
    """An error that is raised if the trials' process can't put the GPUs under load."""


class Machine:
    # The driver's error on a machine with NVIDIA GPUs; known once `gpus` was read.
    driver_error: CarbonoptError | None = None
    # Why the trials' process can't start; known once `stack` was read.
    stack_error: str | None = None

    def __init__(self, build: bool = False) -> None:
        self._build = build

    @cached_property
    def gpus(self) -> tuple[GpuNow, ...]:
        """All GPUs; none if there is no driver, or it doesn't answer.

        `driver_error` is then set if the machine has NVIDIA GPUs; its cause says what is wrong.
        """
        try:
            return gpus_now()
        except MeasurementError as error:
            self.driver_error = error
        except BadInput as error:
            # Device files without a driver that answers; a machine without GPUs has no such files.
            if (
                any(Path("/dev").glob("nvidia[0-9]*"))
                or Path("/proc/driver/nvidia/version").exists()
            ):
                self.driver_error = error
        return ()

    @cached_property
    def smi_code(self) -> int | None:
        """The exit code of `nvidia-smi --help`, which CodeCarbon runs when it is imported.

        None if it doesn't answer.
        """
        command = ["nvidia-smi", "--help"]  # from PATH, as CodeCarbon would find it
        try:
            process = Popen(
                command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
        except OSError:
            return _NOT_FOUND
        try:
            return process.wait(SMI_S)
        except TimeoutExpired:
            # Its end is not waited for: a process that hangs in the driver doesn't end.
            os.killpg(process.pid, signal.SIGKILL)
            return None

    @cached_property
    def launch(self) -> LocalLaunch:
        """The launch of a study whose trials run on all GPUs."""
        return LocalLaunch(gpus=tuple(gpu.index for gpu in self.gpus))

    @cached_property
    def _environment(self) -> dict[str, str]:
        return work_environment(self.launch, [gpu.uuid for gpu in self.gpus])

    @cached_property
    def stack(self) -> probe.Stack | None:
        """The software that the trials' process finds; None if it can't start."""
        what, patience_s = ("build", _BUILD_S) if self._build else ("stack", _START_S)
        if self._build:
            mend((SHM_COMM, CPU_ADAM))
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
        """Keep all GPUs busy while the body runs.

        Raises:
            ProbeError: If that can't be done.
        """
        with self._probe("load", PIPE) as process:
            assert (
                process.stdin is not None
                and process.stdout is not None
                and process.stderr is not None
            )
            try:
                begun = (
                    select.select([process.stdout], [], [], _START_S)[0]
                    and process.stdout.readline()
                )
                if not begun:
                    process.kill()
                    raise ProbeError(
                        _last_line(process.stderr.read()) or f"no load within {_START_S:g} s"
                    )
                yield
                process.stdin.close()
                process.wait(_END_S)
            finally:
                process.kill()

    def _probe(self, what: str, stdin: int, *, own: bool = False) -> Popen[str]:
        """Start the trials' process for a question.

        Args:
            own: Whether it gets a session of its own, so that compilers that it starts can be ended
                with it.
        """
        command, env = run_module("carbonopt.train.probe", what), self._environment
        return Popen(
            command,
            stdin=stdin,
            stdout=PIPE,
            stderr=PIPE,
            env=env,
            text=True,
            start_new_session=own,
        )


def by_hand(what: str) -> str:
    """Return the command to type to see all output of the trials' process."""
    return shlex.join(run_module("carbonopt.train.probe", what))


def _last_line(text: str) -> str:
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), "")
