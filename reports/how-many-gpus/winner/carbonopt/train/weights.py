"""A pretrained model's weights. transformers draws at random what it doesn't find in the files, and says so in a log
alone: here that is refused, before the first trial and again as each one loads.

python -m carbonopt.train.weights reads [[workload, [key, ...]], ...] in JSON on its standard input, with the keys whose
models are in folders on this machine. It prints why one is refused, in JSON, or null.
"""

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed as announced
from transformers.modeling_utils import load_state_dict
from transformers.trainer_utils import set_seed

from carbonopt.core.config import Model
from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.train.failures import reason
from carbonopt.train.model import attention_option, source, unloadable
from carbonopt.train.tasks.base import task_for
from carbonopt.train.tasks.trainer_task import ModelKind, TrainerTask

MODEL_KEY = "workload.model.name_or_path"
_SHOWN = 3  # names of tensors in a message


def check_weights(kind: ModelKind, model: Model, config: PreTrainedConfig) -> None:
    """Loads pretrained weights as a trial will, after downloading a hub's, so that no trial has to wait. Raises
    BadInput if there are none, their files can't be read, or they don't fit the configuration."""
    if model.from_config is None:
        check_loading(kind.auto(), str(model.name_or_path), MODEL_KEY, config=config, **source(model))


def check_loading(auto: Any, name: str, key: str, *, config: PreTrainedConfig, **options: Any) -> None:
    """As `load`, on torch's meta device: shapes are compared and no number is read. Raises BadInput as `load`, and
    where there is nothing that can be loaded."""
    # Of quantized ones only the device that they are for can tell.
    place: dict[str, Any] = {} if is_quantized(config) else {"device_map": "meta"}
    with unloadable("model", name):
        try:
            load(auto, name, key, config=config, **place, **options)
        except BadInput:
            raise
        except Exception as error:  # whatever libraries raise on a damaged file, which they don't name
            if not (files := _damaged(Path(name))):
                raise
            raise BadInput(f"{key}: {files} can't be read ({reason(error)}); copy or save the model again.") from error


def is_quantized(config: PreTrainedConfig) -> bool:
    """Whether the weights are stored in a form that takes kernels of its own to load."""
    return getattr(config, "quantization_config", None) is not None


def load(
    auto: Any, name: str, key: str, *, new_head: bool = True, **options: Any
) -> tuple[PreTrainedModel, Collection[str]]:
    """The model, and which of its parameters are in no file. `auto`: transformers' class. `new_head`: whether those of
    its head may be. Raises BadInput, which names the `key` of the study file, where other tensors are missing or any
    has another shape; and whatever transformers raises where it can't read the files."""
    # ignore_mismatched_sizes: it tells of those, too, instead of raising an error that names none.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loaded = auto.from_pretrained(name, **options)
    of, instead = type(model).__name__, "give a whole folder, as save_pretrained writes it, with its own config.json"
    if others := sorted(loaded["mismatched_keys"]):
        shapes = [f"{tensor} ({_shape(stored)}, not {_shape(own)})" for tensor, stored, own in others]
        fault = f"but {name} differs in {count_text(len(others), 'tensor')}: {_listed(shapes)}"
        raise BadInput(f"{key}: the tensors of {of} must have the shapes that config.json says, {fault}; {instead}.")
    missing = set(loaded["missing_keys"])
    new = _of_head(model, missing, bool(options.get("trust_remote_code"))) if new_head and missing else set()
    if lost := sorted(missing - new):
        tensors = count_text(len(model.state_dict()), "tensor")
        fault = f"but those of {name} lack {len(lost)}: {_listed(lost)}"
        raise BadInput(f"{key}: the files must hold all {tensors} of {of}, {fault}; {instead}.")
    return model, new


def _of_head(model: PreTrainedModel, names: Collection[str], trust_remote_code: bool) -> set[str]:
    """Those that a new head brings, which the base model hasn't."""
    saved = model.config.architectures or ()
    if model.get_output_embeddings() is not None or type(model).__name__ in saved:
        return set()  # a language model's output layer came with it, as did the head of what was saved with one
    try:
        with whole(), torch.device("meta"):
            base = AutoModel.from_config(model.config, trust_remote_code=trust_remote_code)
    except ValueError:  # transformers has no class for it
        base = model.base_model
    own, prefix = base.state_dict().keys(), f"{model.base_model_prefix}."
    if type(base).__name__ not in saved:  # models of masked words are saved without the pooler, which heads read
        own = {name for name in own if not name.startswith("pooler.")}
    return {name for name in names if name.removeprefix(prefix) not in own}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "one number"


def _damaged(folder: Path) -> str:
    """Which of a folder's weights can't be read by themselves, by their paths."""
    damaged = []
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        try:
            load_state_dict(file, map_location="meta")  # of pickles nothing but weights
        except Exception:  # noqa: BLE001, as above
            damaged.append(str(file))
    return _listed(damaged)


@contextmanager
def whole() -> Iterator[None]:
    """While a ZeRO-3 configuration is announced to transformers, it partitions whatever it makes or loads; not within
    this."""
    before = announced._hf_deepspeed_config_weak_ref
    announced.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        announced._hf_deepspeed_config_weak_ref = before


def pretrained_model(
    kind: ModelKind, model: Model, config: PreTrainedConfig, attention: str | None, seed: int
) -> PreTrainedModel:
    """The model with its trained weights, in float32: DeepSpeed makes the half-precision copy and keeps these as the
    master weights. It must be made after TrainingArguments, so that ZeRO-3 can partition while it loads. Weights of a
    new head are drawn from the seed. Raises BadInput as `load`."""
    options = {"config": config, "dtype": torch.float32, **source(model), **attention_option(attention)}
    made, new = load(kind.auto(), str(model.name_or_path), MODEL_KEY, **options)
    if new:
        _draw_again(made, new, seed)
    return made


def _draw_again(model: PreTrainedModel, names: Collection[str], seed: int) -> None:
    """These parameters, as transformers draws them, but from the seed alone: how many numbers have been drawn before
    depends on the ZeRO stage."""
    untrained = {name: weights for name, weights in model.named_parameters() if name in names}
    for name, weights in untrained.items():
        weights._is_hf_initialized = False  # type: ignore[attr-defined]
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = False  # type: ignore[assignment]
    set_seed(seed)
    if not announced.is_deepspeed_zero3_enabled():
        model.initialize_weights()
        return
    from deepspeed import zero

    with zero.GatheredParameters(list(untrained.values()), modifier_rank=0):
        model.initialize_weights()


def main() -> None:
    """The program. Standard output has the answer only."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        refusal = None
        try:
            for workload, keys in json.load(sys.stdin):
                if isinstance(task := task_for(workload), TrainerTask):
                    task.check_weights(keys)
        except BadInput as error:
            refusal = str(error)
        print(json.dumps(refusal), file=answers)


if __name__ == "__main__":
    main()
