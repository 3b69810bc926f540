"""What a directory of checkpoints looks like on disk, and which of the things in it may be trusted.

::

    runs/gpt/                          the directory given to the checkpointer
        step-00000100/                 one complete checkpoint, readable by ``torch.distributed.checkpoint.load``
            .metadata  __0_0.distcp …  what the storage wrote, here one of torch's own format
            manifest.json              size and CRC-32 of each of those files, step, world size, serial, storage
        latest -> step-00000100        relative symbolic link to the checkpoint committed last
        .step-00000200.<token>.tmp/    being written; never looked at by readers, swept at the next start

A directory without a readable manifest, or with a file missing or of another size, is not a checkpoint. Serials count
commits, so "newest" means committed last, also after a run was resumed from an older step. This room only reads;
:mod:`stagereg.checkpoint.commit` is the only one that writes names.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "LATEST",
    "MANIFEST",
    "Checkpoint",
    "FileMark",
    "Manifest",
    "checkpoints",
    "damage",
    "mark",
    "open_checkpoint",
    "step_name",
]

LATEST = "latest"
MANIFEST = "manifest.json"
_FORMAT = 1
_STEP_NAME = re.compile(r"step-\d+")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileMark:
    """The size of one file in bytes and the CRC-32 of its content (``zlib.crc32``)."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says about itself.

    Attributes:
        step: the training step.
        world_size: how many ranks wrote it.
        serial: how many checkpoints were committed before it, and one.
        files: their marks, by the name inside the directory.
        storage: the name of the storage that reads it; a manifest without one is of a time when there was only one.
    """

    step: int
    world_size: int
    serial: int
    files: dict[str, FileMark]
    storage: str = "dcp"

    def dumps(self) -> str:
        """Return the text of ``manifest.json``."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> Manifest:
        """Read the text of ``manifest.json``. Raises: ``ValueError``, ``KeyError`` or ``TypeError`` if it is none."""
        data = json.loads(text)
        if data.pop("format") != _FORMAT:
            raise ValueError("written by another version")
        files = {name: FileMark(**entry) for name, entry in data.pop("files").items()}
        return cls(files=files, **data)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: where it is and what its manifest says."""

    path: Path
    manifest: Manifest


def step_name(step: int) -> str:
    """Return the directory name of a step, so that names sort as steps do."""
    return f"step-{step:08d}"


def mark(path: Path) -> FileMark:
    """Read a file once and return its size and checksum."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return FileMark(size, crc)


def open_checkpoint(path: Path) -> Checkpoint | str:
    """Return the checkpoint in ``path`` if it is complete (sizes only, no content read), else the reason it is not."""
    try:
        manifest = Manifest.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, expected in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected.bytes:
            return f"{name} has {size} bytes instead of {expected.bytes}"
    return Checkpoint(path, manifest)


def damage(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` whose content is not what the manifest says; reads the files."""
    return [name for name in names if mark(checkpoint.path / name) != checkpoint.manifest.files[name]]


def _steps(root: Path) -> Iterator[Path]:
    try:
        entries = list(root.iterdir())
    except OSError:
        return
    yield from (entry for entry in entries if _STEP_NAME.fullmatch(entry.name) and entry.is_dir())


def checkpoints(root: Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return the complete checkpoints under ``root``, newest first, and why each other step directory is none."""
    complete: list[Checkpoint] = []
    refused: dict[Path, str] = {}
    for path in _steps(root):
        found = open_checkpoint(path)
        if isinstance(found, Checkpoint):
            complete.append(found)
        else:
            refused[path] = found
    complete.sort(key=lambda c: (c.manifest.serial, c.manifest.step), reverse=True)
    return complete, refused
