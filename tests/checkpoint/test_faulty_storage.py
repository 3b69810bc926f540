"""The storage of tests that fails on purpose does so at the requested points, as a disk would, and only there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stagereg.checkpoint.failpoints as failpoints
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.errors import CheckpointError

from ..support.faulty_storage import FaultyStorage


@pytest.fixture(autouse=True)
def no_observer_left() -> Iterator[None]:
    yield
    failpoints.watch(None)


@pytest.mark.parametrize("at", ["writing", "flushed", "held", "described"])
def test_a_save_fails_where_and_when_it_was_asked_to(tmp_path: Path, at: str) -> None:
    faulty = FaultyStorage("EDQUOT", at, saves=[2])
    with Checkpointer(str(tmp_path), keep=9, storage=faulty) as made:
        for step in (1, 2, 3):
            made.save(step, {"x": step})
            if step != 2:
                made.wait()
                continue
            with pytest.raises(CheckpointError, match="quota") as caught:
                made.wait()
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.errno == errno.EDQUOT
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-00000001", "step-00000003"]
    restored = {"x": 0}
    with Checkpointer(str(tmp_path)) as other:
        assert other.restore(restored) == restored["x"] == 3, "and it is read without the faulty storage"


def test_so_many_bytes_are_written_before(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Seen(FaultyStorage):
        def _written(self) -> int:
            sizes.append(super()._written())
            return sizes[-1]

    with Checkpointer(str(tmp_path), storage=Seen(after_bytes=2 << 20)) as made:
        made.save(1, {f"x{i}": torch.ones(1 << 18) for i in range(24)})
        with pytest.raises(CheckpointError, match="Input/output error"):
            made.wait()
    assert all(size < 2 << 20 for size in sizes[:-1])
    assert 2 << 20 <= sizes[-1] < 24 << 20
