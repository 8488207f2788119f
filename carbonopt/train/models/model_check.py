"""Check whether trials can train a task's model.

The model is made, run once, and tested for being causal.
"""

import copy
import re
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedConfig, PreTrainedModel

from carbonopt.core.errors import BadInput
from carbonopt.core.extras import check_installed
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, values_of
from carbonopt.train import ranks
from carbonopt.train.failures import ran_out_of_memory, reason, refused
from carbonopt.train.models import model as models
from carbonopt.train.models.live_memory import LiveMemory
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.optim.muon import groups_of
from carbonopt.train.speed.float8_layers import train_in_float8
from carbonopt.train.tasks.trainer_task import TrainerTask

_LAYERS = 2  # models with two kinds of attention alternate them
_VOCABULARY = 64  # vocabulary size of the model for a causality check
_TOKENS = 12  # length of the input whose last token is changed
FLOAT8_CAPABILITY = (8, 9)  # the least compute capability whose GPUs have float8 products
# logits of earlier tokens may change by this fraction of the last token's change, in float32
_LEAK = 1e-4
# Logits may change with padding by this fraction of their change with another token. Of twelve
# small random models rounding changes them by at most 5e-5 of it (BERT), and the padding that
# ConvBERT reads by 5e-4 to 3e-2.
_PADDING_LEAK = 2e-4
MOST_RUN = 60_000_000  # parameters of a model that is run whole, 0.24 GB
_MOST_DRAWN = 1_000_000_000  # parameters of a model with few layers and a small vocabulary
UNMAKEABLE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError, ZeroDivisionError,
    AssertionError, RuntimeError,
)  # fmt: skip


def check_model(
    task: TrainerTask, config: PreTrainedConfig, space: Space, folder: PreparedFolder
) -> None:
    """Raise BadInput if trials can't train the task's model.

    Raises:
        BadInput: transformers or PEFT can't make the model with a setting of the space, it fails on
            the prepared examples, or a causal language model isn't causal.
    """
    check_settings(task, config, space)
    _check_loss(task, config, folder)
    if task.model_kind.auto_class == "AutoModelForCausalLM":
        check_causality(task.model_kind, config, task.workload.model.trust_remote_code)


def check_settings(task: TrainerTask, config: PreTrainedConfig, space: Space) -> None:
    """Raise BadInput if the model can't have what a dimension of the space asks for."""
    kind, trusted = task.model_kind, task.workload.model.trust_remote_code
    model_type = config.model_type
    lora_rank = max((int(rank) for rank in values_of(space["lora_rank"]) if rank), default=0)
    for attention in map(str, values_of(space["attention_implementation"])):
        sentence = (
            f"attention_implementation: {model_type} can't have {attention} here: {{}}; use another"
            " one."
        )
        with refused(sentence, *UNMAKEABLE), torch.device("meta"):
            models.random_model(kind, config, attention, trusted)
    if space["dropout"] is not None:
        models.with_dropout(config, 0.0)
    empty = models.empty_model(kind, config, trusted)
    if (
        True in values_of(space["gradient_checkpointing"])
        and not empty.supports_gradient_checkpointing
    ):
        raise BadInput(f"gradient_checkpointing: {model_type} can't have it; leave it out.")
    if space["weight_averaging"] is not None and any(
        isinstance(part, _BatchNorm) for part in empty.modules()
    ):
        why = (
            "its batch normalization has statistics of the weights that are trained, not of their"
            " average"
        )
        raise BadInput(f"weight_averaging: {model_type} can't have it: {why}; leave it out.")
    for scaling in map(str, values_of(space["float8"])):
        _check_float8(kind, config, scaling, trusted)
    if "muon" in values_of(space["optimizer"]):
        groups_of(empty, [], weight_decay=0.0)
    if lora_rank:
        with refused(f"lora_rank: PEFT can't adapt {model_type}: {{}}; leave it out.", *UNMAKEABLE):
            models.with_lora(kind, empty, lora_rank, inputs_need_gradients=False)


def _check_float8(kind: ModelKind, config: PreTrainedConfig, scaling: str, trusted: bool) -> None:
    """Raise BadInput if the GPU has no float8 products, or no layer of the model gains by them."""
    if scaling == "none":
        return
    check_installed("torchao", "float8", f"float8: {scaling}")
    _check_capability("float8", scaling, "none")
    model = models.empty_model(kind, config, trusted)
    with refused(f"float8: {config.model_type} can't have {scaling}: {{}}; use none.", ValueError):
        train_in_float8(model, scaling)


def _check_capability(name: str, value: str, instead: str) -> None:
    """Raise BadInput if there are GPUs, and they have no float8 products."""
    if not torch.cuda.is_available():
        return
    if (capability := torch.cuda.get_device_capability()) < FLOAT8_CAPABILITY:
        rule = (
            "{}: {} needs a GPU of compute capability {}.{} (Ada, Hopper) or above, but got {}.{}"
        )
        broken = rule.format(name, value, *FLOAT8_CAPABILITY, *capability)
        raise BadInput(f"{broken}; use {instead}.")


def check_output_layer(
    kind: ModelKind, config: PreTrainedConfig, layer: str, trust_remote_code: bool
) -> None:
    """Raise BadInput if a fused output layer can't replace the model's own.

    It also raises BadInput if the GPU has no float8 products and the layer needs them. The model
    runs without numbers, which takes no memory, to see what becomes of its logits.
    """
    if layer == "standard":
        return
    if layer == "fused_fp8":
        _check_capability("output_layer", layer, "fused")
    given, model_type = [], config.model_type
    untold = (
        f"output_layer: whether {model_type} can have a fused one can't be told, since the model"
        " doesn't run"
    )
    unrunnable = (ValueError, TypeError, KeyError, AttributeError, RuntimeError)
    with (
        refused(f"{untold} without numbers ({{}}); use standard.", *unrunnable),
        torch.device("meta"),
        LiveMemory(),  # it answers what models ask about their masks
    ):
        model = kind.auto().from_config(config, trust_remote_code=trust_remote_code)
        own = model.get_output_embeddings()
        own.register_forward_hook(lambda own, inputs, output: given.append(output))
        # Use a cache, which the Trainer turns off in saved models: masks are then made without
        # looking at data.
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=True).logits
    if type(own) is not torch.nn.Linear or not given or logits is not given[-1]:
        why = "it scales or caps its logits, or makes them with something else than a linear layer"
        raise BadInput(f"output_layer: {model_type} can't have a fused one: {why}; use standard.")
    with refused(f"output_layer: that of {model_type} {{}}; use standard.", ValueError):
        models.fuse_output_layer(model, layer, compiled=False)


def lacking(task: TrainerTask, config: PreTrainedConfig, space: Space) -> dict[str, str]:
    """Return the dimensions of a space that this model can't have, and why."""
    kind, trusted = task.model_kind, task.workload.model.trust_remote_code
    lacks = {}
    for name, domain in space.domains().items():
        try:
            check_settings(task, config, Space(**{name: domain}))
            if name == "output_layer":
                for layer in map(str, values_of(domain)):
                    check_output_layer(kind, config, layer, trusted)
        except BadInput as error:
            lacks[name] = str(error).removeprefix(f"{name}: ").removesuffix("; leave it out.")
    return lacks


def cut_down(
    kind: ModelKind, config: PreTrainedConfig, trust_remote_code: bool
) -> Iterator[PreTrainedConfig]:
    """Generate copies of the configuration with few layers, which are to be checked in turn.

    The first has two layers. If other kinds of layers follow, a second one has as many as it takes
    to have each kind.

    Raises:
        BadInput: transformers can't make the whole model.
    """
    yield _with_layers(config, _LAYERS)
    layers = _layers_of_each_kind(models.empty_model(kind, config, trust_remote_code))
    if layers > _LAYERS:
        yield _with_layers(config, layers)


def _with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    if hasattr(text, "num_hidden_layers"):
        text.num_hidden_layers = min(layers, text.num_hidden_layers)
    return small


def _layers_of_each_kind(model: Any) -> int:
    """Return how many of the model's first layers hold at least one of each kind."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    firsts = [0]
    for parts in model.modules():
        if isinstance(parts, torch.nn.ModuleList) and len(parts) == count:
            signatures = [_signature(part) for part in parts]
            firsts += map(signatures.index, set(signatures))
    return 1 + max(firsts)


def _signature(layer: torch.nn.Module) -> Hashable:
    """Return what is equal in layers of one kind: their classes, and settings that are no numbers.

    Numbers may differ in layers of one kind, as a layer's own place does, also within a name.
    """

    def setting(value: Any) -> bool | str:
        if isinstance(value, str):
            return re.sub(r"\d+", "", value)
        return value if isinstance(value, bool) else type(value).__name__

    return tuple(
        (name, type(part), frozenset((key, setting(value)) for key, value in vars(part).items()))
        for name, part in layer.named_modules()
    )


def with_few_tokens(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration with a small vocabulary."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.vocab_size = min(_VOCABULARY, text.vocab_size)
    if isinstance(pad := getattr(text, "pad_token_id", None), int):
        text.pad_token_id = min(pad, text.vocab_size - 1)
    return small


def _check_loss(task: TrainerTask, config: PreTrainedConfig, folder: PreparedFolder) -> None:
    """Raise BadInput if the model fails on the prepared examples.

    A large model runs with few layers. If that fails, the cut may be the reason: the error counts
    if the whole model, without numbers, fails in the same way.
    """
    if _parameters(task, config) <= MOST_RUN:
        error = _error(task, config, folder, ranks.device())
    else:
        error = _error_of_few_layers(task, config, folder)
    if error is None:
        return
    sentence = (
        f"{config.model_type} of this configuration can't be trained on these data:"
        f" {type(error).__name__}"
    )
    raise BadInput(f"{sentence}: {reason(error)}; use another model or configuration.") from error


def _error_of_few_layers(
    task: TrainerTask, config: PreTrainedConfig, folder: PreparedFolder
) -> Exception | None:
    """Return an error that both the model with few layers and the whole one have, or None."""
    try:
        for run in cut_down(task.model_kind, config, task.workload.model.trust_remote_code):
            if _parameters(task, run) > MOST_RUN:
                return None
            if (error := _error(task, run, folder, ranks.device())) is not None:
                of_whole = _error(task, config, folder, torch.device("meta"))
                return error if repr(of_whole) == repr(error) else None
    except (BadInput, *UNMAKEABLE):  # the model can't have few layers
        pass
    return None


def _parameters(task: TrainerTask, config: PreTrainedConfig) -> int:
    return models.parameter_count(task.model_kind, config, task.workload.model.trust_remote_code)


def _error(
    task: TrainerTask, config: PreTrainedConfig, folder: PreparedFolder, device: torch.device
) -> Exception | None:
    """Return the error of making the model and computing a micro batch's loss, or None.

    Weights are random. Running out of memory counts as no error.
    """
    # some kernels of GPUs take no float32
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trusted = task.workload.model.trust_remote_code
    try:
        with torch.random.fork_rng(), torch.no_grad():
            with device:
                model: Any = task.model_kind.auto().from_config(
                    config, dtype=dtype, trust_remote_code=trusted
                )
            task.example_loss(model, folder)
    except UNMAKEABLE as error:
        return None if ran_out_of_memory(str(error)) else error
    return None


def check_causality(kind: ModelKind, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Raise BadInput if the logits of tokens change when a later token does.

    The model is made with few layers and random weights, and the last of some tokens is changed. A
    model that can't be cut down, or is too wide to be drawn, passes.
    """
    leaks = False
    try:
        for cut in cut_down(kind, config, trust_remote_code):
            small = with_few_tokens(cut)
            if models.parameter_count(kind, small, trust_remote_code) > _MOST_DRAWN:
                break
            with torch.random.fork_rng(), ranks.device():
                model = kind.auto().from_config(
                    small, dtype=torch.float32, trust_remote_code=trust_remote_code
                )
                leaks = leaks or _looks_ahead(model)
    except (BadInput, *UNMAKEABLE):
        pass
    if leaks:
        decides = getattr(config.get_text_config(), "is_decoder", None) is False
        instead = "give its configuration is_decoder: true" if decides else "use another model"
        rule = "the model must predict each token from those before it"
        raise BadInput(
            f"{rule}, but {config.model_type} of this configuration looks ahead; {instead}."
        )


def _looks_ahead(model: PreTrainedModel) -> bool:
    model.eval()
    vocab_size = model.config.get_text_config().vocab_size
    # Tokens come from the middle of the vocabulary: a padding token, often one of the first or
    # last, could mask others.
    tokens = (vocab_size // 2 + torch.arange(_TOKENS, device=model.device))[None] % vocab_size
    changed = tokens.clone()
    changed[0, -1] = tokens[0, 0]
    with torch.no_grad():
        logits, others = (
            model(input_ids=read, use_cache=False).logits for read in (tokens, changed)
        )
    change = (logits - others).abs()
    return bool(change[:, :-1].max() > _LEAK * change[:, -1].max())


def padding_note(kind: ModelKind, config: PreTrainedConfig, trust_remote_code: bool) -> str | None:
    """Return a note if a classifier's logits for a text depend on the padding after it, else None.

    The model is made with few layers and random weights. None also for a model that can't be cut
    down, doesn't run, or is too wide to be drawn quickly.
    """
    if kind.auto_class != "AutoModelForSequenceClassification":
        return None
    reads = False
    try:
        small = _with_layers(config, _LAYERS)
        if hasattr(small.get_text_config(), "vocab_size"):
            small = with_few_tokens(small)
        if models.parameter_count(kind, small, trust_remote_code) <= MOST_RUN:
            with torch.random.fork_rng(), ranks.device():
                torch.manual_seed(0)  # the answer is the same at each preparation
                model = kind.auto().from_config(
                    small, dtype=torch.float32, trust_remote_code=trust_remote_code
                )
                reads = _reads_padding(model)
    except (BadInput, *UNMAKEABLE):
        pass
    if not reads:
        return None
    return (
        f"The logits of {config.model_type} for a text depend on how much padding follows it, and"
        " so on the other texts of its batch: its quality depends on batch sizes and on the number"
        " of GPUs, too."
    )


def _reads_padding(model: PreTrainedModel) -> bool:
    """Return whether the logits of a short text change with padding.

    The change is compared with that by another token.
    """
    model.eval()
    text = model.config.get_text_config()
    padding, end = getattr(text, "pad_token_id", None), getattr(text, "eos_token_id", None)
    vocab_size = getattr(text, "vocab_size", _VOCABULARY)
    usual = torch.tensor([token for token in range(vocab_size) if token not in (padding, end)])
    length = _TOKENS // 2 - 1  # short enough that the padding is near the first token
    alone = usual[len(usual) // 2 + torch.arange(length)][None]
    if isinstance(end, int) and end < vocab_size:
        alone[0, -1] = end  # encoder-decoders read it
    changed = alone.clone()
    changed[0, -2] = usual[0]
    padded = torch.nn.functional.pad(alone, (0, _TOKENS), value=padding or 0)
    is_token = torch.arange(length + _TOKENS)[None] < length
    with torch.no_grad():
        logits, others, longer = (
            model(input_ids=read, attention_mask=is_token[:, : read.shape[1]].long()).logits
            for read in (alone, changed, padded)
        )
    change = (longer - logits).abs().max()
    return bool(change > _PADDING_LEAK * (others - logits).abs().max())
