"""Checks of related services: CodeCarbon's configuration files, the hub, Weights & Biases."""

import configparser
import os
import shlex
import socket
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from carbonopt.doctor.check_result import Finding, failure, ok, warning
from carbonopt.doctor.host_checks import disk
from carbonopt.study.trackers.wandb_tracker import has_wandb_key, netrc_file

_CONFIG = ".codecarbon.config"
_CONNECT_S = 3.0
_PORTS = {"http": 80, "https": 443}
_ENDPOINT = "HF_ENDPOINT"


def codecarbon_config() -> Finding:
    """Check that CodeCarbon can parse its configuration files.

    Their settings are overridden, but a file that can't be parsed makes CodeCarbon fail.
    """
    strays = []
    for path in (Path.home() / _CONFIG, Path.cwd() / _CONFIG):
        if (odd := _no_file(path)) is not None:
            return odd
        parser = configparser.ConfigParser()
        try:
            # Read as CodeCarbon does it: a file that is missing or may not be opened is ignored.
            parser.read(path)
            if parser.has_section("codecarbon"):
                dict(parser["codecarbon"])
        except (configparser.Error, UnicodeDecodeError) as error:
            text = f"{path} can't be parsed, so CodeCarbon fails: {' '.join(str(error).split())}"
            return failure(text, f"mv {path} {path}.bad")
        strays += [str(path)] if path.exists() else []
    strays += sorted(name for name in os.environ if name.lower().startswith("codecarbon_"))
    return ok(
        f"{', '.join(strays)}: ignored, every setting is given" if strays else "no stray settings"
    )


def netrc() -> Finding | None:
    return _no_file(netrc_file())


def _no_file(path: Path) -> Finding | None:
    """Return a failure if a path is no regular file: a pipe or /dev/zero would be read forever."""
    if not path.exists() or path.is_file():
        return None
    return failure(f"{path} must be a regular file", shlex.join(["mv", str(path), f"{path}.bad"]))


def hub() -> Finding:
    """Check that the hub can be reached, by opening a connection and sending nothing."""
    try:
        from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
    except ValueError as error:
        return _not_importable(error)
    if HF_HUB_OFFLINE:
        return ok("offline (HF_HUB_OFFLINE): only what is cached or local")
    try:
        scheme, host, port = _peer(ENDPOINT)
        if scheme not in _PORTS:
            raise ValueError("neither http nor https")
    except ValueError as error:
        return warning(*_no_address(error))
    proxy = urllib.request.getproxies().get(scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        try:
            _, host, port = _peer(proxy if "//" in proxy else f"//{proxy}")
        except ValueError as error:
            # The part before the @ may have a password.
            name, shown = f"{scheme}_proxy", proxy.rpartition("@")[2]
            text = f"{name}={shown!r} must be an address such as http://proxy:3128: {error}"
            return warning(text, f"unset {name} {name.upper()}")
    try:
        with socket.create_connection((host, port), _CONNECT_S):
            return ok(f"{host} answers")
    except OSError as error:
        return warning(f"{host}:{port} can't be reached: {error}", "export HF_HUB_OFFLINE=1")


def hub_disk() -> Finding:
    """Check the free space for models and data sets, in the cache folder of huggingface_hub."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ValueError as error:
        return _not_importable(error)
    return disk(Path(HF_HUB_CACHE), "export HF_HOME=/another/disk/huggingface")


def _not_importable(error: ValueError) -> Finding:
    """Return a failure for settings with which huggingface_hub, and so any trial, can't start.

    huggingface_hub reads its settings when it is imported, and every trial imports it.
    """
    try:
        urlsplit(os.environ.get(_ENDPOINT, ""))
    except ValueError:
        return failure(*_no_address(error))
    return failure(
        f"huggingface_hub can't read one of its variables: {error}", "env | grep ^HF_HUB_"
    )


def _no_address(error: ValueError) -> tuple[str, str]:
    """Return the text and the advice of a finding about an invalid HF_ENDPOINT."""
    text = (
        f"{_ENDPOINT}={os.environ.get(_ENDPOINT)!r} must be an address such as"
        f" https://huggingface.co: {error}"
    )
    return text, f"unset {_ENDPOINT}"


def _peer(url: str) -> tuple[str, str, int]:
    """Return the scheme, host and port of a URL.

    Raises:
        ValueError: If the URL has no host or port that could exist.
    """
    address = urlsplit(url)
    if not address.hostname:
        raise ValueError("it names no host")
    address.hostname.encode("idna")
    return address.scheme, address.hostname, address.port or _PORTS.get(address.scheme, 80)


def wandb() -> Finding | None:
    if find_spec("wandb") is None or netrc() is not None:
        return None
    no_login = "no login, which track.wandb.mode online needs"
    return ok("logged in") if has_wandb_key() else warning(no_login, "wandb login")
