"""Imports torchao, where it is installed, without opening a GPU.

transformers imports it too, whether float8 is used or not. As they are imported, some of torchao's
modules ask whether there is a GPU, whether Triton supports it, and whether it has kernels for
Blackwell's microscaling formats, which nothing here uses. Each of these questions opens the GPU,
and a process that has opened one can't be forked for trials.
"""

from importlib.util import find_spec

import torch
from torch.utils import _triton

if find_spec("torchao") is not None:
    if torch.version.cuda:
        # torchao imports the compiler, which must not remember the answers below.
        import torch._inductor.compile_fx
    _own = torch.cuda.is_available, torch.cuda.get_device_capability, _triton.has_triton
    torch.cuda.is_available = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    # Triton supports every GPU that has bf16, which float8 needs here.
    _triton.has_triton = _triton.has_triton_package
    try:
        import torchao.float8
        import torchao.prototype.mx_formats  # noqa: F401
    finally:
        torch.cuda.is_available, torch.cuda.get_device_capability, _triton.has_triton = _own
