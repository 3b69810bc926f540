"""What may be in a directory of a file system and is not trusted."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagereg.checkpoint.store.directory as local
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Checkpointer(str(tmp_path / "run")) as checkpointer:
        checkpointer.save(1, {"x": 1})
        checkpointer.save(2, {"x": 2})
    return tmp_path / "run"


def test_a_checkpoint_may_be_copied_to_a_name_of_its_own(root: Path) -> None:
    shutil.copytree(root / "step-00000001", root / "best")
    found = open_store(root).look(str(root / "best")).checkpoint
    assert isinstance(found, Checkpoint)
    assert (found.manifest.step, found.path, found.name) == (1, str(root / "best"), "best")
    assert found.manifest.time is not None
    assert abs(found.manifest.time - (root / "step-00000001" / "manifest.json").stat().st_mtime) < 60


def save(root: Path, *steps: int, keep: int = 2, text: str = "") -> None:
    with Checkpointer(str(root), keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"x": text})


def meanwhile(monkeypatch: pytest.MonkeyPatch, looks_at: str, act: Callable[[], None]) -> None:
    """Call ``act`` when a reader first looks at a file of that step, as if a run did it."""
    look = local._size
    happened: list[str] = []

    def size(entry: os.DirEntry[str]) -> Any:
        if looks_at in os.path.dirname(entry.path) and not happened:
            happened.append(entry.path)
            act()
        return look(entry)

    monkeypatch.setattr(local, "_size", size)


@pytest.mark.parametrize(("step", "keep", "seen"), [(3, 1, [3]), (2, 2, [3, 1])])
def test_a_reader_sees_the_new_one_where_one_is_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: int, keep: int, seen: list[int]
) -> None:
    meanwhile(monkeypatch, "step-00000002", lambda: save(root, step, keep=keep, text="longer than before" * 100))
    complete, refused = open_store(root).checkpoints()
    assert ([one.manifest.serial for one in complete], refused) == (seen, [])


def test_latest_is_there_also_while_it_is_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, "step-00000002", lambda: save(root, 3, keep=1))
    latest = open_store(root).latest()
    assert latest is not None
    assert latest.manifest.step == 3


@pytest.mark.parametrize(("new", "there"), [(2, 3), (3, None)], ids=["saved again", "deleted"])
def test_what_is_deleted_while_it_is_read_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch, new: int, there: int | None
) -> None:
    store = open_store(root)
    read = store.contents

    def contents(path: str, names: Any) -> Any:
        monkeypatch.setattr(store, "contents", read)
        save(root, new, keep=1, text="others")
        return read(path, names)

    monkeypatch.setattr(store, "contents", contents)
    found = store.look(str(root / "step-00000002"), content=True)
    assert (found.manifest and found.manifest.serial, str(found)) == (there, "" if there else "manifest.json: missing")


def test_what_is_in_the_way_of_a_checkpoint_is_named_and_kept(root: Path) -> None:
    (root / "step-00000003").write_text("mine")
    save(root, 3)
    assert (root / "step-00000003").read_text() == "mine"
    (root / "latest").unlink()
    shutil.copytree(root / "step-00000002", root / "latest")
    with pytest.raises(CheckpointError, match=r"latest is a directory, .*\. Delete it or move it away\."):
        save(root, 4)
    assert [one.manifest.step for one in open_store(root).checkpoints()[0]] == [3, 2]


@pytest.mark.parametrize(("linked", "left"), [(False, []), (True, ["latest", "step-00000002"])])
def test_old_checkpoints_are_deleted_also_without_links(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, linked: bool, left: list[str]
) -> None:
    def symlink_to(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not linked:
        (root / "latest").unlink()
    monkeypatch.setattr(os, "symlink", symlink_to)
    monkeypatch.setattr(CheckpointStore, "sweep", lambda store: None)
    save(root, 3, 4, keep=1)
    assert sorted(os.listdir(root)) == [*left, "step-00000004"]
    assert "Step 4 is saved" in caplog.text


def test_what_another_rank_still_writes_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".step-00000001.12ab.tmp"
    left.mkdir()
    rmdir = os.rmdir

    def write_late(*path: Any, **more: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            (left / "__1_0.distcp").touch()
        rmdir(*path, **more)

    monkeypatch.setattr(os, "rmdir", write_late)
    local.Directory(tmp_path).discard(str(left))
    assert not os.listdir(tmp_path)


def test_checkpoints_of_another_user_that_stay_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a directory that a group shares, and with umask 022, what one has saved another one can only hide."""
    made = tmp_path / "step-00000001"
    made.mkdir()
    store = local.Directory(tmp_path)
    monkeypatch.setattr(local, "discard", lambda path: None)
    store.discard(str(made))
    assert not caplog.records, "its own, which is deleted at the next start"
    monkeypatch.setattr(os, "geteuid", lambda: made.parent.stat().st_uid + 1)
    for _ in range(2):
        store.discard(str(*tmp_path.iterdir()))
    [record] = caplog.records
    assert f"old checkpoints in {tmp_path} belong to another user" in record.getMessage()
