"""What a training loop does with the gradients of one step before the next: zero them, drop them, or carry them over.

A rank without data has to do the same, without seeing the loop. It goes by what the loop did while it had data. A rank
that had data for less than two steps cannot know, and asks one that has seen more, through the process group's store.
"""

from __future__ import annotations

import weakref
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from stagereg.join.session import JoinSession
from stagereg.kernel.channel import resources_of, wait_for_keys

__all__ = ["Policy", "ZeroGradPolicy", "policy_of"]

Policy = Literal["drops", "zeroes", "carries"]


class ZeroGradPolicy:
    """What is known of one module's loop, on this rank and through the store. All ranks make these in the same order.

    What a look at the gradients finds stays on the device until it is asked for.

    Attributes:
        store: of what ranks publish of this module.
        steps: how many steps have been reduced in this join, on this rank or while it had no data.
        step_begins: whether the last backward was reduced, so that the next one begins a step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.steps = 0
        self.step_begins = True
        self._nonzero: torch.Tensor | None = None  # whether there were gradients as the last step began
        self._in_doubt = True
        self._active = False
        self.store = PrefixStore(resources_of(group).next_name("carry"), group.get_group_store())

    def current(self) -> Policy:
        """What the loop does with its gradients between steps, as far as it is known."""
        if self._nonzero is None:
            return "drops"
        return "carries" if self._nonzero.item() else "zeroes"

    def observe(self, gradient: torch.Tensor | None) -> None:
        """A step's backward is about to add to a gradient; the first one does not show what the loop does between."""
        self._nonzero = None if gradient is None else gradient.detach().ne(0).any()
        if self._in_doubt and self.steps:
            self._in_doubt = False
            self.store.set("policy", self.current())

    def set_active(self, active: bool) -> None:
        """Publish whether this rank has data, and will publish what its loop does; nothing if that is known here."""
        if self._in_doubt and active != self._active:
            self._active = active
            self.store.add("active", 1 if active else -1)

    def ask(self, session: JoinSession | None) -> None:
        """Rank without data, in a step: end the doubt. A rank with data publishes its policy within this step.

        It waits by ``session``, or in torch's ``Join``, where there is none, for as long as the store does.
        """
        if not self._in_doubt or not self.steps:  # in the first step no rank knows yet
            return
        self._in_doubt = False
        if self.store.check(["policy"]) or self.store.add("active", 0):
            if session is not None:
                session.detector.wait(lambda seconds: wait_for_keys(self.store, "policy", seconds), "the backward")
            policy = self.store.get("policy").decode()
            self._nonzero = None if policy == "drops" else torch.tensor(policy == "carries")


def policy_of(module: nn.Module, group: dist.ProcessGroup) -> ZeroGradPolicy:
    """Return what is known of the loop of a module, in this join and those before."""
    if module not in _policies:
        _policies[module] = ZeroGradPolicy(group)
    return _policies[module]


_policies: weakref.WeakKeyDictionary[nn.Module, ZeroGradPolicy] = weakref.WeakKeyDictionary()
"""Global, as the module is all that two joins over it have in common; it must not get attributes of ours."""
