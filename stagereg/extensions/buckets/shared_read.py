"""Read each byte of a checkpoint on only one rank, and send the byte to all ranks that need it.

The files, sorted by name, form one stream of bytes, which is divided into pieces. Of n ranks, rank r reads the pieces
r, r + n, r + 2n and so on, computes their checksums, and broadcasts each piece to all ranks. If the ranks need at most
half of a piece on average, rank r instead sends each rank only the bytes that it needs. A rank has two pieces in
memory: the piece that it reads and the piece that it receives. All transfers use the checkpointer's gloo group.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from stagereg.base.pages import view_of
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import differences, joined
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.reading import CheckpointFiles, Readable, Transfer, read_index
from stagereg.checkpoint.storage.subclasses import Whole

_PIECE_BYTES = 48 << 20
_LEAST_BYTES = 4 << 20
_FETCH_BYTES = 8 << 20
_FETCHES = 4  # concurrent requests; a rank needs at most 128 MiB of memory: two pieces, and responses to four requests
_GAP_BYTES = 1 << 12  # maximum bytes between two needed ranges that are sent as one range


def index(checkpoint: Checkpoint, ranks: RankGroup) -> bytes:
    """Read the index on rank 0; return it on all ranks. If that fails, all ranks raise ``CheckpointError``."""
    data = bytearray()

    def read() -> int:
        if ranks.rank == 0:
            data.extend(read_index(checkpoint))
        return len(data)

    failing = "The index of the checkpoint could not be read"
    length = ranks.round_trip(failing, read, lambda lengths: lengths[:1] * ranks.size, ranks.limit)
    data = data.ljust(length, b"\0")
    if ranks.size > 1 and data:
        with ranks.explaining(failing):
            _broadcast(ranks, torch.frombuffer(data, dtype=torch.uint8), 0)
    return bytes(data)


def begin(
    checkpoint: Checkpoint, files: CheckpointFiles, transfer: Transfer, ranks: RankGroup, check: bool
) -> Callable[[], Mapping[str, str]]:
    """Prepare to read one checkpoint for all ranks. Collective; see :class:`SharedRead`."""
    return SharedRead(checkpoint, files, transfer, ranks, check).run


class _RangeDigest(NamedTuple):
    """The size and checksum (``mark``) of a range of a file that a rank has read."""

    name: str
    offset: int
    mark: FileDigest


class _Collected:
    """Collects the bytes of a :class:`.Whole`, a range that must be processed as a whole, until all have arrived."""

    def __init__(self, whole: Whole) -> None:
        self._whole, self._left = whole, whole.length
        self._data: bytearray | None = None

    def add(self, at: int, address: int, count: int) -> None:
        data = self._data = self._data or bytearray(self._whole.length)
        ctypes.memmove((ctypes.c_char * count).from_buffer(data, at), address, count)
        self._left -= count
        if not self._left:
            self._data = None
            self._whole.take(data)


class _Want(NamedTuple):
    """A range of the stream that this rank needs, and its target: a memory address or a :class:`_Collected`."""

    begin: int
    end: int
    to: int | _Collected


class SharedRead:
    """Reads one checkpoint for all ranks. Collective: all ranks construct a ``SharedRead`` and call :meth:`run`.

    The constructor changes no tensor. ``transfer`` lists the bytes that this rank needs. With ``check``, the ranks read
    and verify all files, including files that no rank needs. Raises: ``CheckpointError`` on all ranks if a rank could
    not read its first piece.
    """

    def __init__(
        self, checkpoint: Checkpoint, files: CheckpointFiles, transfer: Transfer, ranks: RankGroup, check: bool
    ) -> None:
        self._checkpoint, self._files, self._ranks, self._check = checkpoint, files, ranks, check
        marks = checkpoint.manifest.files
        self._names = sorted(marks.keys() - {INDEX})
        self._begins = [0]
        for name in self._names:
            self._begins.append(self._begins[-1] + marks[name].bytes)
        total = self._begins[-1]
        self._size = min(_PIECE_BYTES, max(_LEAST_BYTES, total // (4 * ranks.size)))
        self._pieces = [range(at, min(at + self._size, total)) for at in range(0, total, self._size)]
        self._wants = self._wants_of(transfer)
        with ranks.explaining(f"{checkpoint.path} could not be read"):
            self._agree_on_pieces()
        self._failure: Exception | None = None
        self._parts: list[_RangeDigest] = []
        self._read = torch.empty(min(self._size, total), dtype=torch.uint8, device="cpu")
        self._received = torch.empty(0 if ranks.size == 1 else len(self._read), dtype=torch.uint8, device="cpu")
        self._threads = files.enter_context(ThreadPoolExecutor(_FETCHES, thread_name_prefix="stagereg-read"))
        mine = range(ranks.rank, len(self._pieces), ranks.size)
        self._own = iter([number for number in mine if self._is_read(number)])
        self._fetches: list[tuple[str, int, Future[FileDigest]]] = []
        self._begin_next()
        ranks.run_on_all(f"{checkpoint.path} could not be read", self._finish_first)

    def _wants_of(self, transfer: Transfer) -> dict[int, list[_Want]]:
        """Return the ranges that this rank needs, by the number of the piece that contains them."""
        begins = dict(zip(self._names, self._begins, strict=False))
        every = [
            _Want(begins[file] + offset, begins[file] + offset + length, address)
            for file, moves in transfer.moves.items()
            for offset, length, address in moves
        ]
        for whole in transfer.wholes:
            begin = begins[whole.file] + whole.offset
            every.append(_Want(begin, begin + whole.length, _Collected(whole)))
        wants: dict[int, list[_Want]] = defaultdict(list)
        for want in sorted(every, key=lambda each: each.begin):
            for number in range(want.begin // self._size, -(-want.end // self._size)):
                wants[number].append(want)
        return wants

    def _ranges(self, number: int) -> list[tuple[int, int]]:
        piece, found = self._pieces[number], []
        low = high = -1
        for want in self._wants[number]:
            begin, end = max(want.begin, piece.start) - piece.start, min(want.end, piece.stop) - piece.start
            if low >= 0 and begin <= high + _GAP_BYTES:
                high = max(high, end)
                continue
            found.append((low, high))
            low, high = begin, end
        return [*found, (low, high)][1:]

    def _agree_on_pieces(self) -> None:
        """Decide how each piece is sent, and collect the ranges that other ranks need from this rank's pieces."""
        size, rank = self._ranks.size, self._ranks.rank
        ranges = {number: self._ranges(number) for number in self._wants}
        wanted = torch.zeros(len(self._pieces), dtype=torch.int64, device="cpu")
        for number, each in ranges.items():
            wanted[number] = sum(high - low for low, high in each)
        if size > 1:
            self._ranks.wait(dist.all_reduce(wanted, group=self._ranks.group, async_op=True), self._ranks.limit)
        self._wanted: list[int] = wanted.tolist()
        self._broadcast = [2 * n > len(piece) * size for n, piece in zip(self._wanted, self._pieces, strict=True)]
        asked: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
        for number, each in ranges.items():
            if not self._broadcast[number] and number % size != rank:
                asked[number % size] += [(number, *one) for one in each]
        self._asked: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for other, numbers in enumerate(_exchange(self._ranks, asked)):
            for number, low, high in numbers:
                self._asked[number].append((other, low, high))

    def _is_read(self, number: int) -> bool:
        return self._check or self._wanted[number] > 0

    # -- reading

    def _begin_next(self) -> None:
        """Start to read the next piece of this rank on background threads."""
        number = next(self._own, None)
        self._fetches = []
        if number is None or self._failure is not None:
            return
        try:
            memory = view_of(self._read)
            for file, name, offset, at, count in self._extents(self._pieces[number]):
                fetch = self._threads.submit(_fetch, file, offset, memory[at : at + count])
                self._fetches.append((name, offset, fetch))
        except Exception as error:
            self._failure = error

    def _extents(self, piece: range) -> Iterator[tuple[Readable, str, int, int, int]]:
        """Yield the requests for a piece: file, name, offset in the file, offset in the piece, and length."""
        at = piece.start
        while at < piece.stop:
            i = bisect_right(self._begins, at) - 1
            count = min(piece.stop, self._begins[i + 1], at + _FETCH_BYTES) - at
            name = self._names[i]
            yield self._files.file(name), name, at - self._begins[i], at - piece.start, count
            at += count

    def _finish(self) -> None:
        for name, offset, fetch in self._fetches:
            try:
                self._parts.append(_RangeDigest(name, offset, fetch.result()))
            except Exception as error:
                self._failure = self._failure or error

    def _finish_first(self) -> None:
        for _, _, fetch in self._fetches:
            fetch.result()
        if self._failure is not None:
            raise self._failure

    # -- sending

    def run(self) -> dict[str, str]:
        """Read all needed bytes into their targets, and map the name of each corrupt file to its error. Collective.

        Raises: ``CheckpointError`` on all ranks if a rank could not read or copy some bytes. Some tensors have changed.
        """
        failing = f"{self._checkpoint.path} could not be read"
        with self._ranks.explaining(failing):
            self._pass_on()
        return self._ranks.round_trip(failing, self._own_digests, self._damages, self._ranks.limit)

    def _pass_on(self) -> None:
        group, size, rank = self._ranks.group, self._ranks.size, self._ranks.rank
        limit = self._ranks.limit
        for number, piece in enumerate(self._pieces):
            reader, of_all = number % size, self._broadcast[number]
            if not self._is_read(number):
                continue
            if reader == rank:
                self._finish()
                if of_all and size > 1:
                    _broadcast(self._ranks, self._read[: len(piece)], rank)
                for other, low, high in self._asked[number]:
                    cast("Any", dist.isend(self._read[low:high], group=group, group_dst=other)).wait(limit)
                self._place(number, self._read)
                self._begin_next()
                continue
            if of_all:
                _broadcast(self._ranks, self._received[: len(piece)], reader)
            else:
                for low, high in self._ranges(number):
                    cast("Any", dist.irecv(self._received[low:high], group=group, group_src=reader)).wait(limit)
            self._place(number, self._received)

    def _place(self, number: int, data: torch.Tensor) -> None:
        """Copy a piece to its targets. After a failure, nothing is copied, but the ranks still transfer all pieces."""
        piece, address = self._pieces[number], data.data_ptr()
        try:
            for begin, end, to in self._wants.pop(number, ()) if self._failure is None else ():
                low, high = max(begin, piece.start), min(end, piece.stop)
                source = address + low - piece.start
                if isinstance(to, int):
                    ctypes.memmove(to + low - begin, source, high - low)
                else:
                    to.add(low - begin, source, high - low)
        except Exception as error:
            self._failure = error

    def _own_digests(self) -> list[_RangeDigest]:
        if self._failure is not None:
            raise self._failure
        return self._parts

    def _damages(self, ranks: list[list[_RangeDigest]]) -> list[dict[str, str]]:
        """Compare the digests of all ranks with the manifest. Runs on rank 0."""
        found: dict[str, list[FileDigest]] = {name: [] for name in self._names}
        for part in sorted(part for parts in ranks for part in parts):
            found[part.name].append(part.mark)
        manifest = self._checkpoint.manifest
        marks = {INDEX: manifest.files[INDEX], **{name: joined(each) for name, each in found.items()}}
        return [differences(manifest, marks) if self._check else {}] * self._ranks.size


def _fetch(file: Readable, offset: int, memory: memoryview) -> FileDigest:
    file.fetch_into(offset, memory)
    return FileDigest(len(memory), crc32(memory))


def _broadcast(ranks: RankGroup, data: torch.Tensor, source: int) -> None:
    """Broadcast ``data`` from rank ``source``. Collective. Call inside :meth:`.RankGroup.explaining`."""
    ranks.wait(dist.broadcast(data, group=ranks.group, group_src=source, async_op=True), ranks.limit)


def _exchange(ranks: RankGroup, numbers: Sequence[Sequence[tuple[int, int, int]]]) -> list[list[tuple[int, int, int]]]:
    """Send one list of triples to each rank; return the lists that the ranks have sent to this rank. Collective."""
    if ranks.size == 1:
        return [[*each] for each in numbers]
    counts = torch.tensor([3 * len(each) for each in numbers], dtype=torch.int64, device="cpu")
    coming = torch.empty_like(counts)
    ranks.wait(dist.all_to_all_single(coming, counts, group=ranks.group, async_op=True), ranks.limit)
    triples = [triple for each in numbers for triple in each]
    sent = torch.tensor(triples, dtype=torch.int64, device="cpu").flatten()
    got = torch.empty(int(coming.sum()), dtype=torch.int64, device="cpu")
    sizes = coming.tolist(), counts.tolist()
    ranks.wait(dist.all_to_all_single(got, sent, *sizes, group=ranks.group, async_op=True), ranks.limit)
    return [[(a, b, c) for a, b, c in part.view(-1, 3).tolist()] for part in got.split(coming.tolist())]
