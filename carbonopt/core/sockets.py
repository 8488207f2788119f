"""Addresses of Unix sockets, whatever the length of their paths."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_BYTES = 107  # unix(7): 108 including the terminating byte


@contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Give the address by which a socket at a path is bound or connected to.

    A folder for temporary files, such as Slurm makes for each job, can have a longer path than an
    address may have. The folder is opened then, and the address leads through the process's open
    files.

    Args:
        path: the path of the socket, whose folder must exist.
    """
    if len(os.fsencode(path)) <= _LONGEST_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
