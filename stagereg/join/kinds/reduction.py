"""The base of ``ddp`` and ``fsdp2``: a module whose gradients the ranks reduce.

Between two steps, a training loop zeroes the gradients, sets them to None, or carries them over. A rank without data
must do the same, so each rank inspects one gradient at the beginning of each backward while it has data. A rank that
had data for fewer than two steps reads the policy from another rank, through the rendezvous store.

After a loop has carried gradients over, a rank without data retains its gradients. The functions in the join's list
zero them, as on other ranks. From then on, ranks with data publish in each step whether they carried gradients. A rank
without data that did otherwise raises an error, before any optimizer steps.
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
    """Joins a module whose gradients the ranks reduce."""

    reduces_gradients = True
    reduced = False
    watched: Sequence[torch.Tensor] = ()  # parameters; the first one that has a gradient is inspected
    reduces: bool | None = None  # between forward and backward: whether the backward will reduce gradients
    is_unfinished = False  # whether the last backward left its gradients for a later reduction
    has_met = False  # whether the forward of the current step has run collectives
    was_shadowed = False  # whether this rank took part in the last step without data
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
        """How the loop treats gradients, as observed in this join and in earlier joins of the module."""
        if (found := _policies.get(self.module)) is None:
            found = _policies[self.module] = ZeroGradPolicy(self.join_process_group)
        return found

    def expect_forward(self) -> None:
        """Check that ranks without data run this forward's collectives next. Raises: ``JoinError`` if they do not."""
        self.has_met = True
        if self.session is not None and (order := self.session.order) is not None:
            order.check(self)

    def on_backward(self) -> None:
        """Inspect the gradients that the loop has left. Called when a backward is about to add to the gradients."""
        if self.reduces is None:
            return
        if self.gathers and not self.reduces and self.membership is not None:
            self.membership.read()  # raises if another rank reduces; the forward has already synchronized the ranks
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
        """Announce whether this step reduces gradients, with torch's protocol. The result counts the ranks that reduce.

        A rank that does not reduce gradients waits for the result.

        Raises:
            JoinError: another rank reduces gradients in this step, and this rank does not.
        """
        work = TorchWire(self.join_process_group, self.join_device).announce(reduces)
        if not reduces and self.session is not None:
            work.wait()
            if int(work.get_future().value()[0].item()):
                raise JoinError(
                    f"in step {self.session.steps}, this rank does not reduce its gradients, but another rank does "
                    f"(no_sync). {BY_NUMBER}"
                )
        return work

    def shadow(self) -> None:
        """Prepare to take part, without data, in a step of the active ranks."""
        self.policy.set_active(False)
        self.was_shadowed = True

    def ask(self) -> None:
        """On a rank without data, determine whether it carries gradients into a step that reduces gradients."""
        self.policy.ask(self.session, None if self.is_unfinished else self._gradient())

    def shadowed(self) -> None:
        """On a rank without data, record that a step was reduced, with the gradients that this rank had accumulated.

        Raises: ``JoinError`` if the active ranks began the step with different gradients.
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
        """Return how often each optimizer of this module has stepped in this join. Must be equal on all ranks.

        Excludes SGD without momentum on a DDP module: it has no state, and parameters are synchronized after the loop.
        """
        stepped = (each for each, steps in self._steps.items() if steps > 0)
        needed = [each for each in stepped if self.gathers or not _is_plain_sgd(each)]
        inner = {id(getattr(each, "optim", None)) for each in needed}  # ZeRO's inner optimizers: not on all ranks
        return sorted(self._steps[each] for each in needed if id(each) not in inner)

    def _gradient(self) -> torch.Tensor | None:
        gradients = (param.grad for param in self.watched)
        return next((local(gradient) for gradient in gradients if gradient is not None), None)


Habit = Literal["drops", "zeroes", "carries"]
"""What a loop does with gradients between two steps: sets them to None, zeroes them, or carries them over."""

_ADVICE = "Accumulate under no_sync() (FSDP2: set_requires_gradient_sync(False)), or loop over join.iterate(loader)."
_OTHERWISE = (
    "ranks with data began a step %s gradients of earlier steps, but this rank, which has no more data, began it "
    "%s: no listed joinable zeroes gradients as the loop does. List one function that steps the "
    f"optimizer and zeroes the gradients, and zero them nowhere else in the loop. {_ADVICE}"
)


class ZeroGradPolicy:
    """What one module's loop does with gradients between steps. All ranks construct instances in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.joins = 0  # number of joins entered
        self.steps = 0  # reduced steps in this join, including steps without data
        self.step_begins = True  # whether the next backward begins a step: the last backward was reduced
        self.inputs: list[Any] | None = None  # empty inputs of each forward in the last step, for forwards without data
        self.habit: Habit = "drops"  # the observed habit
        self._last: list[list[int]] = []  # for the last two steps: join, step, whether it began with gradients
        self._carried = False  # whether the current step without data began with gradients on this rank
        self._in_doubt = True
        self._active = False
        self.store = PrefixStore(resources_of(group).next_name("carry"), group.get_group_store())

    @property
    def carries(self) -> bool:
        """Whether the loop has carried gradients over at least once."""
        return self.habit == "carries"

    def forget(self, param: torch.Tensor) -> None:
        """Treat a gradient of the previous step as ranks with data do: set it to None, zero it, or keep it."""
        if self.habit == "drops":
            param.grad = None
        elif self.habit == "zeroes" and param.grad is not None:
            param.grad.zero_()

    def observe(self, gradient: torch.Tensor | None) -> None:
        """Record the gradient before the backward of a step, to learn what the loop does. Ignores the first step."""
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
        """Publish whether this rank has data, and so can observe what the loop does, unless that is known."""
        if self._in_doubt and active != self._active:
            self._active = active
            self.store.add("active", 1 if active else -1)

    def ask(self, session: JoinSession | None, gradient: torch.Tensor | None) -> None:
        """On a rank without data, determine what the loop does with gradients. Another rank may have to publish this.

        ``gradient``: the gradient that this rank has at the beginning of the step.
        """
        if self._in_doubt and self.steps:  # in the first step, no rank has observed the habit yet
            self._in_doubt = False
            if self.store.check(["policy"]) or self.store.add("active", 0):
                self.wait("policy", session, "the backward")
                self.habit = cast(Habit, self.store.get("policy").decode())
        self._carried = self.carries and _is_nonzero(gradient)

    def confirm(self, is_whole: bool) -> None:
        """Check a reduced step on a rank without data. Ranks with data have published how they began the step.

        Raises: ``JoinError`` if this rank began the step differently, unless ``is_whole`` is False (``no_sync``).
        """
        if not self.store.check(["carried"]):
            return
        habit, last = json.loads(self.store.get("carried"))
        for join, step, carried in last:
            if is_whole and (join, step) == (self.joins, self.steps) and carried != self._carried:
                raise JoinError(_OTHERWISE % (("with", "without them") if carried else ("without", "with its own")))
        self.habit = habit

    def wait(self, key: str, session: JoinSession | None, what: str) -> None:
        """Wait until a rank has published ``key``. In torch's ``Join`` there is no session: reading the key waits."""
        if session is not None:
            session.peers.detector.wait(lambda seconds: wait_for_keys(self.store, [key], seconds), what)


_policies: weakref.WeakKeyDictionary[nn.Module, ZeroGradPolicy] = weakref.WeakKeyDictionary()
"""Global, because joins share only the module, and stagereg must not add attributes to the module."""


def _is_plain_sgd(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.ne(0).any())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
