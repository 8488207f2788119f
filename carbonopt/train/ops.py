"""DeepSpeed compiles its C++ operators when they are first used: 30 s each. Here they are made before the first trial."""


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
