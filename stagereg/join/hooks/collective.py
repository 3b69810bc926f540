"""``collective``: take part in a declared list of collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from stagereg.join.joinable import JoinHook
from stagereg.kernel.shadow import Collective, shadow
from stagereg.registry import register

__all__ = ["CollectiveHook"]


@register("join_hook", "collective")
class CollectiveHook(JoinHook):
    """Runs the declared collectives once per step of the active ranks, with values that leave their results alone.

    Args:
        collectives: what each step runs, in order.
        group: of the collectives.
        device: of their tensors.
        last_sent: by index, what this rank sent last as the root of a broadcast.
    """

    def __init__(
        self,
        collectives: Sequence[Collective],
        group: dist.ProcessGroup,
        device: torch.device,
        last_sent: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self._collectives = list(collectives)
        self._group = group
        self._device = device
        self._last_sent = last_sent

    def main_hook(self) -> None:
        """Take part in all of them."""
        shadow(self._collectives, self._group, self._device, self._last_sent)
