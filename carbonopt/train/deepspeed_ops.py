"""What DeepSpeed compiles: C++ operators, 30 s each, made before the first trial."""

from pathlib import Path
from typing import Any


def op_builders(with_cpu_adam: bool) -> list[Any]:
    """Of the operators that trials will load: on a host without GPU the shared-memory communication that DeepSpeed's
    backend of torch.distributed builds on its first start; with a GPU the CPU Adam of an offloaded optimizer."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    if torch.cuda.is_available():
        return [get_accelerator().create_op_builder("CPUAdamBuilder")] if with_cpu_adam else []
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    return [builder] if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False) else []


def build_folder(builder: Any) -> Path:
    """Where torch compiles that operator; made if it wasn't there."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(builder.name, verbose=False))
