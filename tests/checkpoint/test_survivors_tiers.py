"""What surviving ranks save if a tier is on: what they hold themselves, and what the tier has."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import stagereg
import stagereg.checkpoint.store.failpoints as failpoints
import stagereg.launch.loss as loss
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.state.entries import per_rank
from stagereg.checkpoint.store.open_store import open_store
from stagereg.data import ResumableSampler
from stagereg.launch.loss import AfterLoss
from stagereg.launch.run_store import RunStore
from stagereg.testing import run_ranks

from ..support.app import App
from ..support.lab import LOCAL, Lab
from ..support.programs import comes_true
from .test_survivors import NOTICE_S, STEPS, Training, begin_next_step

BOUND_S = 30.0
STAYS = stagereg.Leave(save_last=False)


def checkpointer(root: str, machine: int, store_every: int, **tier: Any) -> Checkpointer:
    """Ranks of another folder are on another machine."""
    near = stagereg.build("tier", "disk", dir=f"{root}/{machine}", **{"every": 1000, **tier})
    return Checkpointer(f"{root}/store", every=store_every, tier=near, leave=STAYS)


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


def lose(
    rank: int,
    world_size: int,
    root: str,
    how: str,
    machines: Collection[int],
    tier: dict[str, Any],
    then: Callable[[Training, int], object],
    store_every: int = 1000,
) -> tuple[str, dict[int, dict[str, Any]]]:
    """Train three steps; then rank 1 is lost, and the others do what ``then`` does, and save.

    Returns what they say, and what the state was at each step.
    """
    store = PrefixStore("run", dist.group.WORLD.get_group_store())
    run = RunStore(store, rank, world_size)
    run.lost_ranks = lambda: {1: "(process 1 on here): gone"}  # type: ignore[method-assign]
    after = AfterLoss(run, rank, world_size, NOTICE_S)
    with loss.of_process(after):
        training = Training(how)
        saving = training.checkpointer = checkpointer(root, [*machines][rank], store_every, **tier)
        training.state["marked"] = per_rank(ResumableSampler(range(1000)))
        was = {}
        for step in range(1, STEPS + 1):
            training.step()
            own(training, rank)
            was[step] = of(training)
            saving.maybe_save(step, training.state)
            saving.wait()
            assert comes_true(lambda: not saving._tiering.near._threads.busy, BOUND_S)
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
    training.state |= {
        "marked": per_rank(ResumableSampler(range(1000))),
        "own": per_rank([]),
        "seen": per_rank(torch.zeros(2, dtype=torch.int64)),
        "large": per_rank([]),
    }
    saving = Checkpointer(f"{root}/store", every=1000, leave=STAYS)
    torch.manual_seed(7)
    step = saving.restore(training.state)
    found = {"step": step, "was": of(training), "large": len(training.state["large"].value)}
    saving.close()
    return found


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def expect_restored(root: str, how: str, step: int, told: list[Any]) -> None:
    """A run on other machines goes on from the store, with all that each rank had at a step."""
    for rank, found in enumerate(run_ranks(restored, 3, args=(root, how))):
        was = told[rank][1][step]
        assert found["step"] == step
        assert [name for name in was if not equal(found["was"][name], was[name])] == []
        assert found["large"] == 70_000


THREE = (0, 1, 2)


def test_what_a_failed_rank_alone_had_is_named_as_missing_and_stays_as_the_program_begins_it(tmp_path: Path) -> None:
    root = str(tmp_path)
    told = run_ranks(lose, 3, args=(root, "ddp", THREE, {"every": 2}, begin_next_step))
    lacks = ["random numbers", "own", "seen", "large", "an exact position of marked"]
    saved = f"Ranks 0, 2 saved step 3, in {root}/store/step-00000003"
    assert told[0][0] == f"{saved}; of rank 1 it lacks {', '.join(lacks)}."
    assert open_store(f"{root}/store").checkpoints()[0][0].manifest.lost == {"1": lacks}
    for rank, found in enumerate(run_ranks(restored, 3, args=(root, "ddp"))):
        was, now = told[rank][1][3], found["was"]
        differ = {name for name in was if not equal(now[name], was[name])}
        assert (found["step"], differ) == (3, {"generator", "own", "seen", "marked"} if rank == 1 else set())
        assert found["large"] == (0 if rank == 1 else 70_000)
        assert rank != 1 or (now["own"], now["seen"].tolist()) == ([], [0, 0])


def nothing(training: Training, rank: int) -> None:
    pass


def damage(training: Training, rank: int, machines: Collection[int] = (0, 2)) -> None:
    """Change a byte of all that these machines have of the last step."""
    folder = Path(training.checkpointer._tiering.near.folder.path)
    for path in folder.glob(f"step-0000000{STEPS}.*/*.distcp") if rank in machines else ():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def damage_one(training: Training, rank: int) -> None:
    damage(training, rank, (0,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "copies", "then", "step"),
    [(2, 1, nothing, 2), (1, 1, nothing, 3), (1, 1, damage, 2), (1, 2, damage_one, 3), (1, 0, nothing, None)],
)
def test_the_store_gets_the_newest_step_of_the_tier_where_shards_are_lost(
    tmp_path: Path, every: int, copies: int, then: Callable[[Training, int], object], step: int | None
) -> None:
    root, tier = str(tmp_path), {"every": every, "copies": copies}
    told = run_ranks(lose, 3, args=(root, "fsdp2", THREE, tier, then))
    assert told[0][0] == told[2][0]
    if step is None:
        assert told[0][0].endswith(f"The tier has nothing newer than {root}/store.")
        assert open_store(f"{root}/store").checkpoints() == ([], [])
        return
    assert told[0][0] == f"Ranks 0, 2 saved step {step} of the tier, in {root}/store/step-0000000{step}."
    [kept], damaged = open_store(f"{root}/store").checkpoints()
    assert (kept.manifest.lost, damaged) == ({"1": []}, [])
    assert open_store(f"{root}/store").look(kept.path, content=True).damages == {}
    expect_restored(root, "fsdp2", step, told)


def hang_while_copying(training: Training, rank: int) -> None:
    if rank == 2:
        failpoints.watch(lambda name: time.sleep(1000) if name == "written" else None)


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_copies_costs_the_save_and_nothing_else(tmp_path: Path) -> None:
    told = run_ranks(lose, 3, args=(str(tmp_path), "fsdp2", THREE, {"every": 2}, hang_while_copying))
    assert {told[0][0], told[2][0]} == {"Those who are left have not saved: that has taken longer than 6 s."}
    assert open_store(f"{tmp_path}/store").checkpoints() == ([], [])


@pytest.mark.slow
def test_what_the_tier_has_replaces_nothing_in_the_store(tmp_path: Path) -> None:
    told = run_ranks(lose, 3, args=(str(tmp_path), "fsdp2", THREE, {"every": 2}, nothing, 2))
    assert told[0][0].endswith(f"The tier has nothing newer than {tmp_path}/store.")
    assert [each.manifest.lost for each in open_store(f"{tmp_path}/store").checkpoints()[0]] == [{}]


SHARDED = """
import time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import stagereg


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        begun = checkpointer.restore(state)
        for step in range((begun or 0) + 1, 1_000_000):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            checkpointer.maybe_save(step, state)
            if step == (begun or 0) + 20:
                print(f"GOES {dist.get_rank()} from {begun}\\n", end="", flush=True)


train()
"""
SHARDED_CONFIG = "defaults: [stagereg, _self_]\nnotice_s: 3\ncheckpoint: {every: 100000}\n"


@pytest.mark.slow
def test_a_job_that_comes_back_on_other_machines_goes_on_from_the_step_that_the_tier_had(tmp_path: Path) -> None:
    app = App(tmp_path, {"app.py": SHARDED, "conf/app.yaml": SHARDED_CONFIG})
    program = [str(app.folder / "app.py"), f"hydra.run.dir={tmp_path}/run", f"checkpoint.dir={tmp_path}/store"]
    with Lab(machines=3) as lab:
        tier = ("tier=disk", f"tier.dir={LOCAL}/t", "tier.every=5")
        job = lab.torchrun([*program, *tier])
        processes = [*job.processes.values()]
        for each in processes:
            each.await_output("GOES", BOUND_S * 4)
        lab.machines[1].kill()
        for each in (processes[0], processes[2]):
            assert each.wait(BOUND_S * 2)
        output = "".join(each.output for each in processes)
        found = re.search(rf"Ranks 0, 2 saved step (\d+) of the tier, in {tmp_path}/store/step-", output)
        assert found is not None, output
        again = lab.torchrun([*program, "tier=none"], machines=[0, 2])
        first = next(iter(again.processes.values()))
        first.await_output(f"GOES 0 from {found[1]}", BOUND_S * 4)
        for each in again.processes:
            each.end_processes()
