"""Check whether a model's own settings of generation let trials generate."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from carbonopt.core.errors import BadInput
from carbonopt.spec.workload_settings import Model
from carbonopt.train.failures import reason
from carbonopt.train.models import model as models
from carbonopt.train.models.model_check import MOST_RUN, UNMAKEABLE, cut_down
from carbonopt.train.models.model_kind import ModelKind

# Options of `generate` for one plain sequence a prompt, which a model's own settings can change.
ONE_EACH = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
# Looking up tokens in the prompt saves time for a single prompt and is refused for several.
GREEDY: dict[str, Any] = {
    **ONE_EACH,
    "do_sample": False,
    "prompt_lookup_num_tokens": None,
    "use_cache": True,  # gradient checkpointing switches it off
}
_FILES = ("generation_config.json", "config.json")  # transformers reads the first that exists


def check_generation(
    kind: ModelKind,
    model: Model,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
) -> None:
    """Raise BadInput if trials can't generate because of the model's own settings.

    A model with random weights generates two texts at once. An error counts if there is none
    without the settings. A model that is large even with few layers is not tried.

    Args:
        kind: The kind of model that the task trains.
        model: The workload's model.
        config: Its configuration.
        tokenizer: Its tokenizer.
        options: What trials give `generate`, beside the prompts and `max_new_tokens`.
    """
    settings = None if model.name_or_path is None else _own_settings(model)
    configs = (config, next(cut_down(kind, config, model.trust_remote_code)))
    sizes = [models.parameter_count(kind, each, model.trust_remote_code) for each in configs]
    if settings is None or min(sizes) > MOST_RUN:
        return
    tried = configs[sizes[0] > MOST_RUN]
    with torch.random.fork_rng():
        network = models.random_model(kind, tried, None, model.trust_remote_code).eval()
    plain = network.generation_config
    error = _error(network, settings, tokenizer, options)
    if error is None or _error(network, plain, tokenizer, options) is not None:
        return
    for name in settings.to_diff_dict():
        others = copy.deepcopy(settings)
        setattr(others, name, None)
        if _error(network, others, tokenizer, options) is None:
            break
    else:
        name = "all settings"
    raise BadInput(
        f"trials must be able to generate with {model.name_or_path}'s own generation_config.json,"
        f" but transformers refuses it: {reason(error)}; take {name} out of that file."
    ) from error


def _own_settings(model: Model) -> GenerationConfig | None:
    """Return the settings with which transformers loads the model, or None if it has none."""
    for file in _FILES:
        try:
            return GenerationConfig.from_pretrained(
                str(model.name_or_path), file, revision=model.revision or "main"
            )
        except OSError:
            continue
    return None


@torch.no_grad()
def _error(
    network: Any,
    settings: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
) -> Exception | None:
    """Return the error of generating with these settings as the model's own, or None."""
    network.generation_config = settings
    ids = torch.full((2, 2), int(tokenizer.eos_token_id or 0))
    try:
        with torch.random.fork_rng():
            network.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **options
            )
    except (OSError, *UNMAKEABLE) as error:
        return error
    return None
