"""Prompts with responses, and chats, as tokens with a mark on those of the responses."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from carbonopt.core.errors import BadInput
from carbonopt.train.data import templates
from carbonopt.train.data.messages import Message, read_messages
from carbonopt.train.data.packing import Indices
from carbonopt.train.data.rows import Row
from carbonopt.train.failures import refused

_AT_ONCE = 1000  # number of texts tokenized together
# The statement that encloses the assistant's tokens in some chat templates.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # first character and the one after the last


class Chat(NamedTuple):
    messages: list[Message]
    where: str  # where the row stands, for errors
    are_texts: bool = False  # whether they are two texts, which need no chat template

    @property
    def answers(self) -> bool:
        """True if the assistant says anything in response to a message."""
        return any(_is_response(self.messages, index) for index in range(len(self.messages)))

    def check_roles(self) -> None:
        """Check that the assistant is not called otherwise.

        Raises:
            BadInput: if a chat of several messages has none of the assistant, but of unknown roles.
        """
        roles = list(dict.fromkeys(message["role"] for message in self.messages))
        others = [role for role in roles if role not in templates.USUAL_ROLES]
        if len(self.messages) > 1 and others and "assistant" not in roles:
            raise BadInput(
                "a chat's responses must have the role assistant, but the roles of"
                f" {self.where} are {', '.join(map(repr, roles))}; rename them, such as gpt to"
                " assistant and human to user."
            )


class Marked(NamedTuple):
    tokens: Indices  # int64 [tokens]
    in_response: npt.NDArray[np.bool_]  # [tokens]


def prompt_and_response(row: Row, prompt_column: str, response_column: str) -> Chat:
    """Make a chat of a row's prompt and response, both texts or both lists of messages.

    The messages of a prompt are not learned.

    Raises:
        BadInput: if they are neither.
    """
    values = [row.values[column] for column in (prompt_column, response_column)]
    if not any(isinstance(value, list) for value in values):
        user, assistant = row.text(prompt_column), row.text(response_column)
        texts = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return Chat(texts, row.where, are_texts=True)
    rule = (
        f"columns {prompt_column!r} and {response_column!r} must both hold text, or both lists of"
        " messages with a role and a content"
    )
    prompt, response = (read_messages(value, rule, row.where) for value in values)
    read = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in prompt]
    return Chat([*read, *response], row.where)


def chat_messages(row: Row, column: str) -> Chat:
    """Return a row's chat; a missing value is a chat without messages.

    Raises:
        BadInput: if the value is no list of messages.
    """
    rule = (
        f"column {column!r} must hold lists of messages, each with a role and a content that are"
        " text (or from and value, from human, gpt or system)"
    )
    return Chat(read_messages(row.values[column], rule, row.where), row.where)


def marked(
    chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, plain: bool
) -> Iterator[Marked]:
    """Tokenize each chat and mark the tokens of its responses.

    A token that begins in the prompt and ends in the response belongs to the response.

    Args:
        plain: True to join prompt and response as they are, after the beginning-of-text token if
            the tokenizer puts one before texts, and before its end-of-text token, which is part of
            the response. False to write them with the tokenizer's chat template.

    Raises:
        BadInput: if the tokenizer can't say which characters a token has, or its template refuses a
            chat or doesn't show which part is the assistant's.
    """
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise BadInput(
            "the tokenizer must be a fast one, which knows the characters of a token, but is a"
            f" {kind}."
        )
    if plain:
        yield from _plain(chats, tokenizer)
    elif _GENERATION.search(_template(tokenizer)):
        yield from (_by_generation(chat, tokenizer) for chat in chats)
    else:
        yield from _by_spans([_by_prefixes(chat, tokenizer) for chat in chats], tokenizer)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    with refused("the tokenizer's chat template can't be used: {}.", ValueError):
        template: str = tokenizer.get_chat_template()
    return template


def _speaks(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip())


def _is_response(messages: Sequence[Message], index: int) -> bool:
    """Return whether a message is a response.

    A message of the assistant is none if it is the first one, has no words, or has the weight 0.
    """
    return index > 0 and _speaks(messages[index]) and messages[index].get("weight") != 0


def _plain(chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase) -> Iterator[Marked]:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    first = [begin] if begin is not None and tokenizer("")["input_ids"][:1] == [begin] else []
    last = [] if end is None else [end]
    texts = ([message["content"] for message in chat.messages] for chat in chats)
    spanned = [
        (prompt + response, [(len(prompt), len(prompt + response))]) for prompt, response in texts
    ]
    for tokens, in_response in _by_spans(spanned, tokenizer):
        ids = np.concatenate([np.array(first, np.int64), tokens, np.array(last, np.int64)])
        yield Marked(
            ids, np.concatenate([np.zeros(len(first), bool), in_response, np.ones(len(last), bool)])
        )


def _by_spans(
    spanned: Sequence[tuple[str, list[Span]]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Marked]:
    """Mark the tokens that end within a text's spans.

    The end counts since some tokenizers leave white space at a token's beginning or end out of its
    characters.
    """
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    for start in range(0, len(spanned), _AT_ONCE):
        texts, spans = zip(*spanned[start : start + _AT_ONCE], strict=True)
        encoded = tokenizer(list(texts), **options)
        for ids, offsets, of_text in zip(
            encoded["input_ids"], encoded["offset_mapping"], spans, strict=True
        ):
            ends = np.array([end for _, end in offsets], np.int64)
            inside = [(first < ends) & (ends <= last) for first, last in of_text]
            yield Marked(
                np.array(ids, np.int64), np.logical_or.reduce([np.zeros(len(ids), bool), *inside])
            )


@contextmanager
def _rendering(chat: Chat) -> Iterator[None]:
    with refused(
        f"the tokenizer's chat template refuses {chat.where}: {{}}.",
        jinja2.TemplateError,
        TypeError,
    ):
        yield


def _by_generation(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> Marked:
    if any(message.get("weight") == 0 for message in chat.messages[1:] if _speaks(message)):
        raise BadInput(
            "the tokenizer's chat template marks all that the assistant says, but"
            f" {chat.where} has an answer that is not to be learned (in its prompt, or with weight"
            " 0); give a tokenizer whose template is without {% generation %}."
        )
    with _rendering(chat):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded: Any = templates.apply(tokenizer, chat.messages, **options)
    in_response = np.array(encoded["assistant_masks"], bool)
    if not in_response.any():
        raise BadInput(
            f"the tokenizer's chat template marks no token of {chat.where} as the assistant's."
        )
    return Marked(np.array(encoded["input_ids"], np.int64), in_response)


def _by_prefixes(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """Write a chat with the template, and return the text with the spans of its responses.

    A response is what the template writes for it after the text that prompts for it.
    """
    messages, spans = chat.messages, []

    def text_of(count: int, prompts: bool = False) -> str:
        with _rendering(chat):
            return str(
                templates.apply(
                    tokenizer, messages[:count], tokenize=False, add_generation_prompt=prompts
                )
            )

    whole = text_of(len(messages))
    for index in range(len(messages)):
        if not _is_response(messages, index):
            continue
        before, after = text_of(index, prompts=True), text_of(index + 1)
        if not (after.startswith(before) and whole.startswith(after)):
            rule = (
                "the tokenizer's chat template must write a chat's beginning as it writes the whole"
                " chat"
            )
            instead = (
                "give a tokenizer whose template has {% generation %} around what the assistant"
                " says"
            )
            raise BadInput(
                f"{rule}, but writes message {index + 1} of {chat.where} in another way; {instead}."
            )
        spans.append((len(before), _end(after, tokenizer)))
    return whole, spans


def _end(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return where a turn ends in a text.

    The line break that many templates write after the turn's last special token belongs to the next
    turn.
    """
    stripped = text.rstrip()
    return len(stripped if stripped.endswith(tuple(tokenizer.get_added_vocab())) else text)


def texts_of(chats: Sequence[Chat]) -> list[str]:
    """Return all that is said in the chats, to train a tokenizer on."""
    return [text for chat in chats for message in chat.messages if (text := message["content"])]
