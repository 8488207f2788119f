"""requirements.txt: what train.py and its copy of carbonopt import, in the versions that the trials ran on."""

import re
from collections.abc import Collection
from pathlib import Path

from carbonopt.core.config import Launch, Workload
from carbonopt.core.dimensions import TrialParams

_HEAD = "# What train.py imports, in the versions that the study's trials ran on: pip install -r requirements.txt\n"
_DISTRIBUTIONS = {"yaml": "pyyaml", "pydantic_core": "pydantic"}  # of those whose name is not the module's
_PYTORCH_BUILD = re.compile(r"cpu|cu\d+|rocm[\d.]+")


def requirements(
    workload: Workload, launch: Launch, params: TrialParams, versions: dict[str, str], libraries: Collection[str]
) -> str:
    """`libraries`: the modules that the copy of carbonopt imports, those among them that only some trainings need."""
    ran_on = [f"{label} {versions[key]}" for key, label in (("python", "Python"), ("cuda", "CUDA")) if key in versions]
    lines = [f"# They ran on {' and '.join(ran_on)}.\n"] if ran_on else []
    # DeepSpeed's operators for CPUs, by the first training on a machine, or what torch.compile makes.
    given = any(value for key, value in workload.training_arguments.items() if key.startswith("torch_compile"))
    by_torch = bool(params.torch_compile) or given or params.has_fused_output_layer
    if not launch.gpus or params.offload != "none" or by_torch:
        lines.append("# It also compiles: a C and a C++ compiler (g++) have to be on PATH.\n")
    dataset = workload.dataset
    files = (*(dataset.train_files or ()), *(dataset.eval_files or ()))
    needed = {  # of what is imported only where it is needed
        "datasets": dataset.name_or_path is not None,
        "pyarrow": any(Path(file).suffix.lower() == ".parquet" for file in files),
        "peft": bool(params.lora_rank),
    }
    names = {_DISTRIBUTIONS.get(library, library) for library in libraries if needed.get(library, True)}
    lines += [_line(name, versions.get(name)) for name in sorted({"accelerate", *names})]  # the launcher, too
    return _HEAD + "".join(lines)


def _line(name: str, version: str | None) -> str:
    """A local version (after the +) names a build that package indexes don't have under it: it is in a comment."""
    if version is None:
        return f"{name}  # its version was not recorded\n"
    public, _, local = version.partition("+")
    if not local:
        return f"{name}=={public}\n"
    is_wheel = name == "torch" and _PYTORCH_BUILD.fullmatch(local)
    index = f": pip install torch=={public} --index-url https://download.pytorch.org/whl/{local}" if is_wheel else ""
    return f"{name}=={public}  # recorded: {version}{index}\n"
