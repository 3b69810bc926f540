"""Reads a step whose parts are on several machines: each block from this machine if possible, or from a peer.

Blocks on this machine are verified in memory-mapped files. Blocks of other machines arrive over the network and are
verified on arrival. If a block is corrupt, or a machine does not answer, the reader tries the next machine that has the
part. :meth:`StepReader.fetch` writes only to the reader's own memory, and :meth:`StepReader.read_into` returns only
verified bytes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from mmap import ACCESS_COPY, mmap
from typing import NamedTuple

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES, address
from stagereg.checkpoint.storage.reading import Readable
from stagereg.errors import CheckpointError, CorruptCheckpointError, reason
from stagereg.extensions.tiers.folder import MachineFolder, open_own
from stagereg.extensions.tiers.inventory import TierStep
from stagereg.extensions.tiers.part import Part, PartFile
from stagereg.extensions.tiers.peer import Peer

_log = logging.getLogger(__name__)

_THREADS = 4


class Found(NamedTuple):
    """A summary of the reads of one step on one rank."""

    sources: Counter[str]  # number of bytes read from each machine
    bad: set[tuple[str, int]]  # corrupt copies, as (machine, rank of the part)


class StepReader(ExitStack):
    """Reads one step on one rank. A context manager that closes its files. Only :meth:`read_into` is thread-safe.

    ``here`` names this machine, and ``folder`` has its parts. ``connect(name)`` opens a connection to another machine.
    """

    def __init__(self, step: TierStep, folder: MachineFolder, here: str, connect: Callable[[str], Peer]) -> None:
        super().__init__()
        self.step, self._folder, self._here, self._connect = step, folder, here, connect
        self._ranks = {name: rank for rank, (part, _) in enumerate(step.parts) for name, _ in part.files}
        self._parts: dict[int, Part] = {}
        self._blocks: dict[tuple[str, int], memoryview] = {}
        self._mapped: dict[str, memoryview] = {}
        self._lock = threading.Lock()
        self.found = Found(Counter(), set())

    def content(self, name: str) -> bytes:
        """Return the content of a small file. Raises: ``CorruptCheckpointError`` if no machine has a valid copy."""
        known = self._file(name)
        self.fetch(name, [range(known.nbytes)])
        data = bytearray(known.nbytes)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    def fetch(self, name: str, ranges: Iterable[range]) -> None:
        """Read and verify byte ranges. Raises: ``CorruptCheckpointError`` if no machine has a valid copy of a block."""
        known = self._file(name)
        wanted = {n for each in ranges if each for n in range(each[0] // BLOCK_BYTES, each[-1] // BLOCK_BYTES + 1)}
        missing = sorted(number for number in wanted if (name, number) not in self._blocks)
        rank = self._ranks[name]
        machines = self.step.parts[rank][1]
        reasons: list[str] = []
        for machine in sorted(machines, key=lambda each: each != self._here):
            if missing:
                try:
                    if machine == self._here:
                        self._take_here(name, known, missing)
                    else:
                        keep = partial(self._keep, machine, name)
                        self._connect(machine).get(self.step.save, rank, name, missing, known, keep)
                except (OSError, CheckpointError, ValueError) as error:
                    reasons.append(f"{machine}: {reason(error)}")
                    if isinstance(error, CorruptCheckpointError):
                        self.found.bad.add((machine, rank))
                    _log.warning(
                        "stagereg: cannot read %s of step %d from %s, reading another copy: %s",
                        *(name, self.step.save.step, machine, reason(error)),
                    )
                missing = [number for number in missing if (name, number) not in self._blocks]
        if missing:
            raise CorruptCheckpointError(f"no valid copy of block {missing[0]} of {name}: {'; '.join(reasons)}")

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with bytes that :meth:`fetch` has read. Thread-safe."""
        while memory:
            number, at = divmod(offset, BLOCK_BYTES)
            block = self._blocks[name, number]
            if at >= len(block):
                raise OSError(f"{name} ends at byte {offset}")
            count = min(len(memory), len(block) - at)
            ctypes.memmove(address(memory), address(block) + at, count)
            memory, offset = memory[count:], offset + count

    def _file(self, name: str) -> PartFile:
        if name not in self._ranks:
            raise CheckpointError(f"step {self.step.save.step} has no file {name!r:.100}.")
        return self._part(self._ranks[name]).files[name]

    def _part(self, rank: int) -> Part:
        """Return the part of a rank from the first machine whose manifest matches the reported CRC-32."""
        if rank not in self._parts:
            reported, machines = self.step.parts[rank]
            for machine in sorted(machines, key=lambda each: each != self._here):
                try:
                    there = self._folder.find if machine == self._here else self._connect(machine).part
                    part = there(self.step.save, rank)
                except (OSError, CheckpointError, ValueError) as error:
                    _log.warning("stagereg: cannot read the part of rank %d from %s: %s", rank, machine, reason(error))
                    continue
                if part is not None and crc32(part.dumps().encode()) == reported.crc32:
                    self._parts[rank] = part
                    return part
            raise CorruptCheckpointError(f"no machine has the part of rank {rank}")
        return self._parts[rank]

    def _take_here(self, name: str, known: PartFile, numbers: Sequence[int]) -> None:
        """Verify blocks of a memory-mapped file on this machine, and keep the valid blocks."""
        data = self._map(name)
        if len(data) != known.nbytes:
            raise CorruptCheckpointError(f"expected {known.nbytes} bytes, got {len(data)}")

        def take(number: int) -> bool:
            span = known.block(number)
            block = data[span.start : span.stop]
            is_good = crc32(block) == known.blocks[number]
            if is_good:
                self._keep(self._here, name, number, block)
            return is_good

        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(numbers))) as threads:
            good = [*threads.map(take, numbers)]
        if not all(good):
            raise CorruptCheckpointError(f"CRC-32 mismatch in block {numbers[good.index(False)]}")

    def _keep(self, machine: str, name: str, number: int, block: memoryview) -> None:
        with self._lock:
            self._blocks[name, number] = block
            self.found.sources[machine] += len(block)

    def _map(self, name: str) -> memoryview:
        if name not in self._mapped:
            file = self.enter_context(open_own(f"{self._folder.directory(self.step.save)}/{name}"))
            empty = os.fstat(file.fileno()).st_size == 0
            # Copy-on-write: writes by this process do not change the file.
            self._mapped[name] = memoryview(b"" if empty else mmap(file.fileno(), 0, access=ACCESS_COPY))
        return self._mapped[name]


class BlockFile(Readable):
    """One file of a step, as the source of a transfer. Thread-safe."""

    local = True

    def __init__(self, reader: StepReader, name: str) -> None:
        self._reader, self._name = reader, name

    def read_into(self, offset: int, memory: memoryview) -> None:
        self._reader.read_into(self._name, offset, memory)

    fetch_into = read_into
