"""The table of engines by `launch.kind` of the study file.

An engine is made from a study's configuration and the number of the launch's slot that it uses.
Constructing one starts nothing.
"""

from collections.abc import Callable

from carbonopt.engines.engine import Engine
from carbonopt.engines.hostfile import HostfileEngine
from carbonopt.engines.local import LocalEngine
from carbonopt.engines.replay import ReplayEngine
from carbonopt.engines.slurm import in_a_job
from carbonopt.spec.study_config import StudyConfig

ENGINES: dict[str, Callable[[StudyConfig, int], Engine]] = {
    "local": LocalEngine,
    "slurm": in_a_job,
    "hostfile": HostfileEngine,
    "replay": ReplayEngine,
}
