"""What surviving ranks save if a tier is on, and what the next start reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.base.rank_failures import responding
from stagereg.checkpoint.state.entries import per_rank
from stagereg.checkpoint.store.open_store import open_store
from stagereg.data import ResumableSampler
from stagereg.extensions.recovery.rank_failure import EmergencySave
from stagereg.launch.run_store import RunStore
from stagereg.testing import run_ranks

from ...support.programs import comes_true
from .test_emergency_saver import STEPS, TIMEOUT_S, Training, begin_next_step

BOUND_S = 30.0
INSTEAD = "not exact; with restore=Restore(exact=True) the run resumes from a newer step of the tier instead."


def own(training: Training, rank: int) -> None:
    """Values of this rank alone, which are others at each step."""
    values = training.state["own"].value
    values.append((rank, 0.1 * len(values)))
    training.state["seen"] = per_rank(torch.tensor([rank, len(values)]))
    training.state["large"] = per_rank([rank] * 70_000)
    training.state["marked"].value.advance(1 + rank)


def of(training: Training) -> dict[str, Any]:
    """What a rank has. Collective where the model is in shards."""
    own, seen = training.state["own"].value, training.state["seen"].value
    positions = {"position": training.sampler.state_dict(), "marked": training.state["marked"].value.state_dict()}
    return {**training.copy(), "own": [*own], "seen": seen, **positions}


def lose(rank: int, world_size: int, root: str) -> tuple[str, dict[str, Any]]:
    """Train three steps, each rank as a machine of the tier; then rank 1 is lost in the next step, and the others save.

    Returns what they say, and what the state was.
    """
    store = PrefixStore("run", dist.group.WORLD.get_group_store())
    run = RunStore(store, rank, world_size)
    after = EmergencySave(run, rank, world_size, TIMEOUT_S)
    after.failed_ranks = lambda: {1: "(process 1 on here): gone"}  # type: ignore[method-assign]
    with responding(after):
        training = Training("ddp")
        tier = stagereg.build("tier", "disk", dir=f"{root}/{rank}", every=2)
        saving = training.checkpointer = Checkpointer(f"{root}/store", every=1000, tier=tier, save_last=False)
        training.state["marked"] = per_rank(ResumableSampler(range(1000)))
        for step in range(1, STEPS + 1):
            training.step()
            own(training, rank)
            was = of(training)
            saving.maybe_save(step, training.state)
            saving.wait()
            assert comes_true(lambda: not saving._tiering.near._threads.busy, BOUND_S)
            dist.barrier()
        if rank == 1:
            saving._hold.release()  # as the end of its process does
            time.sleep(0.1)
            store.wait(["over"])
            return "", was
        begin_next_step(training, rank)
        outcome = after.save()
        store.add("ended", 1)
        while store.add("ended", 0) < world_size - 1:
            time.sleep(0.01)
        store.set("over", "")
        return outcome, was


def restored(rank: int, world_size: int, root: str, exact: bool = False) -> dict[str, Any]:
    """What the next start goes on from, with the tier if only an ``exact`` checkpoint will do."""
    training = Training("ddp")
    training.state |= {
        "marked": per_rank(ResumableSampler(range(1000))),
        "own": per_rank([]),
        "seen": per_rank(torch.zeros(2, dtype=torch.int64)),
        "large": per_rank([]),
    }
    tier = stagereg.build("tier", "disk", dir=f"{root}/{rank}", every=2) if exact else None
    restore = stagereg.Restore(exact=exact)
    saving = Checkpointer(f"{root}/store", every=1000, save_last=False, tier=tier, restore=restore)
    torch.manual_seed(7)
    step = saving.restore(training.state)
    found = {"step": step, "was": of(training), "large": len(training.state["large"].value)}
    saving.close()
    return found


def names_of_others(found: dict[str, Any], was: dict[str, Any]) -> set[str]:
    """Return the names of the values that differ from what a rank had."""
    same = {
        name: torch.equal(x, was[name]) if isinstance(x, torch.Tensor) else x == was[name] for name, x in found.items()
    }
    return {name for name in was if not same[name]}


def test_what_a_failed_rank_alone_had_is_named_as_missing_and_stays_as_the_program_begins_it(tmp_path: Path) -> None:
    root = str(tmp_path)
    told = run_ranks(lose, 3, args=(root,))
    lacks = ["random numbers", "own", "seen", "large", "an exact position of marked"]
    saved = f"Ranks 0, 2 saved step 3, in {root}/store/step-00000003"
    assert told[0][0] == f"{saved}; missing from rank 1: {', '.join(lacks)}. A resume from this step is {INSTEAD}"
    assert open_store(f"{root}/store").checkpoints()[0][0].manifest.lost == {"1": lacks}
    for rank, found in enumerate(run_ranks(restored, 3, args=(root,))):
        differ = {"own", "seen", "marked"} if rank == 1 else set()
        assert names_of_others(found["was"], told[rank][1]) == differ
        assert (found["step"], found["large"]) == (3, 0 if rank == 1 else 70_000)
        assert rank != 1 or (found["was"]["own"], found["was"]["seen"].tolist()) == ([], [0, 0])
    for rank, found in enumerate(run_ranks(restored, 3, args=(root, True))):
        assert (found["step"], len(found["was"]["own"])) == (2, 3), "from the tier, and from all of it"
        assert found["was"]["seen"].tolist() == [rank, 3]
