"""What ``ddp`` and ``fsdp2`` share: a module of which the ranks reduce the gradients.

A training loop zeroes the gradients of one step before the next, drops them, or carries them over, and so must a rank
without data. It goes by what it saw while it had data: each rank looks at one gradient as a backward begins. A rank
that had data for less than two steps cannot know, and asks one that has seen more, through the store.

Once a loop has carried gradients over, a rank without data keeps its own: the functions in the list zero its gradients
as they zero the gradients of the others. Ranks with data then publish in each step whether they carried gradients, and
a rank without data that did otherwise raises, before anything steps.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from stagereg.errors import JoinError
from stagereg.join.session import JoinSession
from stagereg.join.tracked import TrackedJoinable
from stagereg.kernel.channel import resources_of, wait_for_keys
from stagereg.kernel.membership import BY_NUMBER
from stagereg.kernel.shadow import TorchWire


class ReducingJoinable(TrackedJoinable):
    """Joins a module of which the ranks reduce the gradients."""

    reduces_gradients = True
    reduced = False
    watched: Sequence[torch.Tensor] = ()  # the gradient of the first that has one shows what the loop does with them
    reduces: bool | None = None  # between a step's forward and its backward, whether that will reduce the gradients
    is_unfinished = False  # whether the last backward has not reduced them, so that they wait for the next one
    has_met = False  # whether the forward of the step under way has run collectives
    was_shadowed = False  # whether the last step here was the hook's, so that the loop has not seen its gradients
    module: Any

    def watch(self) -> None:
        super().watch()
        self.policy.joins += 1
        self.policy.steps = 0
        if self.watched:
            self.policy.set_active(True)

    def attach(self, session: JoinSession) -> None:
        super().attach(session)
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

        @_disable_dynamo
        def hook(optimizer: Optimizer, *_: Any) -> None:
            self._on_optimizer_step(optimizer)

        self.handles = [*self.handles, register_optimizer_step_post_hook(hook)]

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        return not divide_by_initial_world_size

    @property
    def policy(self) -> ZeroGradPolicy:
        """What is known of what the loop does with its gradients, in this join and those before."""
        if (found := _policies.get(self.module)) is None:
            found = _policies[self.module] = ZeroGradPolicy(self.join_process_group)
        return found

    def expect_forward(self) -> None:
        """Check a forward with collectives. Raises: ``JoinError`` if ranks without data run another collective."""
        self.has_met = True
        if self.session is not None and (order := self.session.order) is not None:
            order.check(self)

    def on_backward(self) -> None:
        """A backward has begun, which is about to add to the gradients: look at what the loop has left there."""
        if self.reduces is None:
            return
        if self.gathers and not self.reduces and self.membership is not None:
            self.membership.read()  # Raises if another rank reduces gradients; the ranks have met in the forward.
        if self.session is not None and (order := self.session.order) is not None:
            order.backward_begins(self, self.reduces, self.gathers)
        policy = self.policy
        if self.watched and policy.step_begins:
            policy.observe(self._gradient())
        if self.reduces and self.session is not None:
            self.session.count_reduction(self)
        policy.step_begins = self.reduces
        policy.steps += self.reduces
        self.is_unfinished, self.reduces, self.was_shadowed = not self.reduces, None, False
        self.has_met = False

    def announce_reduction(self, reduces: bool) -> dist.Work:
        """Announce on torch's wire whether this step reduces gradients. The sum is the number of ranks that do.

        A rank that does not reduce gradients waits for the sum.

        Raises:
            JoinError: another rank reduces gradients in this step, and this rank does not.
        """
        work = TorchWire(self.join_process_group, self.join_device).announce(reduces)
        if not reduces and self.session is not None:
            work.wait()
            if int(work.get_future().value()[0].item()):
                raise JoinError(
                    f"in step {self.session.steps}, this rank does not reduce its gradients, and another does "
                    f"(no_sync). {BY_NUMBER}"
                )
        return work

    def shadow(self) -> None:
        """A step of the active ranks is about to be shadowed."""
        self.policy.set_active(False)
        self.was_shadowed = True

    def ask(self) -> None:
        """A step is shadowed, and is going to be reduced: find out with which gradients it begins on this rank."""
        self.policy.ask(self.session, None if self.is_unfinished else self._gradient())

    def shadowed(self) -> None:
        """A shadowed step has been reduced, with the gradients that this rank had accumulated.

        Raises:
            JoinError: the active ranks began it with other gradients.
        """
        self.policy.confirm(is_whole=not self.is_unfinished)
        self.policy.step_begins, self.is_unfinished = True, False
        self.policy.steps += 1

    def _on_optimizer_step(self, optimizer: Optimizer) -> None:
        if optimizer not in self._steps:
            own = set(self.module.parameters())
            given = (param for group in optimizer.param_groups for param in group["params"])
            self._steps[optimizer] = 0 if any(param in own for param in given) else -1
        if self._steps[optimizer] >= 0:
            self._steps[optimizer] += 1

    def optimizer_steps(self) -> list[int]:
        """Return how often optimizers of this module have stepped in this join; all ranks should return the same.

        Without SGD on a DDP module if it has no momentum: it has no state, and the parameters are made equal after the
        loop.
        """
        needed = [
            each for each, steps in self._steps.items() if steps > 0 and (self.gathers or not _is_plain_sgd(each))
        ]
        inner = {id(getattr(each, "optim", None)) for each in needed}  # of ZeRO, which a rank without a shard lacks
        return sorted(self._steps[each] for each in needed if id(each) not in inner)

    def _gradient(self) -> torch.Tensor | None:
        gradients = (param.grad for param in self.watched)
        return next((local(gradient) for gradient in gradients if gradient is not None), None)


Habit = Literal["drops", "zeroes", "carries"]
"""What a loop does with gradients between steps."""

_ADVICE = "Accumulate under no_sync() (FSDP2: set_requires_gradient_sync(False)), or loop over join.iterate(loader)."
_OTHERWISE = (
    "ranks with data began a step %s gradients of the steps before, and this rank, which has no more data, began it "
    "%s: nothing in the list of joinables zeroes gradients as the loop does. List one function that steps the "
    f"optimizer and zeroes the gradients, and zero them nowhere else in the loop. {_ADVICE}"
)


class ZeroGradPolicy:
    """What is known of one module's loop, here and through the store. All ranks make these in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.joins = 0  # that have been entered
        self.steps = 0  # that have been reduced in this join, on this rank or while it had no data
        self.step_begins = True  # with the next backward, as the last one was reduced
        self.inputs: list[Any] | None = None  # empty ones of each forward in the last step, to run the module on
        self.habit: Habit = "drops"  # as far as it is known
        self._last: list[list[int]] = []  # of the last two steps: join, step, and whether it began with gradients
        self._carried = False  # ... the step that is shadowed, on this rank
        self._in_doubt = True
        self._active = False
        self.store = PrefixStore(resources_of(group).next_name("carry"), group.get_group_store())

    @property
    def carries(self) -> bool:
        """Whether the loop has carried gradients over at least once."""
        return self.habit == "carries"

    def forget(self, param: torch.Tensor) -> None:
        """Do with a gradient of the step before what the loop has done with those of the ranks that have data."""
        if self.habit == "drops":
            param.grad = None
        elif self.habit == "zeroes" and param.grad is not None:
            param.grad.zero_()

    def observe(self, gradient: torch.Tensor | None) -> None:
        """A step's backward is about to add to a gradient; the first one does not show what the loop does between."""
        carried = _is_nonzero(gradient)
        if carried and self.steps:
            self.habit = "carries"
        elif not carried and not self.carries:
            self.habit = "drops" if gradient is None else "zeroes"
        self._last = [*self._last[-1:], [self.joins, self.steps, carried]]
        if carried or self.carries:
            self.store.set("carried", json.dumps([self.habit, self._last]))
        if self._in_doubt and self.steps:
            self._in_doubt = False
            self.store.set("policy", self.habit)

    def set_active(self, active: bool) -> None:
        """Publish whether this rank has data, and will publish what its loop does; nothing if that is known here."""
        if self._in_doubt and active != self._active:
            self._active = active
            self.store.add("active", 1 if active else -1)

    def ask(self, session: JoinSession | None, gradient: torch.Tensor | None) -> None:
        """Rank without data, in a step: end the doubt. A rank with data publishes its policy within this step.

        The step begins with ``gradient`` on this rank, unless the loop never carries any.
        """
        if self._in_doubt and self.steps:  # in the first step no rank knows yet
            self._in_doubt = False
            if self.store.check(["policy"]) or self.store.add("active", 0):
                self.wait("policy", session, "the backward")
                self.habit = cast(Habit, self.store.get("policy").decode())
        self._carried = self.carries and _is_nonzero(gradient)

    def confirm(self, is_whole: bool) -> None:
        """Rank without data: a step was reduced, so ranks with data have published if they began it with gradients.

        Raises: ``JoinError`` if it was not what this rank did, unless it began the step as they did, in ``no_sync``.
        """
        if not self.store.check(["carried"]):
            return
        habit, last = json.loads(self.store.get("carried"))
        for join, step, carried in last:
            if is_whole and (join, step) == (self.joins, self.steps) and carried != self._carried:
                raise JoinError(_OTHERWISE % (("with", "without them") if carried else ("without", "with its own")))
        self.habit = habit

    def wait(self, key: str, session: JoinSession | None, what: str) -> None:
        """Wait until a rank has published ``key``. In torch's ``Join``, without a session, reading it does."""
        if session is not None:
            session.peers.detector.wait(lambda seconds: wait_for_keys(self.store, [key], seconds), what)


_policies: weakref.WeakKeyDictionary[nn.Module, ZeroGradPolicy] = weakref.WeakKeyDictionary()
"""Global, as the module is all that two joins over it have in common; it must not get attributes of ours."""


def _is_plain_sgd(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.ne(0).any())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which may be a whole one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
