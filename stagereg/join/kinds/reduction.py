"""What ``ddp`` and ``fsdp2`` share: a module of which the ranks reduce the gradients.

A training loop zeroes the gradients of one step before the next, drops them, or carries them over, and so must a rank
without data. It goes by what it saw while it had data: each rank looks at one gradient as a backward begins. A rank
that had data for less than two steps cannot know, and asks one that has seen more, through the store.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import DTensor

from stagereg.join.session import JoinSession
from stagereg.join.tracked import TrackedJoinable
from stagereg.kernel.channel import resources_of, wait_for_keys


class ReducingJoinable(TrackedJoinable):
    """Joins a module of which the ranks reduce the gradients."""

    reduces_gradients = True
    reduced = False
    watched: Sequence[torch.Tensor] = ()  # the gradient of the first that has one shows what the loop does with them
    reduces: bool | None = None  # between a step's forward and its backward, whether that will reduce the gradients
    is_unfinished = False  # whether the last backward has not reduced them, so that they wait for the next one
    module: Any
    _of_one_join = (*TrackedJoinable._of_one_join, "reduced", "watched", "reduces", "is_unfinished")

    def watch(self) -> None:
        """Begin to watch the module and its gradients."""
        super().watch()
        self.policy.steps = 0
        if self.watched:
            self.policy.set_active(True)

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        """Whether a step depends on which ranks are active: through the divisor."""
        return not divide_by_initial_world_size

    @property
    def policy(self) -> ZeroGradPolicy:
        """What is known of what the loop does with its gradients, in this join and those before."""
        if (found := _policies.get(self.module)) is None:
            found = _policies[self.module] = ZeroGradPolicy(self.join_process_group)
        return found

    def on_backward(self) -> None:
        """A backward has begun, which is about to add to the gradients: look at what the loop has left there."""
        if self.reduces is None:
            return
        policy = self.policy
        if self.watched and policy.step_begins:
            gradients = (param.grad for param in self.watched)
            policy.observe(next((local(grad) for grad in gradients if grad is not None), None))
        if self.reduces and self.session is not None:
            self.session.count_reduction(self)
        policy.step_begins = self.reduces
        policy.steps += self.reduces
        self.is_unfinished, self.reduces = not self.reduces, None

    def shadowed(self) -> None:
        """A shadowed step has been reduced, and what this rank had added up has been part of it."""
        self.policy.step_begins, self.is_unfinished = True, False
        self.policy.steps += 1


class ZeroGradPolicy:
    """What is known of one module's loop, here and through the store. All ranks make these in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.steps = 0  # that have been reduced in this join, on this rank or while it had no data
        self.step_begins = True  # with the next backward, as the last one was reduced
        self.inputs: list[Any] | None = None  # empty ones of each forward in the last step, to run the module on
        self._nonzero: torch.Tensor | None = None  # whether there were gradients as the last step began; on the device
        self._in_doubt = True
        self._active = False
        self.store = PrefixStore(resources_of(group).next_name("carry"), group.get_group_store())

    def current(self) -> Literal["drops", "zeroes", "carries"]:
        """What the loop does with its gradients between steps, as far as it is known."""
        if self._nonzero is None:
            return "drops"
        return "carries" if self._nonzero.item() else "zeroes"

    def forget(self, param: torch.Tensor) -> None:
        """Do with a gradient of the step before what the loop has done with those of the ranks that have data."""
        policy = self.current()
        if policy == "drops":
            param.grad = None
        elif policy == "zeroes" and param.grad is not None:
            param.grad.zero_()

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
        """Rank without data, in a step: end the doubt. A rank with data publishes its policy within this step."""
        if not self._in_doubt or not self.steps:  # in the first step no rank knows yet
            return
        self._in_doubt = False
        if self.store.check(["policy"]) or self.store.add("active", 0):
            self.wait("policy", session, "the backward")
            policy = self.store.get("policy").decode()
            self._nonzero = (
                None if policy == "drops" else torch.tensor(policy == "carries", dtype=torch.bool, device="cpu")
            )

    def wait(self, key: str, session: JoinSession | None, what: str) -> None:
        """Wait until a rank has published ``key``. In torch's ``Join``, without a session, reading it does."""
        if session is not None:
            session.peers.detector.wait(lambda seconds: wait_for_keys(self.store, [key], seconds), what)


_policies: weakref.WeakKeyDictionary[nn.Module, ZeroGradPolicy] = weakref.WeakKeyDictionary()
"""Global, as the module is all that two joins over it have in common; it must not get attributes of ours."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which may be a whole one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
