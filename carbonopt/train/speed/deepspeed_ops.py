"""DeepSpeed's C++ operators: 30 s each to compile, and made before the first trial."""

from pathlib import Path
from typing import Any

from carbonopt.core.builds import noted_build


def op_builders(with_cpu_adam: bool) -> list[Any]:
    """Return the builders of the operators that trials will load.

    On a host without GPU it is the shared-memory communication, which DeepSpeed's backend of
    torch.distributed builds on its first start. With a GPU it is the CPU Adam of an offloaded
    optimizer.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    if torch.cuda.is_available():
        return [get_accelerator().create_op_builder("CPUAdamBuilder")] if with_cpu_adam else []
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    return (
        [builder]
        if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False)
        else []
    )


def load_operator(builder: Any) -> None:
    """Load an operator, compiled first if it is missing; other processes see who compiles it."""
    with noted_build(build_folder(builder)):
        builder.load(verbose=False)


def build_folder(builder: Any) -> Path:
    """Return the folder in which torch compiles an operator, and make it if it is missing."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(builder.name, verbose=False))
