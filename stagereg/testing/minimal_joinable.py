"""The least of a joinable, to carry a join hook that is to be tried: it announces, and has no collectives itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stagereg.join.joinable import Joinable, notify

__all__ = ["MinimalJoinable"]


class MinimalJoinable(Joinable):
    """Joins a hook, over all ranks.

    Args:
        make: makes the hook for one join.
        device: where it announces on torch's wire.
    """

    def __init__(self, make: Callable[[], Any], device: str) -> None:
        super().__init__()
        self._make = make
        self._device = torch.device(device)

    def announce(self) -> None:
        """Announce that this rank has data; once a step, before its collectives."""
        notify(self)

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook; keyword arguments are for those who know them."""
        return self._make()

    @property
    def join_device(self) -> torch.device:
        """The given one."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The default group."""
        return dist.group.WORLD
