"""How values that a user has invented are written."""

import pytest

from carbonopt.core.format import value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("cosine", "cosine"),
        ("", "''"),
        (" ", "' '"),
        ("two\nlines", r"'two\nlines'"),
        ("\u202egnp", r"'\u202egnp'"),
        (True, "yes"),
        (12, "12"),
        (0.000123456, "0.0001235"),
    ],
)
def test_a_value_that_can_not_be_seen_is_quoted(value: object, text: str) -> None:
    assert value_text(value) == text
