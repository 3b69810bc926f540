"""What happens when staging or writing fails: which call raises, what stays on disk, what stays in memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import stagereg
import stagereg.checkpoint.store.failpoints as failpoints
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.advice import advice, causes
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError, StagingError
from stagereg.registry import build
from stagereg.stagers.async_stager import AsyncStager
from tests.support.reading import opened

from ...support.crash_points import POINTS, TIER_POINTS
from ...support.forks import run_forked


@pytest.fixture
def fail_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], None]:
    """Let torch's writer write half of a file and raise, until changed with ``None``."""
    raised: list[BaseException | None] = [None]

    write_data = DcpStorage.write_data

    def half(self: DcpStorage, plan: Any, planner: Any) -> Any:
        if raised[0] is None:
            return write_data(self, plan, planner)
        (Path(self.path) / "__0_0.distcp").write_bytes(b"half")
        held = [planner.resolve_data(item) for item in plan.items]  # as a traceback would hold it
        assert held
        raise raised[0]

    def fail(error: BaseException | None) -> None:
        raised[0] = error

    monkeypatch.setattr(DcpStorage, "write_data", half)
    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["save", "maybe_save", "wait", "close", "restore"])
def test_a_failed_write_is_raised_by_the_next_call(tmp_path: Path, fail_writing: Any, call: str) -> None:
    checkpointer = Checkpointer(str(tmp_path), every=1)
    checkpointer.save(1, {"x": 1})
    checkpointer.wait()
    fail_writing(FULL)
    checkpointer.save(2, {"x": 2})
    checkpointer._background.finish()
    fail_writing(None)
    arguments = {"save": (3, {}), "maybe_save": (3, {}), "restore": ({},)}.get(call, ())
    with pytest.raises(CheckpointError, match=r"(?s)No space left on device") as caught:
        getattr(checkpointer, call)(*arguments)
    assert FULL in list(causes(caught.value))
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]


@pytest.mark.parametrize("storage", ["dcp", *["safetensors"] * has("interop")])
def test_after_a_full_disk_saves_work_once_space_is_free(tmp_path: Path, storage: str) -> None:
    state = {"x": torch.ones(10), "y": "text"}
    with Checkpointer(str(tmp_path), keep=1, storage=build("storage", storage)) as checkpointer:
        for at in range(99):
            reached: list[str] = []

            def full(name: str, at: int = at, reached: list[str] = reached) -> None:
                if name in ("made", "writing", "flushed", "written", "marked", "held", "described"):
                    reached.append(name)
                    if len(reached) == at + 1:
                        raise OSError(errno.ENOSPC, "No space left on device")

            failpoints.watch(full)
            checkpointer.save(2 * at, state)
            checkpointer._background.finish()
            failpoints.watch(None)
            if len(reached) <= at:
                break
            with pytest.raises(CheckpointError, match=rf"Step {2 * at} was not saved: OSError: \[Errno 28\]"):
                checkpointer.wait()
            checkpointer.save(2 * at + 1, state)
            checkpointer.wait()
            checkpointer._background.finish()  # the deletion too
            assert [path.name for path in tmp_path.glob("*step-*")] == [f"step-{2 * at + 1:08}"]
    assert "flushed" in reached


def test_a_failure_leaves_the_old_one_and_does_not_mask_an_error(
    tmp_path: Path, fail_writing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(str(tmp_path)) as checkpointer:  # noqa: PT012
        checkpointer.save(1, {"x": "old"})
        checkpointer.wait()
        fail_writing(FULL)
        checkpointer.save(1, {"x": "new"})
        raise ZeroDivisionError
    assert "No space left" in caplog.text
    state = {"x": ""}
    with Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert state == {"x": "old"}


def test_a_file_that_vanishes_after_its_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data = DcpStorage.write_data

    def lose(self: DcpStorage, plan: Any, planner: Any) -> Any:
        written = write_data(self, plan, planner)
        (Path(self.path) / "__0_0.distcp").unlink()
        return written

    monkeypatch.setattr(DcpStorage, "write_data", lose)
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(1, {"x": 1})
    with pytest.raises(CheckpointError, match=r"differ from the files that were written: __0_0\.distcp: missing"):
        checkpointer.close()
    assert os.listdir(tmp_path) == []


class Tracked(AsyncStager):
    """Hands out fresh copies of tensor ``x`` and keeps only weak references to them."""

    def __init__(self) -> None:
        self.copies: list[weakref.ref[torch.Tensor]] = []
        self.error: BaseException | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        copy = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state_dict.items()}
        self.copies.append(weakref.ref(copy["x"]))
        return copy


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("error", [None, FULL, RuntimeError("broken")])
def test_the_copy_is_released_when_it_is_written_or_lost(
    tmp_path: Path, fail_writing: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    fail_writing(error)
    stager = Tracked()
    at_commit: list[Any] = []
    publish = CheckpointStore.publish

    def publish_and_look(*args: Any) -> str:
        at_commit.extend(copy() for copy in stager.copies)
        return publish(*args)

    monkeypatch.setattr(CheckpointStore, "publish", publish_and_look)
    checkpointer = Checkpointer(str(tmp_path), stager=stager)
    checkpointer.save(1, {"x": torch.ones(10), "nested": {"l": [{"a": 1}]}})
    checkpointer._background.finish()
    assert [copy() for copy in stager.copies] == [None]
    assert at_commit == ([None] if error is None else [])
    with contextlib.nullcontext() if error is None else pytest.raises(CheckpointError):
        checkpointer.close()


@pytest.mark.usefixtures("no_collector")
def test_the_next_save_does_not_wait_for_the_copy_of_a_failed_one(tmp_path: Path, fail_writing: Any) -> None:
    stager: Any = build("stager", "overlapped", max_in_flight=1)
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(str(tmp_path), stager=stager, failure=stagereg.Failure(on_error="warn")) as checkpointer:
        for step in (1, 2, 3):
            fail_writing(FULL if step == 2 else None)
            model(torch.ones(1, 400)).sum().backward()
            optimizer.step()
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
            checkpointer.wait()
            assert stager._copier.pool.in_flight == 0


def test_a_copy_that_proves_bad_after_its_write_is_not_committed(tmp_path: Path) -> None:
    written, committed = threading.Event(), threading.Event()

    class Late(Tracked):
        def synchronize_staging(self) -> None:
            assert written.wait(30)
            committed.wait(0.2)
            raise StagingError(("x",), "has changed meanwhile")

    failpoints.watch(lambda name: {"flushed": written, "committed": committed}.get(name, threading.Event()).set())
    with Checkpointer(str(tmp_path), stager=Late()) as checkpointer:
        with pytest.raises(CheckpointError, match="has changed meanwhile"):
            checkpointer.save(1, {"x": torch.ones(1)})
        checkpointer.wait()
    failpoints.watch(None)
    assert os.listdir(tmp_path) == []


def test_an_interrupt_while_staging_commits_nothing(tmp_path: Path) -> None:
    stager = Tracked()
    stager.error = KeyboardInterrupt()
    with Checkpointer(str(tmp_path), stager=stager) as checkpointer:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, {"x": torch.ones(1)})
        checkpointer.wait()
    assert os.listdir(tmp_path) == []


UNREAD_FAILURE = """
import sys
import stagereg.base.shutdown as ending
from stagereg.base.providers import has
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.storage.dcp import DcpStorage

def full(self, plan, planner):
    raise OSError(28, "No space left on device")

class Interrupted:
    def finish(self):
        raise KeyboardInterrupt

if sys.argv[2] == "fails":
    DcpStorage.write_data = full
if sys.argv[2] == "is_interrupted":
    work = Interrupted()
    ending.wait_for(work)
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"x": 1})
print("the loop is done")
"""


@pytest.mark.parametrize(("how", "status"), [("fails", 1), ("works", 0), ("is_interrupted", 1)])
def test_a_failure_that_was_not_raised_reaches_the_exit_status(tmp_path: Path, how: str, status: int) -> None:
    done = run_forked(UNREAD_FAILURE, tmp_path, how)
    assert done.returncode == status, done.stderr
    assert done.stdout == "the loop is done\n"
    assert ("No space left on device" in done.stderr) == (how == "fails")
    assert ("interrupted while background work" in done.stderr) == (how == "is_interrupted")
    assert "Traceback" not in done.stderr
    if how != "is_interrupted":
        assert ((tmp_path / "step-00000001").exists()) == (how == "works")


NO_MORE_THREADS = """
import sys, threading
import torch
from stagereg import Checkpointer, build
from stagereg.base.providers import has

start = threading.Thread.start

def as_python_3_12_does(self):
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(self)

threading.Thread.start = as_python_3_12_does
chosen = {"stager": build("stager", sys.argv[2]), "storage": build("storage", sys.argv[3])}
if has("callbacks"):
    chosen["on_commit"] = [lambda checkpoint: print("committed", checkpoint.step)]
checkpointer = Checkpointer(sys.argv[1], **chosen)
checkpointer.save(1, {"x": torch.arange(5_000_000)})
"""


@pytest.mark.parametrize(
    ("stager", "storage"), [("overlapped", "dcp"), pytest.param("blocking", "torch_dcp", marks=pytest.mark.slow)]
)
def test_a_save_ends_well_where_no_thread_can_be_started(tmp_path: Path, stager: str, storage: str) -> None:
    done = run_forked(NO_MORE_THREADS, tmp_path, stager, storage, timeout_s=60)
    assert (done.returncode, done.stdout) == (0, "committed 1\n" * has("callbacks")), done.stderr
    with opened(tmp_path / "latest", verify=True) as checkpoint:
        assert torch.equal(checkpoint["x"], torch.arange(5_000_000))


def test_an_error_wrapped_by_torch_is_found_behind_other_errors() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = CheckpointException("write", {0: (ValueError("odd"), None), 1: (full, None)})  # type: ignore[dict-item]
    error = RuntimeError("the save failed")
    error.__cause__ = wrapped
    wrapped.__context__ = error  # and no circle is walked twice
    assert [type(each) for each in causes(error)] == [RuntimeError, CheckpointException, ValueError, OSError]
    assert "full" in advice(error, "runs/gpt")


CALL = re.compile(r"\bfailpoint\(\"(\w+)\"\)")


def test_the_named_failpoints_are_exactly_those_in_the_code() -> None:
    sources = Path(stagereg.__file__).parent.rglob("*.py")
    reached = {name for source in sources for name in CALL.findall(source.read_text())}
    assert reached == {*POINTS, *(TIER_POINTS if has("tiers") else ())}
