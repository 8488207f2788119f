"""What a study uses of one node: its GPUs, the ranks on them, and the meter of what they take."""

import socket
from collections.abc import Callable
from contextlib import ExitStack, closing

from carbonopt.core.config import LocalLaunch
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, StudyInterrupted
from carbonopt.core.trial import Node
from carbonopt.energy.hardware import describe_hardware, gpu_uuids
from carbonopt.energy.machine import MachineMeter
from carbonopt.energy.meter import Meter, Objective
from carbonopt.energy.occupancy import GpuMemory
from carbonopt.engines.process.launcher import ProcessLauncher


class Agent:
    """Owns this node's part of a study. Nobody else meters the node or starts ranks on it, so that nothing is counted
    twice, however many ranks run.

    Args:
        note: is told, once, that trials can't be forked here.

    Raises:
        BadInput: as `check_gpus`, and for what in the user's environment every trial would die of.
    """

    def __init__(self, launch: LocalLaunch, note: Callable[[str], None]) -> None:
        self._gpus = launch.gpus
        self.hardware = describe_hardware(launch.gpus)
        uuids = gpu_uuids(launch.gpus)
        self.node = Node(name=socket.gethostname(), devices=uuids or ("cpu",))
        with ExitStack() as begun:
            self.memory = begun.enter_context(closing(GpuMemory(launch.gpus)))
            self.launcher = begun.enter_context(closing(ProcessLauncher(launch, uuids, note)))
            self._begun = begun.pop_all()

    def open_meter(self, objective: Objective, interrupted: Callable[[], bool]) -> Meter:
        """From here on the node is metered. Its GPUs must be idle: their idle power is measured first.

        Raises:
            MeasurementError: if no energy can be measured.
            StudyInterrupted: if `interrupted` says so meanwhile.
        """
        try:
            return self._begun.enter_context(closing(MachineMeter(self._gpus, objective, interrupted)))
        except Exception as error:
            if interrupted():  # a Ctrl-C also ends the programs that CodeCarbon asks for the CPU, and it fails somehow
                raise StudyInterrupted(BEFORE_FIRST_TRIAL) from error
            raise

    def close(self) -> None:
        self._begun.close()
