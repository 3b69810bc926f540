"""The plan: what is copied, to which offset, and when a plan no longer fits."""

from __future__ import annotations

import pytest
import torch

from stagereg.errors import StagingError
from stagereg.kernel.layout import ALIGNMENT, Layout, plan_layout, signature


def plan(*tensors: torch.Tensor) -> Layout:
    return plan_layout(tensors, signature(tensors))


def test_every_block_starts_on_a_cache_line_and_none_overlap() -> None:
    layout = plan(*(torch.ones(n, dtype=dtype) for n in range(1, 40) for dtype in (torch.uint8, torch.float64)))
    ends = 0
    for region in sorted(layout.regions, key=lambda region: region.offset):
        assert region.offset % ALIGNMENT == 0
        assert region.offset >= ends
        ends = region.offset + region.nbytes
    assert ends <= layout.nbytes


def test_tied_tensors_are_moved_once_and_empty_ones_not_at_all() -> None:
    x = torch.ones(100, 10)
    layout = plan(x, x.t(), x.view(-1), x[20:40], x.clone(), torch.empty(3, 0))
    assert [region.nbytes for region in layout.regions] == [4000, 4000]
    assert plan(torch.empty(0)).nbytes == 0


def test_only_neighbours_in_one_storage_are_one_copy() -> None:
    flat = torch.ones(1000)
    assert len(plan(*flat.split(10)).regions) == 1
    assert len(plan(flat[:10], flat[500:]).regions) == 2
    assert sum(region.nbytes for region in plan(flat[:10], flat[600:]).regions) <= 4 * 410 + 16


def test_a_view_with_costly_holes_is_packed() -> None:
    grid = torch.ones(1000, 1000)
    alone = plan(grid[:, 3])
    assert (alone.regions, alone.packed) == ([], [0])
    assert alone.nbytes <= 4000 + ALIGNMENT
    beside = plan(grid[:, 3], grid)
    assert (len(beside.regions), beside.packed) == (1, [])
    assert beside.nbytes == grid.nbytes
    twice = plan(grid[:, 3], grid[:, 3], grid[:, 4])
    assert twice.pieces[0].offset == twice.pieces[1].offset != twice.pieces[2].offset


def test_views_of_other_dtypes_start_where_they_should() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    layout = plan(raw[4:12].view(torch.float32), raw[8:24].view(torch.complex64), raw[9:40])
    starts = [p.offset + p.start * size for p, size in zip(layout.pieces, (4, 8, 1), strict=True)]
    assert [start - starts[0] for start in starts] == [0, 4, 5]


def test_a_signature_differs_when_only_the_storage_has_shrunk() -> None:
    x = torch.ones(100)
    x.untyped_storage().resize_(200)
    x.untyped_storage().resize_(400)
    whole = signature([x])
    x.untyped_storage().resize_(200)
    assert signature([x]) != whole


def test_a_tensor_beyond_its_storage_is_refused_by_its_index() -> None:
    x = torch.ones(100)
    x.untyped_storage().resize_(396)
    with pytest.raises(StagingError, match="needs 400 bytes but its storage holds 396") as caught:
        plan(torch.ones(3), x)
    assert caught.value.path == (1,)
