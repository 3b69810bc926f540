"""What one rank has written in one save: a *part*, the unit in which tiers keep, copy and check a step.

A part is complete or absent, as a checkpoint is: its own small manifest is written last. It has the checksum of each
block of each file, taken of the staged bytes as they were written. They go wherever the part goes, so whoever reads or
receives any block compares it with what was staged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import joined
from stagereg.checkpoint.format.manifest import MOST, FileDigest, is_name, step_name
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES

_FORMAT = 1
TOKEN = re.compile(r"[0-9a-f]{8,64}", re.ASCII)
_MOST_RANKS = 1 << 24


class SaveId(NamedTuple):
    """One save of all ranks. Equal steps are no proof: after a rollback a step is saved again."""

    run: str  # the run's id, lower-case hexadecimal
    branch: int  # how many times the run has been restored
    serial: int  # the greater, the later it was saved, in all branches
    step: int
    token: str  # of this save alone, lower-case hexadecimal
    world_size: int

    @property
    def order(self) -> tuple[int, int]:
        """The greater, the later."""
        return self.branch, self.serial

    @property
    def folder(self) -> str:
        """The name of the folder that its parts lie in on each machine."""
        return f"{step_name(self.step)}.{self.token}"

    @classmethod
    def of(cls, data: Any) -> SaveId:
        """Return that of which this is the list of fields. Raises: ``ValueError``."""
        if type(data) is not list or len(data) != len(cls._fields):
            raise ValueError("it names no save")
        found = cls(*data)
        numbers = (found.branch, found.serial, found.step, found.world_size)
        if any(type(each) is not int or not 0 <= each <= MOST for each in numbers):
            raise ValueError("a number of its save is none")
        if any(not isinstance(each, str) or not TOKEN.fullmatch(each) for each in (found.run, found.token)):
            raise ValueError("the name of its run or save is none")
        if not 0 < found.world_size <= _MOST_RANKS:
            raise ValueError("its number of ranks is none")
        return found


@dataclass(frozen=True)
class PartFile:
    """One file of a part: its size in bytes, and the CRC-32 of each block of :data:`BLOCK_BYTES`."""

    nbytes: int
    blocks: tuple[int, ...]

    def block(self, number: int) -> range:
        """Return which bytes of the file a block has. Raises: ``LookupError`` if there is no such block."""
        if type(number) is not int or not 0 <= number < len(self.blocks):
            raise LookupError(f"there is no block {number!r:.100}")
        begin = number * BLOCK_BYTES
        return range(begin, min(begin + BLOCK_BYTES, self.nbytes))

    @property
    def mark(self) -> FileDigest:
        """Size and CRC-32 of the whole file."""
        return joined(FileDigest(len(self.block(number)), crc) for number, crc in enumerate(self.blocks))

    @classmethod
    def of_bytes(cls, data: bytes) -> PartFile:
        """Return that of a file with this content."""
        view = memoryview(data)
        return cls(len(data), tuple(crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)))


@dataclass(frozen=True)
class Part:
    """What one rank wrote in one save; the same text, wherever it is."""

    save: SaveId
    rank: int
    files: Mapping[str, PartFile]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.files.values())

    def dumps(self) -> str:
        """Return the text of its manifest, with a checksum of its own."""
        files = {name: asdict(each) for name, each in self.files.items()}
        data = {"format": _FORMAT, "save": [*self.save], "rank": self.rank, "files": files}
        return json.dumps({**data, "crc32": crc32(json.dumps(data).encode())}) + "\n"

    @classmethod
    def loads(cls, text: str | bytes) -> Part:
        """Read that text.

        Raises:
            ValueError: it is none, or damaged, or has a name that is no plain name of a file; the message has the
                reason.
        """
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply to be one") from None
        except TypeError:  # of a peer, whose message may have anything in its place
            raise ValueError("it is not a text") from None
        if type(data) is not dict or data.get("format") != _FORMAT:
            raise ValueError(f"it is no part of format {_FORMAT}")
        save, rank, files = SaveId.of(data.get("save")), data.get("rank"), data.get("files")
        if type(rank) is not int or not 0 <= rank < save.world_size:
            raise ValueError("it is of no rank of its save")
        if type(files) is not dict:
            raise ValueError("it lists no files")
        part = cls(save, rank, {name: _file(name, each) for name, each in files.items()})
        if (text.decode() if isinstance(text, bytes) else text) != part.dumps():
            raise ValueError("it is not what was written: its own CRC-32 differs, or the text")
        return part


def _file(name: str, data: Any) -> PartFile:
    if not is_name(name) or name.startswith("..") or name == "." or set(name) & set("/\\") or is_manifest(name):
        raise ValueError(f"{name!r:.100} is no plain name of a file")
    if type(data) is not dict or data.keys() != {"nbytes", "blocks"} or type(data["blocks"]) is not list:
        raise ValueError(f"{name!r:.100} is not described")
    nbytes, blocks = data["nbytes"], data["blocks"]
    if type(nbytes) is not int or not 0 <= nbytes <= MOST or len(blocks) != -(-nbytes // BLOCK_BYTES):
        raise ValueError(f"{name!r:.100} has another size than its blocks")
    if any(type(each) is not int or not 0 <= each < 1 << 32 for each in blocks):
        raise ValueError(f"{name!r:.100} has a block without a checksum")
    return PartFile(nbytes, tuple(blocks))


def manifest_name(rank: int) -> str:
    return f"part-{rank}.json"


def is_manifest(name: str) -> bool:
    """Whether a file is the manifest of a part, or of one that is yet to come."""
    return re.fullmatch(r"\.?part-\d+\.json(\..*)?", name, re.ASCII) is not None
