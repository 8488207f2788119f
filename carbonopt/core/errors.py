"""The errors that many rooms raise on purpose, the base of all others, and text for them.

The command line turns each into one sentence and its exit code.
"""

from __future__ import annotations

import errno
import os
import re
import unicodedata
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

# The exit codes of the command line. Commands that answer end with 0 if a configuration is
# recommended for the target, and with 3 if none is; others end with 0 if they did what was asked. 1
# is for everything that the others don't name.
EXIT_MET, EXIT_OTHER, EXIT_BAD_INPUT, EXIT_NOT_MET, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

# System errors when a disk is full, or the machine fails.
FULL = (errno.ENOSPC, errno.EDQUOT)
FAILING = (
    errno.EAGAIN,
    errno.EFBIG,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)


def system_reason(error: OSError) -> str:
    """Return why the system refused something, with the file that it refused."""
    named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{named}{error.strerror or error}"


def shortened(value: Any) -> str:
    """Return a value's repr, shortened to be shown in a sentence."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    text = _repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _repr(value: Any) -> str:
    """Return a value's repr; Python refuses that of a whole number of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return f"{type(value).__name__} with a number of too many digits"


def as_servers_read(text: str) -> str:
    """Return an address with %40, and the wide forms of @ that Unicode has, as @."""
    return unicodedata.normalize("NFKC", unquote(text))


def may_hold_password(text: str) -> bool:
    """Return whether a text may have an address in it, and a password in the address."""
    read = as_servers_read(text)
    return "@" in read or "://" in read


def is_address(text: str) -> bool:
    """Return whether a text is an address such as https://host or mailto:user@host, and no path."""
    read = as_servers_read(text)
    return "://" in read or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:.*@", read.strip()) is not None


def shown(value: Any) -> str:
    """Return a value as `shortened` does, unless it may hold a password."""
    return "text that may hold a password" if may_hold_password(_repr(value)) else shortened(value)


def printable(text: str) -> str:
    """Escape what a terminal would obey instead of showing it.

    Users can name anything, and programs print anything.
    """
    return "".join(
        sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text
    )


class CarbonoptError(Exception):
    """The base class; `exit_code` is the exit code of the command line."""

    exit_code = EXIT_OTHER


class BadInput(CarbonoptError):
    """An input of the user that can't be used.

    The text names the rule, the value found and what to do.

    Args:
        keys: the keys of the study file, from the top down, that lead to the value; empty: it is of
            no single key.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, text: str, keys: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.keys = tuple(keys)


class MeasurementError(CarbonoptError):
    """A failure to measure energy.

    Energy that was not measured is never replaced by a zero or a guess.
    """


class MachineLost(CarbonoptError):
    """The connection to one of a launch's machines was lost, or its agent doesn't answer."""


class StudyInterrupted(CarbonoptError):
    """The request to end the study (Ctrl-C, SIGTERM, SIGHUP); the same command goes on.

    Attributes:
        is_stored: Whether the study has begun, so that its folder can be read. False: it may have
            begun in an earlier call.
    """

    exit_code = EXIT_INTERRUPTED

    def __init__(self, text: str, *, is_stored: bool = False) -> None:
        super().__init__(text)
        self.is_stored = is_stored


INTERRUPTED = "interrupted; run the same command again to resume."
BEFORE_A_TRIAL = (
    "interrupted before this command started a trial; run the same command again to resume."
)
