"""``step``: the local work of a training step, such as an optimizer, LR schedule, weight average or counter.

Work without collectives must also run on ranks without data, otherwise replicas diverge. The safest way is to list one
function for all work after ``backward()``, because then ranks with and without data run the same lines.
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
    """Makes ranks that left the loop call a function once per step of the active ranks. Cannot be the first joinable.

    ``Join`` wraps optimizers, schedulers and functions in this class automatically.

    Args:
        step: the function, or an optimizer or scheduler whose ``step`` is called. The function may run collectives if
            the active ranks run the same collectives.
        after: the joinable of the model whose gradients the function uses. The function is not called in steps that do
            not reduce these gradients (``no_sync``). ``None``: the nearest such joinable before it in the list.
        hook: a hook to use instead of :class:`StepHook`.
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
    """Raise ``JoinError`` for a function that needs arguments, because ranks that left the loop have none to pass."""
    if not callable(step):
        raise JoinError(f"the step joinable needs a function, an optimizer or a scheduler, not a {type(step).__name__}")
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some C functions have no signature; an invalid call raises later
        return
    # A scheduler wraps its optimizer's step in a function that still has the unbound method's ``self``.
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
            f"ranks without data would call {name}() without arguments, but it needs {', '.join(needs)}. List a "
            "function that needs no arguments, such as Join([model, lambda: scheduler.step(last_loss())])."
        )
