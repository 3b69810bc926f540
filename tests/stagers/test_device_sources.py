"""Digests of what is copied from an accelerator: every write changes them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stagereg.stagers.device_sources import digests


@given(st.integers(1, 100), st.integers(0, 99), st.integers(1, 255))
def test_a_digest_changes_with_any_byte(nbytes: int, at: int, by: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    before = digests([source, torch.zeros(8, dtype=torch.uint8)])
    source[at % nbytes] += by
    assert (digests([source, torch.zeros(8, dtype=torch.uint8)]) != before).tolist() == [True, False]


def test_a_digest_finds_a_change_too_small_for_a_sum_in_the_dtype() -> None:
    source = torch.full((2**16,), 1.0)
    before = digests([source.view(torch.uint8)])
    source[77] += 1e-7
    assert digests([source.view(torch.uint8)]) != before
