"""A step that is saved again has its plain name in the end, and a whole checkpoint at every name on the way there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Manifest, new_token
from stagereg.checkpoint.store.open_store import open_store

from ...support.crash_points import POINTS
from ...support.reading import opened
from ...support.watching import watching

PLAIN, BEFORE = "step-00000002", "step-00000001"
AGAIN = [*POINTS][[*POINTS].index("renamed") : -1]


class Killed(BaseException):
    """Stands for SIGKILL: what is on the disk stays as it is."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with steps 1 and 2, of which the second is damaged."""
    with Checkpointer(str(tmp_path / "run"), save_last=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": f"first {step}"})
    file = tmp_path / "run" / PLAIN / "index.json"
    file.write_bytes(file.read_bytes().replace(b"first 2", b"worst 2"))
    return tmp_path / "run"


def names(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith("step-"))


def saved_again(root: Path, *steps: int, **options: Any) -> None:
    with Checkpointer(str(root), save_last=False, **options) as checkpointer:
        state = {"x": ""}
        assert checkpointer.restore(state) == 1
        assert state == {"x": "first 1"}
        for step in steps:
            checkpointer.save(step, {"x": f"second {step}"})
            checkpointer.wait()


def expect_whole(root: Path) -> None:
    """``latest`` is a whole checkpoint, each save is listed once, and all but the damaged one are whole."""
    store = open_store(root)
    latest = store.latest()
    assert latest is not None
    complete, damaged = store.checkpoints()
    assert damaged == []
    listed = [(each.manifest.step, each.manifest.serial) for each in complete]
    assert len(listed) == len(set(listed))
    assert latest.manifest in [each.manifest for each in complete[:2]]
    for each in complete:
        assert not store.look(each.path, content=True).damages or each.manifest.serial == 2


def test_the_plain_name_is_back_with_the_commit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def look(point: str) -> None:
        seen.append(point)
        if point in AGAIN:
            expect_whole(root)

    with watching(look):
        saved_again(root, 2)
    assert seen.count("named") == seen.count("repointed") == 1
    assert names(root) == [BEFORE, PLAIN]
    assert os.readlink(root / "latest") == PLAIN
    with opened(root / "latest", verify=True) as checkpoint:
        assert checkpoint.entry("x") == "second 2"
    assert [name for name in os.listdir(root) if name.startswith(".step")] == []
    assert cli.main(["ls", str(root), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(each["step"], each["latest"], Path(each["path"]).name) for each in listed] == [
        (2, True, PLAIN),
        (1, False, BEFORE),
    ]


def publish(root: Path, step: int, killed: Callable[[str], None] = lambda point: None) -> None:
    """Save as a run does that dies where ``killed`` raises."""
    store = open_store(root)
    lock = store.lock()
    try:
        store.sweep()
        with watching(killed):
            written = store.temporary(step, new_token())
            os.mkdir(written)
            store.publish(written, Manifest(step, 1, 0, {"a": store.put(written, "a", b"again")}), 3)
        store.retention.clear()
        store.settle()
    finally:
        lock.release()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", AGAIN)
def test_killed_at_any_moment_the_next_commit_brings_it_back(root: Path, point: str, nth: int) -> None:
    seen: list[str] = []

    def kill(at: str) -> None:
        seen.append(at)
        if seen.count(point) == nth:
            raise Killed

    with suppress(Killed):
        publish(root, 2, kill)
    assert seen.count(point) == nth or (nth == 2 and point != "hidden")  # of the old one, and of the name with a token
    expect_whole(root)
    assert open_store(root).checkpoints()[0][0].manifest.serial == 3
    publish(root, 3)
    expect_whole(root)
    assert names(root) == [BEFORE, PLAIN, "step-00000003"]
    assert (root / PLAIN / "a").read_bytes() == b"again"
    assert [name for name in os.listdir(root) if name.startswith(".step")] == []


@pytest.mark.parametrize("ends", ["by the next commit", "by close"])
def test_it_waits_for_readers_of_the_old_one(root: Path, ends: str) -> None:
    store = open_store(root)
    with ExitStack() as held:
        held.enter_context(store.readers.read_lease(str(root / PLAIN)))
        with Checkpointer(str(root), keep=3, save_last=False) as checkpointer:
            assert checkpointer.restore({"x": ""}) == 1
            checkpointer.save(2, {"x": "second 2"})
            checkpointer.wait()
            [suffixed] = set(names(root)) - {BEFORE, PLAIN}
            assert os.readlink(root / "latest") == suffixed
            assert "worst 2" in (root / PLAIN / "index.json").read_text()
            held.close()
            if ends == "by the next commit":
                checkpointer.save(3, {"x": "third"})
                checkpointer.wait()
                assert set(names(root)) == {BEFORE, PLAIN, "step-00000003"}
    assert PLAIN in names(root)
    assert suffixed not in names(root)
    with opened(root / PLAIN, verify=True) as checkpoint:
        assert checkpoint.entry("x") == "second 2"
    expect_whole(root)


def test_who_reads_it_by_the_name_with_a_token_keeps_that(root: Path) -> None:
    store, suffixed = open_store(root), Path()
    with ExitStack() as held, Checkpointer(str(root), save_last=False) as checkpointer:

        def read(point: str) -> None:
            nonlocal suffixed
            if point == "pointed" and suffixed == Path():
                suffixed = Path(os.path.realpath(root / "latest"))
                held.enter_context(store.readers.read_lease(str(root / "latest")))

        with watching(read):
            checkpointer.save(2, {"x": "second 2"})
            checkpointer.wait()
        assert set(names(root)) == {BEFORE, PLAIN, suffixed.name}
        expect_whole(root)
        assert os.readlink(root / "latest") == PLAIN
        checkpointer.save(3, {"x": "third"})
        checkpointer.wait()
        assert not store.look(str(suffixed), content=True).damages
        held.close()
        checkpointer.save(4, {"x": "fourth"})
    assert suffixed.name not in names(root)


def test_where_files_cannot_be_linked_the_name_with_a_token_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    saved_again(root, 2)
    [first, suffixed] = names(root)
    assert (first, suffixed.startswith(f"{PLAIN}.")) == (BEFORE, True)
    assert os.readlink(root / "latest") == suffixed
    assert "keep names like step-00000060.TOKEN" in caplog.text
    assert open_store(root).leftovers() == []


def test_what_is_kept_is_said_by_the_name_there_is(root: Path) -> None:
    saved_again(root, 2, keep=stagereg.Keep(newest=1, every=1))
    assert open_store(root).retention.kept() == {BEFORE: "every 1", PLAIN: "newest; every 1"}


def test_one_that_was_given_up_later_does_not_take_the_place_of_a_good_one(root: Path) -> None:
    store = open_store(root)
    with (
        Checkpointer(str(root), save_last=False) as checkpointer,
        store.readers.read_lease(str(root / BEFORE)),
    ):
        checkpointer.save(1, {"x": "again"})
        checkpointer.wait()
        again = checkpointer._store.checkpoints()[0][0]
        assert again.name.startswith(f"{BEFORE}.")
        checkpointer._store.retention.distrusted.add(again.path)
        checkpointer.save(3, {"x": "third"})
        checkpointer.wait()
        checkpointer.save(4, {"x": "fourth"})
        checkpointer.wait()
        assert again.name in names(root)
