"""Host memory: lent, never lent twice, back when the last reader is gone."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

import stagereg.kernel.memory as memory
import stagereg.kernel.waiting as waiting
from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.memory import Block, Lease, Pool


def tensor_over(lease: Lease, n: int = 16) -> torch.Tensor:
    return torch.frombuffer(lease.view, dtype=torch.float32, count=n)


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda x: x,
    "slice": lambda x: x[3:5],
    "detached": lambda x: x.detach(),
    "reshaped": lambda x: x.view(4, 4).t(),
    "other dtype": lambda x: x.view(torch.uint8),
    "numpy": lambda x: x.numpy(),
    "storage": lambda x: x.untyped_storage(),
    "parameter": lambda x: torch.nn.Parameter(x),
    "dlpack": lambda x: torch.from_dlpack(x),
    "memoryview": lambda x: memoryview(x.numpy()),
    "saved for backward": lambda x: x * torch.ones(16, requires_grad=True),
}


class TestLoans:
    @pytest.mark.parametrize("holder", HOLDERS)
    def test_a_loan_lasts_as_long_as_anything_over_it(self, holder: str) -> None:
        pool = Pool()
        lease = pool.borrow(64)
        x = tensor_over(lease)
        held: object = HOLDERS[holder](x)
        del lease, x
        gc.collect()
        assert pool.in_flight == 1
        assert pool.held_bytes == 0
        del held
        assert pool.in_flight == 0
        assert pool.held_bytes == 4096  # whole pages

    def test_the_last_reader_may_be_any_thread(self) -> None:
        pool = Pool()
        box = [tensor_over(pool.borrow(64))]
        reader = threading.Thread(target=lambda: box.pop().sum())
        assert pool.in_flight == 1
        reader.start()
        reader.join()
        assert pool.in_flight == 0

    def test_memory_lent_is_never_lent_again(self) -> None:
        pool = Pool(max_in_flight=2)
        first, second = pool.borrow(64), pool.borrow(64)
        third = pool.borrow(64)  # beyond the bound: nobody is there to let go
        assert len({first.address, second.address, third.address}) == 3

    def test_memory_that_came_back_is_used_again(self) -> None:
        pool = Pool()
        address = pool.borrow(64).address
        assert pool.borrow(64).address == address
        assert pool.borrow(10).address == address

    def test_the_smallest_that_fits_is_taken(self) -> None:
        pool = Pool(max_in_flight=3)
        loans = [pool.borrow(n) for n in (300, 100, 200)]
        addresses = [lease.address for lease in loans]
        del loans
        assert pool.borrow(150).address == addresses[2]

    def test_no_more_is_kept_than_may_be_in_flight(self) -> None:
        pool = Pool(max_in_flight=2)
        loans = [pool.borrow(64) for _ in range(5)]
        assert pool.in_flight == len(loans)
        del loans
        assert (pool.in_flight, pool.held_bytes) == (0, 2 * 4096)

    def test_memory_too_small_for_a_state_that_grew_is_freed(self) -> None:
        pool = Pool()
        pool.borrow(64)
        grown = pool.borrow(8192)
        assert pool.held_bytes == 0
        del grown
        assert pool.held_bytes == 8192

    def test_a_pool_that_keeps_nothing_keeps_nothing_even_before_it_is_asked(self) -> None:
        pool = Pool(keep=False)
        x = tensor_over(pool.borrow(64))
        block = arenas_alive()
        del x
        assert arenas_alive() == block - 1
        assert pool.held_bytes == 0

    def test_close_frees_what_came_back_unseen_and_what_comes_back_later(self) -> None:
        before = arenas_alive()
        pool = Pool()
        early, late = tensor_over(pool.borrow(64)), tensor_over(pool.borrow(64))
        del early
        pool.close()
        pool.close()
        assert arenas_alive() == before + 1
        late.fill_(5)
        assert late.eq(5).all()
        del late
        assert arenas_alive() == before
        with pytest.raises(StagerClosedError):
            pool.borrow(64)

    def test_memory_outlives_its_pool(self) -> None:
        pool = Pool()
        x = tensor_over(pool.borrow(64)).fill_(3)
        gone = weakref.ref(pool)
        del pool
        assert gone() is None
        assert x.eq(3).all()

    def test_a_writer_seen_no_more_gets_time_to_let_go(self, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
        pool = Pool(max_in_flight=1, pin=False)
        held = [pool.borrow(64)]
        answers = iter([True, False, False])

        def ask(blocks: list[tuple[int, int]]) -> bool:
            answer = next(answers, None)
            if answer is None:
                held.clear()
            return bool(answer)

        monkeypatch.setattr(memory, "writer_at_work", ask)
        monkeypatch.setattr(waiting, "alone", lambda: True)
        pool.borrow(64)
        assert held == []
        assert not caplog.records

    def test_many_threads_that_drop_lose_no_loan(self) -> None:
        pool = Pool(max_in_flight=None)
        loans = [tensor_over(pool.borrow(64)) for _ in range(400)]

        def drop() -> None:
            while True:
                try:
                    loans.pop()
                except IndexError:
                    return

        threads = [threading.Thread(target=drop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.in_flight == 0
        assert pool.held_bytes == 400 * 4096


def arenas_alive() -> int:
    return sum(type(x) is Block for x in gc.get_objects())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator there is nothing to say")
@pytest.mark.parametrize(("local_rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_pageable_memory_is_told_once_a_machine(
    local_rank: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    Pool()
    assert sum("no accelerator" in record.message for record in caplog.records) == lines


class TestArena:
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 2**22, 2**22 + 1, 3 * 2**22 + 5])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_every_byte_can_be_written(self, nbytes: int, threads: int) -> None:
        view = Block(nbytes, pin=False, threads=threads).view()
        assert len(view) == max(-(-nbytes // 4096), 1) * 4096
        view[0] = view[-1] = 7
        assert (view[0], view[-1]) == (7, 7)

    def test_more_memory_than_there_is_says_how_much_was_wanted(self) -> None:
        with pytest.raises(StagingError, match=r"no 4294967296\.00 GiB of host memory"):
            Block(2**72 // 2**10, pin=False)

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which pages are there")
    @pytest.mark.parametrize("threads", [1, 3])
    def test_pageable_memory_is_there_before_it_is_written(self, threads: int) -> None:
        block = Block(2**25 + 5, pin=False, threads=threads)
        if not understood(block):
            pytest.skip("this kernel cannot be asked for pages ahead of use (Linux 5.14)")
        assert resident(block) == 1.0


def understood(block: Block) -> bool:
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(block.address), ctypes.c_size_t(4096), 23) == 0


def resident(block: Block) -> float:
    """The part of a block's pages that the kernel has backed."""
    pages = -(-block.nbytes // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(block.address), ctypes.c_size_t(block.nbytes), flags) == 0
    return sum(flag & 1 for flag in flags) / pages


def test_memory_that_was_reserved_is_lent_first_and_no_more_is_made() -> None:
    made: list[int] = []

    def make(nbytes: int, pin: bool, threads: int) -> Block:
        made.append(nbytes)
        return Block(nbytes, pin, threads)

    pool = Pool(reserve=3 * 4096, make=make)
    lease = pool.borrow(2 * 4096)
    assert made == [3 * 4096]
    assert lease.nbytes == 3 * 4096
    pool.close()
