"""How values and shares are written."""

import pytest

from carbonopt.core.format import percent_text, value_text


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


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (-20.5, "-2,050 %"),
        (-1e5, "under -1,000,000 %"),
        (-9.5, "-950 %"),
        (0.998, "99.8 %"),
        (0.9999, "over 99.9 %"),
    ],
)
def test_a_share_that_says_nothing_more_is_cut(fraction: float, text: str) -> None:
    assert percent_text(fraction) == text
