"""The client of :mod:`.server`: sends a part to another machine, requests a part, and reads blocks of a part."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import stagereg.extensions.tiers.wire as wire
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError, CorruptCheckpointError
from stagereg.extensions.tiers.folder import open_own
from stagereg.extensions.tiers.part import Part, PartFile, SaveId

_STREAMS = 3  # connections that transfer the blocks of one part concurrently
_AHEAD = 2  # requests in flight on a connection, so that the server never waits for the next request
_ANSWER_S = 30.0  # seconds to wait for an answer of the server, including its disk accesses


class Peer:
    """A connection to a :class:`.PartServer`, opened at the first use. Only :meth:`close` is thread-safe.

    ``secret`` is the secret of the run. Each method raises ``OSError`` if the server does not answer, is not a process
    of this run, or stops; and ``CheckpointError``, with the reason in the message, if the server rejects the request.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address, self._secret = address, secret
        self._lock = threading.Lock()
        self._links: dict[int, wire.Connection] = {}
        self._busy = self._closed = False

    def part(self, save: SaveId, rank: int) -> Part | None:
        """Return the part of a rank in a save; ``None`` if the server lacks it. Raises: ``ValueError`` if corrupt."""
        with self._ending():
            text = _ask(self._link(0), {"do": "part", "save": save, "rank": rank}).get("part")
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
        """Read the blocks ``numbers`` of a file, and call ``take`` with each valid block, on any thread.

        Raises:
            CorruptCheckpointError: a block does not match its checksum.
        """
        with self._ending():
            memory = _memory([len(known.block(number)) for number in numbers])
            rest, bad = iter([*zip(numbers, memory, strict=True)]), list[int]()

            def run(stream: int) -> None:
                link, asked = self._link(stream), deque[tuple[int, memoryview]]()
                while True:
                    while len(asked) < _AHEAD and (more := next(rest, None)):
                        link.send({"do": "get", "save": save, "rank": rank, "file": name, "block": more[0]})
                        asked.append(more)
                    if not asked:
                        return
                    number, block = asked.popleft()
                    if _answer(link).get("nbytes") != len(block):
                        raise CorruptCheckpointError(f"{name} has the wrong size on the other machine")
                    if link.receive_block(block) == known.blocks[number]:
                        take(number, block)
                    else:
                        bad.append(number)

            _on_streams(len(numbers), run)
        if bad:
            raise CorruptCheckpointError(f"CRC-32 mismatch in block {min(bad)} of {name}")

    def put(self, part: Part, directory: str) -> None:
        """Send a part from the files in ``directory``. Return after the other machine has verified and committed it.

        Raises: ``CheckpointError`` if the other machine rejects the part, for example because its disk is full.
        """
        with self._ending():
            control = self._link(0)
            answer = _ask(control, {"do": "put", "part": part.dumps()})
            if answer.get("have"):
                return
            sending = _Sending(part, directory)

            def run(stream: int) -> None:
                try:
                    link = self._link(stream)
                    if stream:
                        _ask(link, {"do": "stream", "token": answer.get("token")})
                    sending.run(link)
                except BaseException:
                    sending.blocks.clear()  # stops the other streams
                    raise

            _on_streams(len(sending.blocks), run)
            _ask(control, {"do": "finish"})

    def close(self) -> None:
        """Close the connection. Calls that other threads are making then fail. Idempotent. Thread-safe."""
        with self._lock:
            self._closed = True
            for link in self._links.values():
                if self._busy:
                    link.end()  # the thread that uses the connection closes it
                else:
                    link.close()

    def _link(self, number: int) -> wire.Connection:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("this connection was closed")
            if (found := self._links.get(number)) is not None:
                return found
        made = wire.connect(self._address, self._secret)
        with self._lock:
            self._links[number] = made
            if self._closed:
                made.end()
        return made

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """If the block raises, close the connections, because unread bytes may remain. The next call opens new ones."""
        self._busy, good = True, False
        try:
            yield
            good = True
        finally:
            with self._lock:
                self._busy = False
                if self._closed or not good:
                    for link in self._links.values():
                        link.close()
                    self._links.clear()


class _Sending:
    """The queue of blocks to send. Each free connection sends the next block."""

    def __init__(self, part: Part, directory: str) -> None:
        self._part, self._directory = part, directory
        self.blocks = deque((name, number) for name, file in part.files.items() for number in range(len(file.blocks)))
        self._lock, self._until_half = threading.Lock(), (len(self.blocks) + 1) // 2

    def run(self, link: wire.Connection) -> None:
        """Send blocks on one connection until the queue is empty."""
        while (block := self._next()) is not None:
            self._send(link, *block)
            with self._lock:
                self._until_half -= 1
                half = self._until_half == 0
            if half:
                failpoint("sending")
        _ask(link, {"do": "end"})

    def _next(self) -> tuple[str, int] | None:
        with contextlib.suppress(IndexError):
            return self.blocks.popleft()
        return None

    def _send(self, link: wire.Connection, name: str, number: int) -> None:
        if link.is_readable(0):  # while blocks are sent, the server sends nothing but errors
            raise CheckpointError(str(link.receive().get("error"))[:1000])
        span = self._part.files[name].block(number)
        with open_own(f"{self._directory}/{name}") as file:
            link.send({"do": "block", "file": name, "block": number}, more=True)
            link.send_file(file.fileno(), span.start, len(span))


def _memory(sizes: Sequence[int]) -> list[memoryview]:
    """Allocate buffers of these sizes in huge pages, which the kernel allocates faster than small pages."""
    if not (total := sum(sizes)):
        return [memoryview(bytearray()) for _ in sizes]
    memory = mmap(-1, total, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    return [memoryview(memory)[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _on_streams(blocks: int, run: Callable[[int], None]) -> None:
    """Call ``run(number)`` for each connection, on one thread per connection. Raises the first error."""
    count = max(1, min(_STREAMS, blocks // 2))
    errors: list[BaseException] = []

    def note_error(stream: int) -> None:
        try:
            run(stream)
        except BaseException as error:
            errors.append(error)

    thread_of = partial(threading.Thread, target=note_error, name="stagereg-tier-stream", daemon=True)
    others = [thread_of(args=[stream]) for stream in range(1, count)]
    for thread in others:
        thread.start()
    note_error(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _ask(link: wire.Connection, request: dict[str, Any]) -> dict[str, Any]:
    link.send(request)
    return _answer(link)


def _answer(link: wire.Connection) -> dict[str, Any]:
    if not link.is_readable(_ANSWER_S):
        raise TimeoutError(f"the other machine has not answered for {_ANSWER_S:g} s")
    answer = link.receive()
    if "error" in answer:
        raise CheckpointError(str(answer["error"])[:1000])
    return answer
