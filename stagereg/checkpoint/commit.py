"""How a written checkpoint becomes the newest one: the only room that creates, renames or deletes names.

The order makes every moment safe to be killed in: the files lie in a hidden sibling directory and are flushed; the
manifest is written and flushed; sizes are checked; the directory is renamed to its final name and the parent flushed;
``latest`` moves by one atomic replacement; only then are old checkpoints deleted. Nothing is overwritten in place.
Where the step has a directory already, the two change names in one atomic exchange (``renameat2``, Linux); a file
system that cannot exchange gets two renames with the old one set aside, and :func:`sweep` puts it back if the process
died between them. One process of a run, rank 0, calls the functions here, except for :func:`flush`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import uuid
from pathlib import Path

from stagereg.checkpoint.layout import (
    LATEST,
    MANIFEST,
    Checkpoint,
    FileMark,
    Manifest,
    checkpoints,
    mark,
    open_checkpoint,
    step_name,
)
from stagereg.errors import CheckpointError

__all__ = ["discard", "flush", "new_token", "probe", "publish", "sweep", "temporary"]

_LEFTOVER = re.compile(r"\.(?P<name>step-\d+|latest|probe)\.[0-9a-f]+\.(?P<kind>tmp|old)")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def new_token() -> str:
    """Return what makes the temporary names of one save unique; draws from the system, not from ``random``."""
    return uuid.uuid4().hex[:12]


def temporary(root: Path, step: int, token: str) -> Path:
    """Return the hidden directory in which all ranks write one save."""
    return root / f".{step_name(step)}.{token}.tmp"


def probe(root: Path) -> None:
    """Create ``root`` if it is not there and prove that files can be created in it. Raises: ``OSError``."""
    root.mkdir(parents=True, exist_ok=True)
    trial = root / f".probe.{new_token()}.tmp"
    trial.touch()
    trial.unlink()


def sweep(root: Path) -> None:
    """Delete what killed runs left half-written, and put back a checkpoint that one of them had set aside."""
    for entry in list(root.iterdir()):
        leftover = _LEFTOVER.fullmatch(entry.name)
        if leftover is None:
            continue
        final = root / leftover["name"]
        if leftover["kind"] == "old" and not isinstance(open_checkpoint(final), Checkpoint):
            discard(final)
            entry.rename(final)
        else:
            discard(entry)


def discard(path: Path) -> None:
    """Delete a directory, file or link of ours; what cannot be deleted stays, since it is in nobody's way."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def flush(path: Path) -> FileMark:
    """Force one written file to the disk and return its mark; any rank may call it for the files it wrote."""
    _sync(path)
    return mark(path)


def publish(
    root: Path, written: Path, step: int, world_size: int, storage: str, files: dict[str, FileMark], keep: int
) -> Path:
    """Commit the checkpoint in ``written`` and delete all but the ``keep`` newest.

    Args:
        root: the directory of checkpoints.
        written: what :func:`temporary` named; all of its files are written and flushed.
        step: the training step.
        world_size: how many ranks wrote it.
        storage: what it was written through, for its manifest.
        files: the mark of every file in ``written``.
        keep: how many complete checkpoints stay, at least 1.

    Returns:
        The final directory.

    Raises:
        CheckpointError: a file is not what the marks say. ``OSError``: the file system refused.
    """
    known, _ = checkpoints(root)
    serial = 1 + max((c.manifest.serial for c in known), default=0)
    _write(written / MANIFEST, Manifest(step, world_size, serial, files, storage).dumps())
    _sync(written)
    complete = open_checkpoint(written)
    if not isinstance(complete, Checkpoint):
        raise CheckpointError(f"{written} did not reach the disk as it was written: {complete}")
    final = root / step_name(step)
    _rename(written, final)
    _sync(root)
    _point_latest(root, final)
    _retain(root, keep)
    return final


def _write(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(written: Path, final: Path) -> None:
    if not os.path.lexists(final):
        written.rename(final)
    elif _exchange(written, final):
        discard(written)
    else:
        aside = written.with_suffix(".old")
        final.rename(aside)
        try:
            written.rename(final)
        except OSError:
            aside.rename(final)
            raise
        discard(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change names in one step; ``False`` where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0


def _point_latest(root: Path, final: Path) -> None:
    link = root / f".{LATEST}.{new_token()}.tmp"
    link.symlink_to(final.name)
    link.replace(root / LATEST)
    _sync(root)


def _retain(root: Path, keep: int) -> None:
    complete, _ = checkpoints(root)
    kept = (root / LATEST).resolve()
    for old in complete[keep:]:
        if old.path.resolve() != kept:
            # Out of sight first: a deletion that is interrupted must not leave half a checkpoint under its name.
            hidden = root / f".{old.path.name}.{new_token()}.tmp"
            old.path.rename(hidden)
            discard(hidden)
