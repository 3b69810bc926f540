"""Tensors of subclasses come back bit for bit as what they were, or are refused by name before anything is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import stagereg
from stagereg.checkpoint.format.wrappers import form_of, same_bits, wraps
from stagereg.errors import CheckpointError, StageregError
from stagereg.testing import run_ranks
from tests.checkpoint.state.test_optimizer_carries import error_of, restore, save
from tests.support.reading import opened
from tests.support.states import KINDS as STAGERS
from tests.support.states import build
from tests.support.subclasses import Codes, Dense, Opaque, Whole, codes, nested

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = {"codes": codes, "nested": nested}


class Rounded(torch.nn.Module):
    """A layer with a weight of a subclass, as int8 weight-only layers have."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.ones(2))


class Strange(Codes):
    """One that the program has not allowed."""


class Moments(torch.optim.Optimizer):
    """Keeps its state as some of a subclass, of this rank's part of a parameter."""

    def __init__(self, params: Any, kind: type[Codes] = Codes) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            local = param.to_local() if isinstance(param, DTensor) else param
            first = param.__create_chunk_list__()[0].offsets[0] if isinstance(param, DTensor) else 0
            made: torch.Tensor = codes(*local.shape, first=first, kind=self.kind)
            if isinstance(param, DTensor):
                layout: Any = {"shape": param.shape, "stride": param.stride()}
                made = DTensor.from_local(made, param.device_mesh, param.placements, run_check=False, **layout)
            self.state[param]["moment"] = made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stager", STAGERS)
def test_each_stager_keeps_what_a_subclass_wraps(tmp_path: Path, kind: str, stager: str) -> None:
    made = KINDS[kind](4)
    made.note = "kept"  # type: ignore[attr-defined]
    with stagereg.Checkpointer(str(tmp_path), every=1, stager=build(stager)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": {"w": made, "n": step}})
            checkpointer.wait()
    found = restore(tmp_path, x={"w": None, "n": 0})["x"]["w"]
    assert type(found) is type(made)
    assert same_bits(found, made)
    assert found.note == "kept"
    with opened(tmp_path, verify=True) as checkpoint:
        assert same_bits(checkpoint["x.w"], made)
        assert same_bits(checkpoint.entry("x")["w"], made)


@pytest.mark.parametrize("storage", ["dcp", "torch_dcp"])
def test_plain_torch_reads_them_too(tmp_path: Path, storage: str) -> None:
    made = codes(4)
    with stagereg.Checkpointer(
        str(tmp_path), every=1, storage=stagereg.build("storage", storage), stager=build("blocking")
    ) as checkpointer:
        checkpointer.save(1, {"x": {"w": made}})
    wanted = {"x": {"w": codes(4, first=9)}}
    dcp.load(wanted, checkpoint_id=str(tmp_path / "latest"))
    assert same_bits(wanted["x"]["w"], made)
    assert same_bits(restore(tmp_path, x={"w": None})["x"]["w"], made)


@pytest.mark.parametrize("stager", STAGERS)
@pytest.mark.parametrize(
    "odd",
    [
        Opaque(torch.ones(3)),
        torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
    ],
    ids=["opaque", "masked", "sparse", "nested", "quantized"],
)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, odd: torch.Tensor, stager: str) -> None:
    with (
        pytest.raises(StageregError, match=r"x\.odd"),
        stagereg.Checkpointer(str(tmp_path), every=1, stager=build(stager)) as checkpointer,
    ):
        checkpointer.save(1, {"x": {"odd": odd}})
    assert not [*tmp_path.glob("step-*")]


def test_one_that_names_no_inner_tensors_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(StageregError, match=r"x\.w.*Opaque has no storage.*__tensor_flatten__"):
        save(tmp_path, x={"w": Opaque(torch.ones(3))})


@pytest.mark.parametrize(
    ("saved", "here"), [(codes(2), torch.zeros(2, 3)), (torch.ones(2, 3), codes(2, first=5)), (nested(2), codes(2))]
)
def test_a_plain_value_becomes_what_was_saved(tmp_path: Path, saved: torch.Tensor, here: torch.Tensor) -> None:
    save(tmp_path, x={"w": saved})
    assert same_bits(restore(tmp_path, x={"w": here})["x"]["w"], saved)


def test_one_that_torch_may_not_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.w.*Strange.*add_safe_globals"):
        save(tmp_path, x={"w": codes(2, kind=Strange)})


def test_a_strided_subclass_is_saved_as_ever(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    save(tmp_path, model=Rounded(weight.as_subclass(Dense)))
    assert torch.equal(restore(tmp_path, model=Rounded(torch.zeros(2, 3)))["model"].weight, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_gets_its_own_kind_bit_for_bit(tmp_path: Path, kind: str) -> None:
    save(tmp_path, model=Rounded(KINDS[kind](2)))
    model = Rounded(KINDS[kind](2, first=7))
    restore(tmp_path, model=model)
    assert same_bits(model.weight, KINDS[kind](2))


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (codes(2), torch.zeros(2, 3)),
        (torch.ones(2, 3), codes(2)),
        (codes(2), codes(2, kind=Whole)),
        (codes(2), Codes(codes(2).codes, codes(2).scale, signed=False)),
        (nested(2), codes(2)),
    ],
    ids=["into plain", "of plain", "another class", "another context", "another scale"],
)
def test_a_module_that_would_round_is_refused_and_unchanged(
    tmp_path: Path, saved: torch.Tensor, here: torch.Tensor
) -> None:
    save(tmp_path, model=Rounded(saved))
    model = Rounded(here)
    model.bias.data.zero_()
    before = form_of(model.weight)
    with pytest.raises(CheckpointError, match="weight"):
        restore(tmp_path, model=model)
    assert form_of(model.weight) == before
    assert not model.bias.any()


def trained(rank: int, kind: type[Codes] = Codes, rows: int = 6) -> tuple[torch.nn.Module, Moments]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(3, rows, bias=False))
    return model, Moments(model.parameters(), kind)


def save_sharded(rank: int, world_size: int, root: str, kind: type[Codes] = Codes) -> None:
    model, optimizer = trained(rank, kind)
    optimizer.step()
    with stagereg.Checkpointer(root, every=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"model": model, "optimizer": optimizer})


def restore_sharded(rank: int, world_size: int, root: str, kind: type[Codes]) -> list[str]:
    return [restore_into(rank, root, kind, stepped) for stepped in (False, True)]


def restore_into(rank: int, root: str, kind: type[Codes], stepped: bool) -> str:
    model, optimizer = trained(rank, kind)
    if stepped:
        optimizer.step()
        [each] = optimizer.state.values()
        each["moment"]._local_tensor.codes.zero_()
    weight = next(model.parameters())
    with torch.no_grad():
        weight.zero_()
    try:
        restore(root, model=model, optimizer=optimizer)
    except CheckpointError as error:
        assert not weight.to_local().any()
        return str(error)
    wanted = DTensor.from_local(
        codes(*weight.to_local().shape, first=weight.__create_chunk_list__()[0].offsets[0], kind=kind),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    got = optimizer.state[weight]["moment"]
    assert (got.placements, got.shape, got.stride()) == (weight.placements, weight.shape, weight.stride())
    return "right" if same_bits(got, wanted) else "WRONG"


def test_parts_under_fsdp2_come_back_on_as_many_ranks_and_on_others_where_that_can_be(tmp_path: Path) -> None:
    run_ranks(save_sharded, 2, args=(str(tmp_path),))
    assert run_ranks(restore_sharded, 2, args=(str(tmp_path), Codes)) == [["right", "right"]] * 2
    [(refused, stepped)] = run_ranks(restore_sharded, 1, args=(str(tmp_path), Codes))
    assert "'optimizer.state.weight.moment'" in refused
    assert "in 2 shards" in refused
    assert stepped == "right"
    with (
        opened(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match="in 2 shards"),
    ):
        checkpoint["optimizer.state.weight.moment"]


def test_parts_that_nothing_can_be_taken_out_of_are_refused_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(save_sharded, 1, args=(str(tmp_path), Whole))
    for both in run_ranks(restore_sharded, 2, args=(str(tmp_path), Whole)):
        assert all("'optimizer.state.weight.moment'" in refused for refused in both)


def save_replicas(rank: int, world_size: int, root: str) -> str:
    made = codes(4)
    try:
        with stagereg.Checkpointer(root, every=1) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"model": Rounded(made), "x": {"w": made}})
    except CheckpointError as error:
        return str(error)
    return ""


def test_replicas_come_back(tmp_path: Path) -> None:
    assert run_ranks(save_replicas, 2, args=(str(tmp_path),)) == ["", ""]
    assert same_bits(restore(tmp_path, x={"w": None})["x"]["w"], codes(4))


def save_mixed(rank: int, world_size: int, root: str) -> bool:
    """A rank has a plain part, as where torchao finds too few elements for blocks."""
    mesh, layout = init_device_mesh("cpu", (world_size,)), {"shape": torch.Size([5, 3]), "stride": (3, 1)}
    local: torch.Tensor = codes(3) if rank == 0 else torch.full((2, 3), 7.0)
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **layout)  # type: ignore[arg-type]
    save(root, x={"w": made})
    blank: torch.Tensor = codes(3, first=5) if rank == 0 else torch.zeros(2, 3)
    live = DTensor.from_local(blank, mesh, [Shard(0)], run_check=False, **layout)  # type: ignore[arg-type]
    found = restore(root, x={"w": live})["x"]["w"]
    return wraps(found) == (rank == 0) and same_bits(found, made)


def test_each_rank_gets_the_kind_of_part_that_it_had(tmp_path: Path) -> None:
    assert run_ranks(save_mixed, 2, args=(str(tmp_path),)) == [True, True]


def save_misfit(rank: int, world_size: int, root: str) -> str:
    """The parts of a DTensor are not those that its shape asks for."""
    mesh, layout = init_device_mesh("cpu", (world_size,)), {"shape": torch.Size([6, 3]), "stride": (3, 1)}
    local: torch.Tensor = codes(4 if rank == 0 else 2)
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **layout)  # type: ignore[arg-type]
    return error_of(root, x={"w": made})


def test_parts_of_other_shapes_than_their_place_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(save_misfit, 2, args=(str(tmp_path),)):
        assert "'x.w'" in told


def test_a_subclass_without_elements_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'x' cannot be saved: it is a .*Codes without elements"):
        save(tmp_path, x=Codes(torch.zeros(0, 4, dtype=torch.int8), torch.tensor(0.2)))
