"""What every rank needs and no rank changes, imported in one place, and its versions. That takes seconds to tens of
seconds, which a process that is forked for each trial spares them (see `forked_rank`)."""

import importlib
import importlib.util
import platform
from importlib.metadata import version
from typing import Any

import torch

# What the Trainer, DeepSpeed and torch import while they set a trial up or make its first step.
_MODULES = (
    *("carbonopt.train.loop", "deepspeed", "deepspeed.runtime.engine", "accelerate.utils.deepspeed"),
    *("transformers.integrations.deepspeed", "transformers.models.auto.modeling_auto"),
)
# On a GPU the engine also loads torch's compiler, whether the trial compiles or not: two of a set-up's three seconds.
_GPU_MODULES = (
    *("torch._inductor.compile_fx", "deepspeed.compile.backend", "deepspeed.compile.inductor"),
    *("deepspeed.module_inject.auto_ep_layer", "deepspeed.monitor.monitor", "deepspeed.ops.triton_ops"),
)
# What the compiler itself imports only once it traces a model.
_COMPILER_MODULES = ("torch._inductor.compile_fx", "torch.distributed.tensor.experimental", "torch.export._trace")
_PACKAGES = "torch deepspeed transformers accelerate datasets tokenizers numpy pydantic pillow scikit-learn"
_MODULE_OF = {"pillow": "PIL", "scikit-learn": "sklearn"}  # where it isn't the package's name


def import_all() -> None:
    """Imports all of it; what is imported already costs nothing. Touches no GPU."""
    for module in (*_MODULES, *(_GPU_MODULES if torch.version.cuda else ())):
        # DeepSpeed's own modules come and go with its versions, and the winner's folder has those of carbonopt that its
        # task needs; what is missing here, a trial imports itself.
        if not module.startswith(("deepspeed.", "carbonopt.")) or importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    # DeepSpeed's engine imports its Muon optimizer only to know whether ours is one, and decorates its kernels with
    # torch.compile, which loads all of the compiler: 1.2 s of a trial's 6 s of set-up, measured on a CPU.
    from deepspeed.runtime import compiler

    compile_decorator = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        compiler.compile = compile_decorator
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        # A rank asks for one, and DeepSpeed then tries all: with a C compiler, which takes a third of a second.
        _ = deepspeed.ops.__compatible_ops__


def load_compiler() -> None:
    """Has torch's compiler import, hash and look up in this process what it otherwise does in a training's first step,
    where it counts as training: 1.2 of 1.7 s of a step whose kernels are in the cache, on an H100. Touches no GPU."""
    for module in _COMPILER_MODULES:
        importlib.import_module(module)
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration

    torch._dynamo.list_backends()  # type: ignore[no-untyped-call]
    init_backend_registration()
    torch_key()  # of torch's sources, which belongs to the name of each kernel
    if torch.version.cuda:
        from torch._inductor.runtime.triton_compat import triton_key

        triton_key()
    else:
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        valid_vec_isa_list()  # asks the C++ compiler


def practise_compiling(device: torch.device) -> None:
    """Compiles a layer that nobody needs, or loads it from the cache: what torch's compiler does once in a process and
    needs the device for. Nothing of it is counted as a trial's kernels."""
    parts = (torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.1))
    layer: Any = torch.compile(torch.nn.Sequential(*parts).to(device))
    layer(torch.ones(2, 8, device=device, requires_grad=True)).sum().backward()
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    torch._dynamo.utils.counters.clear()


def package_versions() -> dict[str, str]:
    """By package, of those that are installed; also python, and cuda where torch was built with it."""
    versions = {"python": platform.python_version(), "pyyaml": version("pyyaml")}
    versions |= {name: version(name) for name in _PACKAGES.split() if _is_installed(name)}
    return versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(_MODULE_OF.get(package, package)) is not None
