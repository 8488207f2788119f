"""The content of the page as parts of lines, and the changes that lead from one to the next.

Only what changed is sent, and each page gets only what it has missed.
"""

import base64
import json
import secrets
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from sse_starlette.event import ServerSentEvent

# The page's content: each part's lines by the part's name.
Parts = Mapping[str, Sequence[str]]
# Changes of one part's lines: where, how many lines are removed there, the lines that come instead.
# The last place comes first. None: the part is removed.
Edits = list[tuple[int, int, list[str]]] | None

# The changes that are kept for pages that were away. A page that has missed more gets everything.
KEPT_CHANGES = 100
_CONNECT_AGAIN_MS = 1000  # how long a page waits before it connects again


@dataclass(frozen=True)
class PageMessage:
    """One message to a page: what it is, the version that it leads to, and its packed content."""

    kind: str  # "whole" or "change"
    version: str
    text: str

    @cached_property
    def event(self) -> bytes:
        """The message as all pages get it, encoded once."""
        event = ServerSentEvent(
            data=self.text, event=self.kind, id=self.version, retry=_CONNECT_AGAIN_MS
        )
        return event.encode()


def changes(before: Parts, after: Parts) -> dict[str, Edits]:
    """Return the edits of the parts that differ."""
    edits: dict[str, Edits] = dict.fromkeys(before.keys() - after.keys())
    for name, lines in after.items():
        old = before.get(name)
        if old is None:
            edits[name] = [(0, 0, list(lines))]
        elif old != lines:
            edits[name] = line_edits(old, lines)
    return edits


def line_edits(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int, list[str]]]:
    """Return the edits that turn some lines into others, the last place first."""
    matcher = SequenceMatcher(None, before, after)
    return [
        (start, end - start, list(after[new_start:new_end]))
        for kind, start, end, new_start, new_end in reversed(matcher.get_opcodes())
        if kind != "equal"
    ]


def packed(content: object) -> str:
    """Return a value as JSON, compressed once for all pages, as text for an event stream."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"))).decode("ascii")


class Board:
    """The page's content with its latest changes.

    A version is named by the server's start and a number, so that a page that was loaded from an
    earlier server gets everything.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._number = 0
        self._parts: Parts = {}
        self._changes: deque[PageMessage] = deque(maxlen=KEPT_CHANGES)
        self._whole: PageMessage | None = None

    @property
    def version(self) -> str:
        return f"{self._start}-{self._number}"

    def publish(self, parts: Parts) -> bool:
        """Take new content; return whether it differs from the content so far."""
        edits = changes(self._parts, parts)
        if not edits:
            return False
        self._number += 1
        self._parts = {name: list(lines) for name, lines in parts.items()}
        self._whole = None
        self._changes.append(PageMessage("change", self.version, packed(edits)))
        return True

    def since(self, version: str) -> list[PageMessage]:
        """Return the messages that lead from a version to the present one, none if it is that one.

        They are one with everything where the version is unknown or too old, and where everything
        is shorter than several changes.
        """
        missed = self._missed(version)
        if missed is None:
            return [self.whole()]
        # Everything is packed only for pages that may need it, as that takes the longest.
        missed_length = sum(len(message.text) for message in missed)
        if len(missed) > 1 and missed_length > len(self.whole().text):
            return [self.whole()]
        return missed

    def _missed(self, version: str) -> list[PageMessage] | None:
        start, _, number = version.rpartition("-")
        if start != self._start or not (number.isascii() and number.isdecimal()):
            return None
        count = self._number - int(number)
        return (
            list(self._changes)[-count:]
            if 0 < count <= len(self._changes)
            else ([] if count == 0 else None)
        )

    def whole(self) -> PageMessage:
        if self._whole is None:
            self._whole = PageMessage("whole", self.version, packed(self._parts))
        return self._whole
