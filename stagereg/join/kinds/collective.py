"""``collective``: a declared list of collectives, for code that talks to other ranks by itself each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stagereg.errors import ConfigError, JoinError, nearest
from stagereg.join.joinable import BuiltInJoinable, JoinHook, notify, serves
from stagereg.kernel.shadow import Collective
from stagereg.registry import register

__all__ = ["CollectiveHook", "CollectiveJoinable"]


@register("join_hook", "collective")
class CollectiveHook(JoinHook):
    """Runs the declared collectives once per step of the active ranks, with values that leave their results alone.

    Args:
        joinable: declares them.
    """

    def __init__(self, joinable: CollectiveJoinable, /) -> None:
        self.joinable = serves(self, joinable, CollectiveJoinable)

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
        collectives: :class:`~stagereg.kernel.shadow.Collective` s, or mappings of their fields as they come from a
            config: ``[{op: all_reduce, shape: [2], dtype: float64, reduce: sum}]``.
        process_group: of the collectives; None is the default group.
        device: of the tensors.
        hook: another hook in the place of ``collective``.

    Attributes:
        last_sent: by index, what this rank sent last as the root of a broadcast.

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
        self.last_sent: dict[int, torch.Tensor] = {}

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
        for collective, tensor in zip(self.collectives, tensors, strict=True):
            collective.check(tensor)
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
    if not isinstance(collective, Mapping):
        raise ConfigError(f"a collective is declared by its fields, as in {{op: all_reduce}}, not by {collective!r}")
    fields = Collective.__dataclass_fields__
    for key in collective:
        if key not in fields:
            raise ConfigError(
                f"a collective has no field {key!r}.{nearest(str(key), fields)} It has: {', '.join(fields)}"
            )
    if "op" not in collective:
        raise ConfigError("a collective needs an op, as in {op: all_reduce}")
    return Collective(**collective)
