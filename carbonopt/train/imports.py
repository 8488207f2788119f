"""Import everything that every rank needs and none changes, and return its versions.

Importing takes seconds to tens of seconds. A process that is forked for each trial spares trials
this time (see `forked_rank`).
"""

import gc
import importlib
import importlib.util
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

# modules that the Trainer, DeepSpeed and torch import while they set up a trial or make its first
# step
_MODULES = (
    *(
        "carbonopt.train.training_loop",
        "deepspeed.runtime.engine",
        "accelerate.utils.deepspeed",
    ),
    *("transformers.integrations.deepspeed", "transformers.models.auto.modeling_auto"),
)
# On a GPU the engine also loads torch's compiler, whether the trial compiles or not: two of a
# set-up's three seconds.
_GPU_MODULES = (
    *("torch._inductor.compile_fx", "deepspeed.compile.backend", "deepspeed.compile.inductor"),
    *(
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.monitor.monitor",
        "deepspeed.ops.triton_ops",
    ),
)
# modules that the compiler itself imports only once it traces a model
_COMPILER_MODULES = (
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
)
_PACKAGES = (
    "torch deepspeed transformers accelerate datasets tokenizers numpy pydantic pillow scikit-learn"
    " peft torchao huggingface_hub pyarrow sqlglot trl"
)
# where the module isn't named like the package
_MODULE_OF = {"pillow": "PIL", "scikit-learn": "sklearn"}


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let imports of a package fail, as if it were not installed, unless it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """Spare a block of imports Python's looking for garbage, of which they leave hardly any."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_search_for_garbage()
def import_all() -> None:
    """Import all modules that a rank needs, without touching a GPU.

    Modules that are already imported cost nothing.
    """
    # DeepSpeed's tuner, which no trial uses, imports MLflow where that is installed: 1.2 of a
    # process's 8.5 s of CPU time.
    with hidden("mlflow"):
        importlib.import_module("deepspeed")
    for module in (*_MODULES, *(_GPU_MODULES if torch.version.cuda else ())):
        # DeepSpeed's own modules come and go with its versions, and the winner's folder has only
        # those of carbonopt that its task needs. A trial itself imports what is missing here.
        if (
            not module.startswith(("deepspeed.", "carbonopt."))
            or importlib.util.find_spec(module) is not None
        ):
            importlib.import_module(module)
    # DeepSpeed's engine imports its Muon optimizer only to know whether ours is one. That module
    # decorates its kernels with torch.compile, which loads all of the compiler: 1.2 s of a trial's
    # 6 s of set-up, measured on a CPU.
    from deepspeed.runtime import compiler

    compile_decorator = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        compiler.compile = compile_decorator
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        # A rank asks for one operator, and DeepSpeed then tries all with a C compiler, which takes
        # a third of a second.
        _ = deepspeed.ops.__compatible_ops__


def load_compiler() -> None:
    """Make torch's compiler import, hash and look up now what a first step would wait for.

    There it would count as training: 1.2 of 1.7 s of a step whose kernels are in the cache, on an
    H100. No GPU is touched.
    """
    for module in _COMPILER_MODULES:
        importlib.import_module(module)
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration

    torch._dynamo.list_backends()  # type: ignore[no-untyped-call]
    init_backend_registration()
    torch_key()  # the hash of torch's sources, which is part of each kernel's name
    if torch.version.cuda:
        from torch._inductor.runtime.triton_compat import triton_key

        triton_key()
    else:
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        valid_vec_isa_list()  # asks the C++ compiler


def practise_compiling(device: torch.device) -> None:
    """Compile a layer that nobody needs, or load it from the cache.

    torch's compiler does some work once in a process, for which it needs the device. Nothing of it
    is counted as a trial's kernels.
    """
    parts = (torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.1))
    layer: Any = torch.compile(torch.nn.Sequential(*parts).to(device))
    layer(torch.ones(2, 8, device=device, requires_grad=True)).sum().backward()
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    torch._dynamo.utils.counters.clear()


def package_versions() -> dict[str, str]:
    """Return the versions of installed packages, python, and cuda if torch was built with it."""
    versions = {"python": platform.python_version(), "pyyaml": version("pyyaml")}
    versions |= {name: version(name) for name in _PACKAGES.split() if _is_installed(name)}
    return versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(_MODULE_OF.get(package, package)) is not None
