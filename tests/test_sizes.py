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


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("4GiB", 2**32),
        ("4 gib", 2**32),
        ("512MB", 512 * 10**6),
        ("1.5KiB", 1536),
        (".5KB", 500),
        ("2TiB", 2**41),
        ("1PB", 10**15),
        ("100B", 100),
        ("100", 100),
        (" 1_000 ", 1000),
        ("1e3", 1000),
        (7, 7),
        (1e9, 10**9),
        (0, 0),
        ("0.1KiB", 102),
    ],
)
def test_a_size_is_a_number_of_bytes(value: Any, size: int) -> None:
    assert ByteSize(value) == size
    assert isinstance(ByteSize(value), int)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2**32, "4GiB"),
        (4 * 10**9, "4GB"),
        (1536, "1536B"),
        (1024, "1KiB"),
        (1000, "1KB"),
        (0, "0B"),
        (3 * 2**50, "3PiB"),
    ],
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


@pytest.mark.parametrize(
    "value", ["", "much", "GiB", "-1", -1, "nan", float("inf"), True, None, [1], "1 2", "9" * 5000]
)
def test_an_invalid_size_is_refused_with_examples(value: Any) -> None:
    with pytest.raises(StageregError, match=r"is not a size in bytes\. Write a size as 4GiB, 512MB"):
        ByteSize(value)


@pytest.mark.parametrize(("value", "near"), [("4GiBB", "GiB"), ("4G", "GB"), ("4 KiiB", "KiB")])
def test_a_wrong_unit_is_refused_with_the_nearest(value: str, near: str) -> None:
    with pytest.raises(StageregError, match=rf"^'{value}' has no unit of bytes\. Did you mean '{near}'\? Write"):
        ByteSize(value)


@pytest.mark.parametrize("value", ["0.5", 0.5, "1.5B"])
def test_a_fraction_of_a_byte_is_refused(value: Any) -> None:
    with pytest.raises(StageregError, match="is a fraction of a byte"):
        ByteSize(value)


@given(st.text())
def test_no_text_is_answered_by_anything_but_a_size_or_a_refusal(text: str) -> None:
    with contextlib.suppress(StageregError):
        assert ByteSize(text) >= 0
