"""``stagereg bench write``: how long a staged copy takes to be on the disk, against the disk's own speed.

Every row writes one and the same copy in host memory to a fresh directory. Durable means that all files and the
directory are flushed, which is part of the time whoever does it; deleting is not. The ceiling is one file of as many
bytes, written with O_DIRECT from an aligned buffer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stagereg.bench.ceiling import flush, raw_write
from stagereg.bench.measure import Case, Timed
from stagereg.bench.states import State
from stagereg.checkpoint.state_planner import StatePlanner
from stagereg.checkpoint.storage.protocol import UsesPadding
from stagereg.errors import CheckpointError
from stagereg.registry import build, names
from stagereg.stagers.async_stager import AsyncStager, ReservesPadding

__all__ = ["CEILING", "cases", "durable", "row_names"]

CEILING = "ceiling"
"""The row that all others are a ratio to."""

_ALIAS = "direct"
"""Another name of ``dcp``, which needs no row."""
_PADDING = "dcp:padding"

_Save = Callable[[Path], object]
_Make = Callable[[], _Save]


def cases(state: State, folder: Path, note: Callable[[str], None]) -> list[Case]:
    """The cases of one state dict, the ceiling first and once more last.

    Args:
        folder: on the file system to be measured; emptied before each sample.
        note: called with what a reader of the figures has to know.
    """
    stager = build("stager", "blocking")
    copy = stager.stage(state.tree)
    stager.close()

    def fresh() -> Path:
        for old in folder.iterdir():
            shutil.rmtree(old)
        return Path(tempfile.mkdtemp(dir=folder))

    makes: dict[str, _Make] = {name: partial(_writer, name, copy) for name in _storages()}
    makes |= {_PADDING: lambda: _with_padding(state), **_torchs(copy)}
    rows = [durable(row, make, state.nbytes, fresh) for row, make in makes.items()]
    ceiling, again = (Timed(row, lambda: raw_write(state.nbytes, note), fresh) for row in (CEILING, f"again:{CEILING}"))
    return [ceiling, *rows, again]


def row_names() -> list[str]:
    """The names of all rows there are."""
    return [CEILING, *_storages(), _PADDING, *_torchs({}), f"again:{CEILING}"]


def durable(row: str, make: _Make, nbytes: int, fresh: Callable[[], Path]) -> Case:
    """One way of writing, made in the first round and kept.

    Args:
        make: makes what writes into a directory.
        nbytes: bytes that have to be there afterwards at least.
        fresh: makes the directory.
    """

    def make_durable() -> _Save:
        write = make()

        def write_and_flush(folder: Path) -> None:
            write(folder)
            flush(folder)

        return write_and_flush

    def check(folder: Path, _: None) -> None:
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if written < nbytes:
            raise CheckpointError(f"only {written} of {nbytes} bytes were written")

    return Timed(row, make_durable, fresh, check)


def _storages() -> list[str]:
    return [name for name in names("storage") if name != _ALIAS]


def _writer(storage: str | UsesPadding, copy: dict[str, Any]) -> _Save:
    writer = build("storage", storage) if isinstance(storage, str) else storage
    return lambda path: save(copy, checkpoint_id=path, storage_writer=writer, planner=StatePlanner(), no_dist=True)


def _with_padding(state: State) -> _Save:
    """``dcp`` at its best: over a copy with the padding that it writes in."""
    storage: Any = build("storage", "dcp")
    stager: AsyncStager = build("stager", "pinned_cached")
    assert isinstance(storage, UsesPadding)
    assert isinstance(stager, ReservesPadding)
    stager.reserve_padding(*storage.padding)
    copy = stager.stage(state.tree)
    stager.close()  # the copy outlives it
    return _writer(storage, copy)  # type: ignore[arg-type]


def _torchs(copy: dict[str, Any]) -> dict[str, _Make]:
    def files(threads: int) -> _Save:
        return lambda path: save(copy, storage_writer=FileSystemWriter(path, thread_count=threads), no_dist=True)

    def pickled(folder: Path) -> None:
        with open(os.path.join(folder, "state.pt"), "wb") as file:
            torch.save(copy, file)

    return {"torch:dcp": lambda: files(1), "torch:dcp_2": lambda: files(2), "torch:save": lambda: pickled}
