"""The join itself: ``with Join([model, optimizer]): ...`` around a training loop.

A rank that leaves the loop body has run out of data. It stays in ``__exit__`` and, for every step that some rank still
takes, runs the hooks of the joinables, which take part in that step's collectives. When no rank is active any more, the
post-hooks run and everybody goes on together. The wire is torch's, so ranks with torch's ``Join`` may be among them.

Left as it was found, on every way out: the joinables' configuration, DDP's divisor, and Python's warning filters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from stagereg.errors import JoinError, UnevenInputsError
from stagereg.join.adapt import adapt
from stagereg.join.joinables.step import StepJoinable
from stagereg.join.protocol import Joinable, JoinConfig, JoinHook, notify
from stagereg.kernel.shadow import PEER_EXHAUSTED, Wire
from stagereg.registry import register

__all__ = ["Join", "configured"]

_SKEW = 1000


class Join:
    """Context manager for training on uneven inputs. Construct and enter it on every rank.

    Args:
        joinables: what takes part, in the order in which the training step uses it. Beside any :class:`Joinable`,
            torch's among them, this takes objects that have no collectives but must stay equal on all ranks: a
            ``torch.optim.Optimizer``, an LR scheduler, or a function; joined ranks call their ``step()`` (the function
            itself) once per step, after the gradients of that step are there. The first must announce its rank each
            step, as DDP does. Its device is used for the join's own collectives.
        enable: False makes the context do nothing, for inputs known to be even.
        throw_on_early_termination: when a rank runs out of data, raise on all ranks at the same step.
        **kwargs: handed to the hook of every joinable, such as DDP's ``divide_by_initial_world_size``.

    Raises:
        JoinError: (a ``ValueError``) no joinables, or joinables with different process groups, or a first one that
            cannot announce.
        UnevenInputsError: (a ``RuntimeError``) on leaving, or at the step, if told to throw.

    Example::

        model = DistributedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with stagereg.Join([model, optimizer]):
            for batch in loader:            # as many as this rank has
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    """

    def __init__(
        self, joinables: Sequence[Any], enable: bool = True, throw_on_early_termination: bool = False, **kwargs: Any
    ) -> None:
        if not isinstance(joinables, Iterable):
            raise JoinError(
                f"joinables must be a list, as in Join([model, optimizer]), not a {type(joinables).__name__}"
            )
        listed = list(joinables)
        if not listed:
            raise JoinError("The join context manager requires at least one joinable")
        self._joinables = adapt(listed)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._kwargs = kwargs
        self._wire = _common_wire(self._joinables)
        self._before: list[Any] = []
        self._hooks: list[JoinHook] | None = self._make_hooks()

    def __enter__(self) -> Join:
        self._before = [getattr(joinable, "_join_config", None) for joinable in self._joinables]
        if self._hooks is None:  # entered again, as once an epoch
            self._hooks = self._make_hooks()
        try:
            for i, joinable in enumerate(self._joinables):
                joinable._join_config = JoinConfig(self._enable, self._throw, is_first_joinable=i == 0)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._enable and error is None:
                self._shadow()
            elif self._enable and type(error) is RuntimeError and str(error) == PEER_EXHAUSTED:
                raise UnevenInputsError(PEER_EXHAUSTED) from error  # raised by torch's notify, inside a torch joinable
        finally:
            self._restore()

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Say that this rank still has data. A joinable calls it before its collectives of each step.

        Args:
            joinable: the caller, whose constructor has called ``Joinable``'s.

        Returns:
            For the first joinable of an enabled join, the work of an asynchronous all-reduce whose one value ends as
            the number of active ranks; for all others None.

        Raises:
            UnevenInputsError: (a ``RuntimeError``) the join is to throw and some rank has run out of data.
        """
        return notify(joinable)

    def _make_hooks(self) -> list[JoinHook]:
        return [joinable.join_hook(**self._kwargs) for joinable in self._joinables]

    def _shadow(self) -> None:
        assert self._hooks is not None
        steps = 0
        objection: Warning | None = None
        while self._wire.count():
            if self._throw:
                self._wire.throw()
            for hook in self._hooks:
                hook.main_hook()
            steps += 1
            if steps == _SKEW + 1:
                objection = self._warn_of_skew()
        for hook in self._hooks:
            hook.post_hook(steps == 0)
        if objection is not None:
            raise objection

    def _warn_of_skew(self) -> Warning | None:
        """Warn; what the user's filters make an error is returned, for the other ranks still count on this one."""
        rank = dist.get_rank(self._wire.group)
        try:
            warnings.warn(
                f"Detected uneven input skew of greater than {_SKEW}. This means that rank {rank} has at least {_SKEW} "
                "fewer inputs than other currently-active ranks. This level of skew could lead to performance "
                "degradation during training.",
                stacklevel=4,
            )
        except Warning as error:
            return error
        return None

    def _restore(self) -> None:
        self._hooks = None
        with contextlib.ExitStack() as every:  # whatever one of them raises
            for joinable, before in zip(self._joinables, self._before, strict=True):
                config = JoinConfig.construct_disabled_join_config() if before is None else before
                every.callback(setattr, joinable, "_join_config", config)
                if (leave := getattr(joinable, "join_exit", None)) is not None:
                    every.callback(leave)


def _common_wire(joinables: Sequence[Any]) -> Wire:
    own = [joinable for joinable in joinables if not isinstance(joinable, StepJoinable)]  # these talk to nobody
    groups: list[Any] = [joinable.join_process_group or dist.group.WORLD for joinable in own]
    if any(group != groups[0] for group in groups):
        raise JoinError("Using join context manager with multiple process groups")
    return Wire(groups[0], joinables[0].join_device)


@register("join", "default")
def configured(
    joinables: Sequence[Any], enable: bool = True, throw: bool = False, divide_by_initial_world_size: bool = True
) -> Join:
    """Make a :class:`Join` from configuration: ``stagereg.instantiate(cfg.join, [model, optimizer])``.

    Args:
        joinables: as in :class:`Join`.
        enable: False makes the context do nothing.
        throw: when a rank runs out of data, raise on all ranks at the same step.
        divide_by_initial_world_size: True: gradients are sums over the active ranks divided by the world size;
            False: divided by the number of active ranks.
    """
    return Join(
        joinables,
        enable=enable,
        throw_on_early_termination=throw,
        divide_by_initial_world_size=divide_by_initial_world_size,
    )
