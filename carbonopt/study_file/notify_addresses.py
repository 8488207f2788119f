"""The addresses to which a study's messages go, which the study file never has.

An address can hold a password, so that of it only its scheme, such as `mailto`, is ever shown.
"""

import logging
import os
import stat
from pathlib import Path
from typing import Any

from carbonopt.core.errors import BadInput
from carbonopt.core.extras import check_installed
from carbonopt.core.files import read_text
from carbonopt.spec.notify_settings import Notify

ADDRESSES = "CARBONOPT_NOTIFY"  # variable with addresses, separated by spaces
_FILE_MIB = 1  # largest file of addresses
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def addresses(settings: Notify) -> tuple[str, ...]:
    """Return the addresses, which Apprise knows how to reach.

    Raises:
        BadInput: If there are none, Apprise is missing or doesn't know one, or others may read the
            file that has them.
    """
    check_installed("apprise", "notify", "notify")
    if settings.config is None:
        addresses, place = os.environ.get(ADDRESSES, "").split(), f"the variable {ADDRESSES}"
    else:
        path = Path(settings.config)
        text = read_text(path, "notify.config", _FILE_MIB)
        if path.stat().st_mode & _OTHERS:
            raise BadInput(
                f"notify.config: nobody but its owner may read {path}, which can hold passwords,"
                f" but its mode is {stat.S_IMODE(path.stat().st_mode):o}; type: chmod 600 {path}"
            )
        lines = [line.strip() for line in text.splitlines()]
        addresses = [line for line in lines if line and not line.startswith("#")]
        place = str(path)
    if not addresses:
        raise BadInput(
            f"notify needs addresses, but {place} has none; give URLs of Apprise, such as"
            f" mailto://USER:PASSWORD@example.org, in {ADDRESSES} or in the file notify.config."
        )
    for number, address in enumerate(addresses, start=1):
        if apprise_service(address) is None:
            raise BadInput(
                f"notify: address {number} of {place} ({address_scheme(address)}) is not one that"
                " Apprise can reach; its documentation has the schemes and their parts."
            )
    return tuple(addresses)


def apprise_service(address: str) -> Any:
    """Return Apprise's service for an address; None if it knows none."""
    import apprise

    # Its lines can hold addresses; what fails is said in `deliver`'s own words.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    return apprise.Apprise.instantiate(address)


def address_scheme(address: str) -> str:
    """Return what of an address may be shown."""
    scheme, colon, _ = address.partition("://")
    return scheme if colon and scheme.isalnum() else "without a scheme"
