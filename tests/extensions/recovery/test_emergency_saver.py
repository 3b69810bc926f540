"""What ranks save that are left when others are lost: the last whole step, if they hold all of it, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stagereg.checkpoint.store.failpoints as failpoints
import stagereg.extensions.recovery.state_tensors as state_tensors
from stagereg.assembly import Checkpointer
from stagereg.base.rank_failures import responding, response
from stagereg.checkpoint.state.entries import per_rank
from stagereg.checkpoint.store.open_store import open_store
from stagereg.data import ResumableSampler
from stagereg.extensions.recovery.emergency_saver import EmergencySaver
from stagereg.extensions.recovery.rank_failure import EmergencySave
from stagereg.launch.run_store import RunStore
from stagereg.testing import run_ranks

TIMEOUT_S = 2.0
LACKS = "random numbers, own"
ALONE = "A resume from this step is not exact; with restore=Restore(exact=True) the run has nothing to resume from."
STEPS = 3


class Training:
    """A small model that is trained alike on all ranks, one step after the other."""

    checkpointer: Checkpointer

    def __init__(self, how: str) -> None:
        torch.manual_seed(0)
        norm = [torch.nn.BatchNorm1d(8)] if how == "batch norm" else []
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), *norm, torch.nn.Linear(8, 4))
        if how in ("fsdp2", "hsdp"):
            shape, names = ((2, 2), ("copies", "shards")) if how == "hsdp" else ((dist.get_world_size(),), ("shards",))
            fully_shard(self.model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        else:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.sampler = ResumableSampler(range(1000))
        self.state = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler, "loss": 0.0}
        self.state["own"] = per_rank([dist.get_rank()])

    def forward(self) -> torch.Tensor:
        self.sampler.advance(2)
        return self.model(torch.rand(2, 4)).square().mean()

    def step(self) -> None:
        value = self.forward()
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        self.state["loss"] = value.item()

    def copy(self) -> dict[str, torch.Tensor]:
        """What the model, the generator and the loss are at this moment."""
        module = getattr(self.model, "module", self.model)
        whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in module.state_dict().items()}
        more = {"loss": torch.tensor(self.state["loss"]), "generator": torch.get_rng_state()}
        return {name: x.detach().clone() for name, x in (whole | more).items()}


def saver_of(checkpointer: Checkpointer) -> EmergencySaver:
    [found] = [each for each in checkpointer._extensions.all if isinstance(each, EmergencySaver)]
    return found


def lose(
    rank: int,
    world_size: int,
    root: str,
    how: str = "ddp",
    lost: Collection[int] = (1,),
    then: Callable[[Training, int], object] | None = None,
    saves: bool = False,
) -> tuple[str, dict[str, torch.Tensor]]:
    """Train three steps; then ranks are lost, and the others do what ``then`` does, and save.

    With none lost each of two takes the other one for lost.
    """
    store = PrefixStore("run", dist.group.WORLD.get_group_store())
    run = RunStore(store, rank, world_size)
    after = EmergencySave(run, rank, world_size, TIMEOUT_S)
    after.failed_ranks = lambda: dict.fromkeys(lost or [1 - rank], "")  # type: ignore[method-assign]
    with responding(after):
        training = Training(how)
        checkpointer = training.checkpointer = Checkpointer(root, every=STEPS if saves else 1000)
        for step in range(1, STEPS + 1):
            training.step()
            checkpointer.maybe_save(step, training.state)
        checkpointer.wait()
        was = training.copy()
        dist.barrier()
        if rank in lost:
            checkpointer._hold.release()  # as the end of its process does
            time.sleep(0.1)
            store.wait(["over"])
            return "", was
        if then is not None:
            then(training, rank)
        outcome = after.save()
        store.add("ended", 1)
        while store.add("ended", 0) < world_size - len(lost):
            time.sleep(0.01)
        store.set("over", "")
        return outcome, was


def begin_next_step(training: Training, rank: int) -> None:
    """As a rank that waits in the collective of the next step: what a forward pass changes is changed."""
    module = training.model.module
    training.sampler.advance(2)
    training.state["loss"] = -1.0
    torch.rand(5)
    module(torch.rand(2, 4))


def restored(rank: int, world_size: int, root: str, how: str) -> dict[str, Any]:
    training = Training(how)
    training.state["own"] = per_rank([-1])
    checkpointer = Checkpointer(root, every=1000)
    torch.manual_seed(7)
    step = checkpointer.restore(training.state)
    found = {"step": step, "was": training.copy(), "position": training.sampler.state_dict()}
    found["own"] = training.state["own"].value
    found["rate"] = training.optimizer.param_groups[0]["lr"]
    found["steps"] = {own["step"].item() for own in training.optimizer.state.values()}
    checkpointer.close()
    return found


@pytest.mark.parametrize(("how", "lost"), [("ddp", 0), ("batch norm", 1)])
def test_those_who_are_left_save_the_last_step_as_it_was(tmp_path: Path, how: str, lost: int) -> None:
    root = str(tmp_path / "kept")
    told = run_ranks(lose, 3, args=(root, how, (lost,), begin_next_step))
    left = [rank for rank in range(3) if rank != lost]
    for rank in left:
        saved = f"Ranks {left[0]}, {left[1]} saved step 3, in {root}/step-00000003"
        assert told[rank][0] == f"{saved}; missing from rank {lost}: {LACKS}. {ALONE}"
    found = run_ranks(restored, 3, args=(root, how))
    for rank in range(3):
        was = told[rank][1]
        assert found[rank]["step"] == 3
        for name in was:  # the generators, too: all ranks are seeded alike
            assert torch.equal(found[rank]["was"][name], was[name]), name
        assert found[rank]["position"]["consumed"] == 2 * STEPS
        assert (found[rank]["position"]["rank"], found[rank]["own"]) == (rank, [-1 if rank == lost else rank])
    assert open_store(root).checkpoints()[0][0].manifest.lost == {str(lost): ["random numbers", "own"]}


class Accelerator:
    """Executes queued work at once, until it waits in a collective. Tensors with dimensions are in its memory."""

    waits = False

    def record_event(self) -> Any:
        recorded_late = self.waits
        return SimpleNamespace(query=lambda: not recorded_late)

    def install(self) -> None:
        state_tensors.is_on_host = lambda x: x.ndim == 0
        torch.accelerator.current_stream = lambda _: self
        torch.Stream = lambda _: contextlib.nullcontext()


def queue_next_step(training: Training, rank: int) -> None:
    """As a rank whose optimizer waits on the accelerator behind a collective, while the host goes on."""
    begin_next_step(training, rank)
    torch.accelerator.current_stream(None).waits = True
    whole = saver_of(training.checkpointer)._whole
    whole._before_write()
    for own in training.optimizer.state.values():
        own["step"] += 1
    training.optimizer.param_groups[0]["lr"] = 7.0
    whole.note(STEPS + 1, training.state)


def lose_on_accelerators(rank: int, world_size: int, root: str) -> tuple[str, dict[str, torch.Tensor]]:
    Accelerator().install()  # for the rest of this process
    return lose(rank, world_size, root, "batch norm", (1,), queue_next_step)


def test_those_whose_accelerators_wait_in_a_collective_save_the_step_before(tmp_path: Path) -> None:
    root = str(tmp_path / "kept")
    told = run_ranks(lose_on_accelerators, 3, args=(root,))
    assert {each for each, _ in told if each} == {
        f"Ranks 0, 2 saved step 3, in {root}/step-00000003; missing from rank 1: {LACKS}. {ALONE}"
    }
    found = run_ranks(restored, 3, args=(root, "batch norm"))
    for rank in range(3):
        assert (found[rank]["step"], found[rank]["rate"], found[rank]["steps"]) == (3, 0.1, {3.0})
        assert all(torch.equal(found[rank]["was"][name], x) for name, x in told[rank][1].items())


def test_replicas_of_shards_save_and_shards_alone_do_not(tmp_path: Path) -> None:
    root = str(tmp_path / "hsdp")
    told, saved = run_ranks(lose, 4, args=(root, "hsdp", (1,))), f"Ranks 0, 2, 3 saved step 3, in {root}/step-00000003"
    assert {text for text, _ in told} == {"", f"{saved}; missing from rank 1: {LACKS}. {ALONE}"}
    found = run_ranks(restored, 4, args=(root, "hsdp"))
    assert found[1]["step"] == 3
    root = str(tmp_path / "fsdp2")
    outcomes = {text for text, _ in run_ranks(lose, 2, args=(root, "fsdp2", (1,)))}
    assert any("do not cover" in text for text in outcomes), outcomes
    assert open_store(root).checkpoints() == ([], [])


def step_once(training: Training, rank: int) -> None:
    training.optimizer.step()


def report_a_cause(training: Training, rank: int) -> None:
    response()._store.set("cause is known", True)


@pytest.mark.parametrize(
    ("then", "why"), [(step_once, "rank 0: its optimizer had begun the next step"), (report_a_cause, "")]
)
def test_nothing_is_saved_of_a_state_that_is_not_whole_or_after_an_error_in_the_program(
    tmp_path: Path, then: Any, why: str
) -> None:
    told = run_ranks(lose, 2, args=(str(tmp_path), "ddp", (1,), then))
    assert why in told[0][0]
    assert bool(why) == bool(told[0][0])
    assert open_store(str(tmp_path)).checkpoints() == ([], [])


def step_on_rank_0(training: Training, rank: int) -> None:
    if rank == 0:
        training.optimizer.step()


def test_a_rank_in_the_middle_of_a_step_leaves_the_save_to_the_others(tmp_path: Path) -> None:
    told = run_ranks(lose, 3, args=(str(tmp_path), "ddp", (1,), step_on_rank_0))
    assert told[0][0] == told[2][0]
    assert told[0][0].startswith("Rank 2 saved step 3")
    assert [*open_store(str(tmp_path)).checkpoints()[0][0].manifest.lost] == ["0", "1"]


def hang_while_writing(training: Training, rank: int) -> None:
    if rank == 0:
        failpoints.watch(lambda name: time.sleep(1000) if name == "agreed" else None)


def test_a_rank_that_hangs_while_saving_costs_the_save_and_nothing_else(tmp_path: Path) -> None:
    told = run_ranks(lose, 3, args=(str(tmp_path), "ddp", (1,), hang_while_writing))
    assert {told[0][0], told[2][0]} == {"The surviving ranks did not save: the emergency save took longer than 6 s."}
    assert open_store(str(tmp_path)).checkpoints() == ([], [])


def test_of_two_who_take_each_other_for_lost_one_saves(tmp_path: Path) -> None:
    told = run_ranks(lose, 2, args=(str(tmp_path), "ddp", ()))
    assert told[0][0] == told[1][0]
    assert "saved step 3" in told[0][0]
    assert len(open_store(str(tmp_path)).checkpoints()[0]) == 1


def be_a_step_ahead(training: Training, rank: int) -> None:
    if rank == 2:
        training.optimizer.step()
        training.checkpointer.remember(training.state, STEPS + 1)
        training.checkpointer._saver.end_step(STEPS + 1)


@pytest.mark.parametrize(
    ("how", "size", "saved"),
    [("ddp", 3, "Rank 2 saved step 4"), pytest.param("hsdp", 4, "saved step 3", marks=pytest.mark.slow)],
)
def test_of_two_steps_the_newest_is_saved_that_is_there_as_a_whole(
    tmp_path: Path, how: str, size: int, saved: str
) -> None:
    told = run_ranks(lose, size, args=(str(tmp_path), how, (1,), be_a_step_ahead))
    assert all(saved in told[rank][0] for rank in range(size) if rank != 1), told


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    told = run_ranks(lose, 2, args=(str(tmp_path), "ddp", (1,), None, True))
    assert told[0][0] == f"Step 3 is saved in {tmp_path}."
    assert [each.manifest.lost for each in open_store(str(tmp_path)).checkpoints()[0]] == [{}]


def test_the_optimizer_waits_while_those_who_are_left_save(tmp_path: Path) -> None:
    told = run_ranks(lose, 3, args=(str(tmp_path), "ddp", (1,), step_while_saving))
    assert all(told[rank][0].startswith("Ranks 0, 2 saved step 3") for rank in (0, 2))


def step_while_saving(training: Training, rank: int) -> None:
    """The training thread goes on as the save begins."""
    failpoints.watch(lambda name: stepped.wait(0.5) if name == "agreed" else None)
    stepped = threading.Event()

    def step() -> None:
        while saver_of(training.checkpointer)._whole._held is False:
            time.sleep(0.001)
        training.optimizer.step()
        stepped.set()

    threading.Thread(target=step, daemon=True).start()
