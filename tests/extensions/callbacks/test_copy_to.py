"""A copy of a checkpoint in another store is complete and verified, or not there; nothing is copied twice."""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hydra import compose, initialize_config_dir

import stagereg
import stagereg.extensions.callbacks.copy_to as copy_to
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.callbacks.copy_to import CopyTo
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint

from ...support.forks import run_forked
from ...support.watching import watching

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROUTES = ["path url", "url path", *(pytest.param(each, marks=pytest.mark.slow) for each in ("path path", "url url"))]
COPY = """
import os, signal, sys
import stagereg.checkpoint.store.failpoints as failpoints
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.extensions.callbacks.copy_to import CopyTo
from stagereg.checkpoint.store.open_store import open_store
newest = open_store(sys.argv[1]).checkpoints()[0][0]
failpoints.watch(lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == sys.argv[3] else None)
CopyTo(sys.argv[2], keep=1).committed(CommittedCheckpoint(newest.manifest.step, newest.path, newest.manifest, {}))
"""


class Killed(BaseException):
    """Ends a copy at a moment."""


@pytest.fixture(params=ROUTES)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A directory of a run, and one for copies."""
    name = uuid.uuid4().hex
    kinds = {"path": str(tmp_path), "url": f"memory://{name}"}
    source, target = request.param.split()
    yield f"{kinds[source]}/run", f"{kinds[target]}/copies"
    if "url" in request.param:
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def save(dir: str, *steps: int, keep: int = 9) -> None:
    with Checkpointer(dir, keep=keep, save_last=False) as checkpointer:
        checkpointer.restore({"x": torch.zeros(99), "y": 0})
        for step in steps:
            checkpointer.save(step, {"x": torch.full((99,), float(step)), "y": step})


def newest(dir: str) -> CommittedCheckpoint:
    found = open_store(dir).checkpoints()[0][0]
    return CommittedCheckpoint(found.manifest.step, found.path, found.manifest, {})


def steps(dir: str) -> list[int]:
    """The steps that are complete and good, newest first; nothing else may be there."""
    store = open_store(dir)
    complete, damaged = store.checkpoints()
    assert damaged == []
    assert [str(store.look(one.path, content=True)) for one in complete] == [""] * len(complete)
    return [one.manifest.step for one in complete]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were copied."""
    seen: list[str] = []
    copy = copy_to._copy_file

    def recorded(source: str, target: str, mark: FileDigest) -> None:
        copy(source, target, mark)
        seen.append(target.rpartition("/")[2])

    monkeypatch.setattr(copy_to, "_copy_file", recorded)
    return seen


def test_a_copy_is_a_checkpoint_to_restore_from(stores: tuple[str, str], tmp_path: Path, copied: list[str]) -> None:
    source, target = stores
    save(source, 5)
    for _ in range(3):
        CopyTo(target).committed(newest(source))
    assert (steps(target), len(copied)) == ([5], len(newest(source).manifest.files))
    found = open_store(target).latest()
    assert found is not None
    assert found.manifest.files == newest(source).manifest.files
    state: dict[str, Any] = {"x": torch.zeros(99), "y": 0}
    with Checkpointer(str(tmp_path / "other"), save_last=False) as other:
        assert other.restore(state, target) == 5
    assert (state["y"], state["x"].sum()) == (5, 99 * 5)


def test_what_is_missing_is_made_up_for_oldest_first(stores: tuple[str, str], copied: list[str]) -> None:
    source, target = stores
    save(source, 1)
    copy = CopyTo(target, keep=Keep(newest=3))
    copy.committed(newest(source))
    save(source, 2, 3, 4)
    copy.committed(newest(source))
    assert steps(target) == [4, 3, 2]
    save(source, 5, 6, 7, 8, 9)
    copied.clear()
    copy.committed(newest(source))
    assert steps(target) == [9, 8, 7]
    assert len(copied) == 3 * len(newest(source).manifest.files)  # what would be deleted at once is not copied


POINTS = ["writing", "flushed", "held", "described", "renamed", "committed", "pointed", "hidden", "retained"]


@pytest.mark.parametrize("point", POINTS)
def test_a_copy_killed_anywhere_goes_on_and_is_never_seen(
    stores: tuple[str, str], copied: list[str], point: str
) -> None:
    source, target = stores
    save(source, 1)
    CopyTo(target, keep=1).committed(newest(source))
    save(source, 2)
    files, copied[:] = len(newest(source).manifest.files), []
    seen: list[str] = []

    def kill(reached: str) -> None:
        seen.append(reached)
        if reached == point and seen.count(point) == 1 + (point == "flushed"):
            raise Killed

    with watching(kill), contextlib.suppress(Killed):
        CopyTo(target, keep=1).committed(newest(source))
    assert point in seen or ("://" in target and point in ("described", "renamed"))
    assert steps(target) in ([1], [2], [2, 1])
    CopyTo(target, keep=1).committed(newest(source))
    assert steps(target)[0] == 2
    assert files - 1 <= len(copied) == len(set(copied)) <= files
    save(source, 3)
    CopyTo(target, keep=1).committed(newest(source))
    assert (steps(target), open_store(target).leftovers()) == ([3], [])


@pytest.mark.parametrize("point", ["flushed", "described", "committed"])
def test_a_process_killed_while_it_copies_loses_nothing(tmp_path: Path, copied: list[str], point: str) -> None:
    source, target = str(tmp_path / "run"), str(tmp_path / "copies")
    save(source, 1)
    done = run_forked(COPY, source, target, point)
    assert done.returncode == -signal.SIGKILL
    assert steps(target) == ([1] if point == "committed" else [])
    CopyTo(target, keep=1).committed(newest(source))
    files = len(newest(source).manifest.files)
    assert (steps(target), len(copied)) == ([1], files - 1 if point == "flushed" else 0)
    assert open_store(target).leftovers() == []


def test_what_is_damaged_here_is_not_copied_and_others_are(tmp_path: Path) -> None:
    source, target = str(tmp_path / "run"), str(tmp_path / "copies")
    save(source, 1, 2)
    path = tmp_path / "run/step-00000001/__0_0.distcp"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=r"step-00000001/__0_0\.distcp does not match its manifest: expected"):
        CopyTo(target).committed(newest(source))
    assert steps(target) == [2]
    CopyTo(target).committed(newest(source))
    assert (steps(target), open_store(target).leftovers()) == ([2], [])


def test_what_lies_there_is_compared_and_copied_again(stores: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = stores
    save(source, 1)
    store = type(open_store(target))
    with monkeypatch.context() as patch:
        patch.setattr(store, "mark", lambda *_: FileDigest(1, 2))
        with pytest.raises(CheckpointError, match=r"copies/.*does not match its manifest: expected"):
            CopyTo(target).committed(newest(source))
        assert steps(target) == []
    CopyTo(target).committed(newest(source))
    assert steps(target) == [1]


def test_a_checkpoint_is_not_deleted_while_it_is_copied(
    stores: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = stores
    save(source, 1)
    copy = copy_to._copy_file

    def go_on(*given: Any) -> None:
        monkeypatch.setattr(copy_to, "_copy_file", copy)
        save(source, 2, keep=1)
        copy(*given)

    monkeypatch.setattr(copy_to, "_copy_file", go_on)
    CopyTo(target).committed(newest(source))
    assert (steps(source), steps(target)) == ([2, 1], [1])
    save(source, 3, keep=1)
    assert steps(source) == [3]


def test_a_store_that_another_run_has_is_left_alone(tmp_path: Path) -> None:
    source, target = str(tmp_path / "run"), str(tmp_path / "copies")
    save(source, 1)
    for place in (target, source):
        with Checkpointer(place, save_last=False) as other:
            other.lock()
            with pytest.raises(CheckpointError, match="in use"):
                CopyTo(place).committed(newest(source))
    CopyTo(target).committed(newest(source))
    assert steps(target) == [1]


def test_a_target_of_no_use_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="fsspec does not support nowhere://"):
        CopyTo("nowhere://bucket/runs")
    with pytest.raises(ConfigError, match=r"newest.* must be a whole number of at least 1"):
        CopyTo("copies", keep=0)


def test_a_run_copies_what_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagereg]\n")
    overrides = [
        f"checkpoint.dir={tmp_path / 'run'}",
        "checkpoint.keep=9",
        "+on_commit@checkpoint.on_commit.backup=copy_to",
        "checkpoint.on_commit.backup.keep.newest=1",
    ]
    overrides += [f"checkpoint.on_commit.backup.dir={tmp_path / 'copies'}", "checkpoint.on_commit.backup.keep.every=2"]
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app", overrides=overrides)
    with stagereg.instantiate(config.checkpoint) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {"x": torch.full((99,), float(step)), "y": step})
            checkpointer.wait()
    assert steps(str(tmp_path / "copies")) == [5, 4, 2]
    assert checkpointer.stats.on_commit_failures == 0


def test_a_copy_takes_what_a_killed_copy_has_left_and_nothing_else(tmp_path: Path) -> None:
    save(str(tmp_path / "run"), 1)
    one = newest(str(tmp_path / "run"))
    [found] = open_store(tmp_path / "run").checkpoints()[0]
    place = Path(copy_to._place(found, open_store(tmp_path / "to")))
    place.mkdir(parents=True)
    (place / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{place} has notes, which is not part of a copy. Move {place} away"):
        CopyTo(str(tmp_path / "to")).committed(one)
    assert [each.name for each in place.iterdir()] == ["notes"]
    place.rename(tmp_path / "away")
    CopyTo(str(tmp_path / "to")).committed(one)
    assert steps(str(tmp_path / "to")) == [1]
