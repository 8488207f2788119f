"""Imports torchao, where it is installed, without opening a GPU.

transformers imports it too, whether float8 is used or not. As they are imported, some of torchao's
modules ask for the GPU's compute capability: whether Triton supports it, and whether it has kernels
for Blackwell's microscaling formats, which nothing here uses. That opens the GPU, and a process
that has opened one can't be forked for trials.
"""

from importlib.util import find_spec

import torch
from torch.utils import _triton

if find_spec("torchao") is not None:
    _own = torch.cuda.get_device_capability, _triton.has_triton
    # Triton supports every GPU that has bf16, which float8 needs here.
    _triton.has_triton = _triton.has_triton_package
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    try:
        import torchao.float8
        import torchao.prototype.mx_formats  # noqa: F401
    finally:
        torch.cuda.get_device_capability, _triton.has_triton = _own
