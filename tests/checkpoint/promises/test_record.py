"""The events that the checkpointer records: enough to draw when each part of a save ran."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.assembly import Checkpointer
from stagereg.base import record
from stagereg.errors import CheckpointError, StagingError
from stagereg.registry import build
from stagereg.stagers.async_stager import AsyncStager
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

from ...support.faulty_storage import FaultyStorage


class Clock:
    """Advances by one second whenever it is looked at, so that moments can be distinguished by their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            self.now += 1.0
            return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(record, "now", made)
    return made


def events(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / record.file_name(rank)).read_text().splitlines()]


def of(directory: Path, event: str) -> list[dict[str, Any]]:
    return [seen for seen in events(directory) if seen["event"] == event]


STATE = {"x": torch.ones(1000), "y": torch.ones(10, dtype=torch.float64), "n": 7}
BYTES = 4 * 1000 + 8 * 10


def test_each_save_copy_and_write_is_recorded(tmp_path: Path) -> None:
    stager = build("stager", "pinned_cached")  # which has copied when the call returns
    saved = Checkpointer(str(tmp_path / "c"), every=2, keep=9, save_last=False, stager=stager)
    with record.recording(tmp_path, 0, 1), saved as checkpointer:
        for step in range(1, 6):
            checkpointer.maybe_save(step, STATE)
        checkpointer.wait()
        stats = checkpointer.stats
    assert [(seen["step"], seen["seconds"]) for seen in of(tmp_path, "stall")] == [
        (2, stats.stall_seconds[0]),
        (4, stats.stall_seconds[1]),
    ]
    assert (stats.saves, stats.bytes_staged) == (2, 2 * BYTES)
    stages, writes = of(tmp_path, "stage"), of(tmp_path, "write")
    assert [(seen["step"], seen["bytes"]) for seen in stages] == [(2, BYTES), (4, BYTES)]
    assert [(seen["step"], seen["seconds"]) for seen in writes] == list(zip((2, 4), stats.write_seconds, strict=True))
    files = [path for path in (tmp_path / "c" / "step-00000004").iterdir() if path.suffix == ".distcp"]
    assert writes[1]["bytes"] >= sum(path.stat().st_size for path in files) >= BYTES
    for stall, stage, write in zip(of(tmp_path, "stall"), stages, writes, strict=True):
        assert stall["start"] <= stage["start"]
        assert stage["start"] + stage["seconds"] <= stall["start"] + stall["seconds"]
        assert stage["start"] < write["start"]
        assert write["start"] + write["seconds"] <= write["t"]


class Timed(AsyncStager):
    """Is done when ``stage`` returns, or ``synchronize_staging``, or when the test completes a future."""

    def __init__(self, clock: Clock, done: str) -> None:
        self._synchronize_after_execute = done == "synchronized"
        self.clock, self.done = clock, done
        self.promise: Future[dict[str, Any]] = Future()
        self.copied = 0.0

    def stage(self, state_dict: dict[str, Any]) -> Any:
        self.copy = BlockingAsyncStager().stage(state_dict)
        self.copied = self.clock()
        return self.promise if self.done == "promised" else self.copy

    def synchronize_staging(self) -> None:
        self.copied = self.clock()


@pytest.mark.parametrize("done", ["at once", "synchronized", "promised"])
def test_a_copy_ends_when_the_stager_is_done(tmp_path: Path, clock: Clock, done: str) -> None:
    stager = Timed(clock, done)
    with record.recording(tmp_path, 0, 1), Checkpointer(str(tmp_path / "c"), stager=stager) as checkpointer:
        checkpointer.save(1, STATE)
        if done == "promised":
            stager.copied = clock()
            stager.promise.set_result(stager.copy)
    (stage,), (stall,) = of(tmp_path, "stage"), of(tmp_path, "stall")
    assert stall["start"] < stage["start"] < stager.copied < stage["start"] + stage["seconds"]
    returned = stall["start"] + stall["seconds"]
    assert (returned < stager.copied) == (done == "promised")
    assert done == "promised" or stage["start"] + stage["seconds"] < returned


class Breaks(BlockingAsyncStager):
    def stage(self, state_dict: dict[str, Any]) -> Any:
        raise StagingError(("x",), "is broken here")


@pytest.mark.parametrize(
    ("given", "why", "copied"),
    [
        ({"storage": FaultyStorage("ENOSPC")}, "No space left on device", [BYTES]),
        ({"stager": Breaks()}, "is broken here", []),
    ],
)
def test_a_lost_save_is_recorded_and_its_copy_counts(
    tmp_path: Path, given: dict[str, Any], why: str, copied: list[int]
) -> None:
    with record.recording(tmp_path, 0, 1), Checkpointer(str(tmp_path / "c"), **given) as checkpointer:  # noqa: SIM117
        with pytest.raises(CheckpointError, match=why):  # noqa: PT012
            checkpointer.save(3, STATE)
            checkpointer.wait()
    assert [(lost["step"], why in lost["error"]) for lost in of(tmp_path, "lost")] == [(3, True)]
    assert [seen["bytes"] for seen in of(tmp_path, "stage")] == copied
    assert of(tmp_path, "write") == []


def test_saved_is_the_step_last_given_to_save(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), every=2) as checkpointer:
        assert checkpointer.saved is None
        for step in range(1, 6):
            checkpointer.maybe_save(step, STATE)
        assert checkpointer.saved == 4
        checkpointer.save(5, STATE)
        assert checkpointer.saved == 5


def two_ranks(rank: int, world_size: int, root: str) -> None:
    with record.recording(Path(root), rank, world_size), Checkpointer(f"{root}/c") as checkpointer:
        checkpointer.save(1, {f"x.rank{rank}": torch.ones(1000 * (rank + 1))})
        checkpointer.wait()


def test_each_rank_reports_of_its_own_bytes(tmp_path: Path) -> None:
    run_ranks(two_ranks, nproc=2, args=(str(tmp_path),))
    for rank in range(2):
        seen = {one["event"]: one for one in events(tmp_path, rank)}
        own = sum(path.stat().st_size for path in (tmp_path / "c/step-00000001").glob(f"__{rank}_*"))
        assert seen["stage"]["bytes"] >= 4000 * (rank + 1)
        assert own <= seen["write"]["bytes"] <= own + (tmp_path / "c/step-00000001/.metadata").stat().st_size
