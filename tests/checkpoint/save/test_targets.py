"""One copy goes to several targets, each by its schedule, and to ranks that share nothing by default."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg.base.shutdown as shutdown
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.save_thread import SaveThreads
from stagereg.checkpoint.save.saver import Saver
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.open_store import open_store
from stagereg.checkpoint.targets import Schedule
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

LONG = datetime.timedelta(minutes=5)


class Target(StoreTarget):
    """A directory; ``fails`` is raised by the next commit, which waits for ``go``."""

    def __init__(self, root: Path, every: int, required: bool = True) -> None:
        store = open_store(str(root))
        super().__init__(store, Keep(9), DcpStorage(), RankGroup(), "0123456789ab", Schedule(every))
        self.required, self.go, self.begun, self.fails = required, threading.Event(), threading.Event(), False
        self.go.set()

    def commit(self, *args: Any) -> None:
        self.begun.set()
        assert self.go.wait(60)
        if self.fails:
            raise OSError("no space")
        super().commit(*args)

    def steps(self) -> list[int]:
        return sorted(each.manifest.step for each in self.store.checkpoints()[0])


class Releasing(BlockingAsyncStager):
    """Notes which copies it gets back."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[float] = []
        self.expected = 0

    def expect_release(self) -> None: ...

    def expect_stage(self) -> None:
        self.expected += 1

    def release(self, staged: dict[str, Any]) -> None:
        self.released.append(float(staged["x"].sum()))


class Run:
    def __init__(self, root: Path, *targets: tuple[int, bool], warns: bool = False) -> None:
        for number in range(len(targets)):
            (root / str(number)).mkdir()
        self.targets = [Target(root / str(number), *each) for number, each in enumerate(targets)]
        self.threads, self.stager = SaveThreads(self.targets, LONG, warns), Releasing()
        self.saver = Saver(self.threads, self.stager)

    def step(self, step: int, value: float = 1.0) -> tuple[int, ...]:
        """End a step, and save it where it is due; return where that is."""
        self.saver.remember({"x": torch.full((4,), value)}, step)
        if not self.saver.due(step):
            return ()
        targets = self.saver.targets_of(step)
        self.saver.save(step, targets)
        return targets

    def steps(self) -> list[list[int]]:
        assert self.threads.finish()
        return [each.steps() for each in self.targets]


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    shutdown._forget()  # no failure of a test must reach the exit status of the tests


def test_each_target_gets_the_steps_of_its_schedule_and_the_first_one_all(tmp_path: Path) -> None:
    run = Run(tmp_path, (2, False), (3, False), (5, True))
    gone = {step: run.step(step) for step in range(1, 11)}
    assert gone == {1: (), 2: (0,), 3: (0, 1), 4: (0,), 5: (0, 2), 6: (0, 1), 7: (), 8: (0,), 9: (0, 1), 10: (0, 2)}
    assert run.steps() == [[2, 3, 4, 5, 6, 8, 9, 10], [3, 6, 9], [5, 10]]
    assert (run.threads.stats.saves, run.threads.stats.tier_saves) == (2, 11)
    assert run.threads.stats.bytes_staged == 8 * 16, "each copy counts once"
    run.threads.close()


@pytest.mark.parametrize(("every", "told"), [(1, []), (2, [3, 5, 7, 9, 11]), (5, [8, 9]), (6, [9, 10, 11])])
def test_the_stager_is_told_of_the_next_save_from_half_way_on(every: int, told: list[int], tmp_path: Path) -> None:
    run, found = Run(tmp_path, (every, False), (100, True)), []
    for step in range(1, 12):
        before = run.stager.expected
        run.step(step)
        found += [step] * (run.stager.expected - before)
    assert found == told, "not before the first save, which tells the size"
    run.threads.close()


def test_the_stager_gets_a_copy_back_when_the_last_target_has_written_it_and_once(tmp_path: Path) -> None:
    run = Run(tmp_path, (1, False), (1, True))
    run.targets[0].go.clear()
    run.step(1, 2.0)
    assert run.targets[0].begun.wait(60)
    assert run.stager.released == [], "the second target has not written it"
    run.targets[0].go.set()
    assert run.steps() == [[1], [1]]
    assert run.stager.released == [8.0]
    run.threads.close()


@pytest.mark.parametrize(("required", "text"), [(False, ""), (True, "no space")])
def test_a_target_that_fails_leaves_the_others_alone(tmp_path: Path, required: bool, text: str, caplog: Any) -> None:
    run = Run(tmp_path, (1, required), (1, True))
    run.targets[0].fails = True
    run.step(1)
    assert run.steps() == [[], [1]]
    if required:
        with pytest.raises(CheckpointError, match=text):
            run.threads.raise_failure()
    assert ("Training continues without a checkpoint in" in caplog.text) is not required
    run.threads.raise_failure()
    assert run.stager.released == [4.0]
    run.threads.close()


def test_a_copy_that_fails_is_reported_once_by_the_last_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, (1, False), (1, True), (1, True))
    failed: Future[Any] = Future()
    failed.set_exception(ValueError("the copy has failed"))
    monkeypatch.setattr(run.stager, "stage", lambda state: failed)
    run.step(1)
    assert run.steps() == [[], [], []]
    assert [each.failing for each in run.threads.all] == [False, False, True]
    with pytest.raises(CheckpointError, match="the copy has failed"):
        run.threads.raise_failure()
    monkeypatch.undo()
    run.step(2)
    assert run.steps() == [[2], [2], [2]]
    run.threads.close()


def test_the_newest_checkpoint_is_named_with_those_that_last_longer(tmp_path: Path) -> None:
    run = Run(tmp_path, (1, False), (2, True))
    assert run.threads.describe_newest() == f"This run has no complete checkpoint in {tmp_path}/1 yet."
    for step in (1, 2, 3):
        run.step(step)
        run.threads.wait()
    text = f"The newest valid checkpoint is step 3, in {tmp_path}/0. Step 2 is in {tmp_path}/1."
    assert run.threads.describe_newest() == text
    run.threads.close()


def save_on_two(rank: int, world_size: int, root: str, dtypes: list[torch.dtype], sizes: list[int]) -> str:
    target = StoreTarget(open_store(root), Keep(), DcpStorage(), RankGroup(), "0123456789ab")
    threads = SaveThreads([target], LONG)
    saver = Saver(threads, BlockingAsyncStager())
    x = torch.full((sizes[rank],), rank + 1, dtype=dtypes[rank])
    saver.remember({"x": x, f"own{rank}": torch.ones(2)})
    saver.save(1)
    assert threads.finish()
    try:
        threads.raise_failure()
    except CheckpointError as error:
        return str(error)
    finally:
        threads.close()
    return ""


def test_a_tensor_that_two_ranks_hold_is_written_by_the_first_one_by_default(tmp_path: Path) -> None:
    assert run_ranks(save_on_two, 2, args=(str(tmp_path), [torch.float32] * 2, [4, 4])) == ["", ""]
    [found] = open_store(str(tmp_path)).checkpoints()[0]
    read = {"x": torch.zeros(4), "own0": torch.zeros(2), "own1": torch.zeros(2)}
    torch.distributed.checkpoint.load(read, checkpoint_id=found.path, no_dist=True)
    assert {name: float(x.sum()) for name, x in read.items()} == {"x": 4.0, "own0": 2.0, "own1": 2.0}


@pytest.mark.parametrize(
    ("dtypes", "sizes"), [((torch.float32, torch.int32), (4, 4)), ((torch.float32, torch.float32), (4, 3))]
)
def test_tensors_of_one_name_in_two_layouts_are_refused_by_default(tmp_path: Path, dtypes: Any, sizes: Any) -> None:
    for text in run_ranks(save_on_two, 2, args=(str(tmp_path), dtypes, sizes)):
        assert "Ranks have tensors of different dtypes or shapes under the name 'x'." in text
    assert open_store(str(tmp_path)).checkpoints() == ([], [])
