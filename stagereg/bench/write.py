"""``stagereg bench write``: how long a staged copy takes to be on the disk, against the disk's own speed.

Every row writes one and the same copy in host memory to a fresh directory. Durable means that all files and the
directory are flushed, which is part of the time whoever does it; deleting is not. The ceiling is one file of as many
bytes, written with O_DIRECT from an aligned buffer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stagereg.bench.ceiling import RawWrite, flush
from stagereg.bench.measure import Case, NotThere, Stopwatch
from stagereg.bench.states import State
from stagereg.checkpoint.storage.protocol import UsesPadding
from stagereg.checkpoint.torchfiles import Plans
from stagereg.errors import CheckpointError, UnknownNameError
from stagereg.registry import build, names
from stagereg.stagers.async_stager import AsyncStager, ReservesPadding

__all__ = ["CEILING", "cases", "row_names"]

CEILING = "ceiling"
"""The row that all others are a ratio to."""

_BUILT_IN = ("dcp", "direct", "safetensors")
_PADDING = "direct:padding"

_Save = Callable[[Path], object]
_Make = Callable[[], _Save]


class Durable(Case):
    """One way of writing, made in the first round and kept.

    Args:
        make: makes what writes into a directory.
        nbytes: bytes that have to be there afterwards at least.
    """

    def __init__(self, row: str, make: _Make, nbytes: int, fresh: Callable[[], Path]) -> None:
        super().__init__(row)
        self._make = make
        self._nbytes = nbytes
        self._fresh = fresh
        self._save: _Save | None = None

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Write once. Raises: ``CheckpointError`` if there is less on the disk than there should be."""
        if self._save is None:
            self._save = self._make()
        folder = self._fresh()
        watch.start()
        self._save(folder)
        flush(folder)
        seconds = watch.lap()
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if written < self._nbytes:
            raise CheckpointError(f"only {written} of {self._nbytes} bytes were written")
        return {self.rows[0]: seconds}

    def close(self) -> None:
        """Let go of the copy."""
        self._save = None


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

    makes: dict[str, _Make] = {name: _storage(name, copy) for name in _storages()}
    makes |= {_PADDING: lambda: _direct_with_padding(state), **_torchs(copy)}
    rows = [Durable(row, make, state.nbytes, fresh) for row, make in makes.items()]
    raw = [RawWrite(row, state.nbytes, fresh, note) for row in (CEILING, f"again:{CEILING}")]
    return [raw[0], *rows, raw[1]]


def row_names() -> list[str]:
    """The names of all rows there are."""
    return [CEILING, *_storages(), _PADDING, *_torchs({}), f"again:{CEILING}"]


def _storages() -> list[str]:
    """What there should be, and whatever else is registered."""
    try:
        registered = names("storage")
    except UnknownNameError:
        registered = []
    return [*_BUILT_IN, *(name for name in registered if name not in _BUILT_IN)]


def _storage(name: str, copy: dict[str, Any]) -> _Make:
    def make() -> _Save:
        writer = _built(name)
        plans = Plans()
        return lambda folder: save(
            copy, checkpoint_id=folder, storage_writer=writer, planner=plans.planner(), no_dist=True
        )

    return make


def _direct_with_padding(state: State) -> _Save:
    """``direct`` at its best: over a copy with the padding that it writes in."""
    writer = _built("direct")
    stager: AsyncStager = build("stager", "pinned_cached")
    if not isinstance(writer, UsesPadding) or not isinstance(stager, ReservesPadding):
        raise NotThere("the storage uses no padding, or the stager reserves none")
    stager.reserve_padding(*writer.padding)
    copy = stager.stage(state.tree)
    stager.close()  # the copy outlives it
    plans = Plans()
    return lambda folder: save(copy, checkpoint_id=folder, storage_writer=writer, planner=plans.planner(), no_dist=True)


def _built(name: str) -> Any:
    try:
        return build("storage", name)
    except UnknownNameError as error:
        raise NotThere("no storage of that name is registered") from error


def _torchs(copy: dict[str, Any]) -> dict[str, _Make]:
    def files(threads: int) -> _Make:
        def make() -> _Save:
            return lambda folder: save(
                copy, storage_writer=FileSystemWriter(folder, thread_count=threads), no_dist=True
            )

        return make

    def pickled(folder: Path) -> None:
        with open(os.path.join(folder, "state.pt"), "wb") as file:
            torch.save(copy, file)

    return {"torch:dcp": files(1), "torch:dcp_2": files(2), "torch:save": lambda: pickled}
