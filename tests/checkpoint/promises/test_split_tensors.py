"""Plain tensors that declare themselves parts of a larger one are saved as parts, and take theirs on any split."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg
from stagereg.checkpoint.format.split_tensors import carry, is_split
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks
from tests.checkpoint.state.test_optimizer_carries import restore as restore_state
from tests.checkpoint.state.test_optimizer_carries import save as save_state
from tests.support.installed import needs
from tests.support.reading import opened
from tests.support.states import KINDS, build
from tests.support.subclasses import Codes

ROWS, COLUMNS = 8, 3
WHOLE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def part_of(whole: torch.Tensor, rows: list[range], padding: int = 1) -> torch.Tensor:
    """Return a tensor with some rows of a larger one, and padding of -1 behind each of them."""
    begins = [sum(len(each) + padding for each in rows[:i]) for i in range(len(rows))]
    x: Any = torch.full((sum(len(each) + padding for each in rows), whole.shape[1]), -1.0)
    for begin, each in zip(begins, rows, strict=True):
        x[begin : begin + len(each)] = whole[each.start : each.stop]
    x.global_shape = tuple(whole.shape)
    x.global_offsets = tuple((each.start, 0) for each in rows)
    x.local_offsets = tuple((begin, 0) for begin in begins)
    x.local_sizes = tuple((len(each), whole.shape[1]) for each in rows)
    return x


def of_rank(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Every rank has every so many rows of it, each of them a part."""
    return part_of(whole, [range(row, row + 1) for row in range(rank, len(whole), world_size)])


class Layer(torch.nn.Module):
    """A module whose parameter is such a part."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(part.clone())
        carry(part, self.weight)


def trained(part: torch.Tensor) -> tuple[Layer, torch.optim.Optimizer]:
    layer = Layer(part)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer.weight.sum().backward()
    optimizer.step()
    carry(part, optimizer.state[layer.weight]["momentum_buffer"])  # as a sharded optimizer does
    return layer, optimizer


def save(rank: int, world_size: int, root: str, stager: str = "overlapped") -> None:
    layer, optimizer = trained(of_rank(WHOLE, rank, world_size))
    zeros = of_rank(torch.zeros(ROWS, COLUMNS), rank, world_size)
    with stagereg.Checkpointer(root, every=1, stager=build(stager)) as checkpointer:
        for step in (1, 2, 3):
            given = {"x": of_rank(WHOLE, rank, world_size), "zeros": zeros}
            checkpointer.save(step, {"values": given, "layer": layer, "optimizer": optimizer})


def restore(rank: int, world_size: int, root: str) -> list[bool]:
    blank = torch.full((ROWS, COLUMNS), 5.0)
    values = {"x": of_rank(blank, rank, world_size), "zeros": of_rank(blank, rank, world_size)}
    layer = Layer(of_rank(blank, rank, world_size))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    restore_state(root, values=values, layer=layer, optimizer=optimizer)
    moment = optimizer.state[layer.weight]["momentum_buffer"]
    trained_layer, _ = trained(of_rank(WHOLE, rank, world_size))
    mine = torch.tensor([True, False] * (len(layer.weight) // 2))  # without the padding
    return [
        torch.equal(values["x"], of_rank(WHOLE, rank, world_size)),
        torch.equal(values["zeros"], of_rank(torch.zeros(ROWS, COLUMNS), rank, world_size)),
        torch.equal(layer.weight[mine], trained_layer.weight[mine]),
        is_split(moment) and torch.equal(moment[mine], torch.ones_like(moment[mine])),
    ]


@pytest.mark.parametrize("saved", [1, 2])
def test_parts_are_taken_on_any_number_of_ranks(tmp_path: Path, saved: int) -> None:
    run_ranks(save, saved, args=(str(tmp_path),))
    with opened(tmp_path, verify=True) as checkpoint:
        assert torch.equal(checkpoint["values.x"], WHOLE)
        assert checkpoint["layer.weight"].shape == WHOLE.shape
    full = {"x": torch.empty(ROWS, COLUMNS), "zeros": torch.ones(ROWS, COLUMNS)}
    restore_state(tmp_path, values=full)
    assert torch.equal(full["x"], WHOLE)
    assert not full["zeros"].any()
    for world_size in (1, 2):
        assert run_ranks(restore, world_size, args=(str(tmp_path),)) == [[True] * 4] * world_size


def adam(part: torch.Tensor, rows: torch.Tensor | None = None) -> tuple[Layer, torch.optim.Optimizer]:
    """Return a layer and an Adam, whose moments declare nothing; after a step with ``rows`` as the gradient."""
    layer = Layer(part)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    if rows is not None:
        layer.weight.grad = rows.clone()
        optimizer.step()
    return layer, optimizer


def of_ranks(whole: torch.Tensor, rank: int, world_size: int, order: int = 1) -> torch.Tensor:
    """Each rank has neighbouring rows of it, without padding: in two parts, which ``order`` -1 turns around."""
    count = ROWS // world_size
    begin, middle, end = rank * count, rank * count + count // 2, (rank + 1) * count
    return part_of(whole, [range(begin, middle), range(middle, end)][::order], padding=0)


def save_adam(rank: int, world_size: int, root: str, grad: torch.Tensor) -> bool:
    layer, optimizer = adam(of_ranks(WHOLE, rank, world_size), of_ranks(grad, rank, world_size))
    save_state(root, layer=layer, optimizer=optimizer)
    return not any(is_split(x) for x in optimizer.state[layer.weight].values())


def restore_adam(rank: int, world_size: int, root: str, grad: torch.Tensor, order: int, had: bool) -> list[bool]:
    blank = of_ranks(torch.full_like(WHOLE, 5.0), rank, world_size, order)
    layer, optimizer = adam(blank, blank if had else None)
    restore_state(root, layer=layer, optimizer=optimizer)
    expected = adam(of_ranks(WHOLE, rank, world_size, order), of_ranks(grad, rank, world_size, order))
    for each, optimizer_of_it in ((layer, optimizer), expected):  # the state is the optimizer's own: it steps
        each.weight.grad = of_ranks(WHOLE, rank, world_size, order)
        optimizer_of_it.step()
    found, wanted = optimizer.state[layer.weight], expected[1].state[expected[0].weight]
    return [torch.equal(layer.weight, expected[0].weight), *(torch.equal(found[key], wanted[key]) for key in wanted)]


@pytest.mark.parametrize(
    ("saved", "world_size", "grad"),
    [(1, 2, WHOLE + 1), (2, 1, WHOLE + 1), (2, 2, torch.ones_like(WHOLE))],
    ids=["1-2", "2-1", "equal"],
)
def test_moments_without_attributes_are_split_as_their_parameter(
    tmp_path: Path, saved: int, world_size: int, grad: torch.Tensor
) -> None:
    assert all(run_ranks(save_adam, saved, args=(str(tmp_path), grad)))
    with opened(tmp_path, verify=True) as checkpoint:
        assert torch.equal(
            checkpoint["optimizer.state.weight.exp_avg"], adam(WHOLE, grad)[1].state_dict()["state"][0]["exp_avg"]
        )
    for order, had in ((1, True), (-1, False)):
        for same in run_ranks(restore_adam, world_size, args=(str(tmp_path), grad, order, had)):
            assert same == [True] * 4


def test_the_padding_of_moments_that_are_new_is_zero(tmp_path: Path) -> None:
    parts = [range(0, 3), range(3, ROWS)]
    layer, optimizer = adam(part_of(WHOLE, parts), part_of(WHOLE, parts))
    optimizer.state[layer.weight]["exp_avg"] = optimizer.state[layer.weight]["exp_avg"].t().contiguous().t()
    save_state(tmp_path, layer=layer, optimizer=optimizer)
    fresh, other = adam(part_of(torch.zeros_like(WHOLE), parts))
    restore_state(tmp_path, layer=fresh, optimizer=other)
    for key in ("exp_avg", "exp_avg_sq"):
        found, saved = other.state[fresh.weight][key], optimizer.state[layer.weight][key].clone()
        saved[3], saved[-1] = 0, 0
        assert torch.equal(found, saved)


def test_moments_that_wrap_tensors_are_refused_by_name(tmp_path: Path) -> None:
    layer, optimizer = adam(part_of(WHOLE, [range(ROWS)]))
    optimizer.state[layer.weight]["exp_avg"] = Codes(torch.zeros(ROWS + 1, COLUMNS, dtype=torch.int8), torch.ones(()))
    with pytest.raises(CheckpointError, match=r"'optimizer': 'state\.weight\.exp_avg' is a Codes, which cannot"):
        save_state(tmp_path, layer=layer, optimizer=optimizer)


@pytest.mark.parametrize("stager", [*KINDS, pytest.param("torch_default", marks=needs("interop"))])
def test_each_stager_keeps_the_attributes(tmp_path: Path, stager: str) -> None:
    x = part_of(WHOLE, [range(4, 8), range(0, 4)])
    with stagereg.Checkpointer(str(tmp_path), every=1, stager=build(stager)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": {"w": x}})
            checkpointer.wait()
    with opened(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["x.w"], WHOLE)


@given(st.lists(st.integers(0, ROWS), max_size=4).map(sorted), st.integers(0, 2), st.data())
@settings(max_examples=15, deadline=None)
def test_any_split_goes_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], padding: int, data: st.DataObject
) -> None:
    def split(cuts: list[int]) -> list[range]:
        ends = [0, *cuts, ROWS]
        return [range(a, b) for a, b in itertools.pairwise(ends)]

    root = tmp_path_factory.mktemp("split")
    parts = data.draw(st.permutations(split(cuts)))
    save_state(root, x={"w": part_of(WHOLE, parts, padding)})
    others = data.draw(st.lists(st.integers(0, ROWS), max_size=3).map(sorted).map(split).flatmap(st.permutations))
    wanted = others[: data.draw(st.integers(1, len(others)))]
    found = {"w": part_of(torch.zeros(ROWS, COLUMNS), wanted)}
    restore_state(root, x=found)
    assert torch.equal(found["w"], part_of(WHOLE, wanted))


@pytest.mark.parametrize(
    "change",
    [
        {"global_shape": (4, COLUMNS)},
        {"global_shape": (ROWS,)},
        {"local_sizes": ((ROWS + 2, COLUMNS),)},
        {"local_offsets": ()},
        {"global_offsets": ((-1, 0),)},
        {"global_offsets": None},
    ],
    ids=str,
)
def test_attributes_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    x = part_of(WHOLE, [range(ROWS)])
    for name, value in change.items():
        setattr(x, name, value)
    with pytest.raises(CheckpointError, match=r"'x\.w'.*global_offsets"):
        save_state(tmp_path, x={"w": x})


def test_parts_that_leave_a_hole_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'x\.w' on the ranks overlap, or do not cover"):
        save_state(tmp_path, x={"w": part_of(WHOLE, [range(0, 3), range(4, 8)])})
