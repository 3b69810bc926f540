"""When one of several ranks fails, all ranks raise with the rank and the reason, and none hangs."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stagereg.checkpoint.ranks.rank_group as rank_group
import stagereg.checkpoint.store.failpoints as failpoints
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Failure
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError, ConfigError, StagingError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks


class Unlike(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} {where}")


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Raises(DcpStorage):
    """Raises the given error in the given method; marks nothing where ``mark`` is to fail, which it leaves to that."""

    given: tuple[str, BaseException] | None = None

    def _raise(self, where: str) -> None:
        if self.given is not None and self.given[0] == where:
            raise self.given[1]

    def reset(self, checkpoint_id: Any = None) -> None:
        self._raise("reset")
        super().reset(checkpoint_id)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._raise("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._raise("finish")
        super().finish(metadata, results)

    @property
    def marks(self) -> Any:
        self._raise("marks")
        return {} if self.given is not None and self.given[0] == "mark" else super().marks


FAULTS = [
    (1, "reset", OSError(116, "Stale file handle")),
    (0, "reset", SystemExit("no licence")),
    (1, "stage", StagingError(("model", "weight"), "is broken here")),
    (1, "agreed", OSError(5, "Input/output error")),
    (1, "write_data", Unlike("no", "licence")),
    (0, "write_data", KeyboardInterrupt("no licence")),
    (1, "write_data", Locked("no licence")),
    (1, "marks", GeneratorExit("no licence")),
    (1, "mark", OSError(28, "No space left on device")),
    (1, "written", OSError(5, "Input/output error")),
    (0, "finish", Unlike("no", "licence")),
    (0, "marked", OSError(5, "Input/output error")),
    (0, "publish", OSError(28, "No space left on device")),
]
"""The rank, the method or the failpoint, and what is raised there."""


@contextmanager
def failing(storage: Raises, stager: Any, where: str, error: BaseException) -> Iterator[None]:
    def reach(name: str) -> None:
        if name == where:
            raise error

    before = failpoints.watch(reach)
    storage.given = where, error
    patched = {"stage": stager, "mark": CheckpointStore, "publish": CheckpointStore}
    with mock.patch.object(patched[where], where, side_effect=error) if where in patched else mock.MagicMock():
        yield
    storage.given = None
    failpoints.watch(before)


def message(act: Any) -> tuple[str, str]:
    """The message of the error of ``act``, and the type of what it was raised from."""
    try:
        act()
    except CheckpointError as error:
        return str(error), type(error.__cause__).__name__
    return "", ""


def visible(root: str | Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith(".lock"))


def each_fault(rank: int, root: str) -> list[tuple[str, str, int | None]]:
    storage, stager, seen = Raises(), BlockingAsyncStager(), []
    with Checkpointer(root, stager=stager, storage=storage, keep=99) as checkpointer:
        for i, (culprit, where, error) in enumerate(FAULTS):
            with failing(storage, stager, where if rank == culprit else "", error):
                at_once = message(lambda i=i: checkpointer.save(2 * i, {f"x.rank{rank}": torch.ones(3)}))  # type: ignore[misc]
                later = message(checkpointer.wait)
            seen.append((*(at_once if at_once[0] else later), checkpointer.restore({f"x.rank{rank}": torch.ones(3)})))
            checkpointer.save(2 * i + 1, {f"x.rank{rank}": torch.ones(3)})
            checkpointer.wait()
    return seen


def see_a_failure_at_different_calls(rank: int, root: str) -> tuple[str, int | None]:
    with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
        background = checkpointer._background
        with mock.patch.object(CheckpointStore, "publish", side_effect=ZeroDivisionError):
            checkpointer.save(1, {"x": 1})
            background.finish()
        # As if the failure had not reached rank 1 yet at its second call.
        with mock.patch.object(background.last, "raise_failure") if rank == 1 else mock.MagicMock():
            first = message(lambda: checkpointer.save(2, {"x": 2}))
        background.finish()
        first = message(checkpointer.wait) if rank == 1 else first
        checkpointer.save(3, {"x": 3})
        checkpointer.wait()
        return first[0], checkpointer.restore({"x": 0})


def save_different_steps(rank: int, root: str) -> str:
    with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
        checkpointer.save(rank, {"x": 1})
        return message(checkpointer.wait)[0]


def restore_fails_on_rank_1(rank: int, root: str) -> str:
    with Checkpointer(
        root, stager=BlockingAsyncStager(), failure=Failure(timeout=datetime.timedelta.max)
    ) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(2, 2)})
        return message(lambda: checkpointer.restore({"model": torch.nn.Linear(2 + rank, 2)}))[0]


def destroy_the_group(rank: int, root: str) -> str:
    checkpointer = Checkpointer(root, stager=BlockingAsyncStager())
    failpoints.watch(lambda name: dist.destroy_process_group() if name == "agreed" else None)
    checkpointer.save(1, {f"x.rank{rank}": torch.ones(3)})
    return message(checkpointer.close)[0]


def all_of_it(rank: int, world_size: int, root: str) -> dict[str, Any]:
    return {
        "faults": each_fault(rank, f"{root}/faults"),
        "apart": see_a_failure_at_different_calls(rank, f"{root}/apart"),
        "steps": save_different_steps(rank, f"{root}/steps"),
        "restore": restore_fails_on_rank_1(rank, f"{root}/restore"),
        "unwritable": message(Checkpointer("/proc/checkpoints", stager=BlockingAsyncStager()).lock)[0],
        "destroyed": destroy_the_group(rank, f"{root}/destroyed"),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("ranks")
    return root, run_ranks(all_of_it, nproc=2, args=(str(root),))


def test_any_error_of_a_rank_is_on_all_and_commits_nothing(ran: Any) -> None:
    root, seen = ran
    for rank, each in enumerate(seen):
        for i, ((text, cause, restored), (culprit, where, error)) in enumerate(
            zip(each["faults"], FAULTS, strict=True)
        ):
            assert text.startswith(f"Step {2 * i} was not saved: "), (rank, where)
            assert f"{type(error).__name__}: {error}" in text, (rank, where)
            assert f"rank {culprit}: " in text or rank == culprit, (rank, where)
            assert cause == "OSError" or not isinstance(error, OSError), (rank, where)
            assert restored == (2 * i - 1 if i else None), (rank, where)
    assert visible(root / "faults") == ["latest", *(f"step-{2 * i + 1:08}" for i in range(len(FAULTS)))]


def test_saves_stay_paired_when_ranks_see_a_failure_apart(ran: Any) -> None:
    root, seen = ran
    for each in seen:
        text, step = each["apart"]
        assert "Step 1 was not saved" in text
        assert step == 3
    assert not (root / "apart/step-00000002").exists()


@pytest.mark.parametrize(
    ("case", "text", "left"),
    [
        ("steps", "different steps at the same time: [0, 1]", []),
        ("restore", "rank 1: 'model' does not accept", ["latest", "step-00000001"]),
        ("unwritable", 'Cannot write to dir="/proc/checkpoints": rank 0: FileNotFoundError', None),
        ("destroyed", "Call close() of the Checkpointer before destroy_process_group()", []),
    ],
)
def test_what_cannot_be_is_reported_on_all_ranks(ran: Any, case: str, text: str, left: list[str] | None) -> None:
    root, seen = ran
    assert all(text in each[case] for each in seen), [each[case] for each in seen]
    assert left is None or visible(root / case) == left


def test_an_error_of_many_ranks_names_only_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    group = RankGroup()
    group.group, group.size = mock.Mock(), 512
    failed = pickle.dumps((None, OSError(28, "No space left on device")))
    monkeypatch.setattr(rank_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group, "_collect", lambda *_: [failed] * 512)
    monkeypatch.setattr(group, "_hand_out", lambda every, _: every[0])
    with pytest.raises(CheckpointError, match=r"ranks 0, 1, 2, 3 and 508 more: OSError.*$") as caught:
        group.round_trip("", int, list)
    assert len(str(caught.value)) < 300


def save_in_a_subgroup(rank: int, world_size: int, root: str) -> list[str]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    with Checkpointer(root, stager=BlockingAsyncStager(), process_group=group) as checkpointer:
        checkpointer.save(1, {f"x.rank{rank}": rank})
        state = {f"x.rank{rank}": 0}
        checkpointer.restore(state)
        assert state == {f"x.rank{rank}": rank}
    return sorted(os.listdir(Path(root) / "latest"))


def test_a_subgroup_saves_without_the_others(tmp_path: Path) -> None:
    results = run_ranks(save_in_a_subgroup, nproc=3, args=(str(tmp_path),))
    assert results[1] == results[2] == [".metadata", "__0_0.distcp", "__1_0.distcp", "index.json", "manifest.json"]


def differ_in_a_subgroup(rank: int, world_size: int, root: str) -> list[str]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    with pytest.raises(ConfigError) as options:
        Checkpointer(root, every=10 * rank, process_group=group)
    with Checkpointer(root, process_group=group, save_last=False) as checkpointer:
        checkpointer.save(1, {"w": torch.full((2,), float(rank))})
        with pytest.raises(CheckpointError) as values:
            checkpointer.wait()
        checkpointer.save(2, {"w": torch.zeros(2)} if rank == 1 else {"w": torch.zeros(3)})
        with pytest.raises(CheckpointError) as shapes:
            checkpointer.wait()
    return [str(each.value) for each in (options, values, shapes)]


def test_messages_of_a_subgroup_name_the_ranks_of_the_job(tmp_path: Path) -> None:
    _, *others = run_ranks(differ_in_a_subgroup, nproc=3, args=(str(tmp_path),))
    for options, *differences in others:
        assert "rank 1 has 10, rank 2 has 20" in options
        assert ["'w' is not the same on ranks 1, 2" in each for each in differences] == [True, True]
