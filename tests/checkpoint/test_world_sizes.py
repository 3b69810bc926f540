"""A checkpoint of any number of ranks is restored by any other number, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stagereg.checkpoint.zero_shards as zero_shards
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.errors import CheckpointError
from stagereg.registry import build
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

SIZES = (1, 2, 3, 4)
KINDS = ("ddp", "zero", "fsdp2")


def network(seed: int) -> torch.nn.Sequential:
    """Seven rows, three, and one: they fit no number of ranks; one layer is frozen, one has buffers."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        torch.nn.BatchNorm1d(7),
        torch.nn.Linear(7, 3),
        torch.nn.Linear(3, 3),
        torch.nn.Linear(3, 1),
    )
    model[3].requires_grad_(False)
    return model


def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, in another order than the model's."""
    weights = [x for name, x in model.named_parameters() if name.endswith("weight")]
    biases = [x for name, x in model.named_parameters() if name.endswith("bias")]
    return [{"params": biases, "weight_decay": 0.0}, {"params": weights, "lr": 0.05}]


class Run:
    """A training run of one kind on the ranks of a group."""

    def __init__(self, kind: str, group: dist.ProcessGroup, seed: int) -> None:
        self.kind, self.group, self.rank = kind, group, dist.get_rank(group)
        self.inner: Any = network(seed)
        if kind == "fsdp2":
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in (self.inner[0], self.inner[2]):
                fully_shard(layer, mesh=mesh)
            self.model: Any = fully_shard(self.inner, mesh=mesh)
        else:
            self.model = DistributedDataParallel(self.inner, process_group=group)
        groups = grouped(self.inner)
        if kind == "zero":
            self.optimizer: Any = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, process_group=group, lr=0.1)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 4])
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "seen": [0]}

    def train(self, step: int) -> None:
        torch.manual_seed(100 * step + self.rank)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 5)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state["seen"][0] = step

    def whole(self) -> dict[str, Any]:
        """The whole state, gathered by torch's own functions; on rank 0 of the group."""
        model = {name: full(x) for name, x in self.inner.state_dict().items()}
        if self.kind == "zero":
            self.optimizer.consolidate_state_dict(0)
        optimizer = self.optimizer.state_dict() if self.kind != "zero" or self.rank == 0 else {"state": {}}
        state = {i: {name: full(x) for name, x in part.items()} for i, part in optimizer["state"].items() if part}
        return {
            "model": model,
            "optimizer": {"state": state, "param_groups": optimizer.get("param_groups")},
            "scheduler": self.scheduler.state_dict(),
            "seen": self.state["seen"],
        }


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def exact(value: Any) -> Any:
    """A value with each tensor replaced by its bits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, list) else value


class Groups:
    """The first ranks, for every number of them, and the rest."""

    def __init__(self) -> None:
        world = list(range(dist.get_world_size()))
        self._first = {size: dist.new_group(world[:size]) for size in SIZES[: len(world)]}
        self._rest = {size: dist.new_group(world[size:]) for size in SIZES[: len(world) - 1]}

    def __getitem__(self, size: int) -> dist.ProcessGroup:
        return self._first[size] if dist.get_rank() < size else self._rest[size]

    @contextmanager
    def checkpointer(self, size: int, root: str, storage: str = "dcp") -> Iterator[Checkpointer]:
        """A checkpointer on the first ranks; the others have one elsewhere.

        Torch names a group that only its own ranks make after the number of groups there were, which has to be the same
        on all of them.
        """
        own = root if dist.get_rank() < size else f"{root}-others"
        chosen = build("storage", storage)
        with Checkpointer(own, stager=BlockingAsyncStager(), storage=chosen, process_group=self[size]) as found:
            yield found


def shown(whole: dict[str, Any] | None, rank_of_it: int = 0) -> dict[str, Any]:
    """Return one rank's value on all ranks."""
    box = [whole]
    dist.broadcast_object_list(box, rank_of_it)
    assert box[0] is not None
    return box[0]


def save(kind: str, size: int, groups: Groups, root: str, storage: str) -> dict[str, Any]:
    """Save a run of some steps on the first ranks, and return all of its state on all ranks."""
    whole = None
    with groups.checkpointer(size, root, storage) as keeper:
        if dist.get_rank() < size:
            run = Run(kind, groups[size], seed=1)
            for step in (1, 2, 3):
                run.train(step)
            keeper.save(3, run.state)
            whole = run.whole()
    return shown(whole)


def restore(kind: str, size: int, groups: Groups, root: str, saved: dict[str, Any]) -> list[str]:
    """Restore on the first ranks into another run, and return what is not as it was saved."""
    differing: list[str] = []
    with groups.checkpointer(size, root) as keeper:
        if dist.get_rank() < size:
            run = Run(kind, groups[size], seed=2)
            if size % 2:  # state that there is before is read into, state that is not is made
                run.train(1)
            assert keeper.restore(run.state) == 3
            found = run.whole()
            differing = [name for name in found if exact(found[name]) != exact(saved[name])]
            run.train(4)
    dist.barrier()
    return [f"{kind} on {size} from {root}: {what}" for what in differing] if dist.get_rank() == 0 else []


def restore_all(
    rank: int, world_size: int, root: str, cases: Sequence[tuple[str, int, str, int]], storage: str
) -> tuple[list[str], dict[tuple[str, int], dict[str, Any]]]:
    """Each case: what is saved, on how many ranks; what is restored, on how many."""
    groups = Groups()
    wholes: dict[tuple[str, int], dict[str, Any]] = {}
    differing = []
    for kind, size, new_kind, new_size in cases:
        folder = f"{root}/{kind}-{size}"
        if (kind, size) not in wholes:
            wholes[kind, size] = save(kind, size, groups, folder, storage)
        differing += restore(new_kind, new_size, groups, folder, wholes[kind, size])
    return differing, wholes


def restore_in_one_process(root: Path | str) -> dict[str, Any]:
    """Restore what any of them saved in this process, which has no process group."""
    model = network(4)
    optimizer = torch.optim.AdamW(grouped(model), lr=0.2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9])
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": [0]}
    with Checkpointer(str(root), stager=BlockingAsyncStager()) as keeper:
        assert keeper.restore(state) is not None
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}


def test_any_number_of_ranks_restores_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    cases = [("ddp", 1, kind, 3) for kind in KINDS]
    cases += [(a, 3, b, 2) for a, b in itertools.product(("zero", "fsdp2"), KINDS)]
    cases += [("zero", 2, "zero", 3), ("fsdp2", 3, "fsdp2", 3)]
    (_, wholes), *_ = results = run_ranks(restore_all, nproc=3, args=(str(tmp_path), cases, "dcp"))
    assert [differing for differing, _ in results] == [[]] * 3
    assert len(wholes) == 4
    for (kind, size), saved in wholes.items():
        assert exact(restore_in_one_process(tmp_path / f"{kind}-{size}")) == exact(saved)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("storage", ["dcp", "safetensors"])
def test_every_move_of_every_kind(tmp_path: Path, storage: str) -> None:
    cases = [
        (kind, a, new, b) for kind, new in itertools.product(KINDS, KINDS) for a, b in itertools.product(SIZES, SIZES)
    ]
    results = run_ranks(restore_all, nproc=4, args=(str(tmp_path), cases, storage), timeout_s=540)
    assert [differing for differing, _ in results] == [[]] * 4
    assert len(results[0][1]) == len(KINDS) * len(SIZES)


def message(act: Callable[[], Any]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


def deal_otherwise(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Shards that are not one rank's each: of two replicas, and of a time when they had other numbers."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shown: dict[str, Any] = {}

    def keep(name: str) -> Checkpointer:
        return Checkpointer(f"{root}/{name}", stager=BlockingAsyncStager())

    def fresh() -> Run:
        assert dist.group.WORLD is not None
        return Run("zero", dist.group.WORLD, seed=2)

    # Two replicas of two shards, dealt anew to four ranks, as many as there were.
    run = Run("zero", halves[rank // 2], seed=1)
    for x in run.inner.parameters():
        x.grad = torch.full_like(x, 0.5)
    run.optimizer.step()
    with keep("replicas") as keeper:
        keeper.save(1, run.state)
        keeper.wait()
        other = fresh()
        keeper.restore(other.state)
        run.optimizer.consolidate_state_dict(0)
        other.optimizer.consolidate_state_dict(0)
        if rank == 0:
            shown["replica"], shown["restored"] = run.optimizer.state_dict(), other.optimizer.state_dict()

    with keep("replicas") as keeper:
        fewer = ZeroRedundancyOptimizer(network(1)[0].parameters(), torch.optim.AdamW)
        shown["fewer"] = message(lambda: keeper.restore({"optimizer": fewer}))
        shown["no optimizer"] = message(lambda: keeper.restore({"optimizer": {}}))
    with keep("plain") as keeper:
        keeper.save(1, {"optimizer": {"lr": 1}})
        keeper.wait()
        shown["no state"] = message(lambda: keeper.restore({"optimizer": fewer}))
    within_ddp = ZeroRedundancyOptimizer(network(1).parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    shown["overlap"] = message(lambda: zero_shards.shard(within_ddp))
    return shown


def test_shards_are_distinguished_by_their_content(tmp_path: Path) -> None:
    results = run_ranks(deal_otherwise, nproc=4, args=(str(tmp_path),))
    first = results[0]
    assert len(first["replica"]["state"]) > 4
    assert exact(first["restored"]["state"]) == exact(first["replica"]["state"])
    assert exact(restore_in_one_process(tmp_path / "replicas")["optimizer"]["state"]) == exact(
        first["replica"]["state"]
    )
    for shown in results:
        assert "groups of [5, 5] parameters, the optimizer here has [2]" in shown["fewer"]
        assert "restore it into an optimizer" in shown["no optimizer"]
        assert "no optimizer's state" in shown["no state"]
        assert "overlap_with_ddp=True has no state that can be saved" in shown["overlap"]


@st.composite
def deals(draw: st.DrawFn) -> tuple[list[int], dict[int, dict[str, int]], dict[str, dict[str, Any]]]:
    """Sizes of groups, the state of every parameter (some have none), and the shards of some ranks."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    total, ranks = sum(sizes), draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=total, max_size=total))
    state = {number: {"step": number} if draw(st.booleans()) else {} for number in range(total)}
    shards = {}
    for rank in range(ranks):
        own = [number for number in range(total) if owners[number] == rank]
        groups, begin = [], 0
        for size in sizes:
            groups.append({"lr": rank, "params": [number for number in own if begin <= number < begin + size]})
            begin += size
        shards[f"x.rank{rank}"] = {
            "state": {number: state[number] for number in own},
            "param_groups": groups,
            "group_sizes": sizes,
        }
    return sizes, state, shards


@settings(max_examples=60)
@given(deals(), st.data())
def test_the_state_of_a_rank_is_put_together_from_any_shards(deal: Any, data: st.DataObject) -> None:
    sizes, state, shards = deal
    wanted = data.draw(st.sets(st.sampled_from(sorted(state)))) if state else set()
    lost = data.draw(st.sampled_from([None, *sorted(shards)[1:]]))
    gone = set() if lost is None else shards[lost]["state"].keys()
    whole, missing = zero_shards.whole([shards[name] for name in shards if name != lost], wanted)
    assert missing == wanted & gone
    assert whole["state"] == {number: state[number] for number in sorted(wanted - gone) if state[number]}
    assert list(whole["state"]) == sorted(whole["state"])
    assert [len(group["params"]) for group in whole["param_groups"]] == sizes
    assert [number for group in whole["param_groups"] for number in group["params"]] == list(range(sum(sizes)))
    assert {group["lr"] for group in whole["param_groups"]} == {0}
