"""The join wire agrees with torch's, and neutral values leave a reduction as it was."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from stagereg.errors import JoinError, UnevenInputsError
from stagereg.kernel.shadow import PEER_EXHAUSTED, Collective, TorchWire
from stagereg.testing import run_ranks

CPU = torch.device("cpu")
REDUCTIONS = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@given(st.sampled_from(sorted(REDUCTIONS)), st.sampled_from(DTYPES), st.integers(-100, 100))
def test_a_neutral_value_changes_no_result(reduce: Any, dtype: torch.dtype, value: int) -> None:
    tensor = torch.full((2, 3), abs(value) if dtype == torch.uint8 else value).to(dtype)
    neutral = Collective("all_reduce", (2, 3), dtype, reduce).neutral(CPU)
    assert neutral.dtype == dtype
    assert torch.equal(REDUCTIONS[reduce](tensor, neutral).to(dtype), tensor)


def test_infinities_survive_beside_a_neutral_value() -> None:
    for reduce, value in (("min", torch.inf), ("max", -torch.inf)):
        neutral = Collective("all_reduce", (), torch.float32, reduce).neutral(CPU)  # type: ignore[arg-type]
        assert REDUCTIONS[reduce](torch.tensor(value), neutral).item() == value


def test_a_declaration_normalizes_names_and_lists() -> None:
    declared = Collective("all_reduce", [2, 3], "bfloat16")  # type: ignore[arg-type]
    assert (declared.shape, declared.dtype) == ((2, 3), torch.bfloat16)
    with pytest.raises(JoinError, match=r"declared for torch\.bfloat16"):
        declared.check(torch.zeros(2, 3))


def count_down(rank: int, world_size: int, lengths: tuple[int, ...]) -> list[int]:
    """What each rank reads from the wire: actives their work's value, joined ranks their count."""
    wire = TorchWire(dist.group.WORLD, CPU)  # type: ignore[arg-type]
    read = []
    for _ in range(lengths[rank]):
        work = wire.announce()
        work.wait()
        read.append(int(work.get_future().value()[0].item()))
    while read[-1:] != [0]:
        read.append(wire.count_active())
    return read


def test_both_ends_of_the_wire_read_the_number_of_active_ranks() -> None:
    assert run_ranks(count_down, 3, args=((1, 3, 0),), timeout_s=30) == [[2, 1, 1, 0]] * 3


def stop(rank: int, world_size: int) -> Any:
    wire = TorchWire(dist.group.WORLD, CPU)  # type: ignore[arg-type]
    if rank == 1:
        assert wire.count_active() == 2
        end = functools.partial(wire.raise_if_exhausted, joined=True)
    else:
        wire.announce()
        end = wire.raise_if_exhausted
    with pytest.raises(UnevenInputsError) as error:
        end()
    return str(error.value), error.value.rank


def test_a_throw_reaches_every_rank() -> None:
    peer = (PEER_EXHAUSTED, None)
    assert run_ranks(stop, 3, timeout_s=30) == [peer, ("Rank 1 exhausted all inputs.", 1), peer]


def mirror(rank: int, world_size: int) -> list[float]:
    collectives = [Collective("all_reduce"), Collective("all_reduce", reduce="product"), Collective("broadcast")]
    group = dist.group.WORLD
    assert group is not None
    tensors = [each.neutral(CPU) if rank == 0 else torch.tensor(5.0) for each in collectives]
    return [collective.issue(tensor, group).item() for collective, tensor in zip(collectives, tensors, strict=True)]


def test_neutral_values_leave_the_results_of_other_ranks_alone() -> None:
    assert run_ranks(mirror, 2, timeout_s=30) == [[5.0, 5.0, 0.0]] * 2
