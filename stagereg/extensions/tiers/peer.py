"""Parts of another machine, through the server of a process there: send one, ask for one, get blocks of one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import stagereg.extensions.tiers.wire as wire
from stagereg.base.small_files import open_regular
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError, CorruptCheckpointError
from stagereg.extensions.tiers.part import Part, PartFile, SaveId

_AHEAD = 2  # requests: the other side has the next one when it has sent a block
_ANSWER_S = 30.0  # seconds that an answer may take which waits for the other machine's disk


class Peer:
    """A connection to a :class:`.PartServer`, made when it is needed. One thread at a time, but :meth:`close`.

    ``secret`` is that of the run.

    Raises:
        OSError: from any method: the other side does not answer, is no process of this run, or stops.
        CheckpointError: from any method: it refuses, with its reason.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address, self._secret = address, secret
        self._lock = threading.Lock()
        self._link: wire.Connection | None = None
        self._busy = self._closed = False

    def part(self, save: SaveId, rank: int) -> Part | None:
        """Return the part of a rank in a save, if it is complete there. Raises: ``ValueError``: it is corrupt."""
        with self._connected() as link:
            text = _ask(link, {"do": "part", "save": save, "rank": rank}).get("part")
            return None if text is None else Part.loads(text)

    def get(
        self,
        save: SaveId,
        rank: int,
        name: str,
        numbers: Sequence[int],
        known: PartFile,
        take: Callable[[int, memoryview], object],
    ) -> None:
        """Get blocks of a file of a part; ``take`` is called with each that is right.

        Raises:
            CorruptCheckpointError: another one is not what was staged.
        """
        asked, bad = 0, list[int]()
        with self._connected() as link:
            memory = _memory([len(known.block(number)) for number in numbers])
            for at, (number, block) in enumerate(zip(numbers, memory, strict=True)):
                while asked < min(at + _AHEAD, len(numbers)):
                    link.send({"do": "get", "save": save, "rank": rank, "file": name, "block": numbers[asked]})
                    asked += 1
                if _answer(link).get("nbytes") != len(block):
                    raise CorruptCheckpointError(f"{name} has another size there")
                if link.receive_block(block) == known.blocks[number]:
                    take(number, block)
                else:
                    bad.append(number)
        if bad:
            raise CorruptCheckpointError(f"block {min(bad)} of {name} is not what was staged")

    def put(self, part: Part, directory: str) -> None:
        """Send a part, whose files are in ``directory``; returns when it is complete there, and checked.

        Raises:
            CheckpointError: there is no room for it, for one, or it was corrupted on its way.
        """
        with self._connected() as link:
            if _ask(link, {"do": "put", "part": part.dumps()}).get("have"):
                return
            blocks = [(name, number) for name, file in part.files.items() for number in range(len(file.blocks))]
            for at, (name, number) in enumerate(blocks):
                if link.is_readable(0):  # the other side sends nothing before the end, but what went wrong
                    raise CheckpointError(str(link.receive().get("error"))[:1000])
                span = part.files[name].block(number)
                descriptor = open_regular(f"{directory}/{name}", owner=os.geteuid())
                try:
                    link.send({"do": "block", "file": name, "block": number}, more=True)
                    link.send_file(descriptor, span.start, len(span))
                finally:
                    os.close(descriptor)
                if at == len(blocks) // 2:
                    failpoint("sending")
            _ask(link, {"do": "finish"})

    def close(self) -> None:
        """End it; what another thread does with it fails. Idempotent."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                if self._busy:
                    self._link.end()  # the thread that uses it closes it
                else:
                    self._link.close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[wire.Connection]:
        """Yield the connection. After an error nobody knows what is still on its way: the next call makes another."""
        self._busy, good = True, False
        try:
            yield self._connection()
            good = True
        finally:
            with self._lock:
                self._busy = False
                if self._link is not None and (self._closed or not good):
                    self._link.close()
                    self._link = None

    def _connection(self) -> wire.Connection:
        link = self._link or wire.connect(self._address, self._secret)
        with self._lock:
            self._link = link
            if self._closed:
                raise ConnectionAbortedError("this connection was closed")
        return link


def _memory(sizes: Sequence[int]) -> list[memoryview]:
    """Return new memory in pieces of these sizes: huge pages, of which the system gives 1.5 GiB/s more."""
    if not (total := sum(sizes)):
        return [memoryview(bytearray()) for _ in sizes]
    memory = mmap(-1, total, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    ends = [*accumulate(sizes)]
    return [memoryview(memory)[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _ask(link: wire.Connection, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request. Raises: ``CheckpointError``: it is a refusal; ``OSError``."""
    link.send(request)
    return _answer(link)


def _answer(link: wire.Connection) -> dict[str, Any]:
    if not link.is_readable(_ANSWER_S):
        raise TimeoutError(f"the other side has not answered for {_ANSWER_S:g} s")
    answer = link.receive()
    if "error" in answer:
        raise CheckpointError(str(answer["error"])[:1000])
    return answer
