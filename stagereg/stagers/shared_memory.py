"""Blocks of memory that other processes read as well, and how tensors over them travel between processes.

A :class:`SharedBlock` is one file in memory (``memfd_create``), so a state dict of any number of tensors costs one file
descriptor, and no space in ``/dev/shm``. A message carries no bytes of its tensors: it has a
:class:`SharedMemoryHandle`, which names the file through the sender's ``/proc`` entry, and offsets into the file. The
receiver maps a block once and keeps the mapping for the next message.

Memory that another process reads is never written:

* Each received message holds a shared lock (``flock``) on the file while one tensor over it lives. A block is idle only
  when its owner can get the exclusive lock. The system drops the locks of a process that dies, so the owner never waits
  for a dead reader.
* A message that was sent and not received yet is marked in the file's last page, and its block is not idle. After a
  minute without a receiver, the message no longer counts.
* An idle block gets another token in that page. Whoever opens an older message later gets an error, never other bytes
  than were sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

from stagereg.errors import StagingError
from stagereg.kernel.memory import Block, view_of

_PAGE = 4096
_TOKEN_BYTES = 16  # at the start of the last page; each byte after them is a slot for one message
_SLOTS = _PAGE - _TOKEN_BYTES
_SENT, _RECEIVED = b"\0", b"\1"
_UNRECEIVED_S = 60.0


class SharedMemoryHandle(NamedTuple):
    """What another process needs to read a block; a small value that can be pickled."""

    path: str  # where the file can be opened while its owner lives
    token: bytes  # 16 bytes that are in the file as long as this handle is valid
    nbytes: int  # of the block
    slot: int  # where the receiver marks the message

    def attach(self) -> memoryview:
        """Return the block's memory; it is not written while the view, or a tensor over it, lives.

        Raises:
            StagingError: the sender is gone or has revoked the message, or its memory may not be opened from here.
        """
        _drop_stale_mappings()
        with contextlib.ExitStack() as on_error:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
                on_error.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH)  # the owner holds the exclusive lock for microseconds only
                if os.pread(fd, _TOKEN_BYTES, self.nbytes) != self.token:
                    raise StagingError([], "a staged copy was received too late: its sender has revoked it")
                view = view_of(self._mapping(fd))
                os.pwrite(fd, _RECEIVED, self.nbytes + _TOKEN_BYTES + self.slot)
            except (OSError, RuntimeError) as error:
                reason = f"a staged copy in shared memory cannot be opened, its sender is gone ({error})"
                raise StagingError([], reason) from error
            on_error.pop_all()
        weakref.finalize(view, _detach, fd).atexit = False
        return view

    def _mapping(self, fd: int) -> torch.Tensor:
        status = os.fstat(fd)
        known = _mappings.get(self.path)
        if known is not None and os.path.samestat(known[0], status):
            return known[1]
        memory = _map(f"/proc/self/fd/{fd}", self.nbytes)
        _mappings[self.path] = status, memory
        return memory


# Global, since messages arrive wherever they are unpickled, and the mapping of a block serves all of its messages.
_mappings: dict[str, tuple[os.stat_result, torch.Tensor]] = {}


def _drop_stale_mappings() -> None:
    """Unmap the files whose owner has closed them or is gone; what messages still use stays mapped for these."""
    for path, (status, _) in list(_mappings.items()):
        try:
            is_stale = not os.path.samestat(os.stat(path), status)
        except OSError:
            is_stale = True
        if is_stale:
            _mappings.pop(path, None)


def _detach(fd: int) -> None:
    """Give up the lock of one message. Runs in a finalizer."""
    os.close(fd)
    _drop_stale_mappings()


def _map(path: str, nbytes: int) -> torch.Tensor:
    # Not Python's mmap, which keeps a second descriptor open, and with it the lock of a reader.
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


class SharedBlock(Block):
    """A block that other processes of this user on this machine can read, see the module.

    Args: as for :class:`.Block`. Raises: ``StagingError`` if there is no memory for it.
    """

    def __init__(self, nbytes: int, pin: bool, threads: int = 1) -> None:
        super().__init__(nbytes, pin and torch.cuda.is_available(), threads)  # no other accelerator locks what is there

    @property
    def idle(self) -> bool:
        """Whether no other process reads it or will. Once it is true, it stays so until the block is sent again."""
        return not self._file.is_own or self._file.revoke()

    def view(self) -> memoryview:
        """As of any block; in a forked child, to which the block of its parent does not belong, of fresh memory."""
        if not self._file.is_own:
            self._memory = self._map()
        return super().view()

    def _map(self) -> torch.Tensor:
        for file in [file for file in _files if not file.address]:
            file.free()
        if not hasattr(os, "memfd_create"):
            raise StagingError([], "shared memory needs Linux here; choose another stager, such as pinned_cached")
        try:
            if self.nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise MemoryError("more than the machine has")
            self._file = _SharedFile(self.nbytes)
            return self._file.map()
        except (OSError, RuntimeError, MemoryError) as error:
            raise StagingError([], f"no {self.nbytes / 2**30:.2f} GiB of shared memory to be had ({error})") from error


class _SharedFile:
    """The file behind a block, as its owner has it. It outlives the block while a message is on its way.

    Methods may run in finalizers: none takes a lock of Python's.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes  # of the block
        self.address = 0  # of the block; 0 when its memory is not mapped any more
        self._owner = os.getpid()
        self._sent_at: dict[int, float] = {}  # by slot, of the messages that are on their way
        self._serials = itertools.count()
        self._fd = os.memfd_create("stagereg", os.MFD_CLOEXEC)
        self._path = f"/proc/{self._owner}/fd/{self._fd}"
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, nbytes + _PAGE)
        self._renew_token()

    def map(self) -> torch.Tensor:
        """Map the block; when that mapping is gone, with all that was made over it, the memory is freed."""
        memory = _map(self._path, self.nbytes)
        self.address = memory.data_ptr()
        _files.append(self)
        weakref.finalize(memory, self.free).atexit = False
        return memory

    @property
    def is_own(self) -> bool:
        """Whether this process made it, and not a process that forked this one."""
        return os.getpid() == self._owner

    def handle(self) -> SharedMemoryHandle:
        """Return a handle, for a message that is on its way until it is received.

        Raises: ``StagingError`` if too many messages are.
        """
        slot = next(self._serials) % _SLOTS
        if slot in self._sent_at and self._on_the_way():
            raise StagingError([], f"{_SLOTS} messages with this copy were sent and not received")
        self._sent_at[slot] = time.monotonic()
        os.pwrite(self._fd, _SENT, self.nbytes + _TOKEN_BYTES + slot)
        return SharedMemoryHandle(self._path, self._token, self.nbytes, slot)

    def revoke(self) -> bool:
        """Invalidate all handles and return True; return False while a message is in transit or a reader is there."""
        if self._on_the_way() or not _lock_exclusively(self._fd):
            return False
        self._renew_token()
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def free(self) -> None:
        """Free the unmapped memory, now or when the last reader is done; not while a message is on its way."""
        self.address = 0
        if self.is_own:
            if self._on_the_way():
                return
            if _lock_exclusively(self._fd):  # a reader that keeps its mapping for the next message keeps no memory
                os.ftruncate(self._fd, 0)
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        with contextlib.suppress(
            ValueError
        ):  # the finalizer did, while a thread that makes a block was here, or the other way
            _files.remove(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled file becomes the memory it stands for. A pickler asks once a message, so each has one slot."""
        return SharedMemoryHandle.attach, (self.handle(),)

    def _on_the_way(self) -> bool:
        """Whether a message was sent lately and not received."""
        if self._sent_at:
            marks = os.pread(self._fd, _SLOTS, self.nbytes + _TOKEN_BYTES)
            too_early = time.monotonic() - _UNRECEIVED_S
            for slot, sent_at in list(self._sent_at.items()):
                if marks[slot : slot + 1] == _RECEIVED or sent_at < too_early:
                    self._sent_at.pop(slot, None)
        return bool(self._sent_at)

    def _renew_token(self) -> None:
        self._token = os.urandom(_TOKEN_BYTES)
        os.pwrite(self._fd, self._token, self.nbytes)


# Global, since a pickler has a tensor and nothing else to find the file by: the files of this process, those that are
# not mapped any more (address 0) while something of them is on its way.
_files: list[_SharedFile] = []


def _lock_exclusively(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has a lock
        return False
    return True


def _file_of(address: int) -> _SharedFile | None:
    for file in list(_files):
        if file.address and file.address <= address < file.address + file.nbytes:
            return file
    return None


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its memory, dtype, shape and strides, and lies on the CPU."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout is torch.strided
    return plain and not x.is_quantized


# -- the pickling of tensors by ``multiprocessing``


def register_reducers() -> None:
    """Have ``multiprocessing`` send tensors over shared blocks as handles, in the whole process. Twice is harmless.

    Queues, pipes and torch's checkpoint process pickle with ``ForkingPickler``, whose reducers are registered by type
    for all of them; there is no registering for some tensors. All other tensors go on to torch's own reducers.
    """
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    ForkingPickler.register(torch.Tensor, _reduce_tensor)
    ForkingPickler.register(torch.nn.Parameter, _reduce_tensor)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    file = _file_of(storage.data_ptr()) if _files and storage.device.type == "cpu" and storage.nbytes() else None
    if file is None:
        return reduce_storage(storage)
    return _storage_over, (file, storage.data_ptr() - file.address, storage.nbytes())


def _storage_over(view: memoryview, offset: int, nbytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def _reduce_tensor(x: torch.Tensor) -> Any:
    """As torch's reducer; of tensors in a block also the attributes, which torch's drops."""
    is_copy = is_plain(x) and (not x.numel() or _file_of(x.untyped_storage().data_ptr()) is not None)
    if not is_copy or not vars(x):
        return reduce_tensor(x)
    return _restore, (x.detach(), type(x), x.requires_grad, vars(x))


def _restore(
    bare: torch.Tensor, kind: type[torch.Tensor], requires_grad: bool, attributes: dict[str, Any]
) -> torch.Tensor:
    made = torch.nn.Parameter(bare, requires_grad) if kind is torch.nn.Parameter else bare.requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made
