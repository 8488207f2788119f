"""The versions of what trials run on."""

import platform
from importlib.metadata import version
from importlib.util import find_spec

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


def package_versions() -> dict[str, str]:
    """By package, of those that are installed; also python, and cuda where torch was built with it."""
    import torch

    versions = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES if find_spec(name)}}
    return versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
