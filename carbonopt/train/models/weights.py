"""Load a pretrained model's weights, and refuse files that lack some of them.

transformers draws weights at random that it doesn't find in the files, and says so only in a log.
Here this is refused, before the first trial and again whenever a trial loads them. Weights that are
no finite numbers are refused before the first trial.
"""

import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed as announced
from transformers.modeling_utils import load_state_dict
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file

from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.spec.workload_settings import Model
from carbonopt.train.failures import reason
from carbonopt.train.models.model import MODEL_KEY, attention_option, source, unloadable
from carbonopt.train.models.model_kind import ModelKind

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Weight files that transformers doesn't read from a model's folder, by their suffixes.
_UNREAD = {
    ".safetensors": "not named model.safetensors",
    ".gguf": "llama.cpp's format",
    ".pth": "a file of torch.save",
    ".pt": "a file of torch.save",
    ".ckpt": "a training's checkpoint",
    ".h5": "TensorFlow's format",
    ".msgpack": "Flax's format",
    ".onnx": "for inference",
    ".npz": "NumPy's format",
}
_SHOWN = 3  # number of tensor names in a message

Pairs = list[tuple[str, str]]


class Loaded(NamedTuple):
    """A loaded model, and in what its files differ from it."""

    model: PreTrainedModel
    new: set[str]  # its parameters that are in no file
    unused: set[str]  # tensors of the files that it does not have


def check_weights(kind: ModelKind, model: Model, config: PreTrainedConfig) -> str | None:
    """Load pretrained weights as a trial will, to check them.

    A hub's weights are downloaded first, so that no trial has to wait.

    Returns:
        A sentence on tensors of the files that the model leaves unused; None if it uses all.

    Raises:
        BadInput: There are no weights, their files can't be read, or they don't fit the
            configuration.
    """
    if model.from_config is not None:
        return None
    name = str(model.name_or_path)
    unused = sorted(check_loading(kind.auto(), name, MODEL_KEY, config=config, **source(model)))
    if not unused:
        return None
    return (
        f"{count_text(len(unused), 'tensor')} of {name} left unused, because the model that this"
        f" task makes of its config.json has no such parameters: {_listed(unused)}"
    )


def check_loading(
    auto: Any, name: str, key: str, *, config: PreTrainedConfig, **options: Any
) -> Collection[str]:
    """Check whether `load` would succeed, on torch's meta device.

    Shapes and types are compared. Numbers are read only if tied tensors are stored twice.

    Returns:
        The names of tensors in the files that the model does not have.

    Raises:
        BadInput: `load` would raise it, there is nothing that can be loaded, or what is stored
            can't be the weights of this configuration.
    """
    # Quantized weights can only be checked on the device that they are for.
    place: dict[str, Any] = {} if is_quantized(config) else {"device_map": "meta"}
    with unloadable("model", name):
        try:
            loaded = load(auto, name, key, config=config, **place, **options)
            if not is_quantized(config):
                _check_types(loaded, name, key, options.get("revision"))
                if pairs := _untied(loaded.model, _tied(loaded.model)):
                    # Only with their numbers they are one again, if these are the same.
                    options |= {"config": config, "dtype": torch.float32}
                    _check_ties(load(auto, name, key, **options).model, pairs, name, key)
            return loaded.unused
        except BadInput:
            raise
        # Libraries raise anything on a damaged file, and don't name the file.
        except Exception as error:
            if is_quantized(config) and not isinstance(error, OSError):
                problem = f"the quantized weights of {name} can't be loaded ({reason(error)})"
                instead = "give the model as it was before it was quantized"
            elif files := _damaged(Path(name)):
                problem = f"{files} can't be read ({reason(error)})"
                instead = "copy or save the model again"
            elif files := _unread(Path(name)):
                problem = f"weights are read from model.safetensors, but {name} has {files}"
                instead = "give the folder that transformers' save_pretrained writes"
            else:
                raise
            raise BadInput(f"{key}: {problem}; {instead}.") from error


def _check_types(loaded: Loaded, name: str, key: str, revision: str | None) -> None:
    """Check the types of the stored tensors that became the model's weights.

    transformers makes floats of any numbers: of a quantized model's whole numbers, too, which mean
    nothing without their scales.

    Raises:
        BadInput: A parameter, or a buffer of floats, is stored as whole numbers or in 8 bits.
    """
    model = loaded.model
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    prefix = f"{model.base_model_prefix}."
    quantized = []
    for tensor, stored in _stored(name, revision).items():
        names = (tensor, tensor.removeprefix(prefix), f"{prefix}{tensor}")
        if stored.dtype in _FLOATS or not loaded.unused.isdisjoint(names):
            continue
        made = next((own[given] for given in names if given in own), None)
        # Some stored weights are renamed or put together, such as those of experts.
        is_weight = tensor.endswith(".weight") if made is None else made.is_floating_point()
        if is_weight:
            quantized.append(f"{tensor} ({str(stored.dtype).removeprefix('torch.')})")
    if quantized:
        raise BadInput(
            f"{key}: weights must be stored as floats of at least 16 bits, but {name}, whose"
            " config.json has no quantization_config that transformers knows, stores"
            f" {count_text(len(quantized), 'tensor')} otherwise: {_listed(sorted(quantized))};"
            " give the model as it was before it was quantized."
        )


def _stored(name: str, revision: str | None) -> dict[str, torch.Tensor]:
    """Return the tensors of the files that transformers reads, mapped into memory, not copied."""
    config = cached_file(name, CONFIG_NAME, revision=revision)
    tensors: dict[str, torch.Tensor] = {}
    for file in _read_files(Path(str(config)).parent):
        tensors |= load_state_dict(file)
    return tensors


def _read_files(folder: Path) -> list[Path]:
    """Return those of a folder's weight files that transformers reads, the first form it finds."""
    forms = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    file = next((folder / form for form in forms if (folder / form).is_file()), None)
    if file is None:
        return []
    if file.suffix != ".json":
        return [file]
    parts = set(json.loads(file.read_bytes())["weight_map"].values())
    return [folder / part for part in sorted(parts)]


def _check_ties(model: PreTrainedModel, pairs: Pairs, name: str, key: str) -> None:
    """Refuse a model with two tensors where its configuration has one.

    transformers trains both then, while the number of parameters and the estimate of memory are the
    configuration's.

    Raises:
        BadInput: A pair of tensors that are tied has different numbers.
    """
    if apart := _untied(model, pairs):
        two = " and ".join(apart[0])
        raise BadInput(
            f"{key}: tensors that config.json ties must have the same numbers, but {name} stores"
            f" others for {two}; set tie_word_embeddings to false in its config.json, so that both"
            f" are trained, or remove {apart[0][0]} from its files."
        )


def _tied(model: PreTrainedModel) -> Pairs:
    """Return the names of the tensors that are one by the model's configuration, in pairs."""
    return list(getattr(model, "all_tied_weights_keys", {}).items())


def _untied(model: PreTrainedModel, pairs: Pairs) -> Pairs:
    """Return those pairs of names that are two tensors of the model."""
    return [
        (one, other)
        for one, other in pairs
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other)
    ]


def check_values(kind: ModelKind, model: Model, config: PreTrainedConfig) -> None:
    """Read the values of pretrained weights once, and refuse those with which no trial can train.

    This is as fast as the files can be read, which each trial does, too. The model is loaded only
    if a file has NaN or infinity in it, because they may be right there: a causal mask may have
    infinity, and the model may leave a tensor unused.

    Raises:
        BadInput: See `check_loaded_values`.
    """
    if model.from_config is not None:
        return
    name = str(model.name_or_path)
    with unloadable("model", name):
        file = cached_file(name, CONFIG_NAME, revision=model.revision)
        if all(map(_has_finite_values, _weight_files(Path(str(file)).parent))):
            return
        options = {"config": config, "dtype": torch.float32, **source(model)}
        loaded = load(kind.auto(), name, MODEL_KEY, **options).model
    check_loaded_values(loaded, name, MODEL_KEY)


def check_loaded_values(model: PreTrainedModel, name: str, key: str) -> None:
    """Raise BadInput if a parameter of the model has NaN or infinity in it, or a buffer NaN.

    Args:
        model: The loaded model.
        name: Its folder or its name on the hub.
        key: The key of the study file.
    """
    unusable = [
        tensor
        for tensor, values in model.named_parameters()
        if not all(map(math.isfinite, _extremes(values)))
    ]
    unusable += [
        tensor
        for tensor, values in model.named_buffers()
        if any(map(math.isnan, _extremes(values)))
    ]
    if unusable:
        raise BadInput(
            f"{key}: weights must be finite numbers, but {name} has NaN or infinity in"
            f" {count_text(len(unusable), 'tensor')}: {_listed(unusable)}; copy or save the model"
            " again, from a training that didn't diverge."
        )


def _has_finite_values(file: Path) -> bool:
    """Return False if a weight file has NaN or infinity in it, or can't be read by itself."""
    try:
        tensors = load_state_dict(file)  # mapped into memory, not copied
    except Exception:  # noqa: BLE001, libraries raise anything on a damaged file
        return False
    return all(math.isfinite(value) for tensor in tensors.values() for value in _extremes(tensor))


def _extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """Return a tensor's least and greatest value: NaN if it has one, zeros if it is quantized.

    On two CPU cores, `torch.isfinite` takes twenty times as long as `aminmax`.
    """
    if tensor.dtype not in _FLOATS or not tensor.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(tensor.detach())
    return low.item(), high.item()


def is_quantized(config: PreTrainedConfig) -> bool:
    """Return whether the weights are stored in a form that takes kernels of its own to load.

    transformers ignores a form that it doesn't know, and reads the files as any others.
    """
    form = getattr(config, "quantization_config", None)
    if not isinstance(form, dict):
        return form is not None
    return bool(AutoHfQuantizer.supports_quant_method(form))


def load(auto: Any, name: str, key: str, *, new_head: bool = True, **options: Any) -> Loaded:
    """Load a model.

    Args:
        auto: transformers' class.
        name: The model's folder or its name on the hub.
        key: The key of the study file, for messages.
        new_head: Whether parameters of the head may be missing.
        options: Options of `from_pretrained`.

    Raises:
        BadInput: Other tensors are missing, or any has another shape.
        Exception: transformers can't read the files, and raises an error of its own.
    """
    # ignore_mismatched_sizes makes it report those tensors, instead of raising an error without
    # names.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loaded = auto.from_pretrained(name, **options)
    of, instead = (
        type(model).__name__,
        "give a whole folder, as save_pretrained writes it, with its own config.json",
    )
    if others := sorted(loaded["mismatched_keys"]):
        shapes = [
            f"{tensor} ({_shape(stored)}, not {_shape(expected)})"
            for tensor, stored, expected in others
        ]
        problem = f"but {name} differs in {count_text(len(others), 'tensor')}: {_listed(shapes)}"
        raise BadInput(
            f"{key}: the tensors of {of} must have the shapes that config.json says, {problem};"
            f" {instead}."
        )
    missing = set(loaded["missing_keys"])
    new = (
        _of_head(model, missing, bool(options.get("trust_remote_code")))
        if new_head and missing
        else set()
    )
    if lost := sorted(missing - new):
        tensors = count_text(len(model.state_dict()), "tensor")
        problem = f"but those of {name} lack {len(lost)}: {_listed(lost)}"
        raise BadInput(f"{key}: the files must hold all {tensors} of {of}, {problem}; {instead}.")
    return Loaded(model, new, set(loaded["unexpected_keys"]))


def _of_head(model: PreTrainedModel, names: Collection[str], trust_remote_code: bool) -> set[str]:
    """Return those of the parameters that belong to a new head, which the base model lacks."""
    saved = model.config.architectures or ()
    if model.get_output_embeddings() is not None or type(model).__name__ in saved:
        # A language model's output layer was saved with it, as was the head of a model saved with
        # one.
        return set()
    try:
        with whole(), torch.device("meta"):
            base = AutoModel.from_config(model.config, trust_remote_code=trust_remote_code)
    except ValueError:  # transformers has no class for the base model
        base = model.base_model
    of_base, prefix = base.state_dict().keys(), f"{model.base_model_prefix}."
    # masked language models are saved without the pooler, which heads read
    if type(base).__name__ not in saved:
        of_base = {name for name in of_base if not name.startswith("pooler.")}
    return {name for name in names if name.removeprefix(prefix) not in of_base}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "one number"


def _weight_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def _unread(folder: Path) -> str:
    """Return the names of a folder's weight files if there is none that transformers reads."""
    if _read_files(folder):
        return ""
    found = (file for suffix in _UNREAD for file in folder.glob(f"*{suffix}"))
    return _listed([f"{file.name} ({_UNREAD[file.suffix]})" for file in sorted(found)])


def _damaged(folder: Path) -> str:
    """Return the paths of a folder's weight files that can't be read by themselves."""
    damaged = []
    for file in _weight_files(folder):
        try:
            load_state_dict(file, map_location="meta")  # loads only weights from pickles
        except Exception:  # noqa: BLE001, libraries raise anything on a damaged file
            damaged.append(str(file))
    return _listed(damaged)


@contextmanager
def whole() -> Iterator[None]:
    """Make and load whole models within, although ZeRO-3 is announced to transformers.

    transformers otherwise partitions any model that it makes or loads then.
    """
    before = announced._hf_deepspeed_config_weak_ref
    announced.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        announced._hf_deepspeed_config_weak_ref = before


def pretrained_model(
    kind: ModelKind, model: Model, config: PreTrainedConfig, attention: str | None, seed: int
) -> PreTrainedModel:
    """Return the model with its trained weights, in float32.

    DeepSpeed makes the half-precision copy and keeps the float32 weights as master weights. The
    model must be made after TrainingArguments, so that ZeRO-3 can partition it while it loads.
    Weights of a new head are drawn from the seed.

    Raises:
        BadInput: See `load`.
    """
    options = {
        "config": config,
        "dtype": torch.float32,
        **source(model),
        **attention_option(attention),
    }
    pretrained, new, _ = load(kind.auto(), str(model.name_or_path), MODEL_KEY, **options)
    if new:
        _draw_again(pretrained, new, seed)
    return pretrained


def _draw_again(model: PreTrainedModel, names: Collection[str], seed: int) -> None:
    """Draw these parameters as transformers does, but from the seed alone.

    How many numbers have been drawn before depends on the ZeRO stage.
    """
    untrained = {name: weights for name, weights in model.named_parameters() if name in names}
    for name, weights in untrained.items():
        weights._is_hf_initialized = False  # type: ignore[attr-defined]
        module = model.get_submodule(name.rpartition(".")[0])
        module._is_hf_initialized = False  # type: ignore[assignment]
    from transformers.trainer_utils import set_seed  # imports PEFT

    set_seed(seed)
    if not announced.is_deepspeed_zero3_enabled():
        model.initialize_weights()
        return
    from deepspeed import zero

    with zero.GatheredParameters(list(untrained.values()), modifier_rank=0):
        model.initialize_weights()
