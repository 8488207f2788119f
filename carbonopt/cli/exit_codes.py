"""The end of a command: which exit code it has, and the sentence that is printed for an error."""

import atexit
import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from carbonopt.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_MET,
    EXIT_NOT_MET,
    EXIT_OTHER,
    FAILING,
    FULL,
    CarbonoptError,
    printable,
    shortened,
    system_reason,
)

# System errors when a folder has been changed meanwhile.
_CHANGED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_LONGEST_SENTENCE = 2000  # largest number of characters of an error, which may quote a user
# The base class of typer's errors for wrong arguments; typer bundles a copy of click and doesn't
# export this class.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def as_command(run: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit code; print an error and use its code."""
    try:
        code = run()
        sys.stdout.flush()
    except KeyboardInterrupt:  # typer turns others into EXIT_INTERRUPTED
        _fail("interrupted.", EXIT_INTERRUPTED)
    except _UsageError as error:
        _fail(_usage_text(error), EXIT_BAD_INPUT)
    except CarbonoptError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # `carbonopt export … | head`
        sys.stderr.close()
        sys.exit(EXIT_OTHER)
    except OSError as error:
        _fail_by_system(error)
    finally:
        # While Python shuts down, a KeyboardInterrupt would print a traceback.
        signal.signal(signal.SIGINT, _end_at_once)
    if code == EXIT_INTERRUPTED:  # typer returns it after Ctrl-C
        _fail("interrupted.", code)
    sys.exit(code)


def exit_by(met: bool) -> NoReturn:
    raise typer.Exit(EXIT_MET if met else EXIT_NOT_MET)


def check_output() -> None:
    """Raise CarbonoptError if standard output is closed, so that the answer would be lost."""
    if getattr(sys.stdout, "name", None) == os.devnull:  # `main` opened it
        raise CarbonoptError(
            "standard output must be open for the answer, but it was closed (>&-); leave it open."
        )


def _usage_text(error: Exception) -> str:
    """Return typer's message about wrong arguments, with the value that the option was given."""
    text: str = error.format_message()  # type: ignore[attr-defined]
    options = [
        name for name in getattr(getattr(error, "param", None), "opts", ()) if name.startswith("-")
    ]
    for name in options:
        given = [word.removeprefix(f"{name}=") for word in sys.argv if word.startswith(f"{name}=")]
        given += [value for word, value in itertools.pairwise(sys.argv) if word == name]
        if given and repr(given[-1]) not in text:
            return f"{text.removesuffix('.')}, but got {shortened(given[-1])}."
    return text


def _fail_by_system(error: OSError) -> NoReturn:
    """End with EXIT_OTHER and one sentence if the machine failed; otherwise raise the error."""
    again = "type the same command again"
    if error.errno == errno.EAGAIN:
        _fail(
            f"no further process can be started; raise the limit (ulimit -u) and {again}.",
            EXIT_OTHER,
        )
    if error.errno not in (*FULL, *FAILING, *_CHANGED):
        raise error
    # Output that could not be written is not tried again when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno in FULL:
        named = "the output" if error.filename is None else os.fsdecode(error.filename)
        quota = ": the quota is used up" if error.errno == errno.EDQUOT else ""
        _fail(f"no space left for {named}{quota}; make room and {again}.", EXIT_OTHER)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        _fail(f"too many files are open; raise the limit (ulimit -n) and {again}.", EXIT_OTHER)
    _fail(f"{system_reason(error)}; fix that and {again}; nothing stored is lost.", EXIT_OTHER)


def _fail(text: str, code: int) -> NoReturn:
    if code == EXIT_BAD_INPUT:  # it stays one sentence, whatever a user's names contain
        text = " ".join(text.split())
        if len(text) > _LONGEST_SENTENCE:
            text = f"{text[: _LONGEST_SENTENCE // 2]} … {text[-_LONGEST_SENTENCE // 2 :]}"
    print(f"carbonopt: {printable(text)}", file=sys.stderr)
    sys.exit(code)


def _end_at_once(signum: int, frame: Any) -> None:
    os.write(2, b"carbonopt: interrupted.\n")
    os._exit(EXIT_INTERRUPTED)


# Registered before most libraries register theirs, so it is called after them.
@atexit.register
def _keep_exit_code() -> None:
    """Ignore Ctrl-C while Python tears down its modules, which takes a second or two after a study.

    Python has reset its handlers by then, and a Ctrl-C would kill it without its exit code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def unraisable(error: "sys.UnraisableHookArgs") -> None:
    """Report an error in a finalizer, but not a Ctrl-C.

    A Ctrl-C there is lost in any case, and should not be shown as an error.
    """
    if error.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(error)
