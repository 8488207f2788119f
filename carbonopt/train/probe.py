"""Print what a trial's process finds on this machine, in its environment.

Usage: python -m carbonopt.train.probe stack|build|load

`stack` prints a Stack as one JSON object. `build` does so after it has compiled operators that are
missing and not locked. `load` prints a line once it keeps all visible GPUs busy, and continues
until its standard input is closed.
"""

import os
import select
import sys
from typing import Any, TextIO

from carbonopt.core.builds import is_whole
from carbonopt.core.values import Frozen
from carbonopt.train.speed.deepspeed_ops import build_folder, load_operator, op_builders

_MATRIX = 4096  # rows and columns
_PRODUCTS = 50  # matrix products between two waits for the GPUs


class TorchGpu(Frozen):
    name: str
    uuid: str  # spelled as NVML does


class Op(Frozen):
    name: str
    built: bool
    lock: str | None = None  # a file for which everyone waits who needs the operator


class Stack(Frozen):
    versions: dict[str, str]
    torch_cuda: str | None  # CUDA version that torch was built with; None: for the CPU only
    gpus: tuple[TorchGpu, ...] = ()
    gpu_error: str | None = None  # why torch can't use GPUs
    nvcc: str | None = None  # version of nvcc
    nvcc_error: str | None = None  # why DeepSpeed wouldn't compile with it
    ops: tuple[Op, ...]


def stack() -> Stack:
    """Return the stack without compiling anything."""
    import torch

    from carbonopt.train.imports import package_versions

    cuda, ops = torch.version.cuda, tuple(map(_op, op_builders(with_cpu_adam=True)))
    return Stack(versions=package_versions(), torch_cuda=cuda, ops=ops, **(_cuda() if cuda else {}))


def _cuda() -> dict[str, Any]:
    """Return torch's GPUs, nvcc's version, and why DeepSpeed wouldn't compile with it.

    The reason follows DeepSpeed's own rule.
    """
    import torch
    from deepspeed.ops.op_builder import builder

    of_cuda: dict[str, Any] = {}
    try:
        torch.cuda.init()
        gpus = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
        of_cuda["gpus"] = tuple(TorchGpu(name=gpu.name, uuid=f"GPU-{gpu.uuid}") for gpu in gpus)
    except RuntimeError as error:
        of_cuda["gpu_error"] = " ".join(str(error).split())
    try:
        of_cuda["nvcc"] = ".".join(map(str, builder.installed_cuda_version()))
        builder.assert_no_cuda_mismatch()
    except (builder.MissingCUDAException, builder.CUDAMismatchException) as error:
        of_cuda["nvcc_error"] = str(error).removeprefix(">- ")
    return of_cuda


def _op(builder: Any) -> Op:
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import LIB_EXT

    if installed_ops.get(builder.name, False):  # DeepSpeed was installed with it
        return Op(name=builder.name, built=True)
    folder = build_folder(builder)
    lock, library = folder / "lock", folder / f"{builder.name}{LIB_EXT}"  # torch's names for them
    return Op(name=builder.name, built=is_whole(library), lock=str(lock) if lock.exists() else None)


def load(answers: TextIO) -> None:
    """Keep all visible GPUs busy until standard input is closed.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    import torch

    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not devices:
        raise RuntimeError("torch sees no GPU")
    matrices = [
        torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.float16) for device in devices
    ]

    def work() -> None:
        for matrix in matrices:
            for _ in range(_PRODUCTS):
                torch.matmul(matrix, matrix)
        for device in devices:
            torch.cuda.synchronize(device)

    work()
    print("busy", file=answers, flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        work()


def main(what: str) -> None:
    """Run the program; `what` is stack, build or load.

    Standard output has the answer only, not what DeepSpeed prints.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        if what == "load":
            load(answers)
            return
        if what == "build":
            for builder in op_builders(with_cpu_adam=True):
                op = _op(builder)
                if not op.built and op.lock is None:
                    load_operator(builder)
        print(stack().model_dump_json(), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
