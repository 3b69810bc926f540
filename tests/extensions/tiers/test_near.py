"""What the ranks of a run agree on about its tier: which steps stay, which are void, and when nothing is left of it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import stagereg
from stagereg.checkpoint.store.failpoints import watch
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.copying import CopyThread
from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.peer import Peer
from stagereg.testing import run_ranks

from ...support.programs import comes_true

BOUND_S = 30.0


def checkpointer(root: str, store: bool = False, **options: Any) -> Any:
    """Two ranks are two machines: each has a folder of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tier = stagereg.build("tier", "disk", dir=f"{root}/{rank}", every=1)
    options = {"every": 1 if store else 100, "save_last": False, **options}
    return stagereg.Checkpointer(f"{root}/store", tier=tier, **options)


def settle(of: Any) -> None:
    of.wait()
    assert comes_true(lambda: not of._tiering.near._threads.busy, BOUND_S)
    dist.barrier()


def steps_in(root: str, rank: int) -> set[int]:
    return {int(path.parent.name[5:13]) for path in Path(root, str(rank)).glob("*/step-*/part-*.json")}


def lose_copies(rank: int, world_size: int, root: str) -> tuple[list[set[int]], list[str]]:
    """Save steps, of which 2 to 7 cannot be copied; return what each left on this rank, and what was logged."""
    found, lines, handler = [], list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stagereg.extensions.tiers.copying")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    refused = mock.Mock(side_effect=CheckpointError("no room"))
    with checkpointer(root) as saving:
        for step in range(1, 10):
            with mock.patch.object(Peer, "put", refused) if step in range(2, 8) else contextlib.nullcontext():
                saving.maybe_save(step, {"x": stagereg.per_rank(torch.tensor([rank, step]))})
                settle(saving)
            found.append(steps_in(root, rank))
    return found, [each for each in lines if "cannot copy step" not in each]


def test_a_copied_step_stays_until_a_newer_one_is_copied_and_a_lag_is_logged(tmp_path: Path) -> None:
    one, other = run_ranks(lose_copies, 2, args=(str(tmp_path),), timeout_s=90)
    assert one[0] == other[0] == [{1}, *({1, step} for step in range(2, 9)), {8, 9}]
    warned, mended = one[1]
    assert "step 1 is the newest step of the local tier with all peer copies, and 5 saves have begun since" in warned
    assert ": copies have failed" in warned
    assert mended.endswith("caught up with the saves: step 8 is copied.")
    assert other[1] == []


def save_in_both(rank: int, world_size: int, root: str) -> list[Any]:
    """Save what is alike and what is not to tier and store at once; return what each of them gives back."""
    model = torch.nn.Linear(400, 400)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    saving = checkpointer(root, store=True)
    for step in (1, 2, 3):
        own = torch.tensor([rank, step])
        with torch.no_grad():
            model.weight.add_(1.0)
        saving.maybe_save(step, {"model": wrapped, "own": stagereg.per_rank(own)})
        settle(saving)
    nbytes = saving.stats.bytes_staged
    saving.close()
    got: list[Any] = []
    for tier in (True, False):
        other = checkpointer(root) if tier else stagereg.Checkpointer(f"{root}/store", save_last=False)
        own = torch.zeros(2, dtype=torch.int64)
        with torch.no_grad():
            model.weight.zero_()
        step = other.restore({"model": wrapped, "own": stagereg.per_rank(own)})
        got.append((step, model.weight.unique().tolist(), own.tolist(), f"{root}/store" in str(other.restored)))
        other.close()
    return [nbytes, *got]


def test_tier_and_store_have_the_same_of_what_ranks_hold_alike(tmp_path: Path) -> None:
    whole = 4 * (400 * 400 + 400)
    for rank, (nbytes, near, stored) in enumerate(run_ranks(save_in_both, 2, args=(str(tmp_path),), timeout_s=90)):
        assert near == (3, [4.0], [rank, 3], False)
        assert stored == (3, [4.0], [rank, 3], True)
        assert nbytes < 3.1 * whole  # the first as a whole, where they compare; then a share, and that of the other one


def run(root: Path, *steps: int, **options: Any) -> tuple[int | None, str]:
    """Restore, and save these steps; return what was restored, and from where."""
    with checkpointer(str(root), **options) as saving:
        restored = saving.restore({"x": torch.zeros(1)})
        for step in steps:
            saving.maybe_save(step, {"x": torch.ones(1)})
            saving.wait()
        return restored, str(saving.restored)


def test_going_back_to_an_older_step_voids_later_ones_once_something_is_saved(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, every=2)
    run(tmp_path, 3, 4, 5, every=100)
    back = str(tmp_path / "store" / "step-00000002")
    assert run(tmp_path, resume=back) == (2, back)  # as an evaluation does
    restored, where = run(tmp_path)
    assert (restored, Path(where).parents[1]) == (5, tmp_path / "0")
    assert run(tmp_path, 3, resume=back) == (2, back)
    restored, where = run(tmp_path)
    assert (restored, Path(where).parents[1]) == (3, tmp_path / "0")


def test_a_step_in_the_tier_is_progress_that_ends_the_count_of_crashes(tmp_path: Path) -> None:
    """Runs that save beyond the step that they restored, and then lose that with their machine, do not die of it."""

    def die(*steps: int) -> int | None:
        with contextlib.closing(checkpointer(str(tmp_path), restore=stagereg.Restore(max_crashes=2))) as saving:
            restored: int | None = saving.restore({"x": torch.zeros(1)})
            for step in steps:
                saving.maybe_save(step, {"x": torch.ones(1)})
                saving.wait()
            saving._quarantine.crashed = True
        for lost in tmp_path.glob("0/*/step-00000002.*"):
            shutil.rmtree(lost)
        return restored

    assert [die(1), *(die(2) for _ in range(4))] == [None, 1, 1, 1, 1]
    assert [die(), die()] == [1, 1]
    with pytest.raises(CheckpointError, match="none of them is valid"):
        die()


def test_the_end_of_a_run_clears_its_tier_only_if_the_store_has_come_as_far(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, every=1)
    assert steps_in(str(tmp_path), 0) == set()
    run(tmp_path, 3, every=100)
    assert steps_in(str(tmp_path), 0) == {3}


def weigh(rank: int, world_size: int, root: str, split: str) -> tuple[int, int]:
    """Save steps; return the most that this machine had at any moment of it, and the bytes of the whole state."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700))
    model = fully_shard(model) if split == "fsdp2" else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    found = [0]

    def weigh_now(point: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # a file has its name by now, or is gone
            found.append(sum(path.stat().st_size for path in Path(root, str(rank)).rglob("*") if path.is_file()))

    watch(weigh_now)
    with checkpointer(root) as saving:
        for step in range(1, 6):
            model(torch.randn(2, 700)).sum().backward()
            optimizer.step()
            saving.maybe_save(step, {"model": model, "optimizer": optimizer})
            settle(saving)
    return max(found), 3 * 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("split", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_machine_never_has_more_than_two_steps_of_its_share_and_its_partners(tmp_path: Path, split: str) -> None:
    for most, whole in run_ranks(weigh, 2, args=(str(tmp_path), split), timeout_s=90):
        share = whole / 2
        assert 3 * share < most < 4 * share * 1.03


def end_without_store(rank: int, world_size: int, root: str) -> None:
    """Save one step, of which rank 1 begins to send its copy late."""
    real = Peer.put

    def put(*given: Any) -> int:
        time.sleep(1.0 if rank else 0.0)
        return real(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Peer, "put", put)
        patched.setattr(CopyThread.close, "__defaults__", (0.0,))
        tier = stagereg.build("tier", "disk", dir=f"{root}/{rank}", every=1)
        with stagereg.Checkpointer(None, tier=tier, save_last=False) as saving:
            saving.maybe_save(1, {"x": stagereg.per_rank(torch.ones(100_000))})


def test_the_end_of_a_run_without_a_store_waits_for_the_last_copies(tmp_path: Path) -> None:
    run_ranks(end_without_store, 2, args=(str(tmp_path),), timeout_s=60)
    for machine in "01":
        assert len([*tmp_path.glob(f"{machine}/*/step-00000001.*/part-?.json")]) == 2


def restore_beside_a_corrupt_copy(rank: int, world_size: int, root: str) -> None:
    """Save a step, flip a bit of what rank 1 wrote there, and restore; that machine is slow to delete its copy."""
    with checkpointer(root) as saving:
        saving.maybe_save(1, {"x": stagereg.per_rank(torch.ones(1000))})
        settle(saving)
    if rank == 1:
        [path] = Path(root, "1").glob("*/step-00000001.*/__1_0.distcp")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    drop = MachineFolder.drop

    def drop_late(*given: Any) -> None:
        time.sleep(1.0 if rank else 0.0)
        drop(*given)

    with pytest.MonkeyPatch.context() as patched, checkpointer(root) as saving:
        patched.setattr(MachineFolder, "drop", drop_late)
        assert saving.restore({"x": stagereg.per_rank(torch.zeros(1000))}) == 1
        settle(saving)


def test_a_corrupt_copy_is_replaced_also_where_its_machine_deletes_it_late(tmp_path: Path) -> None:
    run_ranks(restore_beside_a_corrupt_copy, 2, args=(str(tmp_path),), timeout_s=60)
    one, other = (path.read_bytes() for path in tmp_path.glob("[01]/*/step-00000001.*/__1_0.distcp"))
    assert one == other
