"""``collective``: a declared list of collectives, for code that runs them by itself each step.

Joined ranks run the same ones, on values that leave the others' result alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from stagereg.errors import ConfigError, JoinError, one_of
from stagereg.join.joinable import BuiltInHook, BuiltInJoinable, JoinHook, notify
from stagereg.registry import register
from stagereg.spec import refuse_unknown

Op = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"]
Reduction = Literal["sum", "avg", "product", "min", "max"]


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
        one_of("a collective's op", self.op, get_args(Op))
        one_of("a collective's reduce", self.reduce, get_args(Reduction))
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if not isinstance(dtype, torch.dtype):
            raise JoinError(f"a collective's dtype must be a torch dtype or its name, not {self.dtype!r}")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(self.shape))

    def neutral(self, device: torch.device) -> torch.Tensor:
        """The value that leaves the other ranks' result alone. An ``avg`` still divides by the whole world."""
        value: float = self.reduce == "product"
        if self.reduce in ("min", "max"):
            limits = (False, True) if self.dtype == torch.bool else (-math.inf, math.inf)
            if not (self.dtype.is_floating_point or self.dtype == torch.bool):
                limits = torch.iinfo(self.dtype).min, torch.iinfo(self.dtype).max
            value = limits[self.reduce == "min"]
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


@register("join_hook", "collective")
class CollectiveHook(BuiltInHook["CollectiveJoinable"]):
    """Runs the declared collectives once per step of the active ranks, with values that leave their results alone."""

    def main_hook(self) -> None:
        """Take part in all of them; the root of a broadcast goes on sending what it sent last."""
        declared = self.joinable
        for i, collective in enumerate(declared.collectives):
            tensor = declared.last_sent.get(i, collective.neutral(declared.join_device))
            collective.issue(tensor, declared.join_process_group)


@register("joinable", "collective")
class CollectiveJoinable(BuiltInJoinable):
    """Runs declared collectives, and has joined ranks take part in them.

    Call it once a step with one tensor per declared collective; it checks that the tensors are as declared, announces
    the rank if it is the first joinable, and runs them in order. Code that runs the collectives itself calls
    ``Join.notify_join_context(this)`` before them instead.

    Args:
        collectives: :class:`Collective` s, or mappings of their fields as they come from a
            config: ``[{op: all_reduce, shape: [2], dtype: float64, reduce: sum}]``.
        process_group: of the collectives; None is the default group.
        device: of the tensors.
        hook: another hook in the place of ``collective``.

    Example::

        total = stagereg.build("joinable", "collective", collectives=[{"op": "all_reduce", "shape": [2]}])
        with stagereg.Join([total]):
            for batch in loader:
                (sums,) = total(torch.tensor([loss_sum, len(batch)]))
    """

    own_hook = CollectiveHook

    def __init__(
        self,
        collectives: Sequence[Any],
        process_group: dist.ProcessGroup | None = None,
        device: str = "cpu",
        hook: Callable[..., JoinHook] | None = None,
    ) -> None:
        super().__init__(hook, process_group, device)
        self.collectives = [_declared(collective) for collective in collectives]
        if not self.collectives:
            raise JoinError("the collective joinable needs at least one collective to shadow")
        self.last_sent: dict[int, torch.Tensor] = {}  # by index, as the root of a broadcast

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Run the collectives; active ranks, once a step.

        Args:
            tensors: one for each, of the declared shape and dtype; ``all_reduce``, ``reduce`` and ``broadcast`` change
                them in place.

        Returns:
            For each the tensor, or what the collective made: a list for ``all_gather``, a part for ``reduce_scatter``.

        Raises:
            JoinError: a tensor is not as declared; nothing was sent.
            UnevenInputsError: the join is to throw and some rank has run out of data.
        """
        if len(tensors) != len(self.collectives):
            raise JoinError(f"{len(self.collectives)} collectives are declared but {len(tensors)} tensors were given")
        for declared, tensor in zip(self.collectives, tensors, strict=True):
            if tuple(tensor.shape) != declared.shape or tensor.dtype != declared.dtype:
                raise JoinError(
                    f"{declared.op} was declared for {declared.dtype} of shape {declared.shape} but got {tensor.dtype} "
                    f"of shape {tuple(tensor.shape)}, which ranks without data do not expect"
                )
        notify(self)
        group = self.join_process_group
        results = []
        for i, (collective, tensor) in enumerate(zip(self.collectives, tensors, strict=True)):
            if collective.op == "broadcast" and collective.rank == dist.get_rank():
                self.last_sent[i] = tensor.detach().clone()
            results.append(collective.issue(tensor, group))
        return tuple(results)


def _declared(collective: Any) -> Collective:
    if isinstance(collective, Collective):
        return collective
    if not isinstance(collective, Mapping) or "op" not in collective:
        raise ConfigError(f"a collective is declared by its fields, as in {{op: all_reduce}}, not by {collective!r}")
    refuse_unknown("a collective", collective, Collective)
    return Collective(**collective)
