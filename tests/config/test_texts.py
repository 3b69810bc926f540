"""Sizes, durations, dtypes and devices as text: read as people write them, written so that reading gives the same."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from stagereg import ByteSize
from stagereg.base.durations import duration
from stagereg.config.texts import value_type, written
from stagereg.errors import ConfigError

SIZES: dict[Any, int] = {
    "4GiB": 2**32,
    "4 gib": 2**32,
    "512MB": 512 * 10**6,
    "1.5KiB": 1536,
    ".5KB": 500,
    "2TiB": 2**41,
    "1PB": 10**15,
    "100": 100,
    " 1_000 ": 1000,
    "1e3": 1000,
    "0.1KiB": 102,
    7: 7,
    1e9: 10**9,
}
SECONDS: dict[str, float] = {
    "30s": 30,
    "1h30m": 5400,
    "1 hour, 30 minutes": 5400,
    "2 days": 172800,
    "1w": 604800,
    "500ms": 0.5,
    "-0s": 0,
    "0.25": 0.25,
    "1e-3": 0.001,
    " 30 S ": 30,
}
WRITTEN = {
    **{ByteSize(size): text for size, text in {2**32: "4GiB", 4 * 10**9: "4GB", 1536: "1536B", 0: "0B"}.items()},
    **{timedelta(seconds=s): text for s, text in {0: "0s", 172800: "2d", 90.5: "1m30.5s", 1e-6: "0.000001s"}.items()},
    **{torch.device(text): text for text in ("cpu", "cuda", "cuda:1", "meta")},
}


def read(type_: type, text: Any) -> Any:
    known = value_type(type_)
    assert known is not None
    return known.read(text)


def test_sizes_and_durations_are_read_as_people_write_them() -> None:
    assert {text: ByteSize(text) for text in SIZES} == SIZES
    assert {text: duration(text).total_seconds() for text in SECONDS} == SECONDS
    for text in ("0.25", "1e-3"):  # which are numbers in YAML
        assert OmegaConf.create(f"wait: {text}").wait in (SECONDS[text], text)


def test_the_text_is_the_shortest_that_means_the_same() -> None:
    assert {value: written(value) for value in WRITTEN} == WRITTEN
    assert all(read(type(value), text) == value for value, text in WRITTEN.items())
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert torch.bfloat16 in dtypes
    for dtype in dtypes:
        assert read(torch.dtype, written(dtype)) is read(torch.dtype, str(dtype)) is dtype
    assert read(torch.dtype, "half") is torch.float16


@given(st.integers(0, 2**70).map(ByteSize) | st.timedeltas(min_value=timedelta(0)))
def test_reading_a_text_gives_the_value_again(value: Any) -> None:
    assert read(type(value), written(value)) == value


def test_a_size_calculates_pickles_and_dumps_as_a_number() -> None:
    size = ByteSize("4GiB")
    assert size + 1 == 2**32 + 1
    assert f"{size:d}" == json.dumps(size) == "4294967296"
    assert (f"{size}", repr(size)) == ("4GiB", "ByteSize('4GiB')")
    for again in (pickle.loads(pickle.dumps(size)), copy.deepcopy(size)):
        assert (again, type(again)) == (size, ByteSize)
    for value in (True, None, [1]):
        with pytest.raises(ConfigError, match="is not a size in bytes"):
            ByteSize(value)


SIZE = r"is not a size in bytes\. Write a size as 4GiB, 512MB"
DURATION = r"is not a duration\. Write a duration as 30s, 1h30m, 2 days"
DTYPE = r"is not a dtype\."
DEVICE = r"is not a device, such as cpu, cuda or cuda:0\. .*"
INVALID: list[tuple[Any, Any, str]] = [
    *((ByteSize, value, SIZE) for value in ("", "much", "GiB", "-1", -1, "nan", float("inf"), "1 2", "9" * 5000)),
    *((ByteSize, value, "is a fraction of a byte") for value in ("0.5", 0.5, "1.5B")),
    (ByteSize, "4GiBB", r"^'4GiBB' has no valid unit of bytes\. Did you mean 'GiB'\? Write"),
    (ByteSize, "4G", r"^'4G' has no valid unit of bytes\. Did you mean 'GB'\? Write"),
    *((timedelta, text, DURATION) for text in ("", "-", "s", "1h30", "--3s", "00:05:00", "nan", "1" * 5000)),
    *((timedelta, text, "is too long") for text in ("1e30", "9999999999 days")),
    *((timedelta, text, rf"^'{text}' is negative\. Write a duration as 30s, ") for text in ("-30s", "-1", "-1h30m")),
    (timedelta, "3 dayz", r"has no valid unit of time after 3\. Did you mean 'days?'\?"),
    (timedelta, "2parsecs", r"^'2parsecs' has no valid unit of time after 2\. Write a duration as 30s, "),
    (torch.dtype, "flaot16", rf"^'flaot16' {DTYPE} Did you mean 'float16'\? Write the name of a"),
    (torch.dtype, "torch.flaot32", rf"{DTYPE} Did you mean 'float32'\?"),
    *((torch.dtype, text, rf"^'{text}' {DTYPE}") for text in ("nn", "__name__", "")),
    (torch.device, "cuad:0", rf"^'cuad:0' {DEVICE}one of cpu, cuda, "),
    *((torch.device, text, rf"{DEVICE}Invalid") for text in ("cuda:x", "0")),
    (torch.device, "", rf"{DEVICE}must not be empty"),
    *((timedelta, value, "it must be a duration such as 30s, not ") for value in (True, None, [1])),
]


@pytest.mark.parametrize(("type_", "text", "message"), INVALID, ids=range(len(INVALID)))
def test_an_invalid_text_is_refused_with_examples(type_: type, text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(type_, text)


@pytest.mark.parametrize("type_", [ByteSize, timedelta, torch.dtype, torch.device])
@given(text=st.text())
def test_any_text_is_an_object_or_refused(type_: type, text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(read(type_, text), type_)
