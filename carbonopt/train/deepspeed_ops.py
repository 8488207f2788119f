"""What DeepSpeed compiles: C++ operators, 30 s each, made before the first trial; and what it needn't."""

from pathlib import Path
from typing import Any


def load_ops(with_cpu_adam: bool) -> None:
    """Compiles, or loads from torch's extensions folder, the operators that trials will load."""
    for builder in op_builders(with_cpu_adam):
        builder.load(verbose=False)


def op_builders(with_cpu_adam: bool) -> list[Any]:
    """DeepSpeed's builders of the operators that trials will load.

    On a host without GPU that is the shared-memory communication that torch.distributed's DeepSpeed backend builds on
    its first start; with a GPU it is the CPU Adam that an offloaded optimizer steps with.
    """
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


def import_muon_uncompiled() -> None:
    """Imports DeepSpeed's Muon optimizer without what it asks of torch.compile.

    DeepSpeed's engine imports it only to know whether our optimizer is one, and decorates its kernels with
    torch.compile, which loads all of the compiler: 1.2 s of a trial's 6 s of set-up, measured on a CPU.
    """
    from deepspeed.runtime import compiler

    compile_decorator = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_decorator
