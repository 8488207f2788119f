"""Every error carbonopt raises on purpose. The command line turns each into one sentence and its exit code."""


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
