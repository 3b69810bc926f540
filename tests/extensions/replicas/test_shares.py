"""Of what ranks have alike each stages and writes a share; what is not alike under one name is refused."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.assembly import Checkpointer, Preemption, Replicas
from stagereg.checkpoint.store.failpoints import watch
from stagereg.checkpoint.targets import Part
from stagereg.errors import CheckpointError
from stagereg.extensions.replicas.comparing import (
    Compared,
    EntryContents,
    HeldTensor,
    Kind,
    Place,
    _checksum_of_object,
)
from stagereg.extensions.replicas.shares import ReplicaShards, RowSlice, Shares, shares
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

WIDE = 400


class Wide(torch.nn.Module):
    """Some 640 kB of parameters, of which a share is visible, and a buffer that replicas do not have alike."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(WIDE, WIDE)
        self.scale = torch.nn.Parameter(torch.randn(3))
        self.tied = self.scale
        self.register_buffer("mean", torch.full((2,), float(dist.get_rank())))


def written(root: str, step: int, rank: int) -> int:
    """Bytes of tensors that a rank has written."""
    folder = Path(root) / f"step-{step:08d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    return sum(mark["bytes"] for name, mark in files.items() if name.startswith(f"__{rank}_"))


def share(
    rank: int, size: int, root: str, options: dict[str, Any], wrapped: bool = False
) -> tuple[list[float], list[int], list[str]]:
    """Save five steps; return what was staged in each as a share of the state, what was written, and what differs."""
    model = Wide(1)
    optimizer = torch.optim.Adam(model.parameters())
    given = DistributedDataParallel(model, broadcast_buffers=False) if wrapped else model
    state = {"model": given, "optimizer": optimizer, "epoch": 7}
    whole = 3 * sum(x.nbytes for x in model.parameters())
    staged: list[float] = []
    with Checkpointer(root, keep=9, stager=BlockingAsyncStager(), **options) as keeper:
        for step in range(1, 6):
            for x in model.parameters():
                x.grad = x.detach() * step
            optimizer.step()
            before = keeper.stats.bytes_staged
            keeper.save(step, state)
            keeper.wait()
            staged.append((keeper.stats.bytes_staged - before) / whole)
    other = Wide(2)
    fresh = torch.optim.Adam(other.parameters())
    with Checkpointer(root, stager=BlockingAsyncStager()) as keeper:
        keeper.restore({"model": other, "optimizer": fresh, "epoch": 0})
    pairs = dict(zip(model.parameters(), other.parameters(), strict=True))
    same = all(torch.equal(a, b) for a, b in pairs.items())
    same &= all(torch.equal(x, fresh.state[b][key]) for a, b in pairs.items() for key, x in optimizer.state[a].items())
    assert other.mean.tolist() == [0.0, 0.0]  # type: ignore[union-attr,operator]
    return staged, [written(root, step, rank) for step in (1, 5)], [] if same else ["differs"]


@pytest.mark.parametrize(("size", "wrapped"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_each_rank_writes_its_share_from_the_first_save_on_and_then_stages_no_more(
    tmp_path: Path, size: int, wrapped: bool
) -> None:
    ranks = run_ranks(share, size, args=(str(tmp_path), {}, wrapped), timeout_s=120)
    assert [differing for *_, differing in ranks] == [[]] * size
    for staged, _, _ in ranks:
        assert staged == pytest.approx([1.0] + [1 / size] * 4, rel=0.1)
    for of_step in zip(*(bytes_of for _, bytes_of, _ in ranks), strict=True):
        assert max(of_step) < 1.15 * min(of_step)


def test_replicas_first_and_comparing_saves_are_staged_as_a_whole(tmp_path: Path) -> None:
    first, compared = ({"replicas": Replicas(share=False)}, {"replicas": Replicas(verify_every=2)})
    staged = run_ranks(share, 2, args=(str(tmp_path / "first"), first))[1][0]
    assert staged == pytest.approx([1.0] * 5, abs=0.01)
    staged = run_ranks(share, 2, args=(str(tmp_path / "compared"), compared))[1][0]
    assert staged == pytest.approx([1.0, 0.5, 1.0, 0.5, 1.0], rel=0.1)


def refused(rank: int, size: int, root: str) -> dict[str, str]:
    """What is said of values that ranks have differently."""
    found: dict[str, str] = {}

    def save(name: str, state: Any, drift: Any = None, after: int = 2, **options: Any) -> None:
        with Checkpointer(
            f"{root}/{name}", stager=BlockingAsyncStager(), preemption=Preemption(None), **options
        ) as keeper:
            try:
                for step in range(1, 4):
                    keeper.save(step, state)
                    keeper.wait()
                    if drift is not None and step == after:
                        drift()
                found[name] = ""
            except CheckpointError as error:
                found[name] = str(error)

    save("values", {"x": {"a": torch.full((2,), float(rank))}})
    save("shapes", {"x": torch.ones(2 + rank)})
    save("alike", {"x": torch.ones(2), "loss": rank / 2, "pair": (1, torch.ones(2)), "dtype": torch.float16})
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    norm[0].running_mean.fill_(rank)
    save("buffers", {"model": norm, "average": {"0.running_mean": torch.full((2,), float(rank))}})
    linear = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(linear.weight, rank)
    save("weight", {"model": linear, "loss": torch.nn.CrossEntropyLoss(weight=torch.ones(2))})  # which is a buffer
    save("objects", {"x": (1, torch.full((2,), float(rank))), "size": torch.Size([2, rank])})
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)

    def drift() -> None:
        if rank == 1:
            with torch.no_grad():
                model.bias[1] = 3.0

    save("drift", {"model": model}, drift, replicas=Replicas(verify_every=2))
    torch.manual_seed(1)
    apart = torch.nn.Linear(2, 2)

    def train_apart() -> None:
        with torch.no_grad():
            apart.weight.mul_(rank + 1)

    save("apart", {"model": apart}, train_apart, after=1)
    torch.manual_seed(1)
    changed = torch.nn.Linear(2, 2)
    save("changed", {"model": changed}, lambda: changed.double() if rank == 1 else None, after=1)
    torch.manual_seed(1)
    other = torch.nn.Linear(2, 2)
    groups: Any = [{"params": [other.weight], "lr": 0.1 * (rank + 1)}, {"params": [other.bias]}]
    save("options", {"model": other, "optimizer": torch.optim.SGD(groups, lr=1.0)})
    return found


def test_what_is_not_alike_under_one_name_is_refused(tmp_path: Path) -> None:
    ranks = run_ranks(refused, 3, args=(str(tmp_path),))
    assert ranks[0] == ranks[1] == ranks[2]
    found = ranks[0]
    text = "'x.a' is not the same on ranks 0, 1 (the values differ); 'x.a' is not the same on ranks 0, 2"
    assert text in found["values"]
    assert found["values"].count("'x.a' is not the same on ranks 0, 1 ") == 1
    assert "'x' is not the same on ranks 0, 1 (float32 [3], not float32 [2])" in found["shapes"]
    assert "stagereg.per_rank(value)" in found["values"]
    assert found["alike"] == found["buffers"] == ""
    assert "'model.weight' is not the same on ranks 0, 1 (the values differ)" in found["weight"]
    assert "'x' is not the same on ranks 0, 1 (the values differ)" in found["objects"]
    assert "'size' is not the same on ranks 0, 1 (the values differ)" in found["objects"]
    assert "Step 3 was not saved" in found["drift"]
    assert "'model.bias' is not the same on ranks 0, 1 (the values differ)" in found["drift"]
    assert "Step 2 was not saved" in found["apart"]
    assert "'model' was identical on ranks 0, 1, so each rank staged a shard, but now differs." in found["apart"]
    assert "Step 2 was not saved: The ranks disagree on which rank writes which shard" in found["changed"]
    assert "'optimizer.param_groups.weight.lr' is not the same on all ranks" in found["options"]


def beside(rank: int, size: int, root: str) -> tuple[dict[str, list[int]], list[str]]:
    """Save what all four ranks have alike beside what two of them have; return what was staged, and what differs."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))["parts"]
    own = rank % 2
    staged: dict[str, list[int]] = {"parts": [], "modules": []}
    differing: list[str] = []
    for name, found in staged.items():
        torch.manual_seed(1)
        model = torch.nn.ModuleDict({"common": torch.nn.Linear(WIDE, 2 * WIDE)})
        if name == "parts":  # uneven, so the two that have one have more beside the common ones than the others
            model["split"] = torch.nn.Linear(WIDE, WIDE + 1)
            for module, placement in ((model["common"], Replicate()), (model["split"], Shard(0))):
                x = distribute_tensor(module.weight.detach(), mesh, [placement])
                module.weight = torch.nn.Parameter(x)
        else:
            model[f"expert{own}"] = torch.nn.Linear(WIDE, (1 + own) * WIDE // 2)
        with Checkpointer(
            f"{root}/{name}", keep=9, stager=BlockingAsyncStager(), preemption=Preemption(None)
        ) as keeper:
            for step in range(1, 4):
                before = keeper.stats.bytes_staged
                keeper.save(step, {"model": model})
                keeper.wait()
                found.append(keeper.stats.bytes_staged - before)
        values = {f"model.{key}": x for key, x in model.state_dict().items()}
        values = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in values.items()}
        for step in range(1, 4):
            with stagereg.open_checkpoint(f"{root}/{name}/step-{step:08d}") as there:
                differing += [f"{name} {step} {key}" for key, x in values.items() if not torch.equal(there[key], x)]
    return staged, differing


def test_ranks_that_have_other_tensors_beside_lose_nothing_of_those_that_they_share(tmp_path: Path) -> None:
    ranks = run_ranks(beside, 4, args=(str(tmp_path),), timeout_s=120)
    assert [differing for _, differing in ranks] == [[]] * 4
    for staged, _ in ranks:
        assert all(each < 0.4 * staged["parts"][0] for each in staged["parts"][1:]), "of what is not split a fourth"
        assert all(each < 0.95 * staged["modules"][0] for each in staged["modules"][1:]), "of an expert a half"
    for step in range(1, 4):
        files = [written(str(tmp_path / "parts"), step, rank) for rank in range(4)]
        assert max(files) < 1.15 * min(files)


def knows_late(rank: int, size: int, root: str) -> list[float]:
    """Save while rank 1 does not hear of what was saved before; return what was staged, as shares of the state."""
    torch.manual_seed(1)
    model = torch.nn.Linear(WIDE, WIDE)
    began = threading.Event()
    if rank == 1:
        watch(lambda name: began.wait(60) if name == "ended" else None)
    staged: list[float] = []

    class Counting(BlockingAsyncStager):
        def stage(self, state_dict: dict[str, Any]) -> Any:
            copy = super().stage(state_dict)
            staged.append(sum(x.nbytes for x in copy["model"].values()) / (model.weight.nbytes + model.bias.nbytes))
            return copy

    with Checkpointer(root, keep=99, stager=Counting(), preemption=Preemption(None)) as keeper:
        for step in range(1, 9):
            with torch.no_grad():
                model.weight.fill_(step)
            keeper.save(step, {"model": model})
            if rank == 0 and step == 1:
                keeper.wait()
            elif rank == 1 and step == 2:
                began.set()
    return staged


def test_a_rank_that_knows_late_what_is_alike_writes_its_share_with_the_others(tmp_path: Path) -> None:
    early, late = run_ranks(knows_late, 2, args=(str(tmp_path),), timeout_s=120)
    assert early == pytest.approx([1.0] + [0.5] * 7, abs=0.01)
    assert late == pytest.approx([1.0, 1.0] + [0.5] * 6, abs=0.01)
    for step in range(1, 9):
        assert written(str(tmp_path), step, 0) == pytest.approx(written(str(tmp_path), step, 1), rel=0.1)
        template = {"model.weight": torch.zeros(WIDE, WIDE)}
        torch.distributed.checkpoint.load(template, checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
        assert template["model.weight"].eq(step).all()


def own_values(rank: int, size: int, root: str) -> tuple[Any, Any]:
    """Restore what each rank has for itself."""
    loader = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0), 1)
    loader.last_epoch = 10 + rank
    with Checkpointer(root, stager=BlockingAsyncStager()) as keeper:
        own = stagereg.per_rank({"x": torch.full((1,), rank)})
        state = {"loss": rank / 2, "own": own, "at": stagereg.per_rank(loader)}
        keeper.save(1, state)
        keeper.wait()
        loader.last_epoch = 0
        fresh = {"loss": 9.0, "own": stagereg.per_rank({}), "at": stagereg.per_rank(loader)}
        keeper.restore(fresh)
    return fresh["loss"], (fresh["own"].value["x"].item(), loader.last_epoch)


def test_each_rank_restores_what_is_its_own(tmp_path: Path) -> None:
    assert run_ranks(own_values, 2, args=(str(tmp_path),)) == [(0.0, (0, 10)), (0.5, (1, 11))]
    with stagereg.open_checkpoint(tmp_path) as checkpoint:
        assert [checkpoint.entry("loss", rank) for rank in (None, 0, 1)] == [0.0, 0.0, 0.5]
        assert [checkpoint.entry("own", rank)["x"].item() for rank in (0, 1)] == [0, 1]
        with pytest.raises(CheckpointError, match=r"has no entry 'own\.rank2'\. It has "):
            checkpoint.entry("own", 2)
        with pytest.raises(KeyError, match=r"has no tensor 'loss'\. Call entry\('loss'\)"):
            checkpoint["loss"]


tensors = st.lists(st.lists(st.integers(0, 40_000), max_size=3).map(torch.Size), max_size=6).filter(
    lambda shapes: sum(shape.numel() for shape in shapes) < 10**8
)


def told(kind: Kind, count: int, rank: int) -> Compared:
    """What a rank is told of a kind that so many have alike."""
    return Compared([], {kind: Place(0, count, rank)}, set())


@given(tensors, st.integers(2, 5))
def test_shares_cover_each_tensor_once_and_are_balanced(shapes: list[torch.Size], count: int) -> None:
    pieces = [
        HeldTensor(("x", str(i)), Part(torch.Size([0] * len(shape)), shape), shape, torch.float32, 4 * shape.numel(), i)
        for i, shape in enumerate(shapes)
    ]
    own, kind = EntryContents(pieces, [0] * len(pieces)), ("x", True)
    each = [shares(0, {kind: own}, told(kind, count, rank), "x").cuts.get(kind, []) for rank in range(count)]
    total, staged = sum(shape.numel() for shape in shapes), [0] * count
    for i, shape in enumerate(shapes):
        parts = []
        for rank, cuts in enumerate(each):
            if cuts[i].part is not None:
                dim, begin, rows = cuts[i].rows or (0, 0, shape[0] if shape else 1)
                assert cuts[i].part == Part(torch.Size([begin * (at == dim) for at in range(len(shape))]), shape)
                parts.append((begin, begin + rows))
                staged[rank] += shape.numel() * rows // (shape[dim] if shape else 1) if shape.numel() else 0
        assert parts, "nobody has it"
        assert parts[0][0] == 0
        assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
    assert sum(staged) == total
    rows_of = [shape.numel() // next((size for size in shape if size > 1), 1) for shape in shapes]
    assert all(abs(of_rank - total / count) <= (1 << 16) + max(rows_of, default=0) for of_rank in staged)


@given(st.data())
def test_ranks_write_the_same_shares_whatever_they_know_when_they_stage(data: st.DataObject) -> None:
    every = data.draw(st.sampled_from([0, 3]))
    fails = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    grows = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))  # as by an optimizer's first step
    sizes = list(itertools.accumulate(grows, initial=1))
    ranks = [ReplicaShards(every, True) for _ in range(2)]
    seen: list[list[int]] = [[], []]  # the save in which the shares were found, by save
    for replicas, found in zip(ranks, seen, strict=True):
        staged: list[tuple[dict[str, Any], Shares] | None] = []

        def write(
            number: int, replicas: ReplicaShards = replicas, found: list[int] = found, staged: Any = staged
        ) -> None:
            known = staged[number] or replicas.cut(number, {"x": {"a": torch.ones(sizes[number])}})
            of = number if known is None else known[1].found_in
            found.append(of)
            cuts = {("x", True): [RowSlice((), "a", torch.Size([sizes[number]]), torch.float32, None, None)]}
            new = Shares(number, cuts, {"x.a": None}, {("x", True): 0}) if known is None else None
            replicas.end_save(number, new, failed=fails[number])

        for number in range(len(fails)):
            while len(found) < number - 1 or (len(found) < number and data.draw(st.booleans())):
                write(len(found))
            assert replicas.begin_save().number == number
            staged.append(replicas.cut(number, {"x": {"a": torch.ones(sizes[number])}}))
        while len(found) < len(fails):
            write(len(found))
    assert seen[0] == seen[1]
    for number, of in enumerate(seen[0]):
        assert of == number or not any(fails[of : number - 1]), "shared what a failed save may have made wrong"
        assert of == number or sizes[of] == sizes[number], "shared what is not there"
        assert of == number or not every or number % every
    if not any(fails) and not every and not any(grows):
        assert seen[0] == [0] * len(fails)


def test_sets_that_are_in_another_order_are_alike() -> None:
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other]
    assert _checksum_of_object((one, frozenset("xyz"))) == _checksum_of_object((other, frozenset("zyx"))) != 0
