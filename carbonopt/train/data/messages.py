"""Messages of a chat in the forms in which data sets have them, as templates read them."""

from collections.abc import Mapping
from typing import Any

from carbonopt.core.errors import BadInput, shortened
from carbonopt.train.data import templates

Message = dict[str, Any]  # role and content, both text, and whatever else the template reads

# The senders of ShareGPT's messages, {from: .., value: ..}, by the roles that they have in others.
_SENDERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system",
}  # fmt: skip


def read_messages(value: Any, rule: str, where: str) -> list[Message]:
    """Return a column's value as messages whose role and content are text.

    A missing value is a chat without messages. Keys without a value are left out: Parquet gives
    each message the keys of all messages, and a template may take a key that is present for one
    that is meant. So it is with the arguments of all tools in each call.

    Args:
        rule: what the column must hold, for errors.
        where: where the row stands, for errors.

    Raises:
        BadInput: if the value is no list of messages, or its content is not text alone.
    """
    value = [] if value is None else value
    if not isinstance(value, list):
        raise BadInput(f"{rule}, but {where} has the {type(value).__name__} {shortened(value)}.")
    messages = []
    for given in value:
        message = _usual_keys(_without_filling(given)) if isinstance(given, dict) else {}
        content = _text(message)
        if not isinstance(message.get("role"), str) or content is None:
            raise BadInput(f"{rule}, but {where} has {shortened(given)}.")
        if message.get("weight", 1) not in (0, 1):
            raise BadInput(
                f"a message's weight must be 0, if it is not to be learned, or 1, but {where} has"
                f" {message['weight']!r:.40}."
            )
        messages.append({**message, "content": content})
    return templates.with_usual_roles(messages)


def _without_filling(value: Any) -> Any:
    """Return a value of Parquet or Arrow without the keys that other rows' values have.

    JSON's objects, which are of another class, keep a key that was written.
    """
    if isinstance(value, list):
        return [_without_filling(part) for part in value]
    if type(value) is not dict:
        return value
    return {key: _without_filling(part) for key, part in value.items() if part is not None}


def _usual_keys(given: Mapping[str, Any]) -> Message:
    """Return a message with a role and a content also where it has a sender and a value."""
    message = {key: value for key, value in given.items() if value is not None}
    sender = message.get("from")
    if "role" in message or "content" in message or not isinstance(sender, str):
        return message
    if (role := _SENDERS.get(sender.strip().lower())) is None:
        return message
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": role, "content": message.get("value"), **others}


def _text(message: Mapping[str, Any]) -> str | None:
    """Return a message's text, which is empty if it calls tools alone; None: it has none."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in content
    ]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
