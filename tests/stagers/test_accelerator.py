"""Accelerator sources: page-locked copies on a side stream, complete and in order when ``stage`` returns."""

from __future__ import annotations

import pytest
import torch

from stagereg import AsyncStager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine"),
]


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def test_the_source_may_be_overwritten_as_soon_as_stage_has_returned(stager: AsyncStager) -> None:
    w = torch.zeros(2**26, device=device())
    for step in range(5):
        w.fill_(step)
        copy = stager.stage({"w": w})["w"]
        w.fill_(-1)
        assert copy.device.type == "cpu"
        assert copy.eq(step).all()


def test_work_queued_before_stage_is_in_the_copy(stager: AsyncStager) -> None:
    a = torch.randn(4096, 4096, device=device())
    w = torch.zeros(2**24, device=device())
    for _ in range(20):
        a = a @ a / 4096  # keeps the queue busy while stage is called
    w.fill_(7)
    assert stager.stage({"w": w})["w"].eq(7).all()


def test_work_on_the_callers_own_stream_is_waited_for(stager: AsyncStager) -> None:
    a = torch.randn(4096, 4096, device=device())
    w = torch.zeros(2**24, device=device())
    torch.accelerator.synchronize()
    with torch.Stream(device()):
        for _ in range(20):
            a = a @ a / 4096
        w.fill_(7)
        copy = stager.stage({"w": w})["w"]
    assert copy.eq(7).all()


def test_the_callers_stream_is_as_it_was(stager: AsyncStager) -> None:
    before = torch.accelerator.current_stream()
    stager.stage({"w": torch.ones(10, device=device())})
    assert torch.accelerator.current_stream() == before


def test_pinned_cached_hands_out_page_locked_memory_and_uses_it_again(make) -> None:
    stager = make()
    pinned = type(stager).__name__ == "PinnedCachedStager"
    w = torch.ones(2**20, device=device())
    copy = stager.stage({"w": w, "tied": w.view(-1, 2).t(), "c": torch.ones(3)})
    assert all(x.is_pinned() is pinned for x in copy.values())
    address = copy["w"].data_ptr()
    del copy
    assert (
        stager.stage({"w": w, "tied": w.view(-1, 2).t(), "c": torch.ones(3)})["w"].data_ptr() == address
    ) or not pinned


def test_ties_views_and_dtypes_from_the_accelerator(stager: AsyncStager) -> None:
    x = torch.arange(1000.0, device=device())
    grid = torch.arange(1_000_000.0, device=device()).view(1000, 1000)
    state = {
        "x": x,
        "tied": x.view(10, 100).t(),
        "tail": x[990:],
        "column": grid[:, 3],
        "row": grid[5],
        "expanded": x[:3].view(3, 1).expand(3, 50),
        "half": x.half(),
        "bf16": x.bfloat16(),
        "f8": x.to(torch.float8_e4m3fn),
        "conj": torch.randn(5, dtype=torch.complex64, device=device()).conj(),
        "scalar": torch.tensor(3.0, device=device()),
        "empty": torch.empty(0, 4, device=device()),
        "sparse": torch.eye(3, device=device()).to_sparse(),
        "host": torch.ones(5),
        "p": torch.nn.Parameter(torch.randn(4, device=device())),
    }
    copy = stager.stage(state)
    for name, source in state.items():
        mine = copy[name]
        assert mine.device.type == "cpu", name
        assert (mine.dtype, mine.shape, type(mine)) == (source.dtype, source.shape, type(source)), name
        there = source.detach().cpu()
        dense = (mine.detach(), there) if name != "sparse" else (mine.to_dense(), there.to_dense())
        assert torch.equal(*(x.float() if x.dtype.itemsize == 1 else x for x in dense)), name
    copy["x"].fill_(-1)
    assert copy["tied"].eq(-1).all()
    assert copy["tail"].eq(-1).all()
    assert copy["column"].untyped_storage().nbytes() == 4000


def test_freed_device_memory_is_named(stager: AsyncStager) -> None:
    from stagereg.errors import StagingError

    w = torch.ones(1000, device=device())
    w.untyped_storage().resize_(0)
    with pytest.raises(StagingError, match=r"model\.w"):
        stager.stage({"model": {"w": w}})
    torch.accelerator.synchronize()


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_each_device_has_its_own_stream(stager: AsyncStager) -> None:
    state = {str(i): torch.full((1000,), float(i), device=torch.device(device().type, i)) for i in range(2)}
    copy = stager.stage(state)
    assert copy["0"].eq(0).all()
    assert copy["1"].eq(1).all()
