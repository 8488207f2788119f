"""The error that processes died of, from what they printed."""

import re
from collections.abc import Iterator

_TRACEBACK = "Traceback (most recent call last):"

# Prefix of a line of one of several ranks: "[rank1]: " by PyTorch, "[default0]:" by torchrun.
_RANK = re.compile(r"^\s*\[(rank|default)?\d+\]:\s?")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # a terminal's colours and movements
_OF_GROUP = re.compile(r"^  [|+] ")  # prefix of the lines of an exception group
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(:|$)")

# Errors that launchers raise because a rank of theirs has failed.
_OF_LAUNCHERS = re.compile(r"^(\S*\.)?(ChildFailedError|CalledProcessError)\b")
# Errors that ranks raise because another one has failed, for which they wait.
_OF_OTHERS = re.compile(
    r"^(\S*\.)?(DistBackendError|DistNetworkError|BrokenPipeError|ConnectionResetError)\b"
    r"|Connection (closed|reset) by peer"
)
# Lines that launchers and build tools print after the error of what they have run.
_BY_LAUNCHERS = (
    r"g?make(\[\d+\])?: (\*\*\* \[.*\] Error \d+|Leaving directory)"
    r"|error: Recipe .* failed .*exit code \d+$"  # just
    r"|srun: (error: .*: Exited with exit code \d+|Terminating )"
    r"|[EWI]\d{4} \S+ \d+ torch/distributed/elastic/"
)
# Lines on how to learn more, and omegaconf's on where a key is.
_ADVICE = (
    r"Pass --helpshort or --helpfull"  # absl
    r"|Set the environment variable HYDRA_FULL_ERROR=1"
    r"|(full_key: |object_type=|reference_type=)"
    r"|note: run with `RUST_BACKTRACE="
    r"|For full helptext"  # tyro
    r"|(Try|Run) .*--help\b"  # click, typer
)
_BORDER = r"[╭╰┌└┏┗]"
_SAYS_NO_REASON = re.compile(rf"^({_BY_LAUNCHERS}|{_ADVICE}|{_BORDER})")
_IN_BOX = re.compile(r"^\s*[│┃](.*)[│┃]$")  # a line in a box, as typer and tyro print errors
_REFUSAL = re.compile(r"\berror: ", re.IGNORECASE)
_LONGEST_LINE = 500  # largest number of characters shown of a line

# Printed by carbonopt itself in a trial that other work slows; never the reason why it failed.
SLEEPS_SOONER = "Other work wants this machine's cores: threads sleep sooner while it does."


def last_error(said: str) -> str:
    """Return the line that says why processes failed, from what they printed.

    It is the line of the last exception that is not the consequence of another process's failure,
    or else the last line that may be a reason.
    """
    lines = [line for line in _plain(said) if SLEEPS_SOONER not in line]
    raised = list(_raised(lines))
    causes = [
        line for line in raised if not (_OF_LAUNCHERS.search(line) or _OF_OTHERS.search(line))
    ]
    last = (causes or _refusal_before(lines) or raised or _reasons(lines) or lines)[-1:]
    return last[0].strip()[:_LONGEST_LINE] if last else ""


def _refusal_before(lines: list[str]) -> list[str]:
    """Return the error that a process printed just before its launcher raised one, if any."""
    begin = next((at for at, line in enumerate(lines) if line.endswith(_TRACEBACK)), 0)
    return [line for line in _reasons(lines[:begin])[-1:] if _REFUSAL.search(line)]


def _reasons(lines: list[str]) -> list[str]:
    """Return the lines that may be a reason: without rules and advice, and a box as one line."""
    reasons: list[str] = []
    goes_on = False
    for line in lines:
        boxed = _IN_BOX.match(line)
        text = line.strip() if boxed is None else boxed[1].strip()
        goes_on = goes_on and boxed is not None
        if not any(map(str.isalnum, text)) or _SAYS_NO_REASON.search(text):
            continue
        if goes_on:
            reasons[-1] += f" {text}"
        else:
            reasons.append(text)
        goes_on = boxed is not None
    return reasons


def failed_because_of_others(said: str) -> bool:
    """Return whether all that processes raised is that they lost another one, which had failed."""
    own = [line for line in _raised(_plain(said)) if not _OF_LAUNCHERS.search(line)]
    return bool(own) and all(map(_OF_OTHERS.search, own))


def _plain(said: str) -> list[str]:
    """Return the lines without colours and the names of ranks."""
    return [
        _OF_GROUP.sub("", _RANK.sub("", line)).rstrip()
        for line in _COLOURS.sub("", said).splitlines()
    ]


def _raised(lines: list[str]) -> Iterator[str]:
    """Yield the line of each traceback that names the exception.

    The lines of several ranks' tracebacks may be mixed.
    """
    begun = 0
    for line in lines:
        if line.endswith(_TRACEBACK):
            begun += 1
        elif begun and _ERROR.match(line):
            begun -= 1
            yield line
