"""Every checkpoint loads with plain torch, whatever layout the earlier states in the same memory had."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stagereg

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES: list[list[tuple[torch.dtype, list[int]]]] = [
    [(torch.float32, [40, 30]), (torch.float32, [40, 30]), (torch.int64, [])],
    [(torch.complex64, [40, 30])],
    [(torch.float32, [30, 40]), (torch.float32, [40, 30]), (torch.int64, [])],  # the same bytes, another head
    [(torch.int32, [40, 30]), (torch.float32, [40, 30]), (torch.int64, [])],
    [(torch.bfloat16, [7]), (torch.float64, [3, 5, 2])],
]
MORE = len(SHAPES)  # as the first one, and something that is no tensor
LAZY = MORE + 1  # as the second one, but its memory is to be conjugated when it is read


def made(layout: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * layout + step)
    each = enumerate(SHAPES[layout % MORE])
    more = {"more": step} if layout == MORE else {}
    found = {f"x{i}": torch.rand(shape, generator=generator).mul(100).to(dtype) for i, (dtype, shape) in each} | more
    return found if layout != LAZY else {name: x.mul(1j).conj() for name, x in found.items()}


@settings(max_examples=25, deadline=None)
@example(steps=[1, LAZY], stager="pinned_cached")
@given(
    steps=st.lists(st.sampled_from(range(LAZY + 1)), min_size=3, max_size=8),
    stager=st.sampled_from(["pinned_cached", "overlapped", "blocking"]),
)
def test_every_copy_loads_with_torch_whatever_lay_there_before(steps: list[int], stager: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with stagereg.Checkpointer(folder, keep=9, stager=stagereg.build("stager", stager)) as checkpointer:
            for step, layout in enumerate(steps):
                checkpointer.save(step, made(layout, step))
        for step, layout in enumerate(steps):
            expected = made(layout, step)
            found = {name: torch.zeros_like(torch.as_tensor(x)) for name, x in expected.items()}
            dcp.load(found, checkpoint_id=f"{folder}/step-{step:08}", no_dist=True)
            for name, x in expected.items():
                assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(x)), (step, name)
