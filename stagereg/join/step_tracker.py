"""A module's forward announces its rank, once a training step.

Where all ranks run stagereg's join, announcing is no business of the module itself, so it can be done for any: DDP,
FSDP, or a plain one. A step begins with the first forward that builds a graph, and ends when a backward through one of
its outputs begins. So a second forward before that backward is no second step, and a forward under ``no_grad`` is none:
unless the loop runs its body on all ranks, where the first forward on each batch is a step, whatever it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["Announcer"]


class Announcer:
    """Watches the forwards of a module until :meth:`remove`.

    Args:
        module: whose forward begins a step.
        begins: called where a step begins, before the forward does anything.
        enters: called before every forward, with whether it begins a step.
        leaves: called after every forward, with whether it began a step; also where the forward raised.
        expects: tells whether the first forward on a batch is due.
    """

    def __init__(
        self,
        module: nn.Module,
        begins: Callable[[], None],
        enters: Callable[[bool], None] = lambda began: None,
        leaves: Callable[[bool], None] = lambda began: None,
        expects: Callable[[], bool] = lambda: False,
    ) -> None:
        self._begins, self._enters, self._leaves, self._expects = begins, enters, leaves, expects
        self._open = False
        self._began = False
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    @property
    def open(self) -> bool:
        """Whether a step has begun of which no backward has run."""
        return self._open

    def close(self) -> None:
        """The step is over, whatever ran of it."""
        self._open = False

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _before(self, *_: Any) -> None:
        training = torch.is_grad_enabled()
        if torch._C._current_graph_task_id() != -1:  # a backward computes again what was not kept for it
            self._began = False
            return
        begins = not self._open and (training or self._expects())
        self._began = False  # if it raises, no step has begun
        if begins:
            self._begins()
            self._open = training
        self._began = begins
        self._enters(self._began)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self._leaves(self._began)
        if torch.is_grad_enabled():
            leaves = [
                leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            for leaf in leaves:
                leaf.register_hook(self._backward)
            if not leaves:  # no backward can be seen
                self._open = False

    def _backward(self, gradient: torch.Tensor) -> None:
        self._open = False
