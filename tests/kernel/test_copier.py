"""The copy itself: right bytes for any split among threads, plans kept and dropped, memory leased and returned."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool


def test_one_lease_for_one_copy_until_its_last_tensor_is_gone() -> None:
    pool = Pool()
    copier = HostCopier(pool)
    shared = torch.ones(100, 100)
    state = {"a": shared, "tied": shared.t(), "packed": torch.ones(100, 2000)[:, 1], "e": torch.empty(0)}
    state["p"] = torch.nn.Parameter(torch.ones(5))
    for name in ("a", "tied", "packed", "p"):
        copy = copier.copy(state)
        last = copy[name][1:]
        del copy
        gc.collect()
        assert pool.in_flight == 1, name
        assert last.eq(1).all()
        del last
        assert pool.in_flight == 0, name
    copy = copier.copy(state)
    empty = copy["e"]
    del copy
    assert pool.in_flight == 0
    assert empty.numel() == 0


def test_a_failed_copy_ends_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    copier = HostCopier(pool)
    with monkeypatch.context() as patch:
        patch.setattr(copier.engine, "run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            copier.copy({"w": torch.ones(10)})
    gc.collect()
    assert pool.in_flight == 0
    assert copier.copy({"w": torch.ones(10)})["w"].eq(1).all()


@pytest.mark.parametrize("was_on", [False, True])
def test_the_collector_and_the_grad_mode_are_left_as_they_were(was_on: bool) -> None:
    copier = HostCopier(Pool())
    w, other = torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.complex64, requires_grad=True)
    (gc.enable if was_on else gc.disable)()
    try:
        copy = copier.copy({"w": w, "conj": other.conj()})
        with pytest.raises(StagingError):
            copier.copy({"w": threading.Lock()})
        assert gc.isenabled() is was_on
        assert torch.is_grad_enabled()
        assert (copy["w"].grad_fn, copy["conj"].grad_fn) == (None, None)
    finally:
        gc.enable()


def test_a_storage_that_shrinks_without_moving_is_not_read_past_its_end() -> None:
    copier, x = HostCopier(Pool()), torch.ones(100_000)
    copier.copy({"x": x})
    storage, address = x.untyped_storage(), x.data_ptr()
    for i in range(200):  # memory that was just freed is often allocated again
        storage.resize_(200_000 if i % 2 else 100_000)
        if storage.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator did not reuse the memory")
    with pytest.raises(StagingError, match="'x'"):
        copier.copy({"x": x})
