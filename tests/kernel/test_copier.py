"""The copy itself: right bytes for any split among threads, plans kept and dropped, memory leased and returned."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool

MIB = 2**20


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_bytes_arrive_whole_however_they_are_split(threads: int) -> None:
    sizes = [1, MIB - 1, MIB, MIB + 1, 3 * MIB + 5, 17, 0, 2 * MIB]
    state = {str(i): torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    copier = HostCopier(Pool(), threads)
    for _ in range(2):
        copy = copier.copy(state)
        assert all(torch.equal(copy[k], x) for k, x in state.items())
        for x in state.values():
            x.add_(1)
    copier.close()


def test_a_state_dict_that_stays_as_it_is_is_planned_once() -> None:
    copier, plans = HostCopier(Pool()), []
    state = {"w": torch.ones(10), "c": torch.ones(3, dtype=torch.complex64)}
    for step in range(4):
        state["w"] = state["w"].clone() if step == 3 else state["w"].add_(1)
        copier.copy(state)
        plans.append(copier.layout)
    assert plans[0] is plans[1] is plans[2] is not plans[3]


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
