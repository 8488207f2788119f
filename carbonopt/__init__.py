"""carbonopt finds the training configuration with the lowest emissions.

The configuration still reaches a target quality. `run` runs a study, and `load` reads one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from carbonopt.core.errors import BadInput, CarbonoptError, StudyInterrupted

if TYPE_CHECKING:
    from carbonopt.api.functions import load, run
    from carbonopt.api.opened_study import Study
    from carbonopt.api.recommended import Recommended, TargetNotMet

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "CarbonoptError",
    "Recommended",
    "Study",
    "StudyInterrupted",
    "TargetNotMet",
    "load",
    "run",
]
# Names that are imported when they are first used, so that `import carbonopt` takes no time.
_LATER = {
    "load": "functions",
    "run": "functions",
    "Study": "opened_study",
    "Recommended": "recommended",
    "TargetNotMet": "recommended",
}

if not TYPE_CHECKING:  # else a type checker would take any name for one of carbonopt's

    def __getattr__(name: str) -> Any:
        """Import a name of `_LATER`."""
        if name not in _LATER:
            raise AttributeError(f"module 'carbonopt' has no attribute {name!r}")
        value = getattr(import_module(f"carbonopt.api.{_LATER[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List the public names, also those that have not been imported yet."""
        return sorted({*globals(), *__all__})
