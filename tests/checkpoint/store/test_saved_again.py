"""A step that is saved again replaces the old checkpoint, and ``latest`` is a whole checkpoint at every moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import stagereg.checkpoint.store.failpoints as failpoints
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Manifest, new_token
from stagereg.checkpoint.store.open_store import open_store

from ...support.watching import watching

AGAIN, BEFORE = "step-00000002", "step-00000001"
POINTS = [*failpoints.POINTS]
COMMIT = POINTS[POINTS.index("renamed") : -1]


class Killed(BaseException):
    """Stands for SIGKILL: what is on the disk stays as it is."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with steps 1 and 2, of which the second is damaged."""
    with Checkpointer(str(tmp_path / "run"), save_last=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": f"first {step}"})
    file = tmp_path / "run" / AGAIN / "index.json"
    file.write_bytes(file.read_bytes().replace(b"first 2", b"worst 2"))
    return tmp_path / "run"


def names(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name.lstrip(".").startswith("step-")}


def expect_whole(root: Path) -> None:
    """``latest`` is a whole checkpoint, and all but the damaged one are."""
    store = open_store(root)
    complete, damaged = store.checkpoints()
    assert damaged == []
    latest = store.latest()
    assert latest is not None
    assert latest.manifest in [each.manifest for each in complete[:2]]
    for each in complete:
        assert not store.look(each.path, content=True).damages or each.manifest.serial == 2


def publish(root: Path, step: int, killed: Callable[[str], None] = lambda point: None) -> None:
    """Save as a run does that dies where ``killed`` raises."""
    store = open_store(root)
    with store.lock():
        store.sweep()
        with watching(killed):
            written = store.temporary(step, new_token())
            os.mkdir(written)
            store.publish(written, Manifest(step, 1, 0, {"a": store.put(written, "a", b"again")}), 3)
        store.retention.clear()


@pytest.mark.parametrize("point", [None, *COMMIT])
def test_killed_at_any_moment_the_next_commit_leaves_the_new_one_alone(root: Path, point: str | None) -> None:
    def kill(at: str) -> None:
        expect_whole(root)
        if at == point:
            raise Killed

    with suppress(Killed):
        publish(root, 2, kill)
    expect_whole(root)
    assert open_store(root).checkpoints()[0][0].manifest.serial == 3
    publish(root, 3)
    expect_whole(root)
    [again] = names(root) - {BEFORE, "step-00000003"}
    assert again.startswith(f"{AGAIN}.")
    assert (root / again / "a").read_bytes() == b"again"


def test_the_old_one_stays_while_somebody_reads_it(root: Path) -> None:
    store = open_store(root)
    with store.readers.read_lease(str(root / AGAIN)):
        publish(root, 2)
        [again] = names(root) - {BEFORE, AGAIN}
        assert os.readlink(root / "latest") == again
        assert "worst 2" in (root / AGAIN / "index.json").read_text()
    publish(root, 3)
    assert names(root) == {BEFORE, again, "step-00000003"}


def test_one_that_was_rejected_later_does_not_replace_a_good_one(root: Path) -> None:
    store = open_store(root)
    with Checkpointer(str(root), save_last=False) as checkpointer:
        with store.readers.read_lease(str(root / BEFORE)):
            checkpointer.save(1, {"x": "again"})
            checkpointer.wait()
        again = checkpointer._store.checkpoints()[0][0]
        checkpointer._store.retention.distrusted.add(again.path)
        for step in (3, 4):
            checkpointer.save(step, {"x": "more"})
            checkpointer.wait()
        assert again.name in names(root)
