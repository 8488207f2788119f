"""Turns whatever ends a process into one message on the channel and an exit code."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from carbonopt.core.errors import BadInput
from carbonopt.core.events import BAD_INPUT_EXIT, CRASH_EXIT, FINISHED_EXIT, OUT_OF_MEMORY_EXIT, FailureKind
from carbonopt.train.client import Speaker

# How an allocation that fails outside torch's own allocator is worded; torch raises it as a plain RuntimeError.
_OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class Diverged(Exception):
    """The loss became NaN or infinite."""


@dataclass
class Outcome:
    exit_code: int = FINISHED_EXIT


@contextmanager
def reported(speaker: Speaker | None, peak_memory_gib: Callable[[], float] | None = None) -> Iterator[Outcome]:
    """Runs the body; what it raises goes to the study and, as a traceback, to the log. `speaker` is rank 0's."""
    outcome = Outcome()

    def fail(kind: FailureKind, text: str, exit_code: int, memory_gib: float | None = None) -> None:
        outcome.exit_code = exit_code
        if speaker is not None:
            speaker.failed(kind, text, memory_gib)

    try:
        yield outcome
    except BadInput as error:
        _log(str(error))
        fail("bad_input", str(error), BAD_INPUT_EXIT)
    except Diverged as error:
        _log(str(error))
        fail("diverged", str(error), FINISHED_EXIT)
    except ConnectionError as error:  # the study is gone: nobody is left to be told
        _log(str(error))
        outcome.exit_code = CRASH_EXIT
    except Exception as error:  # noqa: BLE001, the process ends here; the study and the log get all there is to know
        _log(traceback.format_exc())
        if is_out_of_memory(error):
            used = peak_memory_gib() if peak_memory_gib is not None else None
            fail("out_of_memory", _first_sentence(error), OUT_OF_MEMORY_EXIT, used)
        else:
            fail("crash", f"{type(error).__name__}: {_first_sentence(error)}", CRASH_EXIT)


@contextmanager
def as_bad_input(part: str) -> Iterator[None]:
    """What a library raises while it reads what the user gave is about that: one sentence, traceback in the log."""
    try:
        yield
    except (BadInput, OSError, MemoryError):
        raise
    except Exception as error:
        traceback.print_exc()
        what = " ".join(str(error).split())[:300]
        raise BadInput(f"workload.{part} can't be used: {type(error).__name__}: {what}") from error


def _log(text: str) -> None:
    with suppress(OSError):  # a full disk shall not keep the study from being told
        print(text, file=sys.stderr, flush=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the GPU or the host, however the layer below worded it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words.lower() in text for words in _OUT_OF_MEMORY_WORDS)


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else text[:497] + "..."
