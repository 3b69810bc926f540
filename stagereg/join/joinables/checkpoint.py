"""``checkpoint``: saves inside a join, asked for by any rank and taken part in by all.

A save is collective, so an active rank that calls the checkpointer alone would wait for ranks that have left the loop,
or write what these hold from long ago. It asks here instead, and all ranks save before the next step begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import JoinError
from stagereg.join.hooks.checkpoint import CheckpointHook, Saves
from stagereg.join.hooks.fsdp2 import device_of, group_of, reduces
from stagereg.join.joinable import Joinable, notify
from stagereg.join.step_tracker import Announcer
from stagereg.kernel.channel import control_channel
from stagereg.registry import register

__all__ = ["CheckpointJoinable"]

_MOST = 2**51


@register("joinable", "checkpoint")
class CheckpointJoinable(Joinable):
    """Lets any rank ask for a checkpoint, after its optimizer's step; all ranks then save the state after that step.

    The optimizer and all else that a step changes must be in the join too, or be stepped by a function that is. A save
    costs what the checkpointer's ``save`` costs; without one, each step has one small blocking exchange.

    When a rank is told to leave, by SIGTERM or SIGUSR1, ranks with data and without save after the next step for which
    ``maybe`` or ``ask`` is called, and leave together.

    It comes first in the list and announces the rank for the model, so that the exchange comes before the model's own
    collectives on every rank. All ranks construct theirs in the same order. In torch's ``Join``, make a new ``Join``
    for each epoch.

    Args:
        checkpointer: the :class:`stagereg.Checkpointer`; in a join nobody calls its ``save`` directly.
        state: what to save. Of entries that are plain values, ranks that have left the loop save those of one that has
            not.
        module: the model whose forward begins a step: what the loop calls. ``stagereg.Join`` fills in that of the first
            joinable that has one.

    Attributes:
        leads: that it has to be the first of a join's joinables.

    Example::

        saver = stagereg.build("joinable", "checkpoint", checkpointer=checkpointer, state=state, module=model)
        with stagereg.Join([saver, model, optimizer]):
            for step, batch in enumerate(loader, 1):
                train_one_step(batch)
                saver.maybe(step)
    """

    leads = True

    def __init__(self, checkpointer: Saves, state: MutableMapping[str, Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.checkpointer = checkpointer
        self.state = state
        self.module = module
        self._hook: CheckpointHook | None = None
        self._announcer: Announcer | None = None
        self._number = _numbers["checkpoint"]
        _numbers["checkpoint"] += 1

    @property
    def _join_config(self) -> Any:
        return self._config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._config: Any = config
        if not config.enable or self._hook is None:
            return
        if not config.is_first_joinable:
            raise JoinError("the checkpoint joinable comes first in a join: Join([saver, model, optimizer])")
        if self._announcer is None:
            self._announcer = Announcer(self._model(), self._begin, expects=self._expects)

    def ask(self, step: int) -> None:
        """Ask for a checkpoint of the step that has just ended; any rank that has data, after its optimizer's step.

        It is saved before the next step begins, or when the join ends. Outside a join it is saved at once, so there all
        ranks have to ask.

        Args:
            step: under which number; ranks that ask after the same step give the same one.

        Raises:
            JoinError: it is no whole number from 0 on.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _MOST:
            raise JoinError(f"A step is a whole number from 0 on, not {step!r}.")
        if self._announcer is None or self._hook is None:
            self.checkpointer.save(step, self.state)
        else:
            self._hook.asked = step

    def maybe(self, step: int) -> bool:
        """Ask if that is due: ``step`` is a positive multiple of the checkpointer's ``every``, or is as it plans.

        Returns:
            Whether it asked. Ranks that call it after the same step get the same answer. It also asks where the ranks
            have agreed to leave.
        """
        plan = getattr(self.checkpointer, "due", None)  # which also tells that the step has ended
        due = bool(plan(step)) if plan else step > 0 and step % self.checkpointer.every == 0
        if due:
            self.ask(step)
        return due

    def join_hook(self, **kwargs: Any) -> CheckpointHook:
        """Return the hook; takes no keyword arguments of its own. Collective where it is the first time."""
        self.join_exit()
        channel = control_channel(self.join_process_group, f"checkpoint/{self._number}")
        self._hook = CheckpointHook(self.checkpointer, self.state, channel, self._stop)
        return self._hook

    def join_exit(self) -> None:
        """Stop watching the model and its optimizers."""
        if self._hook is not None:
            self._hook.detach()
            self._hook = None

    @property
    def join_device(self) -> torch.device:
        """The model's device."""
        module = self._model()
        if isinstance(module, DistributedDataParallel):
            return module.join_device
        if isinstance(module, FSDPModule):
            return device_of(module)
        return next((param.device for param in module.parameters()), torch.device("cpu"))

    @property
    def join_process_group(self) -> Any:
        """The ranks that train the model."""
        module = self._model()
        if isinstance(module, DistributedDataParallel):
            return module.join_process_group
        if isinstance(module, FSDPModule):
            return group_of(module)
        return getattr(module, "process_group", None) or dist.group.WORLD

    def _model(self) -> nn.Module:
        if self.module is None:
            raise JoinError(
                "the checkpoint joinable needs to know the model whose forward begins a step: "
                "stagereg.build('joinable', 'checkpoint', checkpointer=..., state=..., module=model)"
            )
        return self.module

    def _expects(self) -> bool:
        membership = getattr(self._config, "membership", None)
        return membership is not None and bool(membership.expected)

    def _begin(self) -> None:
        """A step begins on this rank: announce it, and exchange requests before anything else happens."""
        hook, config = self._hook, self._config
        if hook is None:
            return
        membership = getattr(config, "membership", None)
        if hook.joined and (membership is None or not membership.expects_empty_step):
            return  # another hook runs the model, to take part in a step of ranks with data
        hook.joined = False
        if membership is None:
            notify(self)
        else:
            membership.begin(torch.is_grad_enabled() and _reduces(self._model()))
            if config.throw_on_early_termination:
                membership.raise_if_exhausted()
        hook.exchange(active=True)

    def _stop(self) -> None:
        if self._announcer is not None:
            self._announcer.remove()
            self._announcer = None


_numbers: Counter[str] = Counter()


def _reduces(module: nn.Module) -> bool:
    if isinstance(module, DistributedDataParallel):
        return bool(module.require_backward_grad_sync)
    return reduces(module) if isinstance(module, FSDPModule) else True
