"""Sizes are written with a unit and are numbers of bytes."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagereg import ByteSize, StageregError

SIZES = {
    "4GiB": 2**32,
    "4 gib": 2**32,
    "512MB": 512 * 10**6,
    "1.5KiB": 1536,
    ".5KB": 500,
    "2TiB": 2**41,
    "1PB": 10**15,
    "100B": 100,
    "100": 100,
    " 1_000 ": 1000,
    "1e3": 1000,
    "0.1KiB": 102,
    7: 7,
    1e9: 10**9,
}


@pytest.mark.parametrize("value", SIZES)
def test_a_size_is_a_number_of_bytes(value: Any) -> None:
    assert ByteSize(value) == SIZES[value]
    assert isinstance(ByteSize(value), int)


@pytest.mark.parametrize(
    ("size", "text"),
    [(2**32, "4GiB"), (4 * 10**9, "4GB"), (1536, "1536B"), (1024, "1KiB"), (0, "0B"), (3 * 2**50, "3PiB")],
)
def test_its_text_is_the_shortest_that_means_the_same(size: int, text: str) -> None:
    assert (str(ByteSize(size)), repr(ByteSize(size)), f"{ByteSize(size)}") == (text, f"ByteSize({text!r})", text)


@given(st.integers(0, 2**70))
def test_reading_its_text_gives_the_size_again(size: int) -> None:
    assert ByteSize(str(ByteSize(size))) == size


def test_it_calculates_pickles_and_dumps_as_a_number() -> None:
    size = ByteSize("4GiB")
    assert size + 1 == 2**32 + 1
    assert f"{size:d}" == json.dumps(size) == "4294967296"
    for again in (pickle.loads(pickle.dumps(size)), copy.deepcopy(size)):
        assert (again, type(again)) == (size, ByteSize)


INVALID = ["", "much", "GiB", "-1", -1, "nan", float("inf"), True, None, [1], "1 2", "9" * 5000]
NEAREST = {"4GiBB": "GiB", "4G": "GB", "4 KiiB": "KiB"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, r"is not a size in bytes\. Write a size as 4GiB, 512MB") for value in INVALID),
        *((text, rf"^'{text}' has no unit of bytes\. Did you mean '{near}'\? Write") for text, near in NEAREST.items()),
        *((value, "is a fraction of a byte") for value in ("0.5", 0.5, "1.5B")),
    ],
)
def test_an_invalid_size_is_refused_with_examples(value: Any, message: str) -> None:
    with pytest.raises(StageregError, match=message):
        ByteSize(value)


@given(st.text())
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with contextlib.suppress(StageregError):
        assert ByteSize(text) >= 0
