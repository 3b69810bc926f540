"""``stagereg bench write``: how long a staged copy takes to be on the disk, against the disk's own speed.

Every row writes one and the same copy in host memory to a fresh directory. Durable means that all files and the
directory are flushed, which is part of the time whoever does it; deleting is not. The ceiling is one file of as many
bytes, written from an aligned buffer, with O_DIRECT where the file system takes it.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import stagereg.bench.ceiling as ceiling
from stagereg.bench.measure import Case
from stagereg.bench.states import State
from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.errors import CheckpointError
from stagereg.registry import build, names

_ALIAS = "direct"  # another name of ``dcp``, which needs no row
_Save = Callable[[Path], object]


def storages() -> list[str]:
    """The names of all storages, each once."""
    return [name for name in names("storage") if name != _ALIAS]


def cases(state: State, folder: Path) -> list[Case]:
    """The cases of one state dict, the ceiling first and once more last; nothing is made before its first sample."""

    @functools.cache
    def copy() -> dict[str, Any]:
        stager = build("stager", "blocking")
        staged: dict[str, Any] = stager.stage(state.tree)
        stager.close()  # the copy outlives it
        return staged

    def registered(name: str) -> _Save:
        storage, planner = build("storage", name), StatePlanner()
        return lambda path: save(copy(), checkpoint_id=path, storage_writer=storage, planner=planner, no_dist=True)

    def torchs(threads: int) -> _Save:
        return lambda path: save(copy(), storage_writer=FileSystemWriter(path, thread_count=threads), no_dist=True)

    makes: dict[str, Callable[[], _Save]] = {name: functools.partial(registered, name) for name in storages()}
    makes |= {
        "torch:dcp": lambda: torchs(1),
        "torch:dcp_2": lambda: torchs(2),
        "torch:save": lambda: lambda path: torch.save(copy(), path / "state.pt"),
    }
    top = functools.partial(ceiling.raw_write, state.nbytes)
    makes = {ceiling.ROW: top, **makes, f"again:{ceiling.ROW}": top}
    return [durable(row, make, state.nbytes, folder) for row, make in makes.items()]


def durable(row: str, make: Callable[[], _Save], nbytes: int, folder: Path) -> Case:
    """One way of writing, made in the first round and kept; ``nbytes`` have to be there afterwards at least."""
    made = functools.cache(make)

    def turn() -> Iterator[None]:
        write = made()
        for old in folder.iterdir():
            shutil.rmtree(old)
        target = Path(tempfile.mkdtemp(dir=folder))
        yield
        write(target)
        ceiling.flush(target)
        yield
        written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        if written < nbytes:
            raise CheckpointError(f"only {written} of {nbytes} bytes were written")

    return Case(row, turn=turn)
