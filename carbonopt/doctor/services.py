"""What stands beside: CodeCarbon's configuration files, the hub, Weights & Biases."""

import configparser
import os
import socket
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from carbonopt.doctor.check import Finding, failure, ok, warning
from carbonopt.trackers import has_wandb_key

_CONFIG = ".codecarbon.config"
_PREFIX = "codecarbon_"
_CONNECT_S = 3.0
_PORTS = {"http": 80, "https": 443}


def codecarbon_config() -> Finding:
    """Settings that aren't ours are overridden, but a file that CodeCarbon can't parse makes it fail."""
    strays = []
    for path in (Path.home() / _CONFIG, Path.cwd() / _CONFIG):
        if not path.exists():
            continue
        parser = configparser.ConfigParser()
        try:
            parser.read(path)  # as CodeCarbon reads it: what it may not open it ignores
            if parser.has_section("codecarbon"):
                dict(parser["codecarbon"])
        except (configparser.Error, UnicodeDecodeError) as error:
            return failure(
                f"{path} can't be parsed, so CodeCarbon fails: {' '.join(str(error).split())}", f"mv {path} {path}.bad"
            )
        strays.append(str(path))
    strays += sorted(name for name in os.environ if name.lower().startswith(_PREFIX))
    return ok(f"{', '.join(strays)}: ignored, every setting is given" if strays else "no stray settings")


def hub() -> Finding:
    """Whether models and data sets can be fetched; opens a connection and sends nothing."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return ok("offline (HF_HUB_OFFLINE): only what is cached or local")
    address = urlsplit(ENDPOINT)
    host = address.hostname or ""
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = address.port or _PORTS.get(address.scheme, 80)
    try:
        with socket.create_connection((address.hostname or "", port), _CONNECT_S):
            return ok(f"{address.hostname} answers")
    except OSError as error:
        return warning(f"{address.hostname}:{port} can't be reached: {error}", "export HF_HUB_OFFLINE=1")


def wandb() -> Finding | None:
    if find_spec("wandb") is None:
        return None
    if has_wandb_key():
        return ok("logged in")
    return warning("no login, which track.wandb.mode online needs", "wandb login")
