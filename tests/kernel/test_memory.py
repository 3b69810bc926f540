"""Host memory: leased, never leased twice at once, returned when the last reader is gone."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

import stagereg.kernel.memory as memory
from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.memory import Block, Pool


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
        self.code = 0  # what registering answers
        self.pending = 0  # the error that the next kernel will raise
        self.here = threading.local()  # the device of each thread; a new one has the first
        self.locked: dict[int, tuple[int, int]] = {}
        self.unlocked_on: list[int] = []

    def current_device(self) -> int:
        return int(getattr(self.here, "device", 0))

    def set_device(self, device: int) -> None:
        self.here.device = device

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self.here.device = self.current_device(), device
        yield
        self.here.device = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1, "cudaHostRegisterPortable: each device copies without another copy between"
        if not self.code:
            self.locked[address] = nbytes, self.current_device()
        self.pending = self.code
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        assert bytes((ctypes.c_char * 1).from_address(address)) == b"\7", "it is mapped still"
        del self.locked[address]
        self.unlocked_on.append(self.current_device())

    def zeros(self, size: int, dtype: torch.dtype, device: str) -> None:
        if self.pending:
            self.pending = 0
            raise RuntimeError("CUDA error")


class TestPageLocking:
    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        fake = FakeCuda()
        fake.set_device(3)
        for name, value in {
            "cuda.is_available": lambda: True,
            "accelerator.is_available": lambda: True,
            "cuda.cudart": lambda: fake,
            "cuda.current_device": fake.current_device,
            "cuda.device": fake.device,
            "zeros": fake.zeros,
        }.items():
            monkeypatch.setattr(f"torch.{name}", value)
        return fake

    @pytest.mark.parametrize("nbytes", [1, 3 * 2**20 + 5, 5 * 2**20 + 5])
    def test_memory_is_locked_at_its_size_until_freed(self, nbytes: int, cuda: FakeCuda) -> None:
        block = Block(nbytes, True, 2)
        assert cuda.locked == {block.address: (-(-nbytes // 4096) * 4096, 3)}
        x = torch.frombuffer(block.view(), dtype=torch.uint8)
        x[0] = 7
        part = x[:1]
        del block, x
        gc.collect()
        assert len(cuda.locked) == 1, "a tensor over it lives"
        thread = threading.Thread(target=lambda holder: holder.clear(), args=([part],))
        del part
        thread.start()
        thread.join()
        gc.collect()
        assert cuda.locked == {}
        assert cuda.unlocked_on == [3], "not the first device, which a thread has otherwise"

    def test_memory_that_cannot_be_locked_is_used_as_it_is(
        self, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
    ) -> None:
        cuda.code = 2
        block = Block(5 * 2**20, True, 2)
        assert cuda.pending == 0, "else torch raises it after a later kernel"
        assert [
            r.getMessage() for r in caplog.records if "bytes (CUDA error 2). Using pageable memory" in r.getMessage()
        ]
        block.view()[-1] = 7
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
        borrow(Pool(pin=pin), 64).view[0] = 7
        assert (cuda.locked, cuda.unlocked_on) == ({}, [])
        assert ("cannot page-lock" in caplog.text) is (pin is None)
