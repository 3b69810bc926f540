"""Padding around staged tensors: which tensor it belongs to, and how it is looked up."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg
from stagereg.kernel.memory import padding_around

SHAPES = st.lists(st.integers(0, 5), max_size=3)


@settings(max_examples=50, deadline=None)
@given(shapes=st.lists(SHAPES, max_size=6), before=st.integers(0, 2000), after=st.integers(0, 2000))
def test_writing_the_padding_touches_no_tensor(shapes: list[list[int]], before: int, after: int) -> None:
    stager = stagereg.build("stager", "pinned_cached")
    stager.reserve_padding(before, after)
    source = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    staged = stager.stage(source)
    for x in staged.values():
        padding = padding_around(x)
        if padding is None:
            assert x.numel() == 0 or (before, after) == (0, 0)
            continue
        first, last = x.data_ptr() - padding.before, x.data_ptr() + x.nbytes + padding.after
        assert (padding.before, padding.after) == (before, after)
        assert padding.address <= first <= last <= padding.address + padding.nbytes
        for begin, end in ((first, x.data_ptr()), (x.data_ptr() + x.nbytes, last)):
            ctypes.memset(begin, 255, end - begin)
    for name, x in source.items():
        assert torch.equal(staged[name], x)
    stager.close()


def test_a_tensor_with_holes_or_shared_memory_has_no_padding() -> None:
    stager = stagereg.build("stager", "pinned_cached")
    stager.reserve_padding(64, 64)
    w = torch.randn(8, 8)
    staged = stager.stage(
        {"w": w, "tied": w.t(), "view": w[2:], "own": torch.randn(8), "turned": torch.randn(4, 4).t()}
    )
    assert {name: padding_around(x) is not None for name, x in staged.items()} == {
        "w": False, "tied": False, "view": False, "own": True, "turned": False,
    }  # fmt: skip
    assert padding_around(staged["own"][1:]) is None
    assert padding_around(w) is None


@pytest.mark.parametrize("name", ["blocking", "pinned_cached"])
def test_padding_of_returned_memory_is_forgotten(name: str) -> None:
    stager = stagereg.build("stager", name)
    stager.reserve_padding(64, 64)
    address = stager.stage({"x": torch.ones(4)})["x"].data_ptr()
    gc.collect()
    stager.reserve_padding(0, 0)
    x = stager.stage({"x": torch.ones(64)})["x"]
    assert padding_around(x) is None
    assert x.data_ptr() <= address < x.data_ptr() + 4096 or name == "blocking"
