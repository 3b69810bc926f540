"""A page may differ from the printed output only in numbers and in what it leaves out by ``...``."""

from __future__ import annotations

import pytest

from .pages import fits


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("a\n  b  3.25 c\n", True),
        ("a\n b 1,024 c\nd\n", True),
        ("a\n b 21:29:45 c\n", False),
        ("a\n b x c\n", False),
        ("b 3.1 c\n", False),
    ],
)
def test_only_numbers_and_parts_written_as_dots_may_differ(printed: str, same: bool) -> None:
    assert fits("a\n b 1 c\n...\n", printed) == same
