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


def test_every_dtype_and_device_of_torch_is_read_again() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert torch.bfloat16 in dtypes
    for dtype in dtypes:
        assert read(torch.dtype, written(dtype)) is read(torch.dtype, str(dtype)) is dtype
    assert read(torch.dtype, "half") is torch.float16
    for text in ("cpu", "cuda", "cuda:1", "meta"):
        assert written(read(torch.device, text)) == text


DTYPE = r"is not a dtype\."
DEVICE = r"is not a device, such as cpu, cuda or cuda:0\. .*"


@pytest.mark.parametrize(
    ("type_", "text", "message"),
    [
        (torch.dtype, "flaot16", rf"{DTYPE} Did you mean 'float16'\? Write the name of one"),
        (torch.dtype, "bf16", rf"{DTYPE} Did you mean 'bfloat16'\?"),
        (torch.dtype, "torch.flaot32", rf"{DTYPE} Did you mean 'float32'\?"),
        (torch.dtype, "nn", DTYPE),
        (torch.dtype, "__name__", DTYPE),
        (torch.dtype, "", DTYPE),
        (torch.device, "cuad:0", rf"{DEVICE}one of cpu, cuda, "),
        (torch.device, "cuda:x", rf"{DEVICE}Invalid"),
        (torch.device, "0", rf"{DEVICE}Invalid"),
        (torch.device, "", rf"{DEVICE}must not be empty"),
    ],
)
def test_an_invalid_text_is_refused_with_the_reason(type_: type, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^'{text}' {message}"):
        read(type_, text)


@pytest.mark.parametrize("type_", [timedelta, torch.dtype, torch.device])
@given(text=st.text())
def test_any_text_is_an_object_or_refused(type_: type, text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(read(type_, text), type_)


def test_torch_is_not_imported_to_know_its_types() -> None:
    code = (
        "import sys; from stagereg.config import schema, texts; print(texts.value_type(list), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "None False\n", done.stderr
