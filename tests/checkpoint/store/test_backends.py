"""What a checkpoint store promises, it promises on every backend: a directory, a bucket, and one in memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.base.providers import has
from stagereg.checkpoint.format.manifest import Checkpoint, Manifest, new_token
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.located import path_of
from stagereg.checkpoint.store.open_store import backend_of
from stagereg.errors import CheckpointError
from tests.support.memory_backend import MemoryBackend

KINDS = ("directory", *(["bucket"] if has("buckets") else ()), "memory")
CHANGES = ("write", "replace", "delete", "commit", "point", "link", "remove")  # discarding raises nothing
each_backend = pytest.mark.parametrize("kind", KINDS)


@contextlib.contextmanager
def made(kind: str) -> Iterator[Backend]:
    """A new backend of that kind, with nothing in it."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "directory":
            os.mkdir(f"{folder}/run")
            yield Directory(f"{folder}/run")
        elif kind == "bucket":
            yield backend_of(f"memory://{uuid.uuid4().hex}/run")
        else:
            yield MemoryBackend(folder)


def save(store: CheckpointStore, step: int, keep: int = 9) -> Checkpoint:
    written = store.temporary(step, new_token())
    if not store.backend.in_place:
        os.makedirs(written)
    try:
        files = {name: store.put(written, name, f"{name} {step}".encode()) for name in ("a", "b")}
        done = store.publish(written, Manifest(step, 2, 0, files), keep)
    except BaseException:
        store.backend.discard(written)
        raise
    store.retention.clear()
    return done


def there(backend: Backend) -> list[tuple[int, int]]:
    """Step and serial of what is complete, which is whole, as a process sees it that has just begun to look."""
    complete, damaged = (store := CheckpointStore(backend)).checkpoints()
    assert damaged == []
    assert [store.look(one.path, content=True).damages for one in complete] == [{}] * len(complete)
    return [(one.manifest.step, one.manifest.serial) for one in complete]


@each_backend
@settings(max_examples=25, deadline=None)
@given(saves=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=6))
def test_the_newest_stay_and_each_step_has_one(kind: str, saves: list[tuple[int, int]]) -> None:
    with made(kind) as backend:
        store, expected = CheckpointStore(backend), list[tuple[int, int]]()
        for step, keep in saves:
            serial = 1 + max((serial for _, serial in expected), default=0)
            expected = [(step, serial), *(each for each in expected if each[0] != step)][:keep]
            done = save(store, step, keep)
            assert there(backend) == expected
            assert store.latest() == done
            assert path_of(store, done) == done.path
        assert store.leftovers() == []


class Failing:
    """A backend of which one change fails, either before it is made or after."""

    def __init__(self, backend: Backend, at: int, late: bool) -> None:
        self._backend, self._at, self._late = backend, at, late

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._backend, name)
        return act if name not in CHANGES else lambda *given: self._try(act, *given)

    def _try(self, act: Callable[..., Any], *given: Any) -> Any:
        self._at -= 1
        if self._at == 0 and not self._late:
            raise OSError(5, "Input/output error")
        found = act(*given)
        if self._at == 0:
            raise OSError(5, "Input/output error")
        return found


@each_backend
@settings(max_examples=60, deadline=None)
@given(step=st.integers(0, 3), at=st.integers(1, 12), late=st.booleans(), keep=st.integers(1, 3))
def test_whatever_change_fails_a_whole_checkpoint_is_latest_and_the_next_run_goes_on(
    kind: str, step: int, at: int, late: bool, keep: int
) -> None:
    with made(kind) as backend:
        for before in (1, 2):
            save(CheckpointStore(backend), before)
        failed = False
        try:
            save(CheckpointStore(Failing(backend, at, late)), step, keep)
        except OSError:
            failed = True
        found = there(backend)
        assert found[0][0] == step if not failed else set(found) >= {(2, 2), (1, 1)}
        assert CheckpointStore(backend).latest() is not None
        store = CheckpointStore(backend)
        with store.lock():
            store.sweep()
            assert store.leftovers() == []
            assert store.latest() == store.checkpoints()[0][0]
            done = save(store, 4, keep)
            assert there(backend)[0] == (4, done.manifest.serial)


def fail_half_way(kind: str, backend: Backend, at: int, patch: pytest.MonkeyPatch) -> None:
    """Have a commit fail at one of its changes: what it has done before stays done."""
    left = [at]

    def count(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise PermissionError(13, "Permission denied", str(given[-1])[:99])
            return real(*given, **more)

        return act

    commit = type(backend).commit

    def failing(self: Any, written: str, manifest: Manifest) -> str:
        with pytest.MonkeyPatch.context() as within:
            if kind == "directory":
                within.setattr(os, "fsync", count(os.fsync))
                within.setattr(os, "rename", count(os.rename))
            elif kind == "bucket":
                within.setattr(MemoryFileSystem, "pipe_file", count(MemoryFileSystem.pipe_file))
            else:
                self.fails_at = at
            return commit(self, written, manifest)

    patch.setattr(type(backend), "commit", failing)


HALVES = [
    ("directory", 1),
    ("directory", 2),
    ("directory", 3),
    ("directory", 4),
    ("bucket", 1),
    ("memory", 1),
    ("memory", 2),
]


@pytest.mark.parametrize(("kind", "at"), [each for each in HALVES if each[0] in KINDS])
@pytest.mark.parametrize("step", [2, 3])
def test_a_commit_that_fails_half_way_harms_nothing_and_the_next_save_works(
    kind: str, at: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(kind) as backend:
        store = CheckpointStore(backend)
        save(store, 1)
        second = save(store, 2)
        with monkeypatch.context() as patch:
            fail_half_way(kind, backend, at, patch)
            with pytest.raises(OSError, match=r"denied|memory has failed"):
                save(store, step)
        assert there(backend) == [(2, 2), (1, 1)]
        assert store.latest() == second
        save(store, step)
        assert there(backend)[0] == (step, 3)
        assert store.leftovers() == []


@each_backend
def test_one_run_holds_a_store_and_is_named(kind: str) -> None:
    with made(kind) as backend:
        store = CheckpointStore(backend)
        assert backend.holder() is None
        with store.lock() as held:
            assert (owner := backend.holder()) is not None
            assert owner.pid == os.getpid()
            with pytest.raises(CheckpointError, match="in use"):
                CheckpointStore(backend).lock()
            save(store, 1)
        held.release()
        assert backend.holder() is None
        with pytest.raises(CheckpointError, match=r"released the lock of .* must not write there"):
            save(store, 2)
        assert there(backend) == [(1, 1)]
