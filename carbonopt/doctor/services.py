"""What stands beside: CodeCarbon's configuration files, the hub, Weights & Biases."""

import configparser
import os
import shlex
import socket
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from carbonopt.doctor.check import Finding, failure, ok, warning
from carbonopt.doctor.host import disk
from carbonopt.study.trackers import has_wandb_key, netrc_file

_CONFIG = ".codecarbon.config"
_CONNECT_S = 3.0
_PORTS = {"http": 80, "https": 443}
_ENDPOINT = "HF_ENDPOINT"


def codecarbon_config() -> Finding:
    """Settings that aren't ours are overridden, but a file that CodeCarbon can't parse makes it fail."""
    strays = []
    for path in (Path.home() / _CONFIG, Path.cwd() / _CONFIG):
        if (odd := _no_file(path)) is not None:
            return odd
        parser = configparser.ConfigParser()
        try:
            parser.read(path)  # as CodeCarbon reads it: what isn't there, or it may not open, it ignores
            if parser.has_section("codecarbon"):
                dict(parser["codecarbon"])
        except (configparser.Error, UnicodeDecodeError) as error:
            text = f"{path} can't be parsed, so CodeCarbon fails: {' '.join(str(error).split())}"
            return failure(text, f"mv {path} {path}.bad")
        strays += [str(path)] if path.exists() else []
    strays += sorted(name for name in os.environ if name.lower().startswith("codecarbon_"))
    return ok(f"{', '.join(strays)}: ignored, every setting is given" if strays else "no stray settings")


def netrc() -> Finding | None:
    return _no_file(netrc_file())


def _no_file(path: Path) -> Finding | None:
    """Of what is there but no regular file: a pipe or /dev/zero would be read without end."""
    if not path.exists() or path.is_file():
        return None
    return failure(f"{path} must be a regular file", shlex.join(["mv", str(path), f"{path}.bad"]))


def hub() -> Finding:
    """Whether models and data sets can be fetched; opens a connection and sends nothing."""
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
            name, shown = f"{scheme}_proxy", proxy.rpartition("@")[2]  # before the @ a password can stand
            text = f"{name}={shown!r} must be an address such as http://proxy:3128: {error}"
            return warning(text, f"unset {name} {name.upper()}")
    try:
        with socket.create_connection((host, port), _CONNECT_S):
            return ok(f"{host} answers")
    except OSError as error:
        return warning(f"{host}:{port} can't be reached: {error}", "export HF_HUB_OFFLINE=1")


def hub_disk() -> Finding:
    """Space for models and data sets, where huggingface_hub keeps them."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ValueError as error:
        return _not_importable(error)
    return disk(Path(HF_HUB_CACHE), "export HF_HOME=/another/disk/huggingface")


def _not_importable(error: ValueError) -> Finding:
    """huggingface_hub reads its settings when it is imported, and every trial imports it."""
    try:
        urlsplit(os.environ.get(_ENDPOINT, ""))
    except ValueError:
        return failure(*_no_address(error))
    return failure(f"huggingface_hub can't read one of its variables: {error}", "env | grep ^HF_HUB_")


def _no_address(error: ValueError) -> tuple[str, str]:
    """What to say of HF_ENDPOINT, and what to type."""
    text = f"{_ENDPOINT}={os.environ.get(_ENDPOINT)!r} must be an address such as https://huggingface.co: {error}"
    return text, f"unset {_ENDPOINT}"


def _peer(url: str) -> tuple[str, str, int]:
    """Scheme, host and port. Raises ValueError if it has none that could exist."""
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
