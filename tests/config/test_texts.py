"""Dtypes and devices as text: read as people write them, written so that reading gives the same."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagereg.config.texts import value_type, written
from stagereg.errors import ConfigError


def read(type_: type, text: str) -> Any:
    known = value_type(type_)
    assert known is not None
    return known.read(text)


def test_every_dtype_of_torch_is_read_again() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert torch.bfloat16 in dtypes
    for dtype in dtypes:
        assert read(torch.dtype, written(dtype)) is read(torch.dtype, str(dtype)) is dtype
    assert read(torch.dtype, "half") is torch.float16


@pytest.mark.parametrize(("text", "near"), [("flaot16", "float16"), ("bf16", "bfloat16"), ("torch.flaot32", "float32")])
def test_an_invalid_dtype_is_refused_with_the_nearest(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"^'{text}' is not a dtype\. Did you mean '{near}'\? Write the name of one"):
        read(torch.dtype, text)


@pytest.mark.parametrize("text", ["nn", "Tensor", "", "__name__"])
def test_other_names_of_torch_are_no_dtypes(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a dtype"):
        read(torch.dtype, text)


@pytest.mark.parametrize("text", ["cpu", "cuda", "cuda:1", "meta"])
def test_a_device_is_read_again(text: str) -> None:
    assert read(torch.device, text) == torch.device(text)
    assert written(torch.device(text)) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [("cuad:0", "one of cpu, cuda, "), ("cuda:x", "Invalid"), ("0", "Invalid"), ("", "must not be empty")],
)
def test_an_invalid_device_is_refused_with_the_reason_that_torch_gives(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^'{text}' is not a device, such as cpu, cuda or cuda:0\. .*{why}"):
        read(torch.device, text)


@pytest.mark.parametrize("type_", [timedelta, torch.dtype, torch.device])
@given(text=st.text())
def test_no_text_is_answered_by_anything_but_an_object_or_a_refusal(type_: type, text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(read(type_, text), type_)


def test_torch_is_not_imported_to_know_its_types() -> None:
    code = (
        "import sys; from stagereg.config import schema, texts; print(texts.value_type(list), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "None False\n", done.stderr
