"""Every error carbonopt raises on purpose. The command line turns each into one sentence and its exit code."""

import difflib
from collections.abc import Sequence

# Keys of study files and records that were called otherwise before 0.1.0.
RENAMED_KEYS = {"rivals": "runners_up", "core_wait": "cpu_wait_fraction", "known": "energy_source"}


def hint(unknown: str, known: Sequence[str]) -> str:
    """For a misspelt name: 'did you mean X?', or all the known names where none is near."""
    if RENAMED_KEYS.get(unknown) in known:
        return f"it is called {RENAMED_KEYS[unknown]} now."
    near = difflib.get_close_matches(unknown, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}."


class CarbonoptError(Exception):
    """Base class. `exit_code` is what the command line ends with."""

    exit_code = 1


class BadInput(CarbonoptError):
    """What the user gave can't be used. The text names the rule, the value found and what to do."""

    exit_code = 2


class MeasurementError(CarbonoptError):
    """Energy could not be measured. Never replaced by a zero or a guess."""


class StudyInterrupted(CarbonoptError):
    """The study was asked to end (Ctrl-C, SIGTERM); the same command goes on with it."""

    exit_code = 130


BEFORE_FIRST_TRIAL = "interrupted before the first trial; the same command begins again."
