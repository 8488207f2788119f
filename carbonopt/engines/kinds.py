"""Which engine a study has: by `launch.kind` of its study file, in one table. To make one starts nothing; it is of one
of the launch's slots, where that has several."""

from collections.abc import Callable

from carbonopt.core.config import StudyConfig
from carbonopt.engines.base import Engine
from carbonopt.engines.hostfile import HostfileEngine
from carbonopt.engines.local import LocalEngine
from carbonopt.engines.replay import ReplayEngine
from carbonopt.engines.slurm import in_a_job

ENGINES: dict[str, Callable[[StudyConfig, int], Engine]] = {
    "local": LocalEngine,
    "slurm": in_a_job,
    "hostfile": HostfileEngine,
    "replay": ReplayEngine,
}
