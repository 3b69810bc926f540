"""What a training loop does with the gradients of one step before the next: zero them, drop them, or carry them over.

A rank without data has to do the same, without seeing the loop. It goes by what the loop did while it had data. A rank
that had data for less than two steps cannot know, and asks one that has seen more, through the process group's store.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from stagereg.join.failure import limit_of, was_aborted
from stagereg.kernel.channel import wait_for_keys

__all__ = ["GradCarryover", "Policy", "ZeroGradPolicy", "policy_of"]

Policy = Literal["drops", "zeroes", "carries"]

_TURN_S = 0.2
"""Seconds between two looks at whether the join has failed."""


class ZeroGradPolicy:
    """What is known of one module's loop, on this rank and through the store. All ranks make these in the same order.

    What a look at the gradients finds stays on the device until it is asked for.

    Attributes:
        store: of what ranks publish of this module.
        step_begins: whether the last backward was synchronized, so that the next one begins a step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.step_begins = True
        self._nonzero: torch.Tensor | None = None  # whether there were gradients as the last step began
        self._in_doubt = True
        self._group = group
        self.store = PrefixStore(f"stagereg/carry/{_numbers[group.group_name]}", group.get_group_store())
        _numbers[group.group_name] += 1

    def current(self) -> Policy:
        """What the loop does with its gradients between steps, as far as it is known."""
        if self._nonzero is None:
            return "drops"
        return "carries" if self._nonzero.item() else "zeroes"

    def observe(self, gradient: torch.Tensor | None, in_doubt: bool) -> None:
        """Look at a gradient to which a backward is about to add.

        Args:
            gradient: what is there.
            in_doubt: True in the first step, when the gradient does not yet show what the loop does between steps.
        """
        self._nonzero = None if gradient is None else gradient.detach().ne(0).any()
        if self._in_doubt and not in_doubt:
            self._in_doubt = False
            self.store.set("policy", self.current())

    def set_active(self, active: bool) -> None:
        """Publish whether this rank has data, and will publish what its loop does; nothing if that is known here."""
        if self._in_doubt:
            self.store.set(f"active/{self._group.rank()}", "yes" if active else "no")

    def ask(self) -> None:
        """End the doubt, if there is one and some active rank is watched: that rank publishes within this step."""
        if not self._in_doubt:
            return
        keys = [f"active/{rank}" for rank in range(self._group.size())]
        active = (self.store.check([key]) and self.store.get(key) == b"yes" for key in keys)
        if self.store.check(["policy"]) or any(active):
            self._wait()
            policy = self.store.get("policy").decode()
            self._nonzero = None if policy == "drops" else torch.tensor(policy == "carries")
        self._in_doubt = False

    def _wait(self) -> None:
        """Wait as one does in a collective of the group: with its time limit, and until it is aborted."""
        limit = limit_of(self._group)
        deadline = time.monotonic() + limit
        while not wait_for_keys(self.store, "policy", _TURN_S):
            if was_aborted(self._group):
                raise dist.DistError("the process group was aborted")
            if time.monotonic() > deadline:
                raise RuntimeError(f"Operation timed out! No rank published within {limit:g} s what its loop does.")


def policy_of(module: nn.Module, group: dist.ProcessGroup) -> ZeroGradPolicy:
    """Return what is known of the loop of a module, in this join and those before."""
    if module not in _policies:
        _policies[module] = ZeroGradPolicy(group)
    return _policies[module]


_policies: weakref.WeakKeyDictionary[nn.Module, ZeroGradPolicy] = weakref.WeakKeyDictionary()
"""Global, as the module is all that two joins over it have in common; it must not get attributes of ours."""
_numbers: Counter[str] = Counter()


class GradCarryover:
    """Looks at the gradients of a DDP module whenever a backward is about to add to them, until :meth:`remove`.

    Joined ranks ask it what the loop does with its gradients, and whether theirs are part of the next reduction.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # The smallest gradient is the cheapest to look at. Where parameters may be left out of a step, the first of all
        # that gets its gradient shows the moment at which none has been added to yet.
        params = sorted((param for param in ddp.parameters() if param.requires_grad), key=torch.numel)
        watched = params if ddp.find_unused_parameters or ddp.static_graph else params[:1]
        self._params = [weakref.ref(param) for param in watched]
        self._policy = policy_of(ddp, ddp.process_group)
        self._steps = 0
        self._ran = False
        self._will_sync = True
        self._forward_ran = False
        self._handles = [param.register_hook(self._before_accumulation) for param in watched]
        self._policy.set_active(True)

    def before_forward(self, will_sync: bool) -> None:
        """A forward begins that builds a graph; its backward will reduce the gradients, or only add them up."""
        self._forward_ran = True
        self._will_sync = will_sync

    def _before_accumulation(self, _: torch.Tensor) -> None:
        if not self._forward_ran:
            return
        self._forward_ran = False
        if self._policy.step_begins:
            grads = (None if param is None else param.grad for param in (ref() for ref in self._params))
            self._policy.observe(next((grad for grad in grads if grad is not None), None), in_doubt=self._steps == 0)
        self._policy.step_begins = self._will_sync
        self._steps += self._will_sync
        self._ran = True

    def before_shadowed_step(self) -> None:
        """This rank is out of data; called before the collectives of each step that it shadows."""
        self._policy.set_active(False)

    @property
    def known_policy(self) -> Policy:
        """What the loop does with its gradients between steps, as far as it is known here."""
        return self._policy.current()

    def policy(self) -> Policy:
        """The same, after a look at what other ranks know; in a shadowed step, before its reduction."""
        if self._steps:  # in the first step no rank knows yet
            self._policy.ask()
        return self._policy.current()

    def after_shadowed_step(self) -> None:
        """A shadowed step has been reduced, and what this rank had added up has been part of it."""
        self._policy.step_begins = True
        self._steps += 1

    @property
    def is_unfinished(self) -> bool:
        """Whether this join's last backward was not synchronized, so that its gradients wait for the next one."""
        return self._ran and not self._policy.step_begins

    def remove(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()
