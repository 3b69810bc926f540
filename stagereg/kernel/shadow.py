"""The join wire: the collectives by which ranks with data and ranks without stay in step.

Each training step, an active rank *announces* itself (adds one) and a joined rank *counts* (adds zero) in the same
all-reduce. If the join is to throw, a second all-reduce tells the active ranks to stop. The sequence, shapes and dtypes
are those of ``torch.distributed.algorithms.join`` (torch 2.13), so ranks that run torch's ``Join`` and ranks that run
this one can share a job. A joined rank then *shadows* what the active ranks do: the same collectives, on values that
leave the others' result alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from stagereg.errors import JoinError, UnevenInputsError, nearest

__all__ = ["PEER_EXHAUSTED", "Collective", "TorchWire"]

PEER_EXHAUSTED = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
"""What an active rank raises, in torch's words."""

Op = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"]
Reduction = Literal["sum", "avg", "product", "min", "max"]


class TorchWire:
    """One rank's end of the wire.

    Args:
        group: the process group of the joinables.
        device: where the wire's one-element tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    def announce(self, present: bool = True) -> dist.Work:
        """Active rank, once a step and before its collectives: add one to the step's sum.

        When the returned work is done, its tensor holds the number of active ranks.

        Args:
            present: False matches the collective without being counted.
        """
        mine = torch.full((1,), float(present), device=self.device)
        work = dist.all_reduce(mine, group=self.group, async_op=True)
        assert work is not None
        return work

    def count_active(self) -> int:
        """Joined rank, once a step: how many ranks are still active. Waits for them."""
        return int(self._sum(0.0))

    def raise_if_exhausted(self, joined: bool = False) -> None:
        """Rank that may have to throw, after it has announced or counted: raise if it, or another, is out of data."""
        if self._sum(float(joined)):
            rank = dist.get_rank(self.group) if joined else None
            raise UnevenInputsError(PEER_EXHAUSTED if rank is None else f"Rank {rank} exhausted all inputs.", rank)

    def _sum(self, mine: float) -> float:
        total = torch.full((1,), mine, device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.item()


@dataclass(frozen=True)
class Collective:
    """A collective that every rank runs each step, declared so that a joined rank can shadow it.

    Attributes:
        op: its name in ``torch.distributed``. ``all_reduce``, ``reduce`` and ``broadcast`` work in place.
        shape: of the tensor that one rank puts in; ``reduce_scatter`` cuts its first dimension in world-size parts.
        dtype: of that tensor, as a ``torch.dtype`` or its name.
        reduce: how values are combined, where they are.
        rank: the root of ``reduce`` and ``broadcast``: a global rank.
    """

    op: Op
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    reduce: Reduction = "sum"
    rank: int = 0

    def __post_init__(self) -> None:
        for what, value, choices in (("op", self.op, get_args(Op)), ("reduce", self.reduce, get_args(Reduction))):
            if value not in choices:
                close = nearest(value, choices)
                raise JoinError(f"a collective's {what} cannot be {value!r}.{close} One of: {', '.join(choices)}")
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if not isinstance(dtype, torch.dtype):
            raise JoinError(f"a collective's dtype must be a torch dtype or its name, not {self.dtype!r}")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(self.shape))

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that is not as declared, before ranks that trust the declaration meet it on the wire."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise JoinError(
                f"{self.op} was declared for {self.dtype} of shape {self.shape} but got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; joined ranks would answer with the declared one. Declare what the step sends."
            )

    def neutral(self, device: torch.device) -> torch.Tensor:
        """The value that leaves the other ranks' result alone. An ``avg`` still divides by the whole world."""
        value: float = 0
        if self.reduce == "product":
            value = 1
        elif self.reduce in ("min", "max"):
            value = _bound(self.dtype, lowest=self.reduce == "max")
        return torch.full(self.shape, value, dtype=self.dtype, device=device)

    def issue(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Run it and wait. Returns ``tensor``, or what ``all_gather`` (a list) and ``reduce_scatter`` (a part) made."""
        op = getattr(dist.ReduceOp, self.reduce.upper())
        if self.op == "barrier":
            dist.barrier(group=group)
        elif self.op == "all_reduce":
            dist.all_reduce(tensor, op=op, group=group)
        elif self.op == "reduce":
            dist.reduce(tensor, self.rank, op=op, group=group)
        elif self.op == "broadcast":
            dist.broadcast(tensor, self.rank, group=group)
        elif self.op == "all_gather":
            gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, tensor, group=group)
            return gathered
        else:
            parts = [part.contiguous() for part in tensor.chunk(dist.get_world_size(group))]
            part = torch.empty_like(parts[0])
            dist.reduce_scatter(part, parts, op=op, group=group)
            return part
        return tensor


def _bound(dtype: torch.dtype, lowest: bool) -> float:
    if dtype == torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max
