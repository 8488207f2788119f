"""The messages about a study that its user is sent."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from carbonopt.core.errors import is_address
from carbonopt.spec.base_settings import Name, Settings

NotifyEvent = Literal["finished", "failed", "target_met", "stalled", "budget", "waiting"]


def _no_address(path: object) -> object:
    """Return the path of a file as it is; refuse an address, which may hold a password."""
    if isinstance(path, str) and is_address(path):
        raise ValueError(
            "must be the path of a file, because reports print the study file; put the address into"
            " the file, or into the variable CARBONOPT_NOTIFY"
        )
    return path


class Notify(Settings):
    """Messages by Apprise; needs `pip install 'carbonopt[notify]'`."""

    on: tuple[NotifyEvent, ...] = ("finished", "failed")
    """Events, of which no message is sent twice: `finished` (with the answer), `failed` (the
    command ended with an error), `target_met` (by the first complete trial), `stalled` (a trial
    made no progress for `launch.timeout_s`, or the storage could not be reached for a minute),
    `budget` (it ended the study; one message with `finished`), `waiting` (for the hours of
    `schedule`)."""

    attach: bool = True
    """Attaches the picture of the Pareto front to `finished`."""

    config: Annotated[Name | None, BeforeValidator(_no_address)] = None
    """A file of addresses, one a line, that nobody but its owner may read (mode 600). Without it
    they are in the variable `CARBONOPT_NOTIFY`, separated by spaces."""

    def violations(self) -> dict[str, bool]:
        return {
            "on must name at least one event, each once": (
                not self.on or len(set(self.on)) < len(self.on)
            )
        }
