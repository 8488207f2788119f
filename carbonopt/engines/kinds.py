"""Which engine a study has: by `launch.kind` of its study file, in one table. To make one starts nothing."""

from collections.abc import Callable

from carbonopt.core.config import StudyConfig
from carbonopt.engines.base import Engine
from carbonopt.engines.local import LocalEngine
from carbonopt.engines.replay import ReplayEngine

ENGINES: dict[str, Callable[[StudyConfig], Engine]] = {"local": LocalEngine, "replay": ReplayEngine}
