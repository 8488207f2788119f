"""Turns whatever ends a process into one message on the channel and an exit code."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from carbonopt.core.errors import BadInput
from carbonopt.core.events import BAD_INPUT_EXIT, CRASH_EXIT, FINISHED_EXIT, OUT_OF_MEMORY_EXIT, FailureKind
from carbonopt.train.client import Speaker

# How a RuntimeError of torch words that memory ran out, on the GPU or the host, whichever layer noticed; in lower case.
_OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "_status_alloc_failed",
    "memoryerror",
    "unable to allocate",  # Python's and NumPy's
)


class Diverged(Exception):
    """The loss became NaN or infinite."""


def reported(work: Callable[[], None], speaker: Speaker | None, peak_gib: Callable[[], float] | None = None) -> int:
    """The exit code. What `work` raises goes to the study and, as a traceback, to the log. `speaker` is rank 0's."""
    try:
        work()
    except ConnectionError as error:  # the study is gone: nobody is left to be told
        _log(str(error))
        return CRASH_EXIT
    except Exception as error:  # noqa: BLE001, the process ends here; the study and the log get all there is to know
        kind, exit_code, text = ending(error)
        _log(text if kind in ("bad_input", "diverged") else traceback.format_exc())
        if speaker is not None:
            speaker.failed(kind, text, peak_gib() if peak_gib is not None and kind == "out_of_memory" else None)
        return exit_code
    return FINISHED_EXIT


def ending(error: Exception) -> tuple[FailureKind, int, str]:
    """What an error is to a study, with which exit code a process ends for it, and what it says."""
    if isinstance(error, BadInput):
        return "bad_input", BAD_INPUT_EXIT, str(error)
    if isinstance(error, Diverged):
        return "diverged", FINISHED_EXIT, str(error)
    worded_so = isinstance(error, RuntimeError) and ran_out_of_memory(str(error))
    if worded_so or isinstance(error, MemoryError):
        return "out_of_memory", OUT_OF_MEMORY_EXIT, one_line(error) or type(error).__name__
    return "crash", CRASH_EXIT, f"{type(error).__name__}: {one_line(error)}"


def ran_out_of_memory(text: str) -> bool:
    """Whether an error's text, or a log's last lines, says so."""
    return any(words in text.lower() for words in _OUT_OF_MEMORY_WORDS)


def _log(text: str) -> None:
    with suppress(OSError):  # a full disk shall not keep the study from being told
        print(text, file=sys.stderr, flush=True)


@contextmanager
def as_bad_input(part: str) -> Iterator[None]:
    """What a library raises while it reads what the user gave is about that: one sentence, traceback in the log."""
    try:
        yield
    except (BadInput, OSError, MemoryError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise BadInput(f"workload.{part} can't be used: {type(error).__name__}: {reason(error)}.") from error


@contextmanager
def refused(sentence: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises BadInput in place of these errors: the sentence, with what the error says where it has {}."""
    try:
        yield
    except errors as error:
        raise BadInput(sentence.replace("{}", reason(error))) from error


def reason(error: BaseException) -> str:
    """What an error says, as a part of a sentence: without the full stop at its end; with its type where the text says
    nothing by itself."""
    text = one_line(error)
    text = text if text.endswith("...") else text.removesuffix(".")
    if text and not isinstance(error, KeyError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """Its text, cut after 500 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else text[:497] + "..."
