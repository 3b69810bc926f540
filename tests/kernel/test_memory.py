"""Host memory: leased, never leased twice at once, returned when the last reader is gone; page-locked in pieces."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

import stagereg
import stagereg.base.pages as pages
import stagereg.kernel.memory as memory
from stagereg.base.pages import LOCKED_BYTES, Block
from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.memory import Lease, Pool
from stagereg.stagers.async_stager import ExpectsStage


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that promises nothing is given less time."""
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 0.05)


class Borrowed(NamedTuple):
    """A block for one copy; in use while this or a tensor over it exists."""

    view: memoryview
    address: int
    nbytes: int


def borrow(pool: Pool, nbytes: int) -> Borrowed:
    lease = pool.lease(nbytes)
    return Borrowed(lease.view(), lease.block.address, lease.block.nbytes)


def held_bytes(pool: Pool) -> int:
    pool._trim()  # as the next copy does
    return sum(block.nbytes for block in pool._free)


def tensor_over(block: Borrowed, n: int = 16) -> torch.Tensor:
    return torch.frombuffer(block.view, dtype=torch.float32, count=n)


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


class TestLeases:
    @pytest.mark.parametrize("holder", HOLDERS)
    def test_a_lease_lasts_as_long_as_anything_over_it(self, holder: str) -> None:
        pool = Pool()
        block = borrow(pool, 64)
        x = tensor_over(block)
        held: object = HOLDERS[holder](x)
        del block, x
        gc.collect()
        assert pool.in_flight == 1
        assert held_bytes(pool) == 0
        del held
        assert pool.in_flight == 0
        assert held_bytes(pool) == 4096  # whole pages

    def test_returned_memory_is_used_again_and_leased_memory_is_not(self) -> None:
        pool = Pool(max_in_flight=2)
        held = [borrow(pool, 64) for _ in range(3)]  # the last one is beyond the bound: there is no reader to wait for
        addresses = [block.address for block in held]
        assert len(set(addresses)) == pool.in_flight == 3
        held.pop()
        assert [borrow(pool, nbytes).address for nbytes in (64, 10)] == [addresses[2]] * 2
        held.clear()
        assert (pool.in_flight, held_bytes(pool)) == (0, 2 * 4096), "no more is kept than may be in flight"

    def test_nothing_is_kept_after_close_or_without_keep(self) -> None:
        before, pool, other = blocks_alive(), Pool(), Pool(keep=False)
        early, late, plain = (tensor_over(borrow(each, 64)) for each in (pool, pool, other))
        del early, plain
        assert blocks_alive() == before + 2
        pool.close()
        pool.close()
        assert blocks_alive() == before + 1
        late.fill_(5)
        assert late.eq(5).all()
        del late
        assert blocks_alive() == before
        with pytest.raises(StagerClosedError):
            borrow(pool, 64)

    def test_many_threads_that_drop_lose_no_lease(self) -> None:
        pool = Pool(max_in_flight=None)
        blocks = [tensor_over(borrow(pool, 64)) for _ in range(400)]
        shares = [blocks[at::4] for at in range(4)]
        blocks.clear()
        threads = [threading.Thread(target=share.clear) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.in_flight == 0
        assert held_bytes(pool) == 400 * 4096


class TestReleasing:
    def test_release_ends_the_lease_but_not_of_what_is_held(self) -> None:
        for holds in (False, True):
            pool = Pool(max_in_flight=1)
            lease = pool.lease(64)
            copy = lease.hand_out({"w": torch.frombuffer(lease.view(), dtype=torch.float32).fill_(3)})
            address, held = lease.block.address, copy["w"][2:4] if holds else torch.full((2,), 3.0)
            del lease
            for each in ({}, copy, copy, [], None):
                pool.release(each)
            assert copy == {}
            assert pool.in_flight == 0
            again = borrow(pool, 64)
            tensor_over(again).fill_(5)
            assert (again.address == address) is not holds
            assert held.eq(3).all()


def blocks_alive() -> int:
    return sum(type(x) is Block for x in gc.get_objects())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator memory is page-locked")
@pytest.mark.parametrize(("local_rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_pageable_memory_is_logged_once_a_machine(
    local_rank: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stagereg")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    Pool()
    assert sum("no accelerator" in record.message for record in caplog.records) == lines


class TestBlock:
    def test_the_error_for_too_much_memory_has_the_size(self) -> None:
        with pytest.raises(StagingError, match=r"cannot allocate 4294967296\.00 GiB of host memory"):
            Block(2**72 // 2**10, pin=False)

    @pytest.mark.parametrize("threads", [1, 3])
    def test_pageable_memory_is_there_before_it_is_written(self, threads: int) -> None:
        block, libc = Block(2**25 + 5, pin=False, threads=threads), ctypes.CDLL(None)
        address, nbytes = ctypes.c_void_p(block.address), ctypes.c_size_t(block.nbytes)
        if libc.madvise(address, ctypes.c_size_t(4096), 23):
            pytest.skip("this kernel cannot be asked for pages ahead of use (Linux 5.14)")
        flags = (ctypes.c_ubyte * -(-block.nbytes // mmap.PAGESIZE))()  # of each page, whether the kernel has backed it
        assert libc.mincore(address, nbytes, flags) == 0
        assert all(flag & 1 for flag in flags)


class FakeCuda:
    """CUDA as far as memory is page-locked with it: what is registered, by address, and with which device."""

    def __init__(self) -> None:
        self.room = 2**40  # bytes that can be registered
        self.here = threading.local()  # of each thread: its device, and whether a capture is put up with
        self.locked: dict[int, tuple[int, int]] = {}
        self.calls: list[tuple[str, str, bool]] = []  # name, thread, whether a capture is put up with
        self.unlocked_on: list[int] = []
        self.pending: set[str] = set()  # the threads whose next kernel will raise an earlier error
        self.gate = threading.Event()  # registering waits for it
        self.gate.set()

    def current_device(self) -> int:
        return int(getattr(self.here, "device", 0))

    def set_device(self, device: int) -> None:
        if device > 7:
            self.pending.discard(threading.current_thread().name)
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.here.device = device

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self.here.device = self.current_device(), device
        yield
        self.here.device = before

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        self.here.relaxed = True
        yield
        self.here.relaxed = False

    def called(self, name: str) -> None:
        self.calls.append((name, threading.current_thread().name, getattr(self.here, "relaxed", False)))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1, "cudaHostRegisterPortable: each device copies without another copy between"
        self.called("register")
        assert self.gate.wait(20)
        if sum(size for size, _ in self.locked.values()) + nbytes > self.room:
            self.pending.add(threading.current_thread().name)
            return 2
        self.locked[address] = nbytes, self.current_device()
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert bytes((ctypes.c_char * 1).from_address(address)) in (b"\0", b"\7"), "it is mapped still"
        self.called("unregister")
        del self.locked[address]
        self.unlocked_on.append(self.current_device())
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.set_device(3)
    for name, value in {
        "torch.cuda.is_available": lambda: True,
        "torch.accelerator.is_available": lambda: True,
        "torch.cuda.cudart": lambda: fake,
        "torch.cuda.current_device": fake.current_device,
        "torch.cuda.set_device": fake.set_device,
        "torch.cuda.device": fake.device,
        "stagereg.base.pages.relaxed_capture": fake.relaxed_capture,
        "stagereg.base.pages.LOCKED_BYTES": 2**20,
    }.items():
        monkeypatch.setattr(name, value)
    return fake


class TestPageLocking:
    @pytest.mark.parametrize("nbytes", [1, 2**20, 3 * 2**20 + 5, 5 * 2**20])
    def test_memory_is_locked_in_pieces_at_its_size_until_freed(self, nbytes: int, cuda: FakeCuda) -> None:
        block = Block(nbytes, True, 2)
        whole = -(-nbytes // 4096) * 4096
        pieces = {block.address + at: (min(2**20, whole - at), 3) for at in range(0, whole, 2**20)}
        assert cuda.locked == pieces
        assert (block.locked, block.refusal) == (whole, "")
        x = torch.frombuffer(block.view(), dtype=torch.uint8)
        x.fill_(7)
        part = x[:1]
        del block, x
        gc.collect()
        assert cuda.locked == pieces, "a tensor over it lives"
        thread = threading.Thread(target=lambda holder: holder.clear(), args=([part],))
        del part
        thread.start()
        thread.join()
        gc.collect()
        assert cuda.locked == {}
        assert cuda.unlocked_on == [3] * len(pieces), "not the first device, which a thread has otherwise"

    def test_each_call_of_the_driver_leaves_a_capture_of_another_thread_valid(self, cuda: FakeCuda) -> None:
        block = Block(3 * 2**20, True)
        del block
        gc.collect()
        assert [name for name, _, _ in cuda.calls] == ["register"] * 3 + ["unregister"] * 3
        assert all(relaxed for _, _, relaxed in cuda.calls)

    @pytest.mark.parametrize("pieces", [0, 1, 4])
    def test_what_is_locked_stays_locked_if_the_next_piece_is_refused(
        self, pieces: int, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
    ) -> None:
        cuda.room = pieces * 2**20
        pool = Pool()
        held = [borrow(pool, 5 * 2**20 + 5) for _ in range(2)]
        start = held[0].address
        assert [*cuda.locked] == [start + at * 2**20 for at in range(pieces)]
        assert len(cuda.calls) == pieces + 2, "no piece is tried after the first refusal"
        assert cuda.pending == set(), "else torch raises it after a later kernel"
        of = f"page-locked only {pieces * 2**20} of {5 * 2**20 + 4096} bytes (CUDA error 2)"
        assert [record.getMessage() for record in caplog.records if "page-locked" in record.getMessage()] == [
            f"stagereg: {of}. Copies to the other bytes are slower."
        ]
        held[0].view[-1] = held[1].view[-1] = 7
        pool.close()
        held.clear()
        gc.collect()
        assert cuda.locked == {}
        assert len(cuda.unlocked_on) == pieces

    def test_a_forked_child_unlocks_nothing(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        block, parent = Block(2**21, True), os.getpid()
        monkeypatch.setattr("os.getpid", lambda: parent + 1)
        del block
        gc.collect()
        assert cuda.unlocked_on == []

    def test_a_pool_keeps_its_memory_locked_until_it_closes(self, cuda: FakeCuda) -> None:
        pool = Pool()
        for _ in range(3):
            tensor_over(borrow(pool, 64)).view(torch.uint8).fill_(7)
            assert [*cuda.locked.values()] == [(4096, 3)]
        pool.close()
        gc.collect()
        assert cuda.locked == {}

    @pytest.mark.parametrize("pin", [False, None])
    def test_memory_is_not_locked_unasked_or_without_cuda(
        self, pin: bool | None, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        if pin is None:  # another accelerator: torch's allocator, which is not there in this test
            monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        pool = Pool(pin=pin)
        held = borrow(pool, 64)
        held.view[0] = 7
        pool.prepare()
        assert pool._spare is None
        assert (cuda.locked, cuda.unlocked_on) == ({}, [])
        assert ("page-locked only 0 of" in caplog.text) is (pin is None)


NBYTES = 3 * 2**20


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class TestTheBlockMadeInTheBackground:
    @pytest.fixture
    def pool(self, cuda: FakeCuda) -> Iterator[Pool]:
        made = Pool(max_in_flight=2)
        yield made
        cuda.gate.set()
        made.close()

    def test_the_thread_that_stages_locks_no_memory_for_the_second_copy(self, pool: Pool, cuda: FakeCuda) -> None:
        first = borrow(pool, NBYTES)
        cuda.calls.clear()
        pool.prepare()
        second = borrow(pool, NBYTES)
        assert [*cuda.calls] == [("register", "stagereg-memory", True)] * 3
        assert {device for _, device in cuda.locked.values()} == {3}, (
            "not the first device, which a thread has otherwise"
        )
        assert second.address != first.address
        assert all(second.address + at in cuda.locked for at in range(0, NBYTES, 2**20))

    @pytest.mark.parametrize("kind", ["pinned_cached", "overlapped"])
    def test_a_stager_that_is_told_of_the_next_copy_locks_memory_in_the_first_call_only(
        self, kind: str, cuda: FakeCuda
    ) -> None:
        stager, held, threads = stagereg.build("stager", kind), [], list[set[str]]()
        assert isinstance(stager, ExpectsStage)
        for number in range(3):
            cuda.calls.clear()
            del held[:-1]
            copy = stager.stage({"w": torch.full((2**19,), float(number))})
            held.append(copy.result(20) if isinstance(copy, Future) else copy)
            del copy
            stager.expect_stage()
            until(lambda: len(cuda.locked) == 4)  # two blocks of 2 MiB
            threads.append({thread for _, thread, _ in cuda.calls})
        assert threads == [{threading.current_thread().name, "stagereg-memory"}, set(), set()]
        assert [float(each["w"][-1]) for each in held] == [1, 2]
        held.clear()
        stager.close()
        gc.collect()
        assert cuda.locked == {}

    def test_preparing_waits_for_nothing(self, pool: Pool, cuda: FakeCuda) -> None:
        held = borrow(pool, NBYTES)
        cuda.gate.clear()
        for _ in range(3):
            pool.prepare()
        until(lambda: len(cuda.calls) > 3)
        assert len(cuda.calls) == 4, "one block at a time, which has locked nothing yet"
        del held
        other = borrow(pool, NBYTES)  # the first block is free again, so nothing is waited for
        assert other.nbytes == NBYTES

    def test_memory_is_not_taken_if_one_block_is_enough(self, cuda: FakeCuda) -> None:
        for most, in_use in ((1, True), (2, False)):
            pool = Pool(max_in_flight=most)
            pool.prepare()
            assert pool._spare is None, "the size is not known before the first copy"
            held = [borrow(pool, NBYTES)]
            if not in_use:
                held.clear()
            pool.prepare()
            assert pool._spare is None
            assert len(cuda.locked) == 3
            held.clear()
            pool.close()
            pool.prepare()
            assert pool._spare is None
            gc.collect()
            assert cuda.locked == {}

    def test_no_more_blocks_are_made_than_may_be_in_flight(self, pool: Pool, cuda: FakeCuda) -> None:
        held = [borrow(pool, NBYTES)]
        for _ in range(3):
            pool.prepare()
            until(lambda: len(pool._free) + len(held) == 2)
        held.append(borrow(pool, NBYTES))
        pool.prepare()
        assert pool._spare is None
        held.clear()
        held.append(borrow(pool, NBYTES))
        pool.prepare()
        assert pool._spare is None, "a block is free"
        assert len(cuda.locked) == 6

    @pytest.mark.parametrize("finished", [True, False])
    def test_a_block_that_has_become_too_small_is_dropped(self, finished: bool, pool: Pool, cuda: FakeCuda) -> None:
        held = [borrow(pool, NBYTES)]
        if not finished:
            cuda.gate.clear()
        pool.prepare()
        until(lambda: bool(pool._free) if finished else len(cuda.calls) > 3)
        leasing = threading.Thread(target=lambda: held.append(borrow(pool, 2 * NBYTES)))
        leasing.start()
        until(lambda: pool._expected == 2 * NBYTES)
        cuda.gate.set()
        leasing.join()
        assert held[1].nbytes == 2 * NBYTES
        gc.collect()
        assert len(cuda.calls) == (3 + 3 + 3 + 6 if finished else 3 + 1 + 1 + 6), "it is made no further"
        assert len(cuda.locked) == 3 + 6, "the block that is held, and the larger one"
        assert pool._free == []

    def test_close_ends_it_after_a_piece_and_frees_everything(self, pool: Pool, cuda: FakeCuda) -> None:
        held = borrow(pool, NBYTES)
        cuda.gate.clear()
        pool.prepare()
        until(lambda: len(cuda.calls) == 4)
        closing = threading.Thread(target=pool.close)
        closing.start()
        until(lambda: pool._closed)
        cuda.gate.set()
        closing.join()
        assert len([name for name, _, _ in cuda.calls if name == "register"]) == 4
        gc.collect()
        assert len(cuda.locked) == 3, "the block in use"
        del held
        gc.collect()
        assert cuda.locked == {}

    def test_a_failure_is_logged_and_the_next_copy_allocates_its_own_memory(
        self, pool: Pool, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        held = borrow(pool, NBYTES)
        with monkeypatch.context() as patched:
            patched.setattr(pages, "private_memory", lambda nbytes: (_ for _ in ()).throw(OSError("no memory")))
            for _ in range(3):
                pool.prepare()
                assert pool._spare is not None
                pool._spare.join()
        assert caplog.text.count("cannot allocate 0.00 GiB of host memory (no memory)") == 1, "once until the next copy"
        assert borrow(pool, NBYTES).address != held.address

    def test_a_forked_child_waits_for_no_thread_of_its_parent(self, pool: Pool, cuda: FakeCuda) -> None:
        held = borrow(pool, NBYTES)
        cuda.gate.clear()
        pool.prepare()
        thread = pool._spare
        pool.renew()
        assert (pool._spare, pool._free, pool.in_flight) == (None, [], 0)
        cuda.gate.set()
        assert thread is not None
        thread.join()
        del held

    def test_it_is_logged_once(
        self, pool: Pool, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "stagereg")
        held: list[Lease] = []
        for nbytes in (NBYTES, 2 * NBYTES):
            held = [pool.lease(nbytes)]
            pool.prepare()
            until(lambda: bool(pool._free))
        assert [r.getMessage() for r in caplog.records if "in the background" in r.getMessage()] == [
            "stagereg: A copy is still in use shortly before the next one, so memory for another copy (0.00 GiB) is "
            "allocated in the background. max_in_flight=1 uses one copy only."
        ]
        held.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
class TestOnCuda:
    def test_every_piece_of_a_block_is_page_locked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pages, "LOCKED_BYTES", 2**24)
        block = Block(5 * 2**24 + 4096, True, 2)
        assert (block.locked, block.refusal) == (block.nbytes, "")
        x = torch.frombuffer(block.view(), dtype=torch.uint8)
        for at in (0, 2**24 - 1, 2**24, 3 * 2**24 + 5, block.nbytes - 1):
            assert x[at:].is_pinned(), at
        source = torch.arange(2**24, device="cuda").to(torch.uint8)
        for at in range(0, 5 * 2**24, 2**24):
            x[at : at + 2**24].copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert all(torch.equal(x[at : at + 2**24], source.cpu()) for at in range(0, 5 * 2**24, 2**24))

    def test_a_refused_piece_leaves_no_error_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        block = Block(2**24, True)
        assert int(torch.cuda.cudart().cudaHostRegister(block.address, 4096, 1)) != 0, "registered already"
        device = torch.cuda.current_device()
        pages._clear_error()
        assert torch.cuda.current_device() == device
        assert float(torch.ones(10, device="cuda").sum()) == 10

    def test_from_the_second_copy_on_the_training_thread_locks_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads: list[str] = []
        lock = Block._lock

        def noted(self: Block, *args: object) -> None:
            threads.append(threading.current_thread().name)
            lock(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Block, "_lock", noted)
        pool, held = Pool(), []
        for _ in range(2):
            held.append(borrow(pool, 2**26))
            pool.prepare()
        held.pop()
        held.append(borrow(pool, 2**26))
        assert threads == [threading.current_thread().name, "stagereg-memory"]
        held.clear()
        pool.close()


def test_a_piece_is_a_gibibyte() -> None:
    assert LOCKED_BYTES == 2**30, "transfers split at multiples of it; drivers refuse 512 GiB in a call"
