"""When one of several ranks fails, all ranks raise with the rank and the reason, and none hangs."""

from __future__ import annotations

import datetime
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stagereg.checkpoint.failpoints as failpoints
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.rank_group import reasons
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.local_store import LocalStore
from stagereg.errors import CheckpointError, StagingError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.faults import FaultyStorage
from stagereg.testing.ranks import run_ranks


class FailsOn(BlockingAsyncStager):
    """Cannot stage while ``failing`` is set."""

    failing = False

    def stage(self, state_dict: dict[str, Any]) -> Any:
        if self.failing:
            raise StagingError(("model", "weight"), "is broken here")
        return super().stage(state_dict)


def message(act: Any) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


def visible(root: str) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith(".lock"))


def stage_fails_on_rank_1(rank: int, world_size: int, root: str) -> tuple[str, str, list[str], int | None]:
    stager = FailsOn()
    with Checkpointer(root, stager=stager) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
        stager.failing = rank == 1
        at_once = message(lambda: checkpointer.save(2, {"x": torch.ones(3)}))
        later = message(checkpointer.wait)
        stager.failing = False
        checkpointer.save(3, {"x": torch.ones(3)})
        checkpointer.wait()
        step = checkpointer.restore({"x": torch.zeros(3)})
        dist.barrier()
        return at_once, later, visible(root), step


def test_staging_that_fails_on_one_rank_is_reported_on_all(tmp_path: Path) -> None:
    results = run_ranks(stage_fails_on_rank_1, nproc=2, args=(str(tmp_path),))
    assert results[0][0] == ""
    assert "rank 1: " in results[0][1]
    assert "is broken here" in results[0][1]
    assert "is broken here" in results[1][0]
    assert results[1][1] == ""
    for _, _, listing, step in results:
        assert listing == ["latest", "step-00000001", "step-00000003"]
        assert step == 3


class Unmarked(DcpStorage):
    """Takes no checksums, so that the checkpointer reads what was written."""

    marks = {}  # noqa: RUF012


def write_fails(rank: int, world_size: int, root: str, where: str) -> tuple[str, list[str], list[str]]:
    storage = Unmarked() if where == "flush" else DcpStorage()
    with Checkpointer(root, stager=BlockingAsyncStager(), storage=storage) as checkpointer:
        checkpointer.save(1, {f"x.rank{rank}": torch.ones(3)})
        checkpointer.wait()
        original = DcpStorage.write_data, LocalStore.mark, LocalStore.publish

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        if where == "write" and rank == 1:
            DcpStorage.write_data = fail  # type: ignore[method-assign]
        elif where == "flush" and rank == 1:
            LocalStore.mark = fail  # type: ignore[method-assign]
        elif where == "commit" and rank == 0:
            LocalStore.publish = fail  # type: ignore[method-assign]
        checkpointer.save(2, {f"x.rank{rank}": torch.ones(3)})
        causes = []
        try:
            checkpointer.wait()
        except CheckpointError as error:
            causes = [type(error).__name__, type(error.__cause__).__name__, str(error)]
        DcpStorage.write_data, LocalStore.mark, LocalStore.publish = original  # type: ignore[method-assign]
        dist.barrier()
        listing = visible(root)
        dist.barrier()
        checkpointer.save(3, {f"x.rank{rank}": torch.ones(3)})
    return causes[2], causes[:2], listing


def test_a_write_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    for where, culprit in (("write", 1), ("flush", 1), ("commit", 0)):
        root = tmp_path / where
        for text, types, listing in run_ranks(write_fails, nproc=2, args=(str(root), where)):
            assert f"rank {culprit}: OSError: [Errno 28] No space left on device" in text, where
            assert types == ["CheckpointError", "OSError"]
            assert listing == ["latest", "step-00000001"]
        assert (root / "step-00000003" / "manifest.json").exists()


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
    """Raises the given error in the given method."""

    seen: tuple[str, BaseException] | None = None

    def _raise(self, where: str) -> None:
        if self.seen is not None and self.seen[0] == where:
            raise self.seen[1]

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
        return super().marks


ODD = [
    (1, "reset", OSError(116, "Stale file handle")),
    (0, "reset", SystemExit("no licence")),
    (1, "write_data", Unlike("no", "licence")),
    (0, "write_data", KeyboardInterrupt("no licence")),
    (1, "write_data", Locked("no licence")),
    (0, "finish", Unlike("no", "licence")),
    (1, "marks", GeneratorExit("no licence")),
]


def raise_what_is_odd(rank: int, world_size: int, root: str) -> list[str]:
    storage, texts = Raises(), []
    with Checkpointer(root, stager=BlockingAsyncStager(), storage=storage, keep=99) as checkpointer:
        for i, (culprit, where, error) in enumerate(ODD):
            storage.seen = (where, error) if rank == culprit else None
            checkpointer.save(2 * i, {"x": torch.ones(3)})
            texts.append(message(checkpointer.wait))
            storage.seen = None
            checkpointer.save(2 * i + 1, {"x": torch.ones(3)})
            checkpointer.wait()
    return texts


def test_any_error_of_a_storage_is_reported_on_all_ranks(tmp_path: Path) -> None:
    for rank, texts in enumerate(run_ranks(raise_what_is_odd, nproc=2, args=(str(tmp_path),))):
        for i, (text, (culprit, where, error)) in enumerate(zip(texts, ODD, strict=True)):
            assert text.startswith(f"Step {2 * i} was not saved: "), (rank, where)
            assert f"{type(error).__name__}: {error}" in text, (rank, where)
            assert f"rank {culprit}: " in text or rank == culprit, (rank, where)
    assert visible(str(tmp_path)) == ["latest", *(f"step-{2 * i + 1:08}" for i in range(len(ODD)))]


def fail_between_the_collectives(rank: int, world_size: int, root: str) -> list[tuple[str, int | None, int | None]]:
    results = []
    for at, culprit in (("agreed", 1), ("written", 1), ("marked", 0)):
        faulty = FaultyStorage(at=at, saves=[2], ranks=[culprit])
        with Checkpointer(f"{root}/{at}", storage=faulty, stager=BlockingAsyncStager()) as checkpointer:
            checkpointer.save(1, {"x": 1})
            checkpointer.save(2, {"x": 2})
            text = message(checkpointer.wait)
            found = checkpointer.restore({"x": 0})
            checkpointer.save(3, {"x": 3})
            checkpointer.wait()
            results.append((text, found, checkpointer.restore({"x": 0})))
    return results


def test_an_error_between_the_exchanges_commits_nothing(tmp_path: Path) -> None:
    for results in run_ranks(fail_between_the_collectives, nproc=2, args=(str(tmp_path),)):
        for (text, found, then), culprit in zip(results, (1, 1, 0), strict=True):
            assert text.startswith(f"Step 2 was not saved: rank {culprit}: OSError: [Errno 5]")
            assert (found, then) == (1, 3)


def see_a_failure_at_different_calls(rank: int, world_size: int, root: str) -> tuple[str, int | None]:
    with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
        background, publish = checkpointer._background, LocalStore.publish
        LocalStore.publish = lambda *args: 1 // 0  # type: ignore
        checkpointer.save(1, {"x": 1})
        background.drain()
        LocalStore.publish = publish  # type: ignore[method-assign]
        if rank == 1:
            # As if the failure had not reached this rank yet at its second call.
            seen, background.raise_failure = background.raise_failure, lambda: None  # type: ignore[method-assign]
        first = message(lambda: checkpointer.save(2, {"x": 2}))
        if rank == 1:
            background.raise_failure = seen  # type: ignore[method-assign]
        background.drain()
        first = message(checkpointer.wait) if rank == 1 else first
        checkpointer.save(3, {"x": 3})
        checkpointer.wait()
        return first, checkpointer.restore({"x": 0})


def test_saves_stay_paired_when_ranks_see_a_failure_apart(tmp_path: Path) -> None:
    for text, step in run_ranks(see_a_failure_at_different_calls, nproc=2, args=(str(tmp_path),)):
        assert "Step 1 was not saved" in text
        assert step == 3
    assert not (tmp_path / "step-00000002").exists()


def construct(rank: int, world_size: int, root: str) -> str:
    return message(lambda: Checkpointer(root, stager=BlockingAsyncStager()))


def test_an_unwritable_directory_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text in run_ranks(construct, nproc=2, args=(str(tmp_path / "file"),)):
        assert "cannot be written to: rank 0: FileExistsError" in text


def save_different_steps(rank: int, world_size: int, root: str) -> str:
    with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
        checkpointer.save(rank, {"x": 1})
        return message(checkpointer.wait)


def test_ranks_that_save_different_steps_are_reported(tmp_path: Path) -> None:
    for text in run_ranks(save_different_steps, nproc=2, args=(str(tmp_path),)):
        assert "different steps at the same time: [0, 1]" in text
    assert list(tmp_path.iterdir()) == []


def destroy_the_group(rank: int, world_size: int, root: str) -> str:
    checkpointer = Checkpointer(root, stager=BlockingAsyncStager())
    failpoints.watch(lambda name: dist.destroy_process_group() if name == "agreed" else None)
    checkpointer.save(1, {f"x.rank{rank}": torch.ones(3)})
    return message(checkpointer.close)


def test_ranks_whose_group_is_destroyed_do_not_save_alone(tmp_path: Path) -> None:
    for text in run_ranks(destroy_the_group, nproc=2, args=(str(tmp_path),)):
        assert "Step 1 was not saved" in text
        assert "close() the Checkpointer before destroy_process_group()" in text
    assert visible(str(tmp_path)) == []


def test_an_error_of_many_ranks_names_only_a_few() -> None:
    text = reasons({rank: OSError(28, "No space left on device") for rank in range(512)}, alone=False)
    assert "rank 3: OSError" in text
    assert text.endswith("; and 508 more ranks")
    assert len(text) < 300


def restore_fails_on_rank_1(rank: int, world_size: int, root: str) -> str:
    forever = datetime.timedelta.max
    with Checkpointer(root, stager=BlockingAsyncStager(), timeout=forever) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(2, 2)})
        return message(lambda: checkpointer.restore({"model": torch.nn.Linear(2 + rank, 2)}))


def test_a_restore_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    for text in run_ranks(restore_fails_on_rank_1, nproc=2, args=(str(tmp_path),)):
        assert "rank 1: 'model' does not take" in text


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
