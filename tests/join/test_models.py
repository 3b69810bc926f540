"""Whole programs: compressed gradients, two models, a join in a part of the world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from .reference import EXACT, batch, descend, difference, mlp


def seeded(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(dtype)


def values(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for module in modules for p in module.parameters()]


HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "builtin allreduce": dist.BuiltinCommHookType.ALLREDUCE,
    "builtin fp16": dist.BuiltinCommHookType.FP16_COMPRESS,
}


def all_compressed(rank: int, world_size: int) -> dict[tuple[str, bool], Any]:
    return {(hook, zeroing): compressed(rank, hook, zeroing, 3) for hook in ("", *HOOKS) for zeroing in (True, False)}


def compressed(rank: int, hook: str, zeroing: bool, length: int) -> Any:
    ddp = DistributedDataParallel(seeded(torch.float32))
    if hook.startswith("builtin"):
        ddp._register_builtin_comm_hook(HOOKS[hook])
    elif hook:
        ddp.register_comm_hook(None, HOOKS[hook])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    with stagereg.Join([ddp, optimizer], divide_by_initial_world_size=hook == ""):
        for step in range(length + rank):
            if zeroing:
                optimizer.zero_grad()
            ddp(batch(rank, 0, step).float()).sum().backward()
            optimizer.step()
    return values(ddp), [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]


def test_a_communication_hook_keeps_replicas_equal() -> None:
    one, other = run_ranks(all_compressed, 2, timeout_s=60)
    assert len(one) == 2 * (1 + len(HOOKS))
    for (hook, zeroing), (params, momentum) in one.items():
        assert difference(params, one["", zeroing][0]) < 2e-3, (hook, zeroing)
        assert difference([params, momentum], list(other[hook, zeroing])) == 0.0, (hook, zeroing)


def in_a_part(rank: int, world_size: int, lengths: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """All ranks but the first train."""
    group = dist.new_group(list(range(1, world_size)))
    return [two_models(rank - 1, lengths, divide, group) for divide in (True, False)] if rank else []


def two_models(rank: int, lengths: tuple[int, ...], divide: bool, group: Any) -> list[torch.Tensor]:
    one, two = (DistributedDataParallel(seeded(), process_group=group) for _ in range(2))
    first = torch.optim.Adam(one.parameters(), lr=0.05)
    second = ZeroRedundancyOptimizer(two.parameters(), torch.optim.Adam, process_group=group, lr=0.05)
    with stagereg.Join([one, first, two, second], divide_by_initial_world_size=divide):
        for step in range(lengths[rank]):
            first.zero_grad()
            one(batch(rank, 0, step)).sum().backward()
            first.step()
            second.zero_grad()
            two(batch(rank, 1, step)).square().sum().backward()
            second.step()
    return values(one, two)


def test_two_models_of_a_part_of_the_world_in_the_loops_order() -> None:
    lengths = (1, 4, 2)
    right = [in_one_process(lengths, divide) for divide in (True, False)]
    for outcomes in run_ranks(in_a_part, 4, args=(lengths,), timeout_s=30)[1:]:
        assert difference(outcomes, right) < EXACT


def in_one_process(lengths: tuple[int, ...], divide: bool) -> list[torch.Tensor]:
    one, two = seeded(), seeded()
    first, second = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (one, two))
    losses = [
        (first, lambda rank, step: one(batch(rank, 0, step)).sum()),
        (second, lambda rank, step: two(batch(rank, 1, step)).square().sum()),
    ]
    descend(lengths, losses, divide)
    return values(one, two)
