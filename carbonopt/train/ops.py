"""What DeepSpeed compiles: C++ operators, 30 s each, made before the first trial; and what it needn't."""


def load_ops(with_cpu_adam: bool) -> None:
    """Compiles, or loads from torch's extensions folder, the operators that trials will load.

    On a host without GPU that is the shared-memory communication that torch.distributed's DeepSpeed backend builds on
    its first start; with a GPU it is the CPU Adam that an offloaded optimizer steps with.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    if not torch.cuda.is_available():
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
            builder.load(verbose=False)
    elif with_cpu_adam:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)


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
