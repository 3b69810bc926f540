"""Many small tensors are copied by one system call, and one by one where the call is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg
import stagereg.kernel.transfer as transfer
from stagereg.kernel.transfer import iovecs, read_many


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=1024))
def test_every_piece_arrives_and_nothing_else_is_touched(sizes: list[int]) -> None:
    total = sum(sizes) + len(sizes)
    source, to = torch.randint(1, 256, (total + 1,), dtype=torch.uint8), torch.zeros(total + 1, dtype=torch.uint8)
    starts = [0]
    for nbytes in sizes:
        starts.append(starts[-1] + nbytes + 1)
    addresses = [source.data_ptr() + at for at in starts[:-1]]
    targets = [to.data_ptr() + at for at in starts[:-1]]
    assert read_many(iovecs(targets, sizes), iovecs(addresses, sizes), sum(sizes))
    gaps = torch.tensor([at + nbytes for at, nbytes in zip(starts, sizes, strict=False)] + [total], dtype=torch.int64)
    expected = source.clone()
    expected[gaps] = 0
    assert torch.equal(to, expected)


@pytest.mark.parametrize("refusal", ["not permitted", "half done"])
def test_small_tensors_are_copied_singly_where_refused(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transfer._readv
    answers = {
        "not permitted": lambda *args: -1,
        "half done": lambda process, ours, count, theirs, other, flags: real(process, ours, 1, theirs, 1, flags),
    }
    monkeypatch.setattr(transfer, "_readv", answers[refusal])
    stager = stagereg.build("stager", "pinned_cached")
    source = {str(i): torch.randn(i) for i in range(200)}
    staged = stager.stage(source)
    assert all(torch.equal(staged[name], x) for name, x in source.items())
    stager.close()
