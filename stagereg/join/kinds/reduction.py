"""What ``ddp`` and ``fsdp2`` share: a module of which the ranks reduce the gradients.

A joined rank has to do with the gradients of a step what the loop of the active ranks does: zero them, drop them, or
add to them. So, while it has data, each rank looks at one gradient as a backward begins
(:mod:`stagereg.join.carryover`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stagereg.join.carryover import ZeroGradPolicy, policy_of
from stagereg.join.joinable import JoinHook
from stagereg.join.step_tracker import TrackedJoinable

__all__ = ["ReducingJoinable", "local"]


class ReducingJoinable(TrackedJoinable):
    """Joins a module of which the ranks reduce the gradients.

    Attributes:
        divides_by_world: whether gradients are divided by the number of ranks that train the module, and not by the
            number of active ones.
        watched: parameters; the gradient of the first that has one shows what the loop does with them.
        reduces: between a step's forward and its backward, whether that will reduce the gradients; else ``None``.
        is_unfinished: whether the last backward has not reduced them, so that they wait for the next one.
    """

    reduces_gradients = True
    module: Any

    def __init__(
        self,
        hook: Callable[..., JoinHook] | None,
        process_group: dist.ProcessGroup,
        device: torch.device,
        stands_for: Any = None,
    ) -> None:
        super().__init__(hook, process_group, device, stands_for)
        self.divides_by_world = True
        self.watched: Sequence[torch.Tensor] = ()
        self.reduces: bool | None = None
        self.reduced = self.is_unfinished = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the module's hook, and begin to watch the module: torch's ``Join`` calls nothing else."""
        self.detach()
        self.divides_by_world = bool(kwargs.get("divide_by_initial_world_size", True))
        return super().join_hook(**kwargs)

    def watch(self) -> None:
        """Begin to watch the module and its gradients."""
        super().watch()
        self.policy.steps = 0
        if self.watched:
            self.policy.set_active(True)

    def detach(self) -> None:
        """Stop watching."""
        self.watched, self.reduces = (), None
        self.divides_by_world, self.reduced, self.is_unfinished = True, False, False
        super().detach()

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        """Whether a step depends on which ranks are active: through the divisor."""
        return not divide_by_initial_world_size

    @property
    def policy(self) -> ZeroGradPolicy:
        """What is known of what the loop does with its gradients."""
        return policy_of(self.module, self.join_process_group)

    def on_backward(self) -> None:
        """A backward has begun, which is about to add to the gradients: look at what the loop has left there."""
        if self.reduces is None:
            return
        if self.watched and self.policy.step_begins:
            gradients = (param.grad for param in self.watched)
            self.policy.observe(next((local(grad) for grad in gradients if grad is not None), None))
        self.policy.step_begins = self.reduces
        self.policy.steps += self.reduces
        self.is_unfinished, self.reduces = not self.reduces, None

    def shadowed(self) -> None:
        """A shadowed step has been reduced, and what this rank had added up has been part of it."""
        self.policy.step_begins, self.is_unfinished = True, False
        self.policy.steps += 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which may be a whole one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
