"""requirements.txt: what train.py and its copy of carbonopt import, in the versions that the trials ran on."""

import re
from collections.abc import Collection
from pathlib import Path

from carbonopt.core.config import Launch, Workload
from carbonopt.core.dimensions import TrialParams

_HEAD = "# What train.py imports, in the versions that the study's trials ran on: pip install -r requirements.txt\n"
_COMPILERS = "# It also compiles: a C and a C++ compiler (g++) have to be on PATH.\n"
_LAUNCHER = "accelerate"
_DISTRIBUTIONS = {"yaml": "pyyaml", "pydantic_core": "pydantic"}  # of those whose name is not the module's
_PYTORCH_BUILD = re.compile(r"cpu|cu\d+|rocm[\d.]+")


def requirements(
    workload: Workload, launch: Launch, params: TrialParams, versions: dict[str, str], libraries: Collection[str]
) -> str:
    """`libraries`: the modules that the copy of carbonopt imports, those among them that only some trainings need."""
    ran_on = [f"{label} {versions[key]}" for key, label in (("python", "Python"), ("cuda", "CUDA")) if key in versions]
    lines = [f"# They ran on {' and '.join(ran_on)}.\n"] if ran_on else []
    if _compiles(workload, launch, params):
        lines.append(_COMPILERS)
    modules = {_LAUNCHER, *libraries} - _needless(workload, params)
    names = {_DISTRIBUTIONS.get(module, module) for module in modules}
    lines += [_line(name, versions.get(name)) for name in sorted(names)]
    return _HEAD + "".join(lines)


def _compiles(workload: Workload, launch: Launch, params: TrialParams) -> bool:
    """DeepSpeed's operators for CPUs, by the first training on a machine, or what torch.compile makes."""
    given = any(value for key, value in workload.training_arguments.items() if key.startswith("torch_compile"))
    by_torch = bool(params.torch_compile) or given or params.has_fused_output_layer
    return not launch.gpus or params.offload != "none" or by_torch


def _needless(workload: Workload, params: TrialParams) -> set[str]:
    """Modules that are imported where they are needed alone, and that this training doesn't need."""
    dataset = workload.dataset
    files = (*(dataset.train_files or ()), *(dataset.eval_files or ()))
    needed = {
        "datasets": dataset.name_or_path is not None,
        "pyarrow": any(Path(file).suffix.lower() == ".parquet" for file in files),
        "peft": bool(params.lora_rank),
    }
    return {name for name, needs in needed.items() if not needs}


def _line(name: str, version: str | None) -> str:
    """A local version (after the +) names a build that package indexes don't have under it: it is in a comment."""
    if version is None:
        return f"{name}  # its version was not recorded\n"
    public, _, local = version.partition("+")
    if not local:
        return f"{name}=={public}\n"
    index = ""
    if name == "torch" and _PYTORCH_BUILD.fullmatch(local):
        index = f": pip install {name}=={public} --index-url https://download.pytorch.org/whl/{local}"
    return f"{name}=={public}  # recorded: {version}{index}\n"
