"""The workload's model: its configuration, checked, and the model that a trial trains."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from carbonopt.core.config import Model, Workload
from carbonopt.core.errors import BadInput, hint
from carbonopt.train.model_kind import ModelKind
from carbonopt.train.output_layer import FusedOutputLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_LORA_ALPHA_PER_RANK = 2  # lora_alpha = 2r keeps the adapters' scale as the rank changes; the usual choice
_FLOAT8_CAPABILITY = (8, 9)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_config(
    kind: ModelKind, model: Model, tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> "PreTrainedConfig":
    """The model's configuration. One that is written in the study file gets the tokenizer's vocabulary and special
    tokens where it names none: the library's defaults belong to another tokenizer.

    Raises:
        BadInput: if there is no such model, model type or field, or it is not of that kind.
    """
    if model.from_config is None:
        return _pretrained_config(model)
    fields = dict(model.from_config)
    model_type = fields.pop("model_type")
    config_class = _config_class(kind, model_type)
    _check_fields(fields, config_class, model_type)
    fields.setdefault("vocab_size", vocab_size)
    for name in _SPECIAL_TOKENS:
        fields.setdefault(name, getattr(tokenizer, name, None))
    try:
        return config_class(**fields)
    except (TypeError, ValueError) as error:
        raise BadInput(f"workload.model.from_config is not a {model_type}: {' '.join(str(error).split())}.") from error


def _pretrained_config(model: Model) -> "PreTrainedConfig":
    from transformers import AutoConfig

    name = str(model.name_or_path)
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise BadInput(f"workload.model.name_or_path must be a model's folder, but {name} has no config.json.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        return config
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadInput(unloadable("model", name, error)) from error


def _config_class(kind: ModelKind, model_type: str) -> "type[PreTrainedConfig]":
    from transformers import CONFIG_MAPPING

    if model_type not in (known := kind.model_types()):
        raise BadInput(
            f"workload.model.from_config.model_type must be a {kind.name} that transformers knows, "
            f"but got {model_type!r}; {hint(str(model_type), sorted(known))}"
        )
    return CONFIG_MAPPING[model_type]


def _check_fields(fields: dict[str, Any], config_class: "type[PreTrainedConfig]", model_type: str) -> None:
    """transformers takes any field without a word; a misspelt one would train a model of the default size."""
    known = {name for name in inspect.signature(config_class.__init__).parameters if name not in ("self", "kwargs")}
    known |= config_class.attribute_map.keys()
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}  # how it was written before transformers 5, and is still read
    for name in fields:
        if name not in known:
            raise BadInput(f"workload.model.from_config has the unknown field {name} for {model_type}; "
                           f"{hint(name, sorted(known))}")  # fmt: skip


def unloadable(what: str, name: str, error: Exception) -> str:
    """The sentence for a model or tokenizer that transformers can't load."""
    return (
        f"can't load the {what} {name!r} ({' '.join(str(error).split()):.300}); "
        "give a local folder that holds one, or a hub name while online."
    )


def check_model(config: "PreTrainedConfig", workload: Workload, vocab_size: int) -> None:
    """Raises BadInput if the model can't read the tokenizer's ids or sequences of the workload's length."""
    text_config = config.get_text_config()
    if vocab_size > text_config.vocab_size:
        raise BadInput(
            "the model's vocab_size must be at least the tokenizer's vocabulary, "
            f"but got {text_config.vocab_size} and {vocab_size}; use the model's own tokenizer or leave vocab_size out."
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < workload.sequence_length:
        raise BadInput(
            "workload.sequence_length must be at most the model's number of positions, "
            f"but got {workload.sequence_length} and {positions}."
        )


def fetch_weights(kind: ModelKind, model: Model) -> None:
    """Makes sure that a trained model's weights are there; a hub's are downloaded here, so that no trial has to wait.

    Raises:
        BadInput: if a folder has none or the hub doesn't give them.
    """
    if model.from_config is not None:
        return
    name = str(model.name_or_path)
    if Path(name).is_dir():
        if not any(path.suffix in (".safetensors", ".bin") for path in Path(name).iterdir()):
            raise BadInput(f"workload.model.name_or_path must be a model's folder, but {name} has no weights in it.")
        return
    try:
        kind.auto().from_pretrained(
            name, revision=model.revision, trust_remote_code=model.trust_remote_code, dtype="auto"
        )
    except (OSError, ValueError, ImportError) as error:
        raise BadInput(unloadable("model", name, error)) from error


def parameter_count(kind: ModelKind, config: "PreTrainedConfig", trust_remote_code: bool) -> int:
    """The model's parameters, tied ones counted once. Takes no memory: the model is made without its numbers."""
    try:
        with torch.device("meta"):
            model = kind.auto().from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, AssertionError) as error:
        raise BadInput(
            f"transformers can't make a {kind.name} of this {config.model_type} configuration: "
            f"{' '.join(str(error).split()):.300}."
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(
    kind: ModelKind, config: "PreTrainedConfig", attention: str | None, trust_remote_code: bool
) -> "PreTrainedModel":
    """A model with random weights, whole on every rank; draws from torch's global generator.

    It must be made before TrainingArguments: once those announce ZeRO-3 to transformers, the weights are drawn
    piecewise and in another order, and the same seed would mean another model for each ZeRO stage.
    """
    made: PreTrainedModel = kind.auto().from_config(
        config, dtype=torch.float32, trust_remote_code=trust_remote_code, **_attention(attention)
    )
    return made


def pretrained_model(kind: ModelKind, model: Model, attention: str | None) -> "PreTrainedModel":
    """The model with its trained weights, in float32: DeepSpeed makes the half-precision copy and keeps these as the
    master weights. It must be made after TrainingArguments, so that ZeRO-3 can partition while it loads."""
    made: PreTrainedModel = kind.auto().from_pretrained(
        str(model.name_or_path),
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        dtype=torch.float32,
        **_attention(attention),
    )
    return made


def check_output_layer(kind: ModelKind, config: "PreTrainedConfig", layer: str, trust_remote_code: bool) -> None:
    """Runs the model without numbers, which takes no memory, to see what becomes of its logits.

    Raises:
        BadInput: if an output layer of this kind can't replace the model's own, or the GPU has no float8 products.
    """
    if layer == "standard":
        return
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else _FLOAT8_CAPABILITY
    if layer == "fused_fp8" and capability < _FLOAT8_CAPABILITY:
        raise BadInput(
            f"output_layer: fused_fp8 needs a GPU of compute capability {_version(_FLOAT8_CAPABILITY)} (Ada, Hopper) "
            f"or above, but got {_version(capability)}; use fused."
        )
    given = []
    try:
        with torch.device("meta"):
            model = kind.auto().from_config(config, trust_remote_code=trust_remote_code)
            own = model.get_output_embeddings()
            own.register_forward_hook(lambda own, inputs, output: given.append(output))
            # With a cache, as models are saved without one by the Trainer: masks are then made without looking at data.
            logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=True).logits
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise BadInput(
            f"output_layer: whether {config.model_type} can have a fused one can't be told, since the model doesn't "
            f"run without numbers ({' '.join(str(error).split()):.200}); use standard."
        ) from error
    if type(own) is not torch.nn.Linear or not given or logits is not given[-1]:
        raise BadInput(
            f"output_layer: {config.model_type} can't have a fused one: it scales or caps its logits, or makes them "
            "with something else than a linear layer; use standard."
        )
    try:
        fuse_output_layer(model, layer, compiled=False)
    except ValueError as error:
        raise BadInput(f"output_layer: that of {config.model_type} {error}; use standard.") from error


def fuse_output_layer(model: "PreTrainedModel", layer: str, compiled: bool) -> None:
    """Puts a fused output layer in the place of the model's own, which must be one that `check_output_layer` lets
    through."""
    own = model.get_output_embeddings()
    assert isinstance(own, torch.nn.Linear)
    model.set_output_embeddings(FusedOutputLayer(own, float8=layer == "fused_fp8", compiled=compiled))


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _attention(name: str | None) -> dict[str, str]:
    return {} if name is None else {"attn_implementation": name}


def with_lora(kind: ModelKind, model: "PreTrainedModel", rank: int, gradient_checkpointing: bool) -> Any:
    """The model with low-rank adapters on all its linear layers; nothing else is trained any more."""
    import peft

    if gradient_checkpointing:
        model.enable_input_require_grads()  # or no gradient reaches the adapters through a frozen embedding
    config = peft.LoraConfig(
        task_type=kind.peft_task_type, r=rank, lora_alpha=_LORA_ALPHA_PER_RANK * rank, target_modules="all-linear"
    )
    return peft.get_peft_model(model, config)
