"""The changes that pages get: they lead from any version to the present one."""

import base64
import json
import zlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carbonopt.watch.patches import KEPT_CHANGES, Board, PageMessage, changes, line_edits

LINES = st.lists(st.sampled_from(["a", "b", "c", "<td>", ""]), max_size=12)
PARTS = st.dictionaries(st.sampled_from(["now", "header", "table x"]), LINES)


def edited(lines: list[str], edits: list[tuple[int, int, list[str]]]) -> list[str]:
    made = list(lines)
    for start, removed, added in edits:
        made[start : start + removed] = added
    return made


def content(message: PageMessage) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(message.text)))


def taken(parts: dict[str, list[str]], messages: list[PageMessage]) -> dict[str, list[str]]:
    """A page's parts after it has taken messages, as its script does it."""
    for message in messages:
        if message.kind == "whole":
            parts = content(message)
            continue
        parts = dict(parts)
        for name, places in content(message).items():
            if places is None:
                del parts[name]
            else:
                parts[name] = edited(parts.get(name, []), places)
    return parts


@given(LINES, LINES)
def test_edits_turn_lines_into_others(before, after):
    assert edited(before, line_edits(before, after)) == after


@given(PARTS, PARTS)
def test_only_parts_that_differ_are_sent(before, after):
    expected = {name for name in before | after if before.get(name) != after.get(name)}
    assert changes(before, after).keys() == expected


@given(st.lists(PARTS, min_size=1, max_size=6), st.integers(0, 5))
def test_a_page_of_any_version_gets_what_it_missed(contents, stopped):
    board, versions = Board(), {}
    for parts in contents:
        board.publish(parts)
        versions[board.version] = parts
    version = list(versions)[min(stopped, len(versions) - 1)]
    assert taken(dict(versions[version]), board.since(version)) == contents[-1]
    assert board.since(board.version) == []


def test_content_that_is_the_same_is_no_version():
    board = Board()
    assert board.publish({"now": ["a"]})
    before = board.version
    assert not board.publish({"now": ["a"]})
    assert board.version == before


def test_many_changes_longer_than_everything_are_not_sent():
    board = Board()
    board.publish({"now": ["0"]})
    first = board.version
    for number in range(1, 10):
        board.publish({"now": [str(number)]})
    assert [message.kind for message in board.since(first)] == ["whole"]


def test_unknown_versions_get_everything():
    board, other = Board(), Board()
    for number in range(3):
        board.publish({"now": [str(number)] * 50})
        other.publish({"now": ["other"]})
    for unknown in ("", "1", other.version, f"{board.version}0", "x-y", board.version[:-1] + "²"):
        (message,) = board.since(unknown)
        assert (message.kind, content(message)) == ("whole", {"now": ["2"] * 50})


def test_a_page_that_was_away_too_long_gets_everything():
    board = Board()
    board.publish({"rows": [str(row) for row in range(10_000)], "now": ["0"]})
    first = board.version
    for number in range(1, KEPT_CHANGES + 1):
        board.publish({"rows": [str(row) for row in range(10_000)], "now": [str(number)]})
    assert {message.kind for message in board.since(first)} == {"change"}
    board.publish({"now": ["end"]})
    assert [message.kind for message in board.since(first)] == ["whole"]
