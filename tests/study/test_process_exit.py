"""Why a trial's processes ended: the error that they died of, whoever wrapped it."""

import subprocess
import sys

import pytest

from carbonopt.core.last_error import SLEEPS_SOONER, failed_because_of_others, last_error
from carbonopt.study.process_exit import how_they_ended, killed_by_signal

RANKS = """\
[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]: ValueError: a batch of 3
[rank1]:   File "train.py", line 9, in <module>
[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5127
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====
train.py FAILED
"""
ACCELERATE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
KeyError: 'labels'
Traceback (most recent call last):
  File "/usr/bin/accelerate", line 8, in <module>
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
my.package.OwnError: first line
second line
"""


TYPER = """Usage: train.py [OPTIONS]
Try 'train.py --help' for help.
╭─ Error ──────────────────────────────╮
│ Invalid value for '--schedule':      │
│ 'none' is not one of 'cosine'.       │
╰──────────────────────────────────────╯
"""

TYRO = """╭─ Unrecognized options ─────────────────╮
│ Unrecognized options: --foo            │
│ ────────────────────────────────────── │
│ For full helptext, run train.py --help │
╰────────────────────────────────────────╯
"""

ABSL = """FATAL Flags parsing error: Unknown command line flag 'foo'
Pass --helpshort or --helpfull to see help on flags.
"""

HYDRA = """Could not override 'foo'.
To append to your config use +foo=1
Key 'foo' is not in struct
    full_key: foo
    object_type=dict

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""

MAKE = """train.py: error: unrecognized arguments: --foo
make[1]: *** [Makefile:6: train] Error 2
make[1]: Leaving directory '/tmp'
make: *** [Makefile:2: all] Error 2
"""

TORCHRUN = """usage: train.py [-h] [--lr LR]
train.py: error: unrecognized arguments: --foo
E1201 04:00:00.000000 12 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 2)
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
"""

KILLED = """step 20 loss 3.2
Traceback (most recent call last):
  File "/usr/bin/accelerate", line 8, in <module>
subprocess.CalledProcessError: Command died with <Signals.SIGKILL: 9>.
"""

RUST = """thread 'main' panicked at src/main.rs:3:5:
no data
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
"""


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (TYPER, "Invalid value for '--schedule': 'none' is not one of 'cosine'."),
        (TYRO, "Unrecognized options: --foo"),
        (ABSL, "FATAL Flags parsing error: Unknown command line flag 'foo'"),
        (HYDRA, "Key 'foo' is not in struct"),
        (MAKE, "train.py: error: unrecognized arguments: --foo"),
        ("make: *** [Makefile:6: train] Error 2\n", "make: *** [Makefile:6: train] Error 2"),
        (
            "make: *** No rule to make target 'x'. Stop.",
            "make: *** No rule to make target 'x'. Stop.",
        ),
        (TORCHRUN, "train.py: error: unrecognized arguments: --foo"),
        (KILLED, "subprocess.CalledProcessError: Command died with <Signals.SIGKILL: 9>."),
        (RUST, "no data"),
        (RANKS, "ValueError: a batch of 3"),
        (ACCELERATE, "KeyError: 'labels'"),
        (CHAINED, "my.package.OwnError: first line"),
        (
            "run.sh: line 3: frobnicate: command not found\n\n",
            "run.sh: line 3: frobnicate: command not found",
        ),
        ("\x1b[31mRuntimeError\x1b[0m: \x1b[1mno data\x1b[0m", "RuntimeError: no data"),
        ("", ""),
    ],
)
def test_the_error_is_found_beneath_what_it_caused(said: str, error: str) -> None:
    assert last_error(said) == error


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (
            "raise ExceptionGroup('several', [ValueError('a'), TypeError('b')])",
            "ExceptionGroup: several (2 sub-exceptions)",
        ),
        ("x = = 3", "SyntaxError: invalid syntax"),
        ("import nosuch", "ModuleNotFoundError: No module named 'nosuch'"),
        ("print('epoch 1'); import sys; sys.exit('no data')", "no data"),
    ],
)
def test_the_error_of_a_real_program_is_found(program: str, error: str) -> None:
    for command in (
        [sys.executable, "-c", program],
        ["bash", "-ec", '"$0" -c "$1"; echo done', sys.executable, program],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert (
            how_they_ended(done.returncode, done.stderr)
            == f"its processes ended with code 1: {error}"
        )


def test_who_failed_because_of_others_is_known() -> None:
    lost = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [::1]\n"
    launcher = "Traceback (most recent call last):\nx.ChildFailedError:\n"
    assert failed_because_of_others(lost) and failed_because_of_others(lost + launcher)
    for own in ("no such rate\n" + launcher, RANKS, ACCELERATE, CHAINED, ""):
        assert not failed_because_of_others(own), own


def test_what_carbonopt_itself_printed_is_no_reason() -> None:
    said = f"epoch 1\n{SLEEPS_SOONER}\n"
    assert how_they_ended(1, said) == "its processes ended with code 1: epoch 1"
    assert how_they_ended(128 + 9, SLEEPS_SOONER) == "its processes were ended by signal 9"


def test_ranks_that_were_still_connected_are_told_what_to_call() -> None:
    said = "done\nterminate called without an active exception\n"
    for code in (128 + 6, 1):
        assert "destroy_process_group" in how_they_ended(code, said)
        assert "DDP model" in how_they_ended(code, said)
    assert "destroy_process_group" not in how_they_ended(128 + 6, "done\n")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("x\nbash: line 1:  4242 Killed   python train.py\ndone\n", "bash: line 1:  4242 Killed   python train.py"),
        ("run.sh: line 7: 42 Segmentation fault (core dumped) python t.py", None),
        ("Aborted (core dumped)\ndone", "Aborted (core dumped)"),
        ("Aborted after 3 bad epochs\nKilled by user request: no", ""),
        ("epoch 1: Terminated early", ""),
    ],
)  # fmt: skip
def test_a_shell_s_line_says_that_a_signal_ended_a_program(said: str, line: str | None) -> None:
    assert killed_by_signal(said) == (said if line is None else line or None)
