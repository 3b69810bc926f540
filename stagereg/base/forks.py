"""Handle memory and objects of a process that forks, for example for the workers of a ``DataLoader``.

After a fork, parent and child share private pages, and the first write to a shared page costs a page fault and a copy.
:func:`private_memory` returns pages that a child does not inherit. In the child, the addresses of these pages stay
reserved, so that no other memory is mapped there. A child that accesses these addresses crashes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MAP_FIXED_NOREPLACE = 0x100000  # Linux 4.17
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK, _MADV_DOFORK = 10, 11

_libc: Any = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class RenewedInChild(Generic[T]):
    """A set of objects. Each forked child calls ``renew`` with each object, because a child has no background threads.

    Holds weak references. A child processes the sets in the order in which the sets were created.
    """

    def __init__(self, renew: Callable[[T], object]) -> None:
        self._objects: weakref.WeakSet[T] = weakref.WeakSet()
        self._renew = renew
        os.register_at_fork(after_in_child=self._renew_all)

    def add(self, x: T) -> None:
        """Call ``renew`` for an object in each child that is forked from now on."""
        self._objects.add(x)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._objects))

    def _renew_all(self) -> None:
        for x in self:
            self._renew(x)


class PrivateMemory(mmap.mmap):
    """Private pages that a forked child does not inherit (:func:`private_memory`)."""

    address = 0  # address of the first byte
    inherited = False  # whether a child that is forked now inherits the pages

    def inherit(self, inherited: bool) -> None:
        """Set whether children that are forked from now on inherit the pages."""
        self.inherited = inherited
        self.madvise(_MADV_DOFORK if inherited else _MADV_DONTFORK)


def private_memory(nbytes: int) -> PrivateMemory:
    """Return new private pages that a forked child does not inherit. Raises: ``OSError`` if memory is exhausted."""
    memory = PrivateMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory.inherit(False)
    _memories.add(memory)
    return memory


def _seal(memory: PrivateMemory) -> None:
    """Reserve the addresses of pages that this child did not inherit. Leaks ``memory``: freeing would unmap them."""
    if memory.inherited:
        return
    memory.inherited = True  # children of this child inherit the inaccessible pages
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    no_access = 0
    at = _libc.mmap(memory.address, len(memory), no_access, flags, -1, 0)
    if at not in (memory.address, ctypes.c_void_p(-1).value):  # an older kernel treats the address as a hint
        _libc.munmap(at, len(memory))


_memories = RenewedInChild(_seal)  # created at import, to reserve its addresses before other memory is freed
