"""How long a staged copy takes to be on the disk, against the disk's own speed: ``make bench-write``.

Every row writes one and the same copy in host memory to a fresh directory. Durable means that all files and the
directory are flushed, which is part of the time whoever does it; deleting is not. The ceiling is one file of as many
bytes, written from an aligned buffer, with O_DIRECT where the file system takes it.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import stagereg.bench.ceiling as ceiling
import stagereg.bench.command as command
from stagereg.bench.measure import Case
from stagereg.bench.report import Group
from stagereg.bench.states import State
from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.errors import CheckpointError
from stagereg.registry import build, names
from tests.benchmarks import program

_PAGE_BYTES = 4096
_CHUNK_BYTES = 64 * 2**20  # one write; any length from a few MiB on is as fast
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
    top = functools.partial(raw_write, state.nbytes)
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


def raw_write(nbytes: int) -> Callable[[Path], None]:
    """One file in a directory, written from an aligned buffer past the page cache if that can be; not flushed."""
    buffer = ceiling.memory(-(-nbytes // _PAGE_BYTES) * _PAGE_BYTES)

    def write(folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        try:
            file = os.open(folder / "bytes", flags | os.O_DIRECT)
        except OSError:  # of a file system that has no O_DIRECT
            file = os.open(folder / "bytes", flags)
        try:
            at = 0
            while at < len(buffer):
                at += os.pwrite(file, memoryview(buffer)[at : at + _CHUNK_BYTES], at)
        finally:
            os.close(file)

    return write


def row_names() -> list[str]:
    """The names of all rows there are."""
    return [row for case in cases(State({}), Path()) for row in case.rows]


def measure(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    """Measure rows of :func:`row_names`, for each state dict."""
    with command.folder_below(asked.dir) as folder:
        return command.by_states("write", lambda state: cases(state, Path(folder)), asked, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="How long a copy takes to be on the disk, against the disk's speed.")
    command.add_options(parser, 9, lambda asked: row_names(), measure, scale=1 / 3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is, %(default)s")
    parser.add_argument("--states", default="gpt", help="state dicts, with commas, %(default)s")
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
