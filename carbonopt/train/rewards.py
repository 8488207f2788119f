"""Rewards of completions, by the user's own function or by a reward model."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from carbonopt.core.errors import BadInput, shortened
from carbonopt.train import ranks
from carbonopt.train.data import templates
from carbonopt.train.data.pair_rows import Frame
from carbonopt.train.data.pairs import template_of
from carbonopt.train.data.tokens import check_draws_nothing
from carbonopt.train.failures import reason
from carbonopt.train.models import weights
from carbonopt.train.models.model import check_source, unloadable

if TYPE_CHECKING:
    from carbonopt.train.tasks.rlhf import RewardSource

# from prompts and completions to one number each
Rewards = Callable[[Sequence[str], Sequence[str]], list[float]]

_AT_ONCE = 32  # number of texts in a forward pass of a reward model


def load_rewards(source: "RewardSource", key: str) -> Rewards:
    """Return the rewards function of a source.

    Args:
        source: The function or model.
        key: The source's name in the study file.

    Raises:
        BadInput: There is no such function or model.
    """
    return (
        _of_function(source.python, key)
        if source.python is not None
        else _of_model(str(source.model), key)
    )


def check_weights(name: str, key: str) -> None:
    """Raise BadInput if a reward model lacks weights, those of its head included.

    No numbers are read.
    """
    check_source(name, f"workload.{key}.model")
    with unloadable(f"model of workload.{key}", name):
        config = AutoConfig.from_pretrained(name)
    if not weights.is_quantized(config):  # it may be for GPUs that this machine doesn't have
        kind = AutoModelForSequenceClassification
        weights.check_loading(kind, name, f"workload.{key}.model", config=config, new_head=False)


def _of_function(place: str, key: str) -> Rewards:
    path, _, name = place.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location(f"carbonopt_{Path(path).stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"workload.{key}.python: {path} can't be imported: {reason(error)}."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput(
            f"workload.{key}.python must be FILE.py:FUNCTION, but {path} has no function {name}."
        )

    def rewards(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        try:
            given = function(prompts=list(prompts), completions=list(completions))
        except (Exception, SystemExit) as error:
            raise BadInput(
                f"{name} of {path} fails: {type(error).__name__}: {reason(error)}."
            ) from error
        rule = (
            f"{name} of {path} must return a list of one finite number for each of the"
            f" {len(completions)} completions"
        )
        try:
            values = [float(value) for value in islice(given, len(completions) + 1)]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"{rule}, but returned {shortened(given)}.") from error
        if len(values) != len(completions) or not all(map(math.isfinite, values)):
            raise BadInput(f"{rule}, but returned {shortened(values)}.")
        return values

    return rewards


def _of_model(name: str, key: str) -> Rewards:
    """Return a function that scores prompts with completions, with a model of the task reward."""
    with unloadable(f"model of workload.{key}", name), weights.whole():
        tokenizer = AutoTokenizer.from_pretrained(name)
        model: Any
        model, _, _ = weights.load(
            AutoModelForSequenceClassification,
            name,
            f"workload.{key}.model",
            new_head=False,
            dtype=torch.float32,
        )
    weights.check_loaded_values(model, name, f"workload.{key}.model")
    check_draws_nothing(tokenizer, f"workload.{key}.model: the tokenizer of {name!r}")
    if model.config.num_labels != 1:
        rule = f"workload.{key}.model must be a reward model, which has one score"
        raise BadInput(
            f"{rule}, but {name} has {model.config.num_labels} outputs; give one of the task"
            " reward."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # The score is that of a row's last token that isn't the padding, as the configuration has it.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model, chat = model.to(ranks.device()).eval(), _Chat.of(tokenizer, key)

    @torch.no_grad()
    def rewards(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        texts = [
            prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if chat is not None and prompts[0].endswith(chat.asks):
            texts = [f"{chat.begins}{text.removeprefix(chat.begins)}{chat.ends}" for text in texts]
            frame = Frame.of([], [])  # as the task reward reads chats
        else:
            frame = Frame.around(tokenizer, texts[0], ends=False)
        # as Python numbers, which torch doesn't join with numpy's
        before, after = frame.before.tolist(), frame.after.tolist()
        scores: list[float] = []
        for start in range(0, len(texts), _AT_ONCE):
            rows = tokenizer(texts[start : start + _AT_ONCE], add_special_tokens=False)["input_ids"]
            rows = [[*before, *row, *after] for row in rows]
            batch = tokenizer.pad(
                {"input_ids": rows}, padding_side="right", return_tensors="pt"
            ).to(ranks.device())
            scores += model(**batch).logits[:, 0].float().tolist()
        return scores

    return rewards


class _Chat(NamedTuple):
    """The texts that a chat template writes around a chat and its answer."""

    begins: str  # the beginning-of-text token, or nothing
    asks: str  # before an answer
    ends: str  # after an answer

    @classmethod
    def of(cls, tokenizer: Any, key: str) -> "_Chat | None":
        """Return those of a tokenizer's template; None if it has none, or doesn't show them.

        Raises:
            BadInput: The template can't write a question with its answer.
        """
        if tokenizer.chat_template is None:
            return None
        asked, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
        options = {"tokenize": False}
        with template_of(tokenizer, f"workload.{key}.model"):
            alone = templates.apply(tokenizer, [asked], **options)
            prompt = templates.apply(tokenizer, [asked], add_generation_prompt=True, **options)
            whole = templates.apply(tokenizer, [asked, answer], **options)
        asks, answered = prompt.removeprefix(alone), f"{prompt}!"
        if not asks or not prompt.startswith(alone) or not whole.startswith(answered):
            return None
        begins = tokenizer.bos_token or ""
        return cls(begins if whole.startswith(begins) else "", asks, whole.removeprefix(answered))
