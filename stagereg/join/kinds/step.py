"""``step``: the local work of a training step: an optimizer, an LR schedule, an average of the weights, a counter.

What has no collectives of its own still has to happen on ranks without data, or replicas drift apart. One function for
all that follows ``backward()`` is the surest way, since ranks with data and without then run the very same lines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stagereg.errors import JoinError
from stagereg.join.joinable import BuiltInHook, BuiltInJoinable, Joinable, JoinHook
from stagereg.registry import register


@register("join_hook", "step")
class StepHook(BuiltInHook["StepJoinable"]):
    """Calls a function once per step of the active ranks."""

    def main_hook(self) -> None:
        if self.joinable.is_due():
            self.joinable.step()


@register("joinable", "step")
class StepJoinable(BuiltInJoinable):
    """Has a function called on joined ranks, once per step of the active ranks. Cannot be the first joinable.

    ``Join`` wraps optimizers, schedulers and functions in this by itself.

    Args:
        step: the function, or an optimizer or scheduler, whose ``step`` it is then. It may run collectives, if the
            active ranks run the same ones.
        after: the joinable of the model whose gradients it needs; the function is then left out in steps without a
            reduction (``no_sync``). ``None``: the nearest one before it in the list of stagereg's ``Join``.
        hook: another hook in the place of ``step``.
    """

    has_no_collectives = True
    own_hook = StepHook

    def __init__(
        self,
        step: Callable[[], object] | Optimizer | LRScheduler,
        after: Joinable | None = None,
        hook: Callable[..., JoinHook] | None = None,
    ) -> None:
        group, device = (None, "cpu") if after is None else (after.join_process_group, after.join_device)
        super().__init__(hook, group, device)
        self.step: Callable[[], object] = step.step if isinstance(step, (Optimizer, LRScheduler)) else step
        self.after = after
        _refuse_arguments(self.step)


def _refuse_arguments(step: Callable[..., object]) -> None:
    """Refuse a function that joined ranks could not call, before any rank waits for one of them."""
    if not callable(step):
        raise JoinError(f"the step joinable needs a function, an optimizer or a scheduler, not a {type(step).__name__}")
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C: the call itself will tell
        return
    # A scheduler wraps its optimizer's step in a function that still shows the unbound one's ``self``.
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
    needs = [p.name for p in named if p.default is p.empty]
    if needs:
        if needs == ["closure"]:
            raise JoinError(
                "an optimizer that needs a closure cannot be listed: the closure runs the model, and ranks without "
                "data have no batch for it. Leave the optimizer out of the list, loop over join.iterate(loader), and "
                "compute the loss in the closure with join.mean, so that all ranks call the closure equally often."
            )
        name = getattr(step, "__qualname__", repr(step))
        raise JoinError(
            f"joined ranks would call {name}() without arguments, but it needs {', '.join(needs)}. Put a function that "
            "has what it needs in the list, as in Join([model, lambda: scheduler.step(last_loss())])."
        )
