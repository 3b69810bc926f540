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
from stagereg.checkpoint.save.whole_step import _noted
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks
from tests.support.states import OPTIONS, build

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
    with stagereg.Checkpointer(root, every=1, resume="auto") as checkpointer:
        checkpointer.restore({"values": values, "layer": layer, "optimizer": optimizer})
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
    with stagereg.open_checkpoint(tmp_path, verify=True) as checkpoint:
        assert torch.equal(checkpoint["values.x"], WHOLE)
        assert checkpoint["layer.weight"].shape == WHOLE.shape
    full = {"x": torch.empty(ROWS, COLUMNS), "zeros": torch.ones(ROWS, COLUMNS)}
    with stagereg.Checkpointer(str(tmp_path), every=1, resume="auto") as checkpointer:
        checkpointer.restore({"values": full})
    assert torch.equal(full["x"], WHOLE)
    assert not full["zeros"].any()
    for world_size in (1, 2):
        assert run_ranks(restore, world_size, args=(str(tmp_path),)) == [[True] * 4] * world_size


@pytest.mark.parametrize("stager", [*OPTIONS, "torch_default"])
def test_each_stager_keeps_the_attributes(tmp_path: Path, stager: str) -> None:
    x = part_of(WHOLE, [range(4, 8), range(0, 4)])
    with stagereg.Checkpointer(str(tmp_path), every=1, stager=build(stager)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": {"w": x}})
            checkpointer.wait()
    with stagereg.open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["x.w"], WHOLE)


def save_other_replicas(rank: int, world_size: int, root: str) -> str:
    try:
        with stagereg.Checkpointer(root, every=1) as checkpointer:
            checkpointer.save(1, {"x": {"w": part_of(WHOLE + rank, [range(ROWS)])}})
    except CheckpointError as error:
        return str(error)
    return ""


def test_parts_of_one_place_that_differ_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(save_other_replicas, 2, args=(str(tmp_path),)):
        assert "'x.w' is not the same on ranks 0, 1" in told


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
    with stagereg.Checkpointer(str(root), every=1, stager=build("blocking")) as checkpointer:
        checkpointer.save(1, {"x": {"w": part_of(WHOLE, parts, padding)}})
    others = data.draw(st.lists(st.integers(0, ROWS), max_size=3).map(sorted).map(split).flatmap(st.permutations))
    wanted = others[: data.draw(st.integers(1, len(others)))]
    found = {"w": part_of(torch.zeros(ROWS, COLUMNS), wanted)}
    with stagereg.Checkpointer(str(root), every=1, resume="auto") as checkpointer:
        checkpointer.restore({"x": found})
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
    with (
        pytest.raises(CheckpointError, match=r"'x\.w'.*global_offsets"),
        stagereg.Checkpointer(str(tmp_path), every=1) as checkpointer,
    ):
        checkpointer.save(1, {"x": {"w": x}})


def test_parts_that_leave_a_hole_are_refused_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"'x\.w' do not make up"),
        stagereg.Checkpointer(str(tmp_path), every=1) as checkpointer,
    ):
        checkpointer.save(1, {"x": {"w": part_of(WHOLE, [range(0, 3), range(4, 8)])}})


def test_what_is_noted_at_the_end_of_a_step_is_a_part_too() -> None:
    assert is_split(_noted(part_of(WHOLE, [range(ROWS)])))
