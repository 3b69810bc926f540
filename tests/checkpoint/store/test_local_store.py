"""What may be in a directory of a file system and is not trusted."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagereg.checkpoint.store.local_store as local
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.manifest import Checkpoint, Manifest
from stagereg.checkpoint.store.local_store import LocalStore
from stagereg.errors import CheckpointError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Checkpointer(str(tmp_path / "run")) as checkpointer:
        checkpointer.save(1, {"x": 1})
        checkpointer.save(2, {"x": 2})
    return tmp_path / "run"


def refused(root: Path) -> str:
    complete, others = LocalStore(root).checkpoints()
    assert [checkpoint.manifest.step for checkpoint in complete] == [1]
    assert list(others) == [str(root / "step-00000002")]
    return others[str(root / "step-00000002")]


def test_a_link_to_a_file_with_the_right_bytes_is_no_file_of_a_checkpoint(root: Path) -> None:
    file = root / "step-00000002" / "__0_0.distcp"
    file.rename(root / "elsewhere")
    file.symlink_to(root / "elsewhere")
    assert "__0_0.distcp: no regular file" in refused(root)


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_a_pipe_is_refused_and_not_waited_for(root: Path, name: str) -> None:
    (root / "step-00000002" / name).unlink()
    os.mkfifo(root / "step-00000002" / name)
    assert f"{name}: no regular file" in refused(root)


def test_a_manifest_of_a_terabyte_is_not_read(root: Path) -> None:
    os.truncate(root / "step-00000002" / "manifest.json", 1 << 40)
    assert "manifest.json: damaged (it has 1,099,511,627,776 bytes)" in refused(root)


def test_a_checkpoint_under_the_name_of_another_step_is_none(root: Path) -> None:
    shutil.rmtree(root / "step-00000002")
    shutil.copytree(root / "step-00000001", root / "step-00000002")
    assert "of step 1, not of this one" in refused(root)


def test_a_checkpoint_may_be_copied_to_a_name_of_its_own(root: Path) -> None:
    shutil.copytree(root / "step-00000001", root / "best")
    found = LocalStore(root).condition(str(root / "best")).checkpoint
    assert isinstance(found, Checkpoint)
    assert (found.manifest.step, found.path, found.name) == (1, str(root / "best"), "best")


def test_the_time_of_the_commit_is_in_the_manifest(root: Path) -> None:
    times = [checkpoint.manifest.time for checkpoint in LocalStore(root).checkpoints()[0]]
    written = (root / "step-00000001" / "manifest.json").stat().st_mtime
    assert all(time is not None and abs(time - written) < 60 for time in times)


def test_an_unfinished_save_is_listed_and_deleted(root: Path) -> None:
    store = LocalStore(root)
    Path(store.temporary(3, "ab12")).mkdir()
    assert store.leftovers() == [str(root / ".step-00000003.ab12.tmp")]
    store.sweep()
    assert store.leftovers() == []
    assert len(store.checkpoints()[0]) == 2


def test_a_store_that_does_not_exist_has_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "nowhere")
    assert (store.checkpoints(), store.leftovers(), store.latest()) == (([], {}), [], None)


@pytest.mark.parametrize(
    ("taken", "aside", "left"),
    [("gone", "good", 1), ("good", "good", 2), ("damaged", "good", 1), ("damaged", "damaged", None)],
)
def test_of_a_checkpoint_and_the_one_it_replaces_the_good_one_is_kept(
    root: Path, taken: str, aside: str, left: int | None
) -> None:
    old, new = root / ".step-00000003.ab12.old", root / "step-00000003"
    for source, path, state in (("step-00000001", old, aside), ("step-00000002", new, taken)):
        if state == "gone":
            continue
        shutil.copytree(root / source, path)
        manifest = Manifest.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(dataclasses.replace(manifest, step=3).dumps())
        if state == "damaged":
            (path / "__0_0.distcp").write_bytes(b"")
    LocalStore(root).sweep()
    found = LocalStore(root).condition(str(new)).checkpoint
    assert (found.manifest.serial if isinstance(found, Checkpoint) else None) == left
    assert not old.exists()


def test_a_replaced_checkpoint_is_kept_while_its_successor_cannot_be_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = root / ".step-00000002.ab12.old", root / "step-00000002"
    shutil.copytree(new, old)
    real = os.lstat

    def lstat(path: Path, **more: Any) -> os.stat_result:
        if path == new / "manifest.json":
            raise PermissionError(13, "no", str(path))
        return real(path, **more)

    monkeypatch.setattr(os, "lstat", lstat)
    LocalStore(root).sweep()
    assert (old / "manifest.json").exists()
    assert (new / "manifest.json").exists()


def test_a_directory_that_may_be_listed_and_not_entered_is_reported_and_ends(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(name: str) -> Callable[..., os.stat_result]:
        real: Callable[..., os.stat_result] = getattr(os, name)

        def look(path: Any, *args: Any, **more: Any) -> os.stat_result:
            if isinstance(path, (str, Path)) and "/step-0000000" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **more)

        return look

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, forbidden(name))
    complete, refused = LocalStore(root).checkpoints()
    assert complete == []
    assert all("Permission denied" in why for why in refused.values())
    assert len(refused) == 2


def save(root: Path, *steps: int, keep: int = 2, text: str = "") -> None:
    with Checkpointer(str(root), keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"x": text})


def meanwhile(monkeypatch: pytest.MonkeyPatch, looks_at: str, act: Callable[[], None]) -> None:
    """Call ``act`` when a reader first looks at a file of that step, as if a run did it."""
    look = local._size
    happened: list[Path] = []

    def size(path: Path) -> Any:
        if looks_at in str(path) and not happened:
            happened.append(path)
            act()
        return look(path)

    monkeypatch.setattr(local, "_size", size)


def test_a_checkpoint_deleted_while_it_is_checked_is_absent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, "step-00000002", lambda: save(root, 3, keep=1))
    complete, refused = LocalStore(root).checkpoints()
    assert ([one.manifest.step for one in complete], refused) == ([3], {})


def test_of_a_checkpoint_that_is_replaced_while_it_is_checked_the_new_one_is_seen(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, "step-00000002", lambda: save(root, 2, text="longer than before" * 100))
    complete, refused = LocalStore(root).checkpoints()
    assert ([one.manifest.serial for one in complete], refused) == ([3, 1], {})


def test_latest_is_there_also_while_it_is_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, "step-00000002", lambda: save(root, 3, keep=1))
    latest = LocalStore(root).latest()
    assert latest is not None
    assert latest.manifest.step == 3


@pytest.mark.parametrize("new", [2, 3])
def test_content_that_changes_while_it_is_read_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, new: int
) -> None:
    store = LocalStore(root)
    read = store.contents

    def contents(path: str, names: Any) -> Any:
        monkeypatch.setattr(store, "contents", read)
        save(root, new, keep=1, text="others")
        return read(path, names)

    monkeypatch.setattr(store, "contents", contents)
    found = store.examine(str(root / "step-00000002"))
    if new == 2:
        assert (found.manifest is not None and found.manifest.serial, found.damages) == (3, ())
    else:
        assert str(found) == "manifest.json: missing"


def test_what_is_in_the_way_of_a_checkpoint_is_named_and_kept(root: Path) -> None:
    (root / "step-00000003").write_text("mine")
    with pytest.raises(CheckpointError, match=r"Step 3 was not saved.*step-00000003"):
        save(root, 3)
    assert (root / "step-00000003").read_text() == "mine"
    (root / "latest").unlink()
    shutil.copytree(root / "step-00000002", root / "latest")
    with pytest.raises(CheckpointError, match=r"latest"):
        save(root, 4)
    assert len(LocalStore(root).checkpoints()[0]) == 2


def test_old_checkpoints_are_deleted_also_where_there_can_be_no_links(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def symlink_to(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    (root / "latest").unlink()
    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    monkeypatch.setattr(LocalStore, "sweep", lambda store: None)
    save(root, 3, 4, keep=1)
    assert os.listdir(root) == ["step-00000004"]
    assert "step 4 is saved" in caplog.text


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("exchange", [local._exchange, lambda one, other: False], ids=["exchange", "two renames"])
def test_a_save_whose_rename_cannot_be_flushed_deletes_no_other_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: int, exchange: Any
) -> None:
    sync = local._sync

    def fails(path: Path) -> None:
        if path == root:
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(local, "_exchange", exchange)
    with monkeypatch.context() as patch:
        patch.setattr(local, "_sync", fails)
        with pytest.raises(CheckpointError, match=f"Step {step} was not saved"):
            save(root, step)
    complete, refused = LocalStore(root).checkpoints()
    assert ([one.manifest.serial for one in complete], refused) == ([2, 1], {})
    assert sorted(os.listdir(root)) == ["latest", "step-00000001", "step-00000002"]
