"""What a directory of a file system may hold and is not believed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.layout import Checkpoint, Manifest
from stagereg.checkpoint.place.local import LocalPlace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Checkpointer(str(tmp_path / "run")) as checkpointer:
        checkpointer.save(1, {"x": 1})
        checkpointer.save(2, {"x": 2})
    return tmp_path / "run"


def refused(root: Path) -> str:
    complete, others = LocalPlace(root).checkpoints()
    assert [checkpoint.manifest.step for checkpoint in complete] == [1]
    assert list(others) == [str(root / "step-00000002")]
    return others[str(root / "step-00000002")]


def test_a_link_to_a_file_with_the_right_bytes_is_no_file_of_a_checkpoint(root: Path) -> None:
    file = root / "step-00000002" / "__0_0.distcp"
    file.rename(root / "elsewhere")
    file.symlink_to(root / "elsewhere")
    assert "__0_0.distcp: no regular file" in refused(root)


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_a_pipe_is_refused_and_nobody_waits_for_its_other_end(root: Path, name: str) -> None:
    (root / "step-00000002" / name).unlink()
    os.mkfifo(root / "step-00000002" / name)
    assert f"{name}: no regular file" in refused(root)


def test_a_checkpoint_under_the_name_of_another_step_is_none(root: Path) -> None:
    shutil.rmtree(root / "step-00000002")
    shutil.copytree(root / "step-00000001", root / "step-00000002")
    assert "of step 1, not of this one" in refused(root)


def test_a_checkpoint_may_be_copied_to_a_name_of_its_own(root: Path) -> None:
    shutil.copytree(root / "step-00000001", root / "best")
    found = LocalPlace(root).open(str(root / "best"))
    assert isinstance(found, Checkpoint)
    assert (found.manifest.step, found.path, found.name) == (1, str(root / "best"), "best")


def test_the_time_of_the_commit_is_in_the_manifest(root: Path) -> None:
    times = [checkpoint.manifest.time for checkpoint in LocalPlace(root).checkpoints()[0]]
    written = (root / "step-00000001" / "manifest.json").stat().st_mtime
    assert all(time is not None and abs(time - written) < 60 for time in times)


def test_what_is_half_written_is_listed_and_swept(root: Path) -> None:
    place = LocalPlace(root)
    Path(place.temporary(3, "ab12")).mkdir()
    assert place.leftovers() == [str(root / ".step-00000003.ab12.tmp")]
    place.sweep()
    assert place.leftovers() == []
    assert len(place.checkpoints()[0]) == 2


def test_a_place_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "nowhere")
    assert (place.checkpoints(), place.leftovers(), place.latest()) == (([], {}), [], None)


@pytest.mark.parametrize(
    ("taken", "aside", "left"),
    [("gone", "good", 1), ("good", "good", 2), ("damaged", "good", 1), ("damaged", "damaged", None)],
)
def test_of_a_checkpoint_and_the_one_that_was_set_aside_for_it_the_good_one_stays(
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
    LocalPlace(root).sweep()
    found = LocalPlace(root).open(str(new))
    assert (found.manifest.serial if isinstance(found, Checkpoint) else None) == left
    assert not old.exists()


def test_what_was_set_aside_stays_while_the_other_one_cannot_be_looked_at(
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
    LocalPlace(root).sweep()
    assert (old / "manifest.json").exists()
    assert (new / "manifest.json").exists()
