"""Digests of what is copied from an accelerator: every write changes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagereg.stagers.device_sources import digests


def differ(before: tuple[torch.Tensor, list[int]], sources: list[torch.Tensor]) -> list[bool]:
    after, lengths = digests(sources)
    assert lengths == before[1]
    return [bool(each.any()) for each in (before[0] != after).split(lengths)]


@given(st.integers(1, 40_000), st.integers(0, 39_999), st.integers(1, 255))
def test_a_digest_changes_with_any_byte(nbytes: int, at: int, by: int) -> None:
    sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)]
    before = digests(sources)
    sources[0][at % nbytes] += by
    assert differ(before, sources) == [True, False]


@given(st.integers(2, 30_000), st.integers(0, 29_999), st.integers(0, 29_999))
def test_a_digest_changes_if_two_words_change_places(count: int, one: int, other: int) -> None:
    words = torch.arange(count)
    before = digests([words.view(torch.uint8)])
    words[[one % count, other % count]] = words[[other % count, one % count]]
    assert differ(before, [words.view(torch.uint8)]) == [one % count != other % count]


@pytest.mark.parametrize("write", ["sort", "roll", "swap"])
def test_a_digest_changes_if_blocks_change_places(write: str) -> None:
    experts = torch.randn(8, 256, 64)
    before = digests([experts.view(-1).view(torch.uint8)])
    order = {"sort": [7, 6, 5, 4, 3, 2, 1, 0], "roll": [7, 0, 1, 2, 3, 4, 5, 6], "swap": [0, 6, 2, 3, 4, 5, 1, 7]}[
        write
    ]
    experts.copy_(experts[order])
    assert differ(before, [experts.view(-1).view(torch.uint8)]) == [True]


def test_a_digest_finds_a_change_too_small_for_a_sum_in_the_dtype() -> None:
    source = torch.full((2**16,), 1.0)
    before = digests([source.view(torch.uint8)])
    source[77] += 1e-7
    assert differ(before, [source.view(torch.uint8)]) == [True]
