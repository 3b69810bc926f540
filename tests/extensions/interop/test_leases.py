"""What is read for a user stays until that has ended: an open checkpoint, and one that is converted."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(str(tmp_path / "run"), keep=1, save_last=False) as checkpointer:
        save(checkpointer, 1)
        yield checkpointer


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, {"x": torch.full((8,), float(step))})
    checkpointer.wait()


def there(checkpointer: Checkpointer, prefix: str) -> list[str]:
    return sorted(name for name in os.listdir(checkpointer.dir) if name.startswith(prefix))


def test_an_open_checkpoint_that_is_forgotten_is_let_go(run: Checkpointer) -> None:
    checkpoint = stagereg.open_checkpoint(str(run.dir))
    assert len(there(run, ".reading")) == 1
    del checkpoint
    gc.collect()
    assert there(run, ".reading") == []


def test_a_checkpoint_that_is_converted_stays(
    run: Checkpointer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, seen, acted = CheckpointStore.contents, list[list[str]](), list[str]()

    def contents(store: CheckpointStore, path: str, parts: Any) -> Any:
        if not acted:
            acted.append(path)
            save(run, 2)
            seen.append(there(run, "step-"))
        return read(store, path, parts)

    monkeypatch.setattr(CheckpointStore, "contents", contents)
    assert cli.main(["convert", str(run.dir), str(tmp_path / "out.pt")]) == 0
    assert seen == [["step-00000001", "step-00000002"]]
    save(run, 3)
    assert (there(run, "step-"), there(run, ".reading")) == (["step-00000003"], [])
