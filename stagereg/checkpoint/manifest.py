"""What a checkpoint is made of, wherever it lies: the names, the manifest, and the marks of its files.

::

    runs/gpt/                          the directory, or URL, given to the checkpointer: a checkpoint store
        step-00000100/                 one complete checkpoint, readable by ``torch.distributed.checkpoint.load``
            .metadata  __0_0.distcp …  what the storage wrote, here one of torch's own format
            manifest.json              size and CRC-32 of each of those files, step, world size, serial, storage, time
        latest -> step-00000100        the checkpoint committed last

A directory without a readable manifest, or with a file missing or of another size, is not a checkpoint. Serials count
commits, so "newest" means committed last, also after a run was resumed from an older step. A manifest has a CRC-32 of
itself, and nothing in it is believed that could lead out of its directory. This module touches no disk: how a
checkpoint is found, read and committed is described in :mod:`stagereg.checkpoint.store`.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from stagereg.checkpoint.checksum import crc32

__all__ = [
    "LATEST",
    "MANIFEST",
    "MANIFEST_BYTES",
    "MOST",
    "Checkpoint",
    "FileMark",
    "Manifest",
    "file_mark",
    "new_token",
    "newest_first",
    "step_name",
    "step_of",
    "step_within",
]

LATEST = "latest"
MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 28
"""What is longer is not read: with some hundred bytes for each file, that is far more than any run writes."""
_FORMAT = 2
_STEP_NAME = re.compile(r"step-(?P<step>\d+)", re.ASCII)
_BLOCK_BYTES = 1 << 20
_LONGEST_NAME = 255  # bytes, as file systems have it
MOST = (1 << 63) - 1
"""The greatest number that a manifest may have, of a step as of bytes."""
_LATEST_TIME = 1 << 37  # in the year 6325; a date can be made of it everywhere


@dataclass(frozen=True)
class FileMark:
    """The size of one file in bytes and the CRC-32 of its content (:mod:`.checksum`)."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete checkpoint.

    Attributes:
        step: the training step.
        world_size: how many ranks wrote it.
        serial: how many checkpoints were committed before it, and one.
        files: their marks, by the name inside the directory.
        storage: the name of the storage that reads it; a manifest without one is of a time when there was only one.
        time: when it was committed, whole seconds since the epoch; ``None`` in one of format 1.
    """

    step: int
    world_size: int
    serial: int
    files: dict[str, FileMark]
    storage: str = "dcp"
    time: int | None = None

    def dumps(self) -> str:
        """Return the text of ``manifest.json``."""
        data = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**data, "crc32": _crc32(data)}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str | bytes) -> Manifest:
        """Read the text of ``manifest.json``, of this format or of format 1.

        Raises:
            ValueError: it is none, or damaged, or has a name that is no plain name of a file; the message has the
                reason.
        """
        try:
            data = _checked(json.loads(text))
        except RecursionError:
            raise ValueError("it is nested too deeply to be one") from None
        storage = data.get("storage", "dcp")
        if not isinstance(storage, str) or not _is_name(storage):
            raise ValueError(f"storage is {storage!r:.100}, which is no name")
        manifest = cls(
            step=_whole(data, "step"),
            world_size=_whole(data, "world_size", least=1),
            serial=_whole(data, "serial"),
            files=_marks(data.get("files")),
            storage=storage,
            time=_whole(data, "time", most=_LATEST_TIME) if data.get("time") is not None else None,
        )
        # The checksum is of what the text means; a change of the space between values shows here.
        if data["format"] == _FORMAT and (text.decode() if isinstance(text, bytes) else text) != manifest.dumps():
            raise ValueError("it is not what was written, though it means the same")
        return manifest


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: where it is, a path or a URL, and its manifest."""

    path: str
    manifest: Manifest

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def step_name(step: int) -> str:
    """Return the directory name of a step, so that names sort as steps do."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for; ``None`` for a name that is of no step."""
    found = _STEP_NAME.fullmatch(name)
    return None if found is None else int(found["step"])


def step_within(name: str) -> int | None:
    """Return the step that a name is about which has one somewhere in it, as temporary names and such with a token."""
    found = _STEP_NAME.search(name)
    return None if found is None else int(found["step"])


def new_token() -> str:
    """Return what makes the temporary names of one save unique; draws from the system, not from ``random``."""
    return uuid.uuid4().hex[:12]


def file_mark(stream: _Readable) -> FileMark:
    """Read a stream to its end, in blocks, and return its size and checksum."""
    size = crc = 0
    while block := stream.read(_BLOCK_BYTES):
        size += len(block)
        crc = crc32(block, crc)
    return FileMark(size, crc)


def newest_first(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Return checkpoints in the order of their commits, the last one first."""
    return sorted(checkpoints, key=lambda c: (c.manifest.serial, c.manifest.step), reverse=True)


def _crc32(data: dict[str, Any]) -> int:
    """Return the checksum of a manifest without one: of its JSON with sorted keys, no spaces, and ASCII only."""
    return crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


def _checked(data: Any) -> dict[str, Any]:
    """Return the content of a manifest of a known format, without the checksum, which is right."""
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    form = data.get("format")
    if type(form) is not int or form not in (1, _FORMAT):
        raise ValueError(f"it is of format {form!r:.100}, written by another version")
    if form == _FORMAT and data.pop("crc32", None) != _crc32(data):
        raise ValueError("it is not what was written: its own CRC-32 differs")
    return data


def _marks(given: Any) -> dict[str, FileMark]:
    if not isinstance(given, dict):
        raise ValueError("it lists no files")
    marks = {}
    for name, entry in given.items():
        if not _is_plain(name):
            raise ValueError(f"{name!r:.100} is no plain name of a file")
        if not isinstance(entry, dict):
            raise ValueError(f"{name} has no mark")
        marks[name] = FileMark(_whole(entry, "bytes"), _whole(entry, "crc32"))
    return marks


def _is_plain(name: str) -> bool:
    """Whether a name stays in its directory and can be printed: no separator, no ``..``, no control character."""
    return _is_name(name) and name not in (".", "..", MANIFEST) and not set(name) & set("/\\")


def _is_name(text: str) -> bool:
    return text.isprintable() and 0 < len(text.encode()) <= _LONGEST_NAME


def _whole(data: dict[str, Any], key: str, least: int = 0, most: int = MOST) -> int:
    value = data.get(key)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is {value!r:.100}, which is no whole number from {least} to {most}")
    return value
