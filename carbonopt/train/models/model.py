"""The workload's model: its configuration, which is checked, and the model that a trial trains.

`weights` reads what is in the files of pretrained models.
"""

import copy
import inspect
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from carbonopt.core.errors import BadInput
from carbonopt.core.files import parsed_json
from carbonopt.core.refusals import hint
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.trial_spec import Prepared, TrialSpec
from carbonopt.spec.workload_settings import Model, ModelWorkload
from carbonopt.train.failures import refused
from carbonopt.train.models import varlen_attention
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.speed.output_layer import FusedOutputLayer

MODEL_KEY = "workload.model.name_or_path"
# Fields of configurations that count layers; with 0 transformers builds a model without layers.
_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers",
)  # fmt: skip
# Names of the number of heads and of the width in models' configurations.
_WIDTHS = (
    "num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "encoder_attention_heads",
    "decoder_attention_heads", "hidden_size", "n_embd", "d_model",
)  # fmt: skip
# Fields of configurations that give a model dropout; those of heads and of whole layers are other
# methods.
_DROPOUTS = (
    "dropout", "dropout_rate", "hidden_dropout", "hidden_dropout_prob", "attention_dropout",
    "resid_dropout", "attention_probs_dropout_prob", "activation_dropout", "embed_dropout",
    "resid_pdrop", "embd_pdrop", "emb_pdrop", "attn_pdrop", "embedding_dropout", "mlp_dropout",
    "residual_dropout",
)  # fmt: skip
# parameters in float32, 1 GB of the host's memory, beside another trial that runs
_MOST_PREFETCHED = 250_000_000

# The next trial's random model: its folder and seed, the model, and the states of Python's, NumPy's
# and torch's generators after it was drawn.
_prefetched: (
    tuple[tuple[PreparedFolder, int], PreTrainedModel, tuple[Any, Any, torch.Tensor]] | None
) = None


def model_config(
    kind: ModelKind, workload: ModelWorkload, tokenizer: PreTrainedTokenizerBase | None, **head: Any
) -> PreTrainedConfig:
    """Return the configuration of the workload's model, checked against the tokenizer.

    A configuration written in the study file gets the tokenizer's vocabulary and special tokens
    where it names none, because the library's defaults belong to another tokenizer.

    Args:
        kind: The kind of model that the task trains.
        workload: The workload, whose model is loaded or made.
        tokenizer: The tokenizer of a text model; None for others.
        head: Fields that the task sets for every model.

    Raises:
        BadInput: There is no such model, model type or field; the model is not of this kind; or it
            can't read the tokenizer's ids or sequences of the workload's length.
    """
    model = workload.model
    if model.from_config is None:
        name = str(model.name_or_path)
        check_source(name, MODEL_KEY, model.revision)
        with unloadable("model", name):
            config: PreTrainedConfig = AutoConfig.from_pretrained(name, **source(model), **head)
    else:
        if given := head.keys() & model.from_config.keys():
            raise BadInput(
                f"workload.model.from_config can't have {min(given)}: the data says it; leave it"
                " out."
            )
        special = {
            name: getattr(tokenizer, name, None)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        defaults = {} if tokenizer is None else {"vocab_size": id_count(tokenizer), **special}
        config = _written_config(kind, model.from_config, {**defaults, **head})
    if tokenizer is not None:
        is_pretrained = model.from_config is None
        _check_text(config, id_count(tokenizer), workload.sequence_length, is_pretrained)
    return config


def check_source(name: str, key: str, revision: str | None = None) -> None:
    """Check that a name stands for a whole model, before any of its files are loaded.

    Args:
        name: The model's folder or its name on the hub.
        key: The key of the study file.
        revision: The revision on the hub.

    Raises:
        BadInput: There is an adapter, no configuration in a folder, or one with sizes below 1 or a
            type that torch doesn't have.
    """
    folder = Path(name)
    if folder.is_file():
        raise BadInput(
            f"{key} must be a model's folder or its name on a hub, but {name} is a file."
        )
    with unloadable("model", name):
        adapter = find_adapter_config_file(name, revision=revision)
    # transformers loads an adapter with the model, and freezes the model's own weights.
    if adapter is not None:
        raise BadInput(
            f"{key} must be a whole model, but {name} has an adapter, in adapter_config.json; merge"
            " it into its model (PEFT's merge_and_unload) and give the folder that save_pretrained"
            " writes then, or give the model alone, without the adapter's files."
        )
    if not folder.is_dir():
        return
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise BadInput(f"{key} must be a model's folder, but {folder} has no config.json.")
    try:
        values = parsed_json(file.read_bytes())
    except ValueError:  # transformers refuses it, with the reason
        return
    if isinstance(values, dict):
        # A published model may lack one half of an encoder and a decoder.
        sizes = {key: value for key, value in values.items() if "coder_layers" not in key}
        _check_sizes(sizes, f"{key}: {file}: ")
        _check_types(values, f"{key}: {file}: ")


def _check_types(values: dict[str, Any], where: str) -> None:
    """Raise BadInput for a type that is none of torch's, such as `auto`.

    Args:
        values: A model's configuration, which may have those of its parts in it.
        where: The place of its fields, for the message.
    """
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("_config"):
            _check_types(value, f"{where}{name}.")
            continue
        if name not in ("dtype", "torch_dtype") or not isinstance(value, str):
            continue
        if not isinstance(getattr(torch, value, None), torch.dtype):
            raise BadInput(
                f"{where}{name} must be one of torch's types, such as float32 or bfloat16, but got"
                f" {value!r}; write the type of the stored weights, or take {name} out."
            )


def _check_sizes(values: dict[str, Any], where: str) -> None:
    """Raise BadInput for a size below 1, which the libraries take or fail at without naming it.

    Args:
        values: A model's configuration.
        where: The place of its fields, for the message.
    """
    for name, value in values.items():
        if name in (*_LAYERS, *_WIDTHS) and isinstance(value, int) and value < 1:
            raise BadInput(f"{where}{name} must be at least 1, but got {value}.")


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's largest token id plus one.

    Ids may have gaps, so a tokenizer can have fewer tokens than this.
    """
    return 1 + max(tokenizer.get_vocab().values())


def _check_text(
    config: PreTrainedConfig, ids: int, length: int | None, is_pretrained: bool
) -> None:
    text_config = config.get_text_config()
    if ids > text_config.vocab_size:
        rule = "the model's vocab_size must be above the tokenizer's largest token id"
        instead = "use the model's own tokenizer or leave vocab_size out"
        if is_pretrained:
            instead = (
                "use the model's own tokenizer or, if tokens were added to it, give the model"
                " embeddings for them (model.resize_token_embeddings) and save it again"
            )
        raise BadInput(f"{rule}, but got {text_config.vocab_size} and {ids - 1}; {instead}.")
    positions = getattr(text_config, "max_position_embeddings", None)
    if length is not None and isinstance(positions, int) and 0 < positions < length:
        rule = "workload.sequence_length must be at most the model's number of positions"
        raise BadInput(f"{rule}, but got {length} and {positions}.")


def source(model: Model) -> dict[str, Any]:
    """Return the options, beside the name, with which transformers loads a model."""
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}


def save_config(config: PreTrainedConfig, folder: PreparedFolder, model: Model) -> None:
    """Write the configuration that trials read, with the code of a model that brings its own."""
    config.save_pretrained(folder.model_config)
    if model.trust_remote_code:
        copy_code(Path(str(model.name_or_path)), folder.model_config)


def saved_config(folder: PreparedFolder, trust_remote_code: bool) -> PreTrainedConfig:
    """Read what `save_config` wrote."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        folder.model_config, trust_remote_code=trust_remote_code
    )
    return config


def copy_code(source_folder: Path, target: Path) -> None:
    """Copy the Python files of a local model or tokenizer.

    transformers leaves them behind when it saves a model. A hub model's configuration names the
    repository of its code instead.
    """
    for file in source_folder.glob("*.py") if source_folder.is_dir() else ():
        shutil.copy2(file, target / file.name)


def _written_config(
    kind: ModelKind, written: dict[str, Any], defaults: dict[str, Any]
) -> PreTrainedConfig:
    """Make a configuration from the study file's fields and refuse unknown ones.

    transformers accepts any field silently, and a misspelt one would train a model of the default
    size.
    """
    fields = dict(written)
    model_type = fields.pop("model_type")
    if model_type not in (types := kind.model_types()):
        rule = (
            f"workload.model.from_config.model_type must be a {kind.name} that transformers knows"
        )
        raise BadInput(f"{rule}, but got {model_type!r}; {hint(str(model_type), types)}")
    config_class = CONFIG_MAPPING[model_type]
    known = {
        name
        for name in inspect.signature(config_class.__init__).parameters
        if name not in ("self", "kwargs")
    }
    known |= config_class.attribute_map.keys()
    if "rope_parameters" in known:
        # the spelling before transformers 5, which is still read
        known |= {"rope_theta", "rope_scaling"}
    if unknown := [name for name in fields if name not in known]:
        sentence = f"workload.model.from_config has the unknown field {unknown[0]} for {model_type}"
        raise BadInput(f"{sentence}; {hint(unknown[0], sorted(known))}")
    _check_sizes(fields, "workload.model.from_config.")
    with refused(f"workload.model.from_config is not a {model_type}: {{}}.", TypeError, ValueError):
        return config_class(**(defaults | fields))


@contextmanager
def unloadable(what: str, name: str) -> Iterator[None]:
    """Raise BadInput where transformers can't load that model or tokenizer."""
    sentence = f"can't load the {what} {name!r} ({{}}); "
    instead = (
        "copy or save it again, with all its files"
        if Path(name).is_dir()
        else "give a local folder that holds one, or a hub name while online"
    )
    with (
        refused(f"{sentence}{instead}.", OSError, ValueError, KeyError),
        refused(f"{sentence}install the package that it needs.", ImportError),
    ):
        yield


def with_dropout(config: PreTrainedConfig, dropout: float | None) -> PreTrainedConfig:
    """Return a copy of the configuration with this dropout wherever the model has dropout.

    With None, return the configuration itself.

    Raises:
        BadInput: A model of this type has no dropout.
    """
    if dropout is None:
        return config
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    # DBRX keeps the dropout of attention in a nested configuration. One that has layers is another
    # model (the image model of Git).
    nested = [
        part
        for part in vars(text).values()
        if isinstance(part, PreTrainedConfig) and not _has_layers(part)
    ]
    places = [(part, name) for part in (text, *nested) for name in _DROPOUTS]
    places = [
        (part, name) for part, name in places if isinstance(getattr(part, name, None), int | float)
    ]
    if not places:
        raise BadInput(f"dropout: {config.model_type} has none in its configuration; leave it out.")
    sentence = (
        f"dropout: {config.model_type} can't have it: its configuration refuses {{}}; leave it out."
    )
    # MPT's dropout is a whole number; its check raises an error of its own, unlike any other's
    with refused(sentence, Exception):
        for part, name in places:
            setattr(part, name, dropout)
    return changed


def _has_layers(config: PreTrainedConfig) -> bool:
    return any(hasattr(config, name) for name in _LAYERS)


def parameter_count(kind: ModelKind, config: PreTrainedConfig, trust_remote_code: bool) -> int:
    """Count the model's parameters, tied ones once."""
    model = empty_model(kind, config, trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def has_experts(model: torch.nn.Module) -> bool:
    """Return whether a token passes through only some of the model's weights, those of experts.

    Models say so in nothing but the names of modules and classes.
    """
    for name, part in model.named_modules():
        own_name, kind = name.rpartition(".")[2].lower(), type(part).__name__.lower()
        if "expert" in own_name or "expert" in kind or kind.endswith("moe"):
            return True
    return False


def empty_model(kind: ModelKind, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """Return the model without numbers, on torch's meta device, where it takes no memory.

    Raises:
        BadInput: transformers can't make the model.
    """
    sentence = (
        f"transformers can't make a {kind.name} of this {config.model_type} configuration: {{}}."
    )
    unmakeable = (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ZeroDivisionError,
        AssertionError,
    )
    with refused(sentence, *unmakeable), torch.device("meta"):
        return kind.auto().from_config(config, trust_remote_code=trust_remote_code)


def random_model(
    kind: ModelKind, config: PreTrainedConfig, attention: str | None, trust_remote_code: bool
) -> Any:
    """Return a model with random weights, whole on every rank.

    The weights are drawn from torch's global generator. The model must be made before
    TrainingArguments: once those announce ZeRO-3 to transformers, weights are drawn piecewise and
    in another order, and the same seed would mean another model for each ZeRO stage.
    """
    options = {
        "dtype": torch.float32,
        "trust_remote_code": trust_remote_code,
        **attention_option(attention),
    }
    return kind.auto().from_config(config, **options)


def prefetch_model(kind: ModelKind, folder: PreparedFolder, prepared: Prepared, seed: int) -> None:
    """Draw the model of the prepared configuration, written in the study file, for the next trial.

    A model that is too big to keep in memory until then is not drawn.
    """
    global _prefetched
    if (prepared.model_parameters or 0) > _MOST_PREFETCHED:
        return
    config = saved_config(folder, trust_remote_code=False)
    if hasattr(config, "auto_map"):  # its class comes from outside code, which the trial loads
        return
    from transformers.trainer_utils import set_seed  # imports PEFT

    set_seed(seed)
    model = random_model(kind, config, attention=None, trust_remote_code=False)
    _prefetched = (
        (folder, seed),
        model,
        (random.getstate(), np.random.get_state(), torch.get_rng_state()),
    )


def take_prefetched_model(spec: TrialSpec) -> PreTrainedModel | None:
    """Return the prefetched model, once, if the trial would draw the same one from its seed now.

    The random generators then stand as if the trial had just drawn it.
    """
    global _prefetched
    prefetched, _prefetched = _prefetched, None
    if prefetched is None or (spec.params.attention_implementation, spec.params.dropout) != (
        None,
        None,
    ):
        return None
    drawn_of, model, (python, numpy, cpu) = prefetched
    if drawn_of != (PreparedFolder(Path(spec.prepared_dir)), spec.seed):
        return None
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    return model


def attention_option(name: str | None) -> dict[str, str]:
    """Return transformers' option for an attention; None stands for the model's own."""
    if name == varlen_attention.VARLEN:
        varlen_attention.register()
    return {} if name is None else {"attn_implementation": name}


def fuse_output_layer(model: PreTrainedModel, layer: str, compiled: bool) -> None:
    """Replace the model's output layer, which passed `check_output_layer`, with a fused one."""
    own = model.get_output_embeddings()
    assert isinstance(own, torch.nn.Linear)
    model.set_output_embeddings(
        FusedOutputLayer(own, float8=layer == "fused_fp8", compiled=compiled)
    )


def with_lora(
    kind: ModelKind, model: PreTrainedModel, rank: int, inputs_need_gradients: bool
) -> Any:
    """Return the model with low-rank adapters on all its linear layers.

    Of the remaining weights only those of the head, if there is one, are trained.

    Args:
        inputs_need_gradients: Whether the first block's inputs must have gradients, although the
            embedding has none: checkpoints and ZeRO-3's leaves don't train a block without.
    """
    import peft

    if inputs_need_gradients:
        model.enable_input_require_grads()
    alpha = 2 * rank  # keeps the adapters' scale as the rank changes; the usual choice
    whole = head_names(model) or None  # modules on top of a pretrained model were not pretrained
    config = peft.LoraConfig(
        task_type=kind.peft_task_type,
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        modules_to_save=whole,
    )
    return peft.get_peft_model(model, config)


def head_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules on top of the base model that have parameters of their own.

    A language model has none: its output layer came with it.
    """
    if model.base_model is model or model.get_output_embeddings() is not None:
        return []
    parts = model.named_children()
    return [
        name
        for name, part in parts
        if part is not model.base_model and any(True for _ in part.parameters())
    ]
