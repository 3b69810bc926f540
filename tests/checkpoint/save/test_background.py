"""The background thread: its order, its time-out, its end, and how failures reach the next call."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagereg.base.shutdown as shutdown
import stagereg.checkpoint.save.save_thread as module
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.committing import ExchangeCache
from stagereg.checkpoint.save.failures import Failures
from stagereg.checkpoint.save.save_thread import SaveThread, SaveThreads
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy, Write
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.open_store import open_store
from stagereg.checkpoint.targets import ReplicaSave
from stagereg.errors import CheckpointError

LONG_S = 3600.0


class Fake:
    """In place of ``write_and_commit``: begins, and ends when it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: StoreTarget) -> None:
        self.target = target
        self.errors: dict[int, BaseException] = {}
        self.begun, self.go, self.busy = threading.Event(), threading.Event(), threading.Lock()
        self.real = module.write_and_commit
        monkeypatch.setattr(module, "write_and_commit", self)

    def __call__(self, write: Write, cache: ExchangeCache) -> tuple[float, int] | None:
        if write.target is not self.target:  # of a checkpointer that another test has left
            return self.real(write, cache)
        assert self.busy.acquire(blocking=False), "two writes at once"
        self.begun.set()
        assert self.go.wait(30)
        self.busy.release()
        if write.request.step in self.errors:
            raise self.errors[write.request.step]
        return 0.0, 0

    def background(self, timeout_s: float = LONG_S) -> SaveThread:
        return SaveThread(self.target, datetime.timedelta(seconds=timeout_s))

    def submitted(self, background: SaveThread, step: int = 1) -> Write:
        request = Request(step)
        write = Write(request, StagedCopy(request, ReplicaSave()), self.target)
        background.submit(write)
        return write


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    target = StoreTarget(open_store(str(tmp_path)), 1, DcpStorage(), RankGroup(), "0123456789ab")
    yield Fake(monkeypatch, target)
    shutdown._forget()  # no failure of a test must reach the exit status of the tests


def test_a_third_save_waits_and_writes_never_overlap(write: Fake) -> None:
    threads = SaveThreads([write.target], datetime.timedelta(seconds=LONG_S))
    background = threads.last
    for step in (1, 2):
        write.submitted(background, step)
    third = threading.Thread(target=threads.admit, args=(Request(3),))
    third.start()
    assert write.begun.wait(30)
    third.join(0.2)
    assert third.is_alive()
    write.go.set()
    third.join(30)
    assert not third.is_alive()
    assert background.finish()
    assert background.newest == 2


def test_a_save_behind_one_that_hangs_is_written_after_it(write: Fake, caplog: pytest.LogCaptureFixture) -> None:
    background = write.background(0.0)
    write.errors[1] = OSError("gone")
    first, second = write.submitted(background, 1), write.submitted(background, 2)
    assert not background.finish()
    assert first.late
    assert not second.late
    background.timeout_s = LONG_S
    write.go.set()
    assert second.over.wait(30)
    assert background.finish()
    assert "step 1 was not saved" in caplog.text
    with pytest.raises(CheckpointError, match="Step 1 was not saved: it took longer"):
        background.raise_failure()
    background.raise_failure()
    assert background.newest == 2


def test_the_first_failure_is_raised_and_later_ones_are_logged(write: Fake, caplog: pytest.LogCaptureFixture) -> None:
    write.errors = {1: OSError("disk"), 2: OSError("once more")}
    write.go.set()
    background = write.background()
    for step in (1, 2):
        write.submitted(background, step)
    assert background.finish()
    with pytest.raises(CheckpointError, match="Step 1 was not saved: OSError: disk") as caught:
        background.raise_failure()
    assert caught.value.__cause__ is write.errors[1]
    assert "once more" in caplog.text
    background.raise_failure()


@pytest.mark.parametrize("closed", [True, False])
def test_a_background_that_is_closed_or_dropped_leaves_no_thread(write: Fake, closed: bool) -> None:
    write.go.set()
    background = write.background()
    write.submitted(background)
    background.finish()
    thread = background._thread
    assert thread is not None
    assert thread.daemon, "it must not hold up the end of the process"
    if closed:
        background.close()
    else:
        del background
    thread.join(30)
    assert not thread.is_alive()


def test_without_a_thread_a_save_is_refused_and_not_waited_for(write: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> Any:
        raise RuntimeError("can't start new thread")

    background = write.background()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CheckpointError, match="can't start new thread"):
            write.submitted(background)
    assert background.finish()
    write.go.set()
    write.submitted(background)
    assert background.finish()


def test_saves_behind_a_deletion_that_hangs_are_late_too(write: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    deleting, go_on = threading.Event(), threading.Event()

    def clear() -> None:
        deleting.set()
        assert go_on.wait(30)

    monkeypatch.setattr(write.target.store.retention, "clear", clear)
    background = write.background(0.2)
    write.go.set()
    write.submitted(background)
    assert background.finish(), "the deletion is no part of the save"
    background.raise_failure()
    assert deleting.wait(30)
    write.submitted(background, 2)
    assert not background.wait()
    with pytest.raises(CheckpointError, match="took longer than"):
        background.raise_failure()
    go_on.set()


def test_a_look_that_fails_leaves_the_thread_to_later_saves(write: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    looked = threading.Event()

    class Rank:
        def look(self) -> None:
            looked.set()
            raise ValueError("no process group")

    rank, background = Rank(), write.background()
    background.call_when_idle(rank.look)
    assert looked.wait(30)
    write.go.set()
    write.submitted(background)
    assert background.finish()
    background.raise_failure()


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_of_a_later_save_is_logged_in_full_only_if_it_differs(
    caplog: pytest.LogCaptureFixture, first: bool
) -> None:
    failures = Failures(False, first, str)
    texts = [f"Step {step} was not saved: OSError: {why}." for step, why in ((1, "full"), (2, "full"), (3, "broken"))]
    for step, text in enumerate(texts, 1):
        failures.keep_failure(step, CheckpointError(text))
    with pytest.raises(CheckpointError) as raised:
        failures.raise_first()
    assert str(raised.value) == texts[0]
    short = ["Step 2 was not saved, for the same reason as step 1."] * first
    assert [each.getMessage() for each in caplog.records] == [*short, texts[2]]


def test_a_save_to_the_same_place_withdraws_the_status_of_an_earlier_checkpointer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[BaseException] = []
    monkeypatch.setattr(shutdown, "report_error", reported.append)
    monkeypatch.setattr(shutdown, "withdraw_error", reported.remove)
    here, again, elsewhere = (Failures(True, True, str, where) for where in ("here", "here", "elsewhere"))
    here.set_status(4)
    elsewhere.set_status(5)
    assert len(reported) == 2
    again.set_status(None)
    assert ["step 5" in str(each) for each in reported] == [True]
    elsewhere.set_status(None)
    assert reported == []
