"""What takes part in a join, under torch's names.

Signatures and behaviour are those of ``torch.distributed.algorithms.join`` (torch 2.13). torch's own joinables are
:class:`Joinable` s here by ``isinstance``, and the ones here go into torch's ``Join``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable as TorchJoinable

from stagereg.errors import JoinableNotInitializedError
from stagereg.kernel.membership import Membership
from stagereg.kernel.shadow import TorchWire

__all__ = ["JoinConfig", "JoinHook", "Joinable", "NotedConfig", "notify"]


class JoinHook:
    """What a rank without data does for one joinable.

    ``main_hook`` runs once for every step that the active ranks take, and takes part in the collectives of that step;
    ``post_hook`` runs once when all ranks have joined. A subclass overrides either. If it also has a ``before_step``,
    stagereg's ``Join`` calls that for all hooks in order, before the first ``main_hook`` of each step; and an
    ``out_of_data`` once this rank has left its loop, before it waits for the others.
    """

    def main_hook(self) -> None:
        """Take part in one step: forward, backward and optimizer step of the active ranks. Joined ranks only."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, on every rank.

        Args:
            is_last_joiner: whether this rank was among the last to run out of data.
        """


class JoinConfig(NamedTuple):
    """What a joinable has to know of the join it is in; torch's joinables read the same fields.

    Attributes:
        enable: whether the join is on.
        throw_on_early_termination: whether it throws when some rank runs out of data.
        is_first_joinable: whether this joinable is the one that announces its rank each step.
        membership: how it does so, where all ranks run stagereg's join; ``None`` on torch's wire, and outside a join.
    """

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool
    membership: Membership | None = None

    @staticmethod
    def construct_disabled_join_config() -> JoinConfig:
        """The configuration of a joinable outside any join."""
        return JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class NotedConfig(JoinConfig):
    """The configuration of a first joinable; knows how often it has been asked, which is how announcing begins.

    Attributes:
        asked: how often ``is_first_joinable`` was read, as torch's and stagereg's ``notify_join_context`` do.
    """

    asked = 0

    @property
    def is_first_joinable(self) -> bool:
        """As in :class:`JoinConfig`."""
        self.asked += 1
        return self[2]


class Joinable(ABC):
    """Something with collectives of its own in every training step.

    A subclass calls this constructor, and calls ``Join.notify_join_context(self)`` before its collectives of each step.
    The first joinable of a join announces the rank through that call; for the others it does nothing.
    """

    _join_config: Any

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig.construct_disabled_join_config()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one join. All joinables of a join get the same ``kwargs`` and take what they know."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the join's own collectives put their tensors, if this joinable is the first."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The process group of the collectives; the same for all joinables of a join."""

    def join_exit(self) -> None:  # noqa: B027 (most joinables have nothing to put back)
        """Put back what ``join_hook`` changed outside itself. Called by stagereg's ``Join`` on every way out."""


Joinable.register(TorchJoinable)  # type: ignore[type-abstract]


def notify(joinable: Any) -> dist.Work | None:
    """See :meth:`stagereg.Join.notify_join_context`."""
    if not hasattr(joinable, "_join_config"):
        raise JoinableNotInitializedError(
            f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor"
        )
    config = joinable._join_config
    if not config.is_first_joinable or not config.enable:
        return None
    membership = getattr(config, "membership", None)
    if membership is not None:
        membership.begin()
        if config.throw_on_early_termination:
            membership.raise_if_exhausted()
        return None
    wire = TorchWire(joinable.join_process_group, joinable.join_device)
    work = wire.announce()
    if config.throw_on_early_termination:
        wire.raise_if_exhausted()
    return work
