"""A component is told the name that a checkpoint has when its turn comes."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.open_store import open_store
from stagereg.extensions.callbacks.calls import _Caller
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint

PLAIN = "step-00000002"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with steps 1 and 2, of which the second is damaged."""
    with Checkpointer(str(tmp_path / "run"), save_last=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": f"first {step}"})
    file = tmp_path / "run" / PLAIN / "index.json"
    file.write_bytes(file.read_bytes().replace(b"first 2", b"worst 2"))
    return tmp_path / "run"


def test_a_component_whose_turn_comes_later_is_told_the_name_there_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, bool]] = []
    turn, take = threading.Event(), _Caller._take
    monkeypatch.setattr(_Caller, "_take", lambda *given: turn.wait(60) and take(*given))
    store = open_store(root)
    with ExitStack() as held:
        held.enter_context(store.readers.read_lease(str(root / PLAIN)))

        def look(each: CommittedCheckpoint) -> None:
            told.append((Path(each.path).name, (Path(each.path) / "index.json").exists()))

        with Checkpointer(str(root), every=1, keep=3, save_last=False, on_commit=[look]) as checkpointer:
            assert checkpointer.restore({"x": ""}) == 1
            checkpointer.save(2, {"x": "second 2"})
            checkpointer.wait()
            assert (root / PLAIN).exists()
            held.close()
            checkpointer.save(3, {"x": "third"})
            checkpointer.wait()
            turn.set()
            checkpointer._calls.finish()
            assert checkpointer.stats.on_commit_failures == 0
    assert told == [(PLAIN, True), ("step-00000003", True)]
