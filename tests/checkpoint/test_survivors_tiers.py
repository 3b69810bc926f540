"""What ranks save that are left, where a tier is on: also what the lost ones alone had, and what the tier has."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import stagereg
import stagereg.launch.loss as loss
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.state.entries import per_rank
from stagereg.checkpoint.store.open_store import open_store
from stagereg.launch.loss import AfterLoss
from stagereg.launch.run_store import RunStore
from stagereg.testing import run_ranks

from ..support.programs import comes_true
from .test_survivors import NOTICE_S, STEPS, Training, begin_next_step

BOUND_S = 30.0
STAYS = stagereg.Leave(save_last=False)


def checkpointer(root: str, machine: int, **tier: Any) -> Checkpointer:
    """Ranks of another folder are on another machine."""
    near = stagereg.build("tier", "disk", dir=f"{root}/{machine}", **{"every": 1000, **tier})
    return Checkpointer(f"{root}/store", every=1000, tier=near, leave=STAYS)


def own(training: Training, rank: int) -> None:
    """Values of this rank alone, which are others at each step."""
    values = training.state["own"].value
    values.append((rank, 0.1 * len(values)))
    training.state["seen"] = per_rank(torch.tensor([rank, len(values)]))
    training.state["large"] = per_rank([rank] * 70_000)


def await_small_copies(training: Training, lost: Collection[int]) -> None:
    """Wait until somebody keeps the last step of each rank that is about to be lost."""
    kept = training.checkpointer._tiering.near.kept

    def are_kept() -> bool:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, [(rank, step) for rank, step, _ in kept.listed()])
        return {(rank, STEPS) for rank in lost} <= {each for pairs in found for each in pairs}

    assert comes_true(are_kept, BOUND_S)


def lose(
    rank: int,
    world_size: int,
    root: str,
    how: str,
    machines: Collection[int],
    tier: dict[str, Any],
    then: Callable[[Training, int], object],
) -> tuple[str, dict[str, Any]]:
    """Train three steps; then rank 1 is lost, and the others do what ``then`` does, and save."""
    store = PrefixStore("run", dist.group.WORLD.get_group_store())
    run = RunStore(store, rank, world_size)
    run.lost_ranks = lambda: frozenset([1])  # type: ignore[method-assign]
    after = AfterLoss(run, rank, world_size, NOTICE_S)
    with loss.of_process(after):
        training = Training(how)
        saving = training.checkpointer = checkpointer(root, [*machines][rank], **tier)
        for step in range(1, STEPS + 1):
            training.step()
            own(training, rank)
            saving.maybe_save(step, training.state)
        saving.wait()
        if how == "ddp" and tier.get("copies", 1):
            await_small_copies(training, [1])
        was = {**training.copy(), "own": [*training.state["own"].value], "seen": training.state["seen"].value}
        dist.barrier()
        if rank == 1:
            saving._hold.let_go()  # as the end of its process does
            time.sleep(0.1)
            store.wait(["over"])
            return "", was
        then(training, rank)
        outcome = after.save()
        store.add("ended", 1)
        while store.add("ended", 0) < world_size - 1:
            time.sleep(0.01)
        store.set("over", "")
        return outcome, was


def restored(rank: int, world_size: int, root: str, how: str) -> dict[str, Any]:
    """What a run without a tier goes on from."""
    training = Training(how)
    training.state |= {"own": per_rank([]), "seen": per_rank(torch.zeros(2, dtype=torch.int64)), "large": per_rank([])}
    saving = Checkpointer(f"{root}/store", every=1000, leave=STAYS)
    torch.manual_seed(7)
    step = saving.restore(training.state)
    state = training.state
    found = {"step": step, "was": {**training.copy(), "own": state["own"].value, "seen": state["seen"].value}}
    found |= {"position": training.sampler.state_dict(), "large": len(state["large"].value)}
    saving.close()
    return found


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("machines", [(0, 1, 2), (0, 1, 1), (0, 0, 0)], ids=["three machines", "two", "one"])
def test_what_a_lost_rank_alone_had_comes_from_a_rank_that_keeps_it(tmp_path: Path, machines: tuple[int, ...]) -> None:
    root = str(tmp_path)
    told = run_ranks(lose, 3, args=(root, "ddp", machines, {}, begin_next_step))
    assert told[0][0] == f"Ranks 0, 2 saved step 3, in {root}/store/step-00000003; of rank 1 it lacks large."
    assert open_store(f"{root}/store").checkpoints()[0][0].manifest.lost == {"1": ["large"]}
    for rank, found in enumerate(run_ranks(restored, 3, args=(root, "ddp"))):
        was = told[rank][1]
        assert found["step"] == 3
        assert [name for name in was if not equal(found["was"][name], was[name])] == []
        assert (found["position"]["rank"], found["position"]["consumed"]) == (rank, 2 * STEPS)
        assert found["large"] == (0 if rank == 1 else 70_000)


def nothing(training: Training, rank: int) -> None:
    pass


def parts_in(root: str, machine: int) -> set[int]:
    return {int(path.parent.name[5:13]) for path in Path(root, str(machine)).glob("*/step-*/part-*.json")}


def test_the_store_gets_the_newest_step_of_the_tier_where_shards_are_lost(tmp_path: Path) -> None:
    root = str(tmp_path)
    told = run_ranks(lose, 3, args=(root, "fsdp2", (0, 1, 2), {"every": 2}, nothing))
    assert told[0][0] == told[2][0]
    print(told[0][0])
    assert told[0][0].endswith(f"Ranks 0, 2 saved step 2 of the tier, in {root}/store/step-00000002."), told[0][0]
    [kept], damaged = open_store(f"{root}/store").checkpoints()
    assert (kept.manifest.lost, damaged) == ({"1": []}, [])
    assert open_store(f"{root}/store").look(kept.path, content=True).damages == {}
    for rank, found in enumerate(run_ranks(restored, 3, args=(root, "fsdp2"))):
        print(rank, found["step"])
