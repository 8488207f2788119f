"""Ctrl-C when a command is all but over: a line or nothing, never a traceback."""

import subprocess
import sys

ENDING = """
import atexit, os, signal, sys
from carbonopt.cli import app as cli
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print("not reached", file=sys.stderr)))
cli.main()
"""


def test_ctrl_c_while_python_tidies_up_is_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "carbonopt: interrupted.\n")


IN_A_FINALIZER = """
import signal, weakref
from carbonopt.cli import app as cli
class Thing: pass
def finalize(_): signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
thing = Thing()
reference = weakref.ref(thing, finalize)
def version():
    global thing
    del thing
    print("went on")
cli.app = lambda *_, **__: version()
cli.main()
"""


def test_ctrl_c_in_a_finalizer_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_FINALIZER], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


IN_THE_TEARDOWN = """
import os, signal
from carbonopt.cli import app as cli
class Thing:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)
thing = Thing()
cli.main()
"""


def test_ctrl_c_while_modules_are_torn_down_leaves_the_exit_code() -> None:
    for argument, code in (("--version", 0), ("--no-such-option", 2)):
        done = subprocess.run(
            [sys.executable, "-c", IN_THE_TEARDOWN, argument], capture_output=True, text=True
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr
