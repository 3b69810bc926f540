"""``module``: says that a module's steps cannot be shadowed, where a rank without data would have to."""

from __future__ import annotations

from torch import nn

from stagereg.errors import JoinError
from stagereg.join.joinable import JoinHook
from stagereg.registry import register

__all__ = ["ModuleHook"]


@register("join_hook", "module")
class ModuleHook(JoinHook):
    """Refuses to shadow.

    Args:
        module: whose collectives only its own forward and backward know.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kind = type(module).__name__

    def main_hook(self) -> None:
        """Raise ``JoinError``: this rank has left a loop that others go on with."""
        raise JoinError(
            "this rank has left the loop while others go on, and nothing but the loop body can take part in the "
            f"steps of a {self._kind}. Loop over join.iterate(loader), which runs the body on all ranks, and leave it "
            "on all of them at the same step."
        )
