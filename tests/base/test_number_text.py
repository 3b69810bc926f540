"""Numbers as people write them, of which one reader makes whole numbers."""

from __future__ import annotations

import pytest

from stagereg.base.number_text import decimal


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_some_ascii_digits_are_a_number(text: str, number: int) -> None:
    assert decimal(text) == number


@pytest.mark.parametrize(
    "text", ["", "9" * 19, "9" * 5000, "-1", "+1", " 1", "1\n", "1_0", "1.0", "0x1", "\u0663", "\u00b2"]
)
def test_anything_else_is_none(text: str) -> None:
    assert decimal(text) is None
    assert decimal("12345678", most=7) is None
