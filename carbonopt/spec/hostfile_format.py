"""Hostfiles in the format of DeepSpeed and MPI's operators for Kubernetes.

Such a file has a line `HOST slots=N` for each machine.
"""

import re

from pydantic import Field

from carbonopt.core.errors import BadInput
from carbonopt.core.values import Frozen

MOST_HOSTS = 1000
# must be no option of ssh, and nothing that a shell would interpret
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@:-]{0,199}"
_LINE = re.compile(rf"(?P<name>{_NAME})\s+slots=(?P<slots>[0-9]{{1,4}})")


class Host(Frozen):
    """A machine of a hostfile."""

    name: str = Field(pattern=rf"^{_NAME}$")  # the name by which ssh reaches it
    # its number of ranks: one on each of its first GPUs, or all on its CPU
    slots: int = Field(ge=1, le=1024)


def parse_hostfile(text: str, origin: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile, in their order.

    Empty lines, and text after a `#`, are ignored.

    Args:
        text: the text of the file.
        origin: the file's name for messages.

    Raises:
        BadInput: for anything else than hosts.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (said := line.partition("#")[0].strip()):
            continue
        match = _LINE.fullmatch(said)
        if match is None or not 1 <= int(match["slots"]) <= 1024:
            raise BadInput(
                f"{origin}, line {number}: must be `HOST slots=N`, with N from 1 to 1024, but is"
                f" {said!r}."
            )
        if match["name"] in hosts:
            raise BadInput(
                f"{origin}, line {number}: {match['name']} is there twice; give all its slots in"
                " one line."
            )
        hosts[match["name"]] = Host(name=match["name"], slots=int(match["slots"]))
    if not hosts:
        raise BadInput(f"{origin} must have a line `HOST slots=N` for each machine, but has none.")
    if len(hosts) > MOST_HOSTS:
        raise BadInput(f"{origin} must have at most {MOST_HOSTS} hosts, but has {len(hosts)}.")
    return tuple(hosts.values())
