"""The reason why a trial's processes have ended, by their exit code and what they printed."""

import re
from pathlib import Path

from carbonopt.core.last_error import last_error

SIGNALLED = 128
_SIGBUS = SIGNALLED + 7

# Printed where PyTorch's threads are still at work when Python ends (pytorch issue 190489).
STILL_CONNECTED = "terminate called without an active exception"
# Printed by a shell for a program that a signal has ended; bash writes its own name before it.
_SIGNALS = "Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Terminated"
_KILLED = re.compile(
    rf"^(?:\S+: (?:line )?\d+: +(?:\d+ +)?(?:{_SIGNALS})\b.*|(?:{_SIGNALS})(?: \(core dumped\))?)$",
    re.MULTILINE,
)


def killed_by_signal(said: str) -> str | None:
    """Return the line in which a shell says that a signal has ended a program; None: none does."""
    lines = [found[0].strip() for found in _KILLED.finditer(said)]
    return lines[-1] if lines else None


def how_they_ended(code: int, said: str) -> str:
    """Describe how processes ended, by their exit code and the error that they printed.

    Args:
        code: Exit code as a shell reports it: 128 plus the number of a signal that ended them.
        said: What the processes printed.
    """
    ended = (
        f"were ended by signal {code - SIGNALLED}"
        if code > SIGNALLED
        else f"ended with code {code}"
    )
    if code == _SIGBUS:
        ended += (
            " (SIGBUS: /dev/shm is too small; give the container a larger one, such as"
            " --shm-size=8g)"
        )
    if STILL_CONNECTED in said:
        ended += (
            " (PyTorch's ranks were still connected when Python ended; call"
            " torch.distributed.destroy_process_group() at the script's end, and delete the DDP"
            " model and its optimizer before it)"
        )
    if not (last := last_error(said)):
        return f"its processes {ended}"
    # What was printed before a signal is seldom the reason for it.
    before = "; the last line of their output: " if code > SIGNALLED else ": "
    return f"its processes {ended}{before}{last}"


def host_oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed since boot; 0 if not known."""
    vmstat = Path("/proc/vmstat")
    lines = vmstat.read_text().splitlines() if vmstat.exists() else []  # not Linux
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
