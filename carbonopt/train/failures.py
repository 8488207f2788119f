"""Turn whatever ends a process into one message on the channel and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from carbonopt.core.channel import (
    BAD_INPUT_EXIT,
    CRASH_EXIT,
    FINISHED_EXIT,
    OUT_OF_MEMORY_EXIT,
    FailureKind,
)
from carbonopt.core.errors import BadInput

if TYPE_CHECKING:
    from carbonopt.train.client import Speaker

# Phrases, in lower case, by which a RuntimeError of torch says that memory ran out, on the GPU or
# the host, whichever layer noticed.
_OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "_status_alloc_failed",
    "memoryerror",
    "unable to allocate",  # the words of Python and NumPy
)


# Errors of libraries that only name another one: that of the datasets library for any file that it
# can't read, and those of transformers' configurations for any value that they refuse.
_WRAPPERS = (
    "DatasetGenerationError",
    "StrictDataclassClassValidationError",
    "StrictDataclassFieldValidationError",
)
_PICKLES = "weights_only"  # part of torch's message about objects that it refuses to read


class Diverged(Exception):
    """The loss became NaN or infinite."""


def reported(
    work: Callable[[], None], speaker: Speaker | None, peak_gib: Callable[[], float] | None = None
) -> int:
    """Run `work`, report any failure of it, and return the exit code.

    An error goes to the study and, with its traceback, to the log. Errors of input and diverged
    training are logged without a traceback.

    Args:
        work: The work to run.
        speaker: Rank 0's end of the channel; None on other ranks.
        peak_gib: Returns the peak memory, which is reported if memory ran out.
    """
    try:
        work()
    except ConnectionError as error:  # the study is gone, so there is nobody to report to
        _log(str(error))
        return CRASH_EXIT
    # the process ends here; the study and the log get all there is to know
    except Exception as error:  # noqa: BLE001
        kind, exit_code, text = ending(error)
        _log(text if kind in ("bad_input", "diverged") else traceback.format_exc())
        if speaker is not None:
            speaker.failed(
                kind, text, peak_gib() if peak_gib is not None and kind == "out_of_memory" else None
            )
        return exit_code
    return FINISHED_EXIT


def ending(error: BaseException) -> tuple[FailureKind, int, str]:
    """Return an error's kind, the exit code of a process that it ends, and its message."""
    if isinstance(error, BadInput):
        return "bad_input", BAD_INPUT_EXIT, str(error)
    if isinstance(error, Diverged):
        return "diverged", FINISHED_EXIT, str(error)
    worded_so = isinstance(error, RuntimeError) and ran_out_of_memory(str(error))
    if worded_so or isinstance(error, MemoryError):
        return "out_of_memory", OUT_OF_MEMORY_EXIT, one_line(error) or type(error).__name__
    return "crash", CRASH_EXIT, f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")


def ran_out_of_memory(text: str) -> bool:
    """Return whether an error's text or a log's last lines say that memory ran out."""
    return any(words in text.lower() for words in _OUT_OF_MEMORY_WORDS)


def _log(text: str) -> None:
    with suppress(OSError):  # a full disk must not keep the study from being told
        print(text, file=sys.stderr, flush=True)


@contextmanager
def as_bad_input(part: str) -> Iterator[None]:
    """Raise BadInput in place of what a library raises while it reads the user's input.

    The message is one sentence; the traceback goes to the log.
    """
    try:
        yield
    except (BadInput, OSError, MemoryError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise BadInput(f"workload.{part} can't be used: {reason(error)}.") from error


@contextmanager
def refused(sentence: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise BadInput in place of these errors.

    Its message is the sentence, in which the error's reason replaces {}.
    """
    try:
        yield
    except errors as error:
        raise BadInput(sentence.replace("{}", reason(error))) from error


def reason(error: BaseException) -> str:
    """Return what an error says, as a part of a sentence.

    It has no full stop at its end, and the error's type where the text says nothing by itself.
    """
    if type(error).__name__ in _WRAPPERS and error.__cause__ is not None:
        return reason(error.__cause__)
    text = one_line(error)
    if _PICKLES in text:  # torch's message suggests to read them all the same
        return (
            "it is damaged, or holds other objects than weights, which could run a program while"
            " they are read"
        )
    text = text if text.endswith("...") else text.removesuffix(".")
    if text and not isinstance(error, KeyError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """Return the error's text on one line, cut after 500 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else text[:497] + "..."
