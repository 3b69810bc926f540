"""``step``: the local work of a training step in a join: an optimizer, a schedule, or any function.

``Join`` wraps optimizers, schedulers and functions in this by itself. One function for all that follows ``backward()``
is the surest way to keep ranks equal, since ranks with data and ranks without then run the very same lines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stagereg.errors import JoinError
from stagereg.join.hooks.step import StepHook
from stagereg.join.joinable import Joinable
from stagereg.registry import register

__all__ = ["StepJoinable"]


@register("joinable", "step")
class StepJoinable(Joinable):
    """Has a function called on joined ranks, once per step of the active ranks. Cannot be the first joinable.

    Args:
        step: the function, such as ``optimizer.step``. It may run collectives, if the active ranks run the same ones.
        after: the ``ddp`` or ``fsdp2`` joinable of the model whose gradients it needs; the function is then left out in
            steps without a reduction (``no_sync``). ``Join`` fills it in with the nearest one before it in its list.

    Attributes:
        silent: that it talks to no other rank by itself.
    """

    silent = True

    def __init__(self, step: Callable[[], object], after: Any = None) -> None:
        super().__init__()
        _takes_nothing(step)
        self.step = step
        self.after = after

    def join_hook(self, **kwargs: Any) -> StepHook:
        """Return the hook; takes no keyword arguments of its own."""
        return StepHook(self.step, None if self.after is None else self.after.reduced)

    @property
    def join_device(self) -> torch.device:
        """The device of ``after``, or the CPU."""
        return torch.device("cpu") if self.after is None else self.after.join_device

    @property
    def join_process_group(self) -> Any:
        """The process group of ``after``, or the default one."""
        return dist.group.WORLD if self.after is None else self.after.join_process_group


def _takes_nothing(step: Callable[..., object]) -> None:
    """Refuse a function that joined ranks could not call, before any rank waits for one of them."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C: the call itself will tell
        return
    # A scheduler wraps its optimizer's step in a function that still shows the unbound one's ``self``.
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs = [p.name for p in parameters if p.default is p.empty and p.kind not in optional and p.name != "self"]
    if needs:
        name = getattr(step, "__qualname__", repr(step))
        raise JoinError(
            f"joined ranks would call {name}() without arguments, but it needs {', '.join(needs)}. Put a function that "
            "has what it needs in the list, as in Join([model, lambda: scheduler.step(last_loss())])."
        )
