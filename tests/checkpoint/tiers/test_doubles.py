"""What replicas on two machines have alike is written on both, compared, and not sent; what differs is sent."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg import record
from stagereg.checkpoint.ranks.comparing import Compared, Place, double
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES
from stagereg.checkpoint.storage.doubled import DoubledStorage
from stagereg.checkpoint.tiers.part import Part, PartFile
from stagereg.testing import run_ranks
from tests.support.tier_parts import connected, data_of, new_folder, serving, write_part

from ...support.programs import comes_true

BOUND_S = 30.0
WIDE = 400
PER_MACHINE = 2
STAYS = stagereg.Leave(save_last=False)


def network(split: str, size: int) -> tuple[Any, torch.optim.Optimizer]:
    """Some 3.8 MB with its moments, alike on all ranks, or on every second one, or on none."""
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE), torch.nn.Linear(WIDE, WIDE))
    if split == "ddp":
        model = DistributedDataParallel(model)
    else:
        shape = (size // 2, 2) if split == "hsdp" else (size,)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :]))
    return model, torch.optim.AdamW(model.parameters())


def whole(state: dict[str, Any]) -> list[torch.Tensor]:
    """All parameters and moments."""
    model, optimizer = state["model"], state["optimizer"]
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (*model.parameters(), *moments)]


def train(
    rank: int, size: int, root: str, split: str, per_machine: int, harm: str = "", wanted: int = 1
) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Take three steps, of which the tier has each; return the copies of the last one, and what was saved."""
    copies: list[dict[str, Any]] = []

    def note(event: str, **fields: Any) -> None:
        if event == "copy" and fields["step"] == 3:
            copies.append(fields)

    record.emit = note
    model, optimizer = network(split, size)
    state = {"model": model, "optimizer": optimizer, "own": stagereg.per_rank(torch.tensor([rank]))}
    tier = stagereg.build("tier", "disk", dir=f"{root}/{rank // per_machine}", every=1, copies=wanted)
    with stagereg.Checkpointer(f"{root}/store", every=100, tier=tier, leave=STAYS) as saving:
        for step in range(1, 4):
            torch.manual_seed(step)
            model(torch.randn(2, WIDE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3 and rank == size - 1 and harm == "drift":
                with torch.no_grad():
                    next(iter(model.parameters()))[5, 7] += 1.0  # of the first rank's share, and in no sample
            if step == 3 and harm == "full disk":
                DoubledStorage.write_double = no_room  # type: ignore[method-assign,assignment]
            saving.maybe_save(step, state)
            saving.wait()
            assert comes_true(lambda: not saving._tiering.near._threads.busy, BOUND_S)
            dist.barrier()
        saved = [x.detach().clone() for x in whole(state)]
    return copies, saved


def no_room(_: object, path: str, *__: object) -> None:
    Path(path).write_bytes(b"as far as it went")
    raise OSError(28, "No space left on device")


def files_of_step_3(root: Path, machine: int) -> dict[str, bytes]:
    [folder] = (root / str(machine)).glob("*/step-00000003.*")
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.suffix == ".distcp"}


def resume(rank: int, size: int, root: str, split: str) -> tuple[int | None, list[torch.Tensor], int]:
    """Restore on ranks of one machine."""
    model, optimizer = network(split, size)
    own = torch.tensor([-1])
    state = {"model": model, "optimizer": optimizer, "own": stagereg.per_rank(own)}
    tier = stagereg.build("tier", "disk", dir=f"{root}/0", every=1)
    with stagereg.Checkpointer(f"{root}/store", every=100, tier=tier, leave=STAYS) as saving:
        return saving.restore(state), [x.detach().clone() for x in whole(state)], int(own)


@pytest.mark.parametrize(
    ("split", "size", "per_machine", "wanted"),
    [("ddp", 2, 1, 1), ("ddp", 3, 1, 1), ("ddp", 3, 1, 2), ("hsdp", 4, 2, 1)],
)
def test_what_replicas_have_is_not_sent_and_survives_a_machine(
    tmp_path: Path, split: str, size: int, per_machine: int, wanted: int
) -> None:
    ranks = run_ranks(train, size, args=(str(tmp_path), split, per_machine, "", wanted), timeout_s=120)
    for copies, _ in ranks:
        assert [each.get("error") for each in copies] == [None] * wanted
        for each in copies:
            assert 0 < each["sent"] < 0.1 * each["bytes"], "small things, and what a rank has for itself"
            assert each["bytes"] > 300_000
    every: dict[str, bytes] = {}
    machines = size // per_machine
    for machine in range(machines):
        for name, data in files_of_step_3(tmp_path, machine).items():
            assert every.setdefault(name, data) == data, "the copies differ"
    if machines == 2:
        shutil.rmtree(tmp_path / "1")
        for rank, (step, state, own) in enumerate(run_ranks(resume, size, args=(str(tmp_path), split), timeout_s=90)):
            assert (step, own) == (3, rank)
            assert all(map(torch.equal, state, ranks[rank][1]))


@pytest.mark.parametrize(("split", "harm"), [("fsdp2", ""), ("ddp", "full disk"), ("ddp", "drift")])
def test_what_the_other_machine_has_not_or_has_otherwise_is_sent(tmp_path: Path, split: str, harm: str) -> None:
    ranks = run_ranks(train, 2, args=(str(tmp_path), split, 1, harm), timeout_s=120)
    first = ranks[0][0][0]
    assert first["sent"] > 0.5 * first["bytes"]
    assert files_of_step_3(tmp_path, 0) == files_of_step_3(tmp_path, 1)
    assert [*tmp_path.glob("*/*/step-00000003.*/.*")] == [], "what is of no use takes room"
    shutil.rmtree(tmp_path / "1")
    found = run_ranks(resume, 2, args=(str(tmp_path), split), timeout_s=90)
    assert [step for step, *_ in found] == [3, 3]
    assert all(map(torch.equal, found[0][1], ranks[0][1]))


BLOCKS = 3


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wrong=st.sets(st.integers(0, BLOCKS)), larger=st.booleans(), other=st.booleans())
def test_blocks_that_differ_are_sent_and_those_alone(
    tmp_path_factory: pytest.TempPathFactory, wrong: set[int], larger: bool, other: bool
) -> None:
    root = tmp_path_factory.mktemp("machines")
    here, there = new_folder(root / "here"), new_folder(root / "there")
    size = BLOCKS * BLOCK_BYTES + 77
    part = write_part(here, {"big": size, "small": 5})
    data = bytearray(Path(here.directory(part.save), "big").read_bytes())
    for number in wrong:
        data[number * BLOCK_BYTES + 3] ^= 1
    data += b"x" * larger
    double_of = part.save._replace(token="f" * 12) if other else part.save
    Path(there.directory(part.save)).mkdir(parents=True)
    Path(there.double_path(part.save, "big")).write_bytes(data)
    note = Part(double_of, part.rank, {"big": PartFile.of_bytes(bytes(data))})
    if other:
        Path(there.directory(double_of)).mkdir(parents=True)
    there.note_double(note)
    with serving(there) as server, connected(server.address) as peer:
        sent = peer.put(part, here.directory(part.save))
    every = larger or other
    assert sent == 5 + sum(
        len(part.files["big"].block(number)) for number in range(BLOCKS + 1) if every or number in wrong
    )
    assert there.find(part.save, part.rank) is not None
    assert other or not Path(there.double_path(part.save, "big")).exists()
    for name in part.files:
        assert Path(there.directory(part.save), name).read_bytes() == Path(here.directory(part.save), name).read_bytes()
    assert data_of(5) == Path(there.directory(part.save), "small").read_bytes()


@given(st.data())
def test_who_writes_the_share_of_another_has_all_of_it(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    kinds = [("model", True), ("model", False), ("optimizer", True)]
    told = [Compared([], {}, set(), {}, []) for _ in range(size)]
    for kind in kinds:
        label = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))  # 0: has nothing of it
        for group in {1, 2} & set(label):
            members = [rank for rank in range(size) if label[rank] == group]
            for number, rank in enumerate(members):
                told[rank].places[kind] = Place(members[0], len(members), number)
    pairs = [(rank, data.draw(st.lists(st.integers(0, size - 1), unique=True))) for rank in range(size)]
    double(told, pairs)
    for rank, others in pairs:
        shared = {kind: place for kind, place in told[rank].places.items() if place.ranks > 1}
        able = [each for each in others if all(told[each].places.get(k, (-1,))[0] == p[0] for k, p in shared.items())]
        assert len(told[rank].doubled) == bool(able and shared)
        for writer in told[rank].doubled:
            assert writer in able
            assert told[writer].doubles[rank] == {kind: place.number for kind, place in shared.items()}
