"""Where a training step begins: with the forward of a module, which is watched once for all that needs it.

A step begins with the first forward that builds a graph, and ends when a backward through one of its outputs begins. So
a second forward before that backward is no second step, and a forward under ``no_grad`` is none; unless the loop runs
its body on all ranks, where the first forward on each batch is a step, whatever it is for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagereg.join.joinable import BuiltInJoinable, JoinHook, notify
from stagereg.kernel.membership import Membership
from stagereg.kernel.shadow import TorchWire

__all__ = ["StepTracker", "TrackedJoinable", "differentiable"]


class StepTracker:
    """Watches the forwards of a joinable's module until :meth:`remove`, and calls the joinable's methods.

    Args:
        joinable: its methods are called while its ``_join_config`` is enabled.
        module: whose forward begins a step.

    Attributes:
        begun: how many steps have begun.
        is_open: whether a step has begun of which no backward has run.
        in_step: whether a forward runs that has begun a step.
        handles: of hooks, which are removed with it.
    """

    def __init__(self, joinable: TrackedJoinable, module: nn.Module) -> None:
        self.begun = 0
        self.is_open = False
        self.in_step = False
        self._joinable = joinable
        self._seen = False  # whether the joinable takes part in the forward that runs
        self.handles: list[Any] = [
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self.handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen = False
        if _in_backward() or not self._joinable._join_config.enable:
            return
        training = torch.is_grad_enabled()
        begins = not self.is_open and (training or self._joinable.awaits_forward())
        if begins:
            self._joinable.on_step()  # if it raises, no step has begun
            self.begun += 1
            self.is_open = training
        self._seen, self.in_step = True, begins
        self._joinable.before_forward(begins, args, kwargs)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._seen or _in_backward():
            return
        self._seen, began, self.in_step = False, self.in_step, False
        self._joinable.after_forward(began)
        if torch.is_grad_enabled():
            tensors = differentiable(output)
            for tensor in tensors:
                tensor.register_hook(self._on_backward)
            if not tensors:  # no backward can be seen
                self.is_open = False

    def _on_backward(self, gradient: torch.Tensor) -> None:
        self.is_open = False
        self._joinable.on_backward()


class TrackedJoinable(BuiltInJoinable):
    """A joinable whose steps begin with the forward of its module.

    It watches from ``join_hook`` on, until :meth:`detach`.
    """

    announces_itself = True
    tracker: StepTracker | None = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook, and begin to watch the module: torch's ``Join`` calls nothing else."""
        if self.tracker is not None:  # torch's ``Join`` does not detach
            self.detach()
        hook = super().join_hook(**kwargs)
        self.watch()
        return hook

    def watch(self) -> None:
        """Begin to watch the module, which is not watched."""
        assert self.module is not None
        self.tracker = StepTracker(self, self.module)

    def detach(self) -> None:
        """Stop watching."""
        if self.tracker is not None:
            self.tracker.remove()
            del self.tracker
        super().detach()

    @property
    def has_unfinished_step(self) -> bool:
        """Whether a step of this rank has begun without a backward."""
        return self.tracker is not None and self.tracker.is_open

    @property
    def membership(self) -> Membership | None:
        """How the join knows who has data; ``None`` on torch's wire."""
        return None if self.session is None else self.session.membership

    @property
    def will_reduce(self) -> bool:
        """Whether the next backward reduces the gradients among the ranks."""
        return True

    def active_that_reduce(self) -> int:
        """Joined rank: how many active ranks will reduce their gradients in this step."""
        if (membership := self.membership) is not None:
            return int(membership.read().syncing)
        return TorchWire(self.join_process_group, self.join_device).count_active()

    def awaits_forward(self) -> bool:
        """Whether the loop has given its body a batch of which no step has begun, so that any forward is one."""
        return self.session is not None and self._join_config.is_first_joinable and self.session.awaits_step

    def on_step(self) -> None:
        """A step begins: announce it, before the forward does anything."""
        notify(self)

    def before_forward(self, is_step: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins. Called after :meth:`on_step` if it begins a step."""

    def after_forward(self, is_step: bool) -> None:
        """A forward has ended, or has raised."""

    def on_backward(self) -> None:
        """A gradient has reached an output of the module. Called once for each of them."""


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors in ``output`` through which a backward can run."""
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    tensors = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if tensor.requires_grad]


def _in_backward() -> bool:
    """Whether a backward runs; it computes forwards again of which the results were not kept (checkpointing)."""
    return torch._C._current_graph_task_id() != -1
