"""Imports torchao, where it is installed, without opening a GPU.

transformers imports it too, whether float8 is used or not. One of torchao's modules asks for the
GPU's compute capability as it is imported, to offer kernels for Blackwell's microscaling formats,
which nothing here uses. A process that has opened a GPU can't be forked for trials.
"""

from importlib.util import find_spec

import torch

if find_spec("torchao") is not None:
    _is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        import torchao.float8
        import torchao.prototype.mx_formats  # noqa: F401
    finally:
        torch.cuda.is_available = _is_available
