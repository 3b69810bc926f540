"""A *part*: the files that one rank writes in one save. Tiers store, copy and verify a step part by part.

Like a checkpoint, a part is either complete or absent, because its manifest is written last. The manifest contains the
checksum of each block of each file, computed from the staged bytes during the write. Each copy of a part includes the
manifest, so each process that reads or receives a block can verify that the block has the staged bytes.
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
    """Identifies one save of all ranks. The step is not unique, because a step may be saved again after a rollback."""

    run: str  # run ID, lower-case hexadecimal
    branch: int  # number of the branch of the run (:class:`.Lineage`)
    serial: int  # greater for later saves of the branch
    step: int
    token: str  # unique for each save, lower-case hexadecimal
    world_size: int

    @property
    def order(self) -> tuple[int, int]:
        """The sort key, which is greater for later saves."""
        return self.branch, self.serial

    @property
    def folder(self) -> str:
        """The name of the folder that stores the parts of this save on each machine."""
        return f"{step_name(self.step)}.{self.token}"

    @classmethod
    def of(cls, data: Any) -> SaveId:
        """Validate a list of fields that was parsed from JSON, and return the save. Raises: ``ValueError``."""
        if type(data) is not list or len(data) != len(cls._fields):
            raise ValueError(f"invalid save id: expected a list of {len(cls._fields)} fields")
        found = cls(*data)
        numbers = (found.branch, found.serial, found.step, found.world_size)
        if any(type(each) is not int or not 0 <= each <= MOST for each in numbers):
            raise ValueError(f"invalid save id: branch, serial, step and world_size must be in 0..{MOST}")
        if any(not isinstance(each, str) or not TOKEN.fullmatch(each) for each in (found.run, found.token)):
            raise ValueError("invalid save id: run and token must be 8 to 64 hexadecimal digits")
        if not 0 < found.world_size <= _MOST_RANKS:
            raise ValueError(f"invalid save id: world_size must be in 1..{_MOST_RANKS}, got {found.world_size}")
        return found


@dataclass(frozen=True)
class PartFile:
    """One file of a part: its size in bytes, and the CRC-32 of each block of :data:`BLOCK_BYTES`."""

    nbytes: int
    blocks: tuple[int, ...]

    def block(self, number: int) -> range:
        """Return the byte range of a block in the file. Raises: ``LookupError`` if the block does not exist."""
        if type(number) is not int or not 0 <= number < len(self.blocks):
            raise LookupError(f"block {number!r:.100} does not exist: the file has {len(self.blocks)} blocks")
        begin = number * BLOCK_BYTES
        return range(begin, min(begin + BLOCK_BYTES, self.nbytes))

    @property
    def mark(self) -> FileDigest:
        """The size and the CRC-32 of the whole file."""
        return joined(FileDigest(len(self.block(number)), crc) for number, crc in enumerate(self.blocks))

    @classmethod
    def of_bytes(cls, data: bytes) -> PartFile:
        """Return the size and checksums of a file with this content."""
        view = memoryview(data)
        return cls(len(data), tuple(crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)))


@dataclass(frozen=True)
class Part:
    """The files that one rank wrote in one save. The manifest is identical on every machine with the part."""

    save: SaveId
    rank: int
    files: Mapping[str, PartFile]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.files.values())

    def dumps(self) -> str:
        """Return the manifest as JSON text. Its last field is the CRC-32 of the other fields."""
        files = {name: asdict(each) for name, each in self.files.items()}
        data = {"format": _FORMAT, "save": [*self.save], "rank": self.rank, "files": files}
        return json.dumps({**data, "crc32": crc32(json.dumps(data).encode())}) + "\n"

    @classmethod
    def loads(cls, text: str | bytes) -> Part:
        """Parse the text of a manifest.

        Raises: ``ValueError`` if the text is not a manifest, is corrupt, or contains an unsafe file name.
        """
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("invalid manifest: nested too deeply") from None
        except TypeError:  # a message from a peer may have any type here
            raise ValueError("invalid manifest: not a string") from None
        if type(data) is not dict or data.get("format") != _FORMAT:
            raise ValueError(f"not the manifest of a part in format {_FORMAT}")
        save, rank, files = SaveId.of(data.get("save")), data.get("rank"), data.get("files")
        if type(rank) is not int or not 0 <= rank < save.world_size:
            raise ValueError(f"invalid manifest: rank must be in 0..{save.world_size - 1}, got {rank!r:.100}")
        if type(files) is not dict:
            raise ValueError("invalid manifest: files must be an object")
        part = cls(save, rank, {name: _file(name, each) for name, each in files.items()})
        if (text.decode() if isinstance(text, bytes) else text) != part.dumps():
            raise ValueError("invalid manifest: its text and its CRC-32 do not match")
        return part


def _file(name: str, data: Any) -> PartFile:
    if not is_name(name) or name.startswith("..") or name == "." or set(name) & set("/\\") or is_manifest(name):
        raise ValueError(f"{name!r:.100} is not a plain file name")
    if type(data) is not dict or data.keys() != {"nbytes", "blocks"} or type(data["blocks"]) is not list:
        raise ValueError(f"{name!r:.100} must have the fields nbytes and blocks")
    nbytes, blocks = data["nbytes"], data["blocks"]
    if type(nbytes) is not int or not 0 <= nbytes <= MOST or len(blocks) != -(-nbytes // BLOCK_BYTES):
        raise ValueError(f"{name!r:.100}: the number of blocks ({len(blocks)}) does not match nbytes={nbytes!r:.100}")
    if any(type(each) is not int or not 0 <= each < 1 << 32 for each in blocks):
        raise ValueError(f"{name!r:.100} has a block without a valid CRC-32")
    return PartFile(nbytes, tuple(blocks))


def manifest_name(rank: int) -> str:
    return f"part-{rank}.json"


def is_manifest(name: str) -> bool:
    """Return whether a file with this name is the manifest of a part or accompanies such a manifest."""
    return re.fullmatch(r"\.?part-\d+\.json(\..*)?", name, re.ASCII) is not None
