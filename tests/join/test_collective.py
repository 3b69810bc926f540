"""A declared collective gives active ranks the result over the active ranks, and refuses what was not declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import JoinError
from stagereg.join.kinds.collective import Collective
from stagereg.testing import run_ranks

from ..support.reference import EXACT, Case, batch, difference, net

REDUCTIONS = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@given(st.sampled_from(sorted(REDUCTIONS)), st.sampled_from(DTYPES), st.integers(-100, 100))
def test_a_neutral_value_changes_no_result(reduce: Any, dtype: torch.dtype, value: int) -> None:
    tensor = torch.full((2, 3), abs(value) if dtype == torch.uint8 else value).to(dtype)
    neutral = Collective("all_reduce", (2, 3), dtype, reduce).neutral(torch.device("cpu"))
    assert neutral.dtype == dtype
    assert torch.equal(REDUCTIONS[reduce](tensor, neutral).to(dtype), tensor)


def test_a_declaration_normalizes_names_and_lists() -> None:
    declared = Collective("all_reduce", [2, 3], "bfloat16")  # type: ignore[arg-type]
    assert (declared.shape, declared.dtype) == ((2, 3), torch.bfloat16)


LENGTHS = (1, 3, 2)  # ranks 0, 1, 2 are active, then 1 and 2, then 1 alone


def mine(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    value = torch.full(shape, rank + 2)
    return value.eq(3) if dtype == torch.bool else value.to(dtype)


REDUCED = {"sum": [9, 7, 3], "product": [24, 12, 3], "min": [2, 3, 3], "max": [4, 4, 3]}
DTYPES_SENT = ["int64", "int32", "uint8", "bfloat16", "float16"]
RIGHT: list[tuple[dict[str, Any], int, list[Any]]] = [
    *(({"op": "all_reduce", "shape": [1], "reduce": reduce}, 1, [[v] for v in REDUCED[reduce]]) for reduce in REDUCED),
    *(({"op": "all_reduce", "dtype": dtype, "reduce": "min"}, 1, REDUCED["min"]) for dtype in DTYPES_SENT),
    *(({"op": "all_reduce", "dtype": dtype, "reduce": "product"}, 1, REDUCED["product"]) for dtype in DTYPES_SENT),
    ({"op": "all_reduce", "dtype": "bool", "reduce": "max"}, 1, [True, True, True]),
    ({"op": "all_reduce", "dtype": "bool", "reduce": "min"}, 1, [False, False, True]),
    ({"op": "all_reduce", "dtype": "complex64"}, 1, [9, 7, 3]),
    ({"op": "reduce", "rank": 1}, 1, [9, 7, 3]),
    ({"op": "broadcast", "rank": 0, "dtype": "int64"}, 1, [2, 2, 2]),  # what a joined root sent last
    ({"op": "broadcast", "rank": 1}, 2, [3, 3]),
    ({"op": "all_gather"}, 1, [[2, 3, 4], [0, 3, 4], [0, 3, 0]]),
    ({"op": "reduce_scatter", "shape": [6]}, 1, [[9, 9], [7, 7], [3, 3]]),
    ({"op": "barrier"}, 2, [4, 4]),
]
"""What is declared, and what a rank gets in each of its steps."""


def run_all(rank: int, world_size: int, context: str) -> list[list[Any]]:
    return [run_one(rank, declared, context) for declared, _, _ in RIGHT]


def run_one(rank: int, declared: dict[str, Any], context: str) -> list[Any]:
    collective = stagereg.build("joinable", "collective", collectives=[declared])
    results = []
    with {"ours": stagereg.Join, "torch's": TorchJoin}[context]([collective]):
        for _ in range(LENGTHS[rank]):
            (result,) = collective(mine(rank, tuple(declared.get("shape", ())), collective.collectives[0].dtype))
            results.append([each.item() for each in result] if isinstance(result, list) else result.tolist())
    return results


@pytest.mark.parametrize("context", ["ours", "torch's"])
def test_active_ranks_have_the_results_over_the_active_ranks(context: str) -> None:
    outcomes = run_ranks(run_all, 3, args=(context,), timeout_s=60)
    for i, (declared, rank, right) in enumerate(RIGHT):
        assert outcomes[rank][i] == right, declared


def in_a_part(rank: int, world_size: int, lengths: tuple[int, ...]) -> list[Any]:
    """All ranks but the first train."""
    group = dist.new_group(list(range(1, world_size)))
    return [two_models(rank - 1, lengths, divide, group) for divide in (True, False)] if rank else []


def two_models(rank: int, lengths: tuple[int, ...], divide: bool, group: Any) -> Any:
    """The parameters of both models at the end, and the results of two collectives in each step."""
    declared = [Collective("all_reduce", (2,)), {"op": "all_reduce", "dtype": "int64", "reduce": "max"}]
    both = stagereg.build("joinable", "collective", collectives=declared, process_group=group)
    one, two = (DistributedDataParallel(net(Case()), process_group=group) for _ in range(2))
    first = torch.optim.Adam(one.parameters(), lr=0.05)
    second = ZeroRedundancyOptimizer(two.parameters(), torch.optim.Adam, process_group=group, lr=0.05)
    seen = []
    with stagereg.Join([one, both, first, two, second], divide_by_initial_world_size=divide):
        for step in range(lengths[rank]):
            first.zero_grad()
            one(batch(rank, 0, step)).sum().backward()
            pair, most = both(torch.tensor([1.0, 10.0]), torch.tensor(step))
            first.step()
            second.zero_grad()
            two(batch(rank, 1, step)).square().sum().backward()
            second.step()
            seen.append((pair.tolist(), most.item()))
    return [param.detach() for model in (one, two) for param in model.parameters()], seen


def in_one_process(lengths: tuple[int, ...], divide: bool) -> list[torch.Tensor]:
    one, two = net(Case()), net(Case())
    first, second = (torch.optim.Adam(model.parameters(), lr=0.05) for model in (one, two))
    for step in range(max(lengths)):
        active = [rank for rank, length in enumerate(lengths) if length > step]
        divisor = len(lengths) if divide else len(active)
        first.zero_grad()
        second.zero_grad()
        for rank in active:
            (one(batch(rank, 0, step)).sum() / divisor).backward()
            (two(batch(rank, 1, step)).square().sum() / divisor).backward()
        first.step()
        second.step()
    return [param.detach() for model in (one, two) for param in model.parameters()]


def test_two_models_and_collectives_of_a_part_of_the_world() -> None:
    lengths = (1, 4, 2)
    active = [sum(length > step for length in lengths) for step in range(max(lengths))]
    results = [([1.0 * ranks, 10.0 * ranks], step) for step, ranks in enumerate(active)]
    right = [in_one_process(lengths, divide) for divide in (True, False)]
    for length, outcomes in zip(lengths, run_ranks(in_a_part, 4, args=(lengths,), timeout_s=30)[1:], strict=True):
        for (params, seen), wanted in zip(outcomes, right, strict=True):
            assert difference(params, wanted) < EXACT
            assert seen == results[:length]


def undeclared(rank: int, world_size: int) -> list[str]:
    collective = stagereg.build("joinable", "collective", collectives=[{"op": "all_reduce", "shape": [2]}])
    answers = []
    with stagereg.Join([collective]):
        for wrong in ((torch.ones(3),), (torch.ones(2, dtype=torch.float64),), (torch.ones(2), torch.ones(2))):
            if rank == 0:  # were anything sent, the other rank would answer it and the counts would differ
                with pytest.raises(JoinError) as error:
                    collective(*wrong)
                answers.append(str(error.value))
        (total,) = collective(torch.ones(2))
        answers.append(str(total.tolist()))
    return answers


def test_an_undeclared_collective_is_refused_before_sending() -> None:
    (shape, dtype, number, total), other = run_ranks(undeclared, 2, timeout_s=30)
    assert "declared for torch.float32 of shape (2,) but got torch.float32 of shape (3,)" in shape
    assert "got torch.float64 of shape (2,)" in dtype
    assert number == "1 collectives are declared but 2 tensors were given"
    assert [total] == other == ["[2.0, 2.0]"]
