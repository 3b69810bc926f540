"""Directories of small checkpoints for the commands that read them, written without training."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from stagereg.checkpoint.format.manifest import FileDigest, Manifest, new_token, step_name
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_store


def contents(step: int, salt: str = "") -> dict[str, bytes]:
    """The files of a step; of all steps ``a`` and ``b`` have the same sizes, and ``c`` has not."""
    text = f"{step:08d}{salt:32}".encode()
    return {"a": text * 3, "b": text[::-1], "c": text * (step // 100 + 1)}


def save(root: Path | str, *steps: int, salt: str = "", ranks: int = 2) -> list[str]:
    """Commit a checkpoint for each step, in this order, in a local or remote store; return where they are."""
    store = open_store(root)
    return [_save(store, step, contents(step, salt), ranks) for step in steps]


def _save(store: CheckpointStore, step: int, files: dict[str, bytes], ranks: int) -> str:
    written = store.temporary(step, new_token())
    for name, content in files.items():
        if not store.backend.in_place:
            Path(written).mkdir(parents=True, exist_ok=True)
        store.put(written, name, content)
    marks = {name: FileDigest(len(content), zlib.crc32(content)) for name, content in files.items()}
    return store.publish(written, Manifest(step, ranks, 0, marks), keep=99).path


def path_of(root: Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return root / step_name(step)


def flipped(content: bytes) -> bytes:
    """The content with the last bit flipped."""
    return content[:-1] + bytes([content[-1] ^ 1])


def flip(file: Path) -> None:
    file.write_bytes(flipped(file.read_bytes()))


def instead(file: Path, make: Callable[[Path], object]) -> None:
    """Make something else in the place of a file."""
    file.unlink()
    make(file)
