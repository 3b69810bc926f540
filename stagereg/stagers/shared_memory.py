"""Memory that other processes read as well: blocks in shared memory, and how their tensors travel.

A :class:`SharedBlock` is one file in memory (``memfd_create``), so a state dict of any number of tensors costs one file
descriptor, and no space in ``/dev/shm``. A tensor over it goes through ``multiprocessing`` (a queue, a pipe, torch's
own checkpoint process) without its bytes: what is sent is a :class:`Passage`, which says how to open the file through
the sender's ``/proc`` entry, and an offset. The receiver maps a block once and keeps the mapping for the next message.

Memory that somebody else reads is never written again. Each received message holds a shared lock (``flock``) on the
file as long as one tensor over it lives, and :attr:`SharedBlock.idle` is only true when an exclusive one can be had.
The kernel drops the locks of a process that dies, so nobody waits for the dead, and needs no list of readers. What was
sent and not received yet is marked in the file's last page. If nobody has received it after a minute, it is revoked by
counting up a generation in that page: who opens it later gets an error, and never other bytes than were sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import sys
import tempfile
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

from stagereg.errors import StagingError
from stagereg.kernel.memory import Block, log

__all__ = ["Passage", "SharedBlock", "enter", "passage_to"]

_PAGE = 4096
_WORTH_TOUCHING = 2**22
_HEADER = struct.Struct("=16sQ")  # the block's token, its generation
_FIRST_SLOT = 64  # bytes into the last page; from here on one byte a message that is on its way
_SLOTS = _PAGE - _FIRST_SLOT
_SENT, _RECEIVED = b"\1", b"\2"
_ON_THE_WAY_S = 60.0
_LOCK_S = 5.0
_KEPT_MAPPINGS = 8
_UNTRACKED = -1


class Passage(NamedTuple):
    """What another process needs to read a block; a small value that can be pickled.

    Attributes:
        path: where the file can be opened while its sender lives.
        token: 16 bytes that tell this block from all others.
        generation: how often the block had been lent when this was made.
        nbytes: of the block's memory.
        slot: where the receiver marks that it has come; -1 where the sender holds the memory until it is answered.
    """

    path: str
    token: bytes
    generation: int
    nbytes: int
    slot: int = _UNTRACKED


class SharedBlock(Block):
    """A block that other processes of this user on this machine can read, see the module.

    Args: as for :class:`.Block`. Raises: ``StagingError`` if the memory is not to be had.
    """

    def __init__(self, nbytes: int, pin: bool, threads: int = 1) -> None:
        super().__init__(nbytes, False, threads)
        if pin:
            self.pinned = self._memory.lock_pages()

    @property
    def idle(self) -> bool:
        """Whether nobody else reads it. Once it is true, nobody can begin to before it is lent and sent again."""
        return not self._file.is_own or self._file.settle()

    def view(self) -> memoryview:
        """As of any block. In a forked child, which has the parent's memory before it and no copy, of fresh memory."""
        if not self._file.is_own:
            self._map(threads=1)
        return super().view()

    def _map(self, threads: int) -> None:
        for file in [file for file in _left if file.is_own and not file.on_the_way]:
            file.leave()
        try:
            if self.nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise MemoryError("more than the machine has")
            self._file = _File(self.nbytes)
            self._memory = self._file.map()
        except (OSError, MemoryError) as error:
            raise StagingError([], f"no {self.nbytes / 2**30:.2f} GiB of shared memory to be had ({error})") from error
        self._owner, self.address = self._memory, self._memory.address
        if self.nbytes >= _WORTH_TOUCHING and sys.platform.startswith("linux"):
            self._touch(threads)


class _Memory:
    """A file's pages in this process, for as long as this object lives; needs no file descriptor of its own."""

    def __init__(self, fd: int, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._munmap = libc.munmap
        self._unlock: Any = None
        self.nbytes = nbytes
        self.address = 0
        # Not Python's mmap, which keeps a second descriptor open.
        address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = address

    def view(self) -> memoryview:
        block = (ctypes.c_char * self.nbytes).from_address(self.address)
        block._owner = self  # type: ignore[attr-defined]
        return memoryview(block).cast("B")

    def lock_pages(self) -> bool:
        """Page-lock, where that can be; whether it could."""
        if not torch.cuda.is_available():
            return False
        runtime = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(self.address, self.nbytes, 0))
        if failed:
            log.warning("stagereg: %d shared bytes could not be page-locked (CUDA error %d)", self.nbytes, failed)
            return False
        self._unlock = runtime.cudaHostUnregister
        return True

    def __del__(self) -> None:
        if self.address:
            if self._unlock is not None:
                self._unlock(self.address)
            self._munmap(self.address, self.nbytes)


class _File:
    """The file behind a block, as its owner has it: who reads it, and what is on its way.

    It outlives its block while messages are on their way. Methods may run in finalizers: none takes a lock of Python's.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = 0
        self._token, self._generation = os.urandom(16), 0
        self._owner = os.getpid()
        self._offered = False
        self._ways: dict[int, float] = {}  # slot -> when it was sent
        self._unlink: weakref.finalize[Any, Any] | None = None
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("stagereg", os.MFD_CLOEXEC)
            self._path = f"/proc/{self._owner}/fd/{self._fd}"
        else:
            self._fd, self._path = tempfile.mkstemp(prefix="stagereg-")
            self._unlink = weakref.finalize(self, _unlink, self._path, self._owner)
        try:
            os.ftruncate(self._fd, nbytes + _PAGE)
            os.pwrite(self._fd, _HEADER.pack(self._token, self._generation), nbytes)
        except OSError:
            os.close(self._fd)
            raise

    def map(self) -> _Memory:
        """Map it for the owner; when that mapping is gone, with all that was made over it, the memory is freed."""
        try:
            memory = _Memory(self._fd, self.nbytes)
        except OSError:
            os.close(self._fd)
            raise
        self.address = memory.address
        _live[self.address] = self
        weakref.finalize(memory, self.leave).atexit = False
        return memory

    def offer(self, tracked: bool) -> Passage:
        """Return a passage; if ``tracked``, for a message that is on its way until somebody receives it."""
        self._offered = True
        slot = self._take_slot() if tracked else _UNTRACKED
        return Passage(self._path, self._token, self._generation, self.nbytes, slot)

    @property
    def is_own(self) -> bool:
        """Whether this process made it, and not one that forked this one."""
        return os.getpid() == self._owner

    @property
    def on_the_way(self) -> bool:
        """Whether something was sent lately and nobody has received it."""
        if self._ways:
            marks = os.pread(self._fd, _SLOTS, self.nbytes + _FIRST_SLOT)
            late = time.monotonic() - _ON_THE_WAY_S
            for slot, sent in list(self._ways.items()):
                if marks[slot : slot + 1] == _RECEIVED or sent < late:
                    self._ways.pop(slot, None)
        return bool(self._ways)

    def settle(self) -> bool:
        """See :attr:`SharedBlock.idle`. Revokes what was sent and can still be opened."""
        if self.on_the_way:
            return False
        with _sole(self._fd) as sole:
            if sole and self._offered:
                self._generation += 1
                os.pwrite(self._fd, _HEADER.pack(self._token, self._generation), self.nbytes)
                self._offered = False
            return sole

    def leave(self) -> None:
        """Free the memory, now or when the last reader is done; keep the file while a message is on its way."""
        _live.pop(self.address, None)
        if not self.is_own:
            os.close(self._fd)
            return
        if self.on_the_way:
            if self not in _left:
                _left.append(self)
            return
        if self in _left:
            _left.remove(self)
        with _sole(self._fd) as sole:
            if sole:  # a reader that keeps its mapping for the next message keeps no memory
                os.ftruncate(self._fd, 0)
        if self._unlink is not None:
            self._unlink()
        os.close(self._fd)

    def __reduce__(self) -> tuple[type[_Arrival], tuple[Passage]]:
        """In a message it stands for its block. A pickler comes here once a message, so each has one passage."""
        return _Arrival, (self.offer(tracked=True),)

    def _take_slot(self) -> int:
        if len(self._ways) == _SLOTS and not self.on_the_way:
            self._ways.clear()
        for slot in range(_SLOTS):
            if slot not in self._ways:
                self._ways[slot] = time.monotonic()
                os.pwrite(self._fd, _SENT, self.nbytes + _FIRST_SLOT + slot)
                return slot
        raise StagingError([], f"{_SLOTS} messages with this copy were sent and none of them received")


def _unlink(path: str, owner: int) -> None:
    if os.getpid() == owner:
        os.unlink(path)


_live: dict[int, _File] = {}  # by the address of the memory
_left: list[_File] = []  # files without a block, of which something is on its way


@contextlib.contextmanager
def _sole(fd: int) -> Iterator[bool]:
    """Whether nobody else has a lock on the file; nobody gets one meanwhile if so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _file_of(address: int) -> _File | None:
    for begin, file in list(_live.items()):
        if begin <= address < begin + file.nbytes:
            return file
    return None


def passage_to(address: int) -> tuple[Passage, int] | None:
    """Return how another process reads the block that ``address`` lies in, and where the block begins.

    For a message whose sender holds the memory until the receiver has answered. None for other memory.
    """
    file = _file_of(address)
    return None if file is None else (file.offer(tracked=False), file.address)


# -- the receiver

_mapped: OrderedDict[bytes, _Memory] = OrderedDict()


def enter(passage: Passage) -> memoryview:
    """Return the memory behind a passage; nobody writes to it while the view, or a tensor over it, lives.

    Raises:
        StagingError: the sender is gone or has revoked the message, or its memory may not be opened from here.
    """
    fd = -1
    try:
        fd = os.open(passage.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        _share(fd)
        header = os.pread(fd, _HEADER.size, passage.nbytes)
        if header != _HEADER.pack(passage.token, passage.generation):
            raise StagingError([], "a staged copy was received too late: its sender has given it up")
        memory = _mapped.get(passage.token) or _mapping(fd, passage)
        if passage.slot != _UNTRACKED:
            os.pwrite(fd, _RECEIVED, passage.nbytes + _FIRST_SLOT + passage.slot)
    except OSError as error:
        _close(fd)
        raise StagingError(
            [], f"a staged copy in shared memory cannot be opened, its sender is gone ({error})"
        ) from error
    except BaseException:
        _close(fd)
        raise
    _mapped[passage.token] = memory
    _mapped.move_to_end(passage.token)
    while len(_mapped) > _KEPT_MAPPINGS:
        _mapped.popitem(last=False)
    view = memory.view()
    weakref.finalize(view, _done, fd, passage).atexit = False
    return view


def _mapping(fd: int, passage: Passage) -> _Memory:
    # Opened once more: a mapping keeps what it was made from open, and so would keep the lock.
    again = os.open(f"/proc/self/fd/{fd}" if passage.path.startswith("/proc/") else passage.path, os.O_RDWR)
    try:
        return _Memory(again, passage.nbytes)
    finally:
        os.close(again)


def _share(fd: int) -> None:
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the sender is just looking whether anybody reads, which takes microseconds
            if time.monotonic() > until:
                raise
            time.sleep(0.001)


def _done(fd: int, passage: Passage) -> None:
    """Give up the lock; the mapping too, if no message will come any more. Runs in a finalizer."""
    try:
        there, here = os.stat(passage.path), os.fstat(fd)
        gone = (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
    except OSError:
        gone = True
    if gone:
        _mapped.pop(passage.token, None)
    _close(fd)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


# -- the pickling of tensors by ``multiprocessing``


class _Arrival:
    """A block as one message brings it, under one lock."""

    def __init__(self, passage: Passage) -> None:
        self.view = enter(passage)


def _storage(arrival: _Arrival, offset: int, nbytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(arrival.view, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    file = _file_of(storage.data_ptr()) if _live and storage.device.type == "cpu" and storage.nbytes() else None
    if file is None:
        return reduce_storage(storage)
    return _storage, (file, storage.data_ptr() - file.address, storage.nbytes())


def _dressed(bare: torch.Tensor, conj: bool, neg: bool, attributes: dict[str, Any]) -> torch.Tensor:
    made = torch._neg_view(bare) if neg else bare
    made = made.conj() if conj else made
    vars(made).update(attributes)
    return made


def _reduce_tensor(x: torch.Tensor) -> Any:
    """Torch's reducer, with what that forgets of tensors in a block: conjugation, negation, attributes."""
    conj, neg = x.is_conj(), x.is_neg()
    if not (conj or neg or vars(x)) or x.device.type != "cpu" or x.layout is not torch.strided:
        return reduce_tensor(x)
    if x.numel() and _file_of(x.untyped_storage().data_ptr()) is None:
        return reduce_tensor(x)
    bare = x.detach()
    bare = bare.conj() if conj else bare
    bare = torch._neg_view(bare) if neg else bare
    if isinstance(x, torch.nn.Parameter):
        bare = torch.nn.Parameter(bare, requires_grad=x.requires_grad)
    else:
        bare.requires_grad_(x.requires_grad)
    return _dressed, (bare, conj, neg, vars(x))


ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
ForkingPickler.register(torch.Tensor, _reduce_tensor)
ForkingPickler.register(torch.nn.Parameter, _reduce_tensor)
