"""What a training loop does with the gradients of one step before the next: zero them, drop them, or carry them over.

A rank without data has to do the same, without seeing the loop. It goes by what the loop did while it had data. If that
was for less than two steps it cannot know, and asks a rank that has seen more, through the process group's store: the
wire has no room for it.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from stagereg.join.failure import limit_of, was_aborted
from stagereg.kernel.channel import wait_for_keys

__all__ = ["CarryWatch", "Memory"]

Habit = Literal["drops", "zeroes", "carries"]

_TURN_S = 0.2
"""Seconds between two looks at whether the join has failed."""


class CarryWatch:
    """Looks at the gradients whenever a backward of a DDP module is about to add to them.

    Joined ranks ask it for the loop's habit: it "drops" its gradients, "zeroes" them in place, or "carries" them over.
    What a look finds stays on the device until then, and is remembered for the module's next watch.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        # The smallest gradient is the cheapest to look at. Where parameters may be left out of a step, the first of all
        # that gets its gradient tells the moment at which none has been added to yet.
        params = sorted((param for param in ddp.parameters() if param.requires_grad), key=torch.numel)
        watched = params if ddp.find_unused_parameters or ddp.static_graph else params[:1]
        self._params = [weakref.ref(param) for param in watched]
        if ddp not in _memories:
            _memories[ddp] = Memory(ddp.process_group)
        self._memory = _memories[ddp]
        self._steps = 0
        self._ran = False
        self._will_sync = True
        self._forward_ran = False
        self._joined = False
        handles: list[Any] = [param.register_hook(self._before_accumulation) for param in watched]
        self._handles = [*handles, ddp.register_forward_pre_hook(self._before_forward)]
        self._memory.enter()

    def _before_forward(self, *_: Any) -> None:
        ddp = self._ddp()
        if ddp is not None and torch.is_grad_enabled():
            self._forward_ran = True
            self._will_sync = bool(ddp.require_backward_grad_sync)

    def _before_accumulation(self, _: torch.Tensor) -> None:
        if not self._forward_ran:
            return
        self._forward_ran = False
        if self._memory.step_begins:
            grads = (None if param is None else param.grad for param in (ref() for ref in self._params))
            there = next((grad for grad in grads if grad is not None), None)
            self._memory.see(None if there is None else there.detach().ne(0).any(), in_doubt=self._steps == 0)
        self._memory.step_begins = self._will_sync
        self._steps += self._will_sync
        self._ran = True

    def join(self) -> None:
        """This rank has run out of data; call it before the collectives of each step that it shadows."""
        if not self._joined:
            self._joined = True
            self._memory.leave()

    def ask(self) -> None:
        """Find out what only other ranks know; call it in a shadowed step, before its reduction."""
        if self._steps:  # in the first step nobody knows yet
            self._memory.ask()

    def settle(self) -> None:
        """A shadowed step has been reduced, and what waited has been contributed."""
        self._memory.step_begins = True
        self._steps += 1

    def habit(self) -> Habit:
        """What the loop does with its gradients between steps, as far as it is known."""
        return self._memory.habit()

    @property
    def unfinished(self) -> bool:
        """Whether this join's last backward was not synchronized, so that its gradients wait for the next one."""
        return self._ran and not self._memory.step_begins

    def remove(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()


class Memory:
    """What is known of one module's loop, here and through the store. All ranks make these in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.step_begins = True
        self._nonzero: torch.Tensor | None = None  # whether there were gradients as the last step began
        self._in_doubt = True
        self._group = group
        self._store = PrefixStore(f"stagereg/carry/{_numbers[group.group_name]}", group.get_group_store())
        _numbers[group.group_name] += 1

    def see(self, nonzero: torch.Tensor | None, in_doubt: bool) -> None:
        """Note what a look has found; in a first step it may only be that no step has been before."""
        self._nonzero = nonzero
        if self._in_doubt and not in_doubt:
            self._in_doubt = False
            self._store.set("habit", self.habit())

    def habit(self) -> Habit:
        if self._nonzero is None:
            return "drops"
        return "carries" if self._nonzero.item() else "zeroes"

    def enter(self) -> None:
        if self._in_doubt:
            self._store.set(f"active/{self._group.rank()}", "yes")

    def leave(self) -> None:
        if self._in_doubt:
            self._store.set(f"active/{self._group.rank()}", "no")

    def ask(self) -> None:
        """End the doubt, if there is one and some active rank has a watch: that rank will tell within this step."""
        if not self._in_doubt:
            return
        ranks = [f"active/{rank}" for rank in range(self._group.size())]
        others = (self._store.check([key]) and self._store.get(key) == b"yes" for key in ranks)
        if self._store.check(["habit"]) or any(others):
            self._await_habit()
            habit = self._store.get("habit").decode()
            self._nonzero = None if habit == "drops" else torch.tensor(habit == "carries")
        self._in_doubt = False

    def _await_habit(self) -> None:
        """Wait for it as one waits in a collective of the group: with its limit, and until it is aborted."""
        limit = limit_of(self._group)
        deadline = time.monotonic() + limit
        while not wait_for_keys(self._store, "habit", _TURN_S):
            if was_aborted(self._group):
                raise dist.DistError("the process group was aborted")
            if time.monotonic() > deadline:
                raise RuntimeError(f"Operation timed out! No rank told within {limit:g} s what it does with gradients.")


_memories: weakref.WeakKeyDictionary[DistributedDataParallel, Memory] = weakref.WeakKeyDictionary()
_numbers: Counter[str] = Counter()
