"""Every rank ends a join of an FSDP2 module with the numbers of a single process that has all the data of each step."""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import stagereg
from stagereg.testing import run_ranks

from ...join.test_numbers import CASES, wrong
from ...support.reference import Case, batch

NAMES = (
    *("adam", "sgd with momentum", "a rank without batches", "a schedule", "a function", "divided by the active ranks"),
    *("gradients never zeroed", "zeroed in place at the end", "zeroed between forward and backward"),
    *("a rank that never sees a second step", "out of data inside an accumulation"),
    *("out of data inside an accumulation, active ranks", "keywords, nested outputs, two forwards"),
)
LIBRARIES = ("ours", "torch", "counted", "planned")
WAYS = [(library, reshard) for reshard in (True, False) for library in LIBRARIES]
"""Of the library, and whether parameters are sharded between a forward and its backward."""


def sharded(name: str, reshard: bool) -> Case:
    wrap = {"reshard_after_forward": reshard}
    return replace(CASES[name], column="fsdp2", wrap=wrap, one_join=False)  # as torch's has to be


@pytest.mark.parametrize("names", [NAMES[::3], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_rank_has_the_numbers_of_a_single_process(names: tuple[str, ...]) -> None:
    """Every case in one of the ways, so that every way meets several cases."""
    runs = {}
    for name, (library, reshard) in zip(names, itertools.cycle(WAYS), strict=False):
        runs[name] = (sharded(name, reshard), library)
    runs["replicated shards"] = (Case(column="hsdp", lengths=(1, 1, 2, 3)), "ours")
    assert wrong(runs) == {}


def single(dtype: torch.dtype, root: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype) if root is None else root
    return fully_shard(module)


def divided(rank: int, world_size: int) -> Any:
    """Gradients of a step with one rank of two, without and with a divisor of one's own; what is left of it."""
    results: dict[Any, float] = {}
    for dtype in (torch.float32, torch.float64):
        for own in (None, 4.0):
            module = single(dtype)
            if own is not None:
                module.set_gradient_divide_factor(own)
            seen: list[float] = []
            note = functools.partial(noted, seen, module)
            with stagereg.Join([module, note], divide_by_initial_world_size=False):
                for _ in range(1 + rank):
                    module.zero_grad()
                    module(torch.ones(2, 4, dtype=dtype)).sum().backward()
                    note()
            results[str(dtype), own] = seen[-1]
            group = module._get_fsdp_state()._fsdp_param_group
            assert group.gradient_divide_factor == own
            assert not group.force_sum_reduction_for_comms
            assert len(module._forward_pre_hooks) == 1 == len(module._forward_hooks)  # FSDP2's own
    return results


def noted(seen: list[float], module: Any) -> None:
    seen.append(float(module[1].bias.grad.full_tensor()))


def test_the_divisor_is_scaled_in_every_dtype_and_put_back() -> None:
    for results in run_ranks(divided, 2, timeout_s=30):
        # Two samples on one of two ranks: over the active rank 2, over a divisor of one's own for two ranks 2 * 2 / 4.
        wanted = {None: 2.0, 4.0: 1.0}
        assert results == {(str(dtype), own): wanted[own] for dtype in (torch.float32, torch.float64) for own in wanted}


class Opaque:
    """A batch that only its module can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Odd(nn.Module):
    """Takes opaque batches too, and cannot run on an empty one unless it is ``careful``."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.careful = careful

    def forward(self, x: Any) -> torch.Tensor:
        x = x.x if isinstance(x, Opaque) else x
        result: torch.Tensor = self.linear(x.flatten(1) if self.careful else x.view(len(x), -1))
        return result


ODD: dict[str, tuple[int, bool, bool, tuple[str, ...]]] = {
    "cannot run on nothing": (0, False, False, ("Odd cannot run on an empty batch",)),
    "cannot be emptied": (
        0,
        True,
        True,
        ("it is not a tensor, array", "stagereg.empty_batch.register(CLASS, function)"),
    ),
    "cannot be emptied, and need not": (2, True, True, ("0.400000",)),
}
"""Steps of the first rank, whether the module is careful, and its batches opaque; the parts of the result."""


def odd(rank: int, world_size: int, first: int, careful: bool, opaque: bool) -> str:
    module = single(torch.float64, Odd(careful).double())
    model = stagereg.build("joinable", "fsdp2", module=module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.no_grad():
        module.linear.bias.fill_(1.0)
    try:
        with stagereg.Join([model, optimizer]):
            for step in range(2 if rank else first):
                x = batch(rank, 0, step)
                optimizer.zero_grad()
                module(Opaque(x) if opaque else x).sum().backward()
                optimizer.step()
    except stagereg.StageregError as error:
        return str(error)
    return f"{module.linear.bias.full_tensor().item():.6f}"


@pytest.mark.parametrize("name", ODD)
def test_a_module_that_needs_samples_is_named(name: str) -> None:
    *options, parts = ODD[name]
    for text in run_ranks(odd, 2, args=tuple(options), timeout_s=30):
        assert all(part in text for part in parts), text


def kept_and_switched(rank: int, world_size: int) -> tuple[bool, str]:
    module = single(torch.float64)
    with stagereg.Join([module]):
        x = batch(rank, 0, 0)
        module(x).sum().backward()
        there = weakref.ref(x)
        del x
        is_gone = there() is None
    try:
        with stagereg.Join([module]):
            loss = module(batch(rank, 0, 0)).sum()
            module.set_requires_gradient_sync(False)
            loss.backward()
    except stagereg.StageregError as error:
        return is_gone, str(error)
    return is_gone, ""


def test_no_batch_is_kept_and_no_late_switch_is_taken() -> None:
    for is_gone, text in run_ranks(kept_and_switched, 2, timeout_s=30):
        assert is_gone
        assert "call it before the forward" in text
