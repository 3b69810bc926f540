"""``checkpoint``: saves inside a join, asked for by any rank and taken part in by all.

A save is collective, so an active rank that calls the checkpointer alone would wait for ranks that have left the loop,
or write what these hold from long ago. It asks here instead, and all ranks save before the next step begins.

Once a step, before anything of it happens, the ranks exchange what was asked for: one small sum on a channel of its
own. All of them have ended the same step then, so what they save together is the state after it. The sum also carries
whether a rank got a signal to leave (SIGTERM, SIGUSR1): the ranks that still have data then ask at the end of the step.

A save is then the checkpointer's own: numbers are those of a rank with data, and stale optimizers fail it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.state.entries import positions
from stagereg.errors import JoinError
from stagereg.join.adapt import auto
from stagereg.join.joinable import BuiltInHook, JoinHook, notify
from stagereg.join.kinds.module import ModuleJoinable
from stagereg.join.tracked import TrackedJoinable
from stagereg.kernel.channel import control_channel
from stagereg.launch.preemption import SIGNALS
from stagereg.registry import register

_MOST = 2**51


@register("join_hook", "checkpoint")
class CheckpointHook(BuiltInHook["CheckpointJoinable"]):
    """Exchanges requests once a step, and saves what was requested; first of a join's hooks."""

    def before_step(self) -> None:
        """Exchange on a rank without data, ahead of the step's other hooks."""
        self.joinable.shadow_step()

    def main_hook(self) -> None:
        """Exchange in torch's ``Join``, which does not call :meth:`before_step`."""
        if self.joinable.session is None:
            self.joinable.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Exchange what was asked for after the last step."""
        self.joinable.exchange(active=False)
        self.joinable.detach()


@register("joinable", "checkpoint")
class CheckpointJoinable(TrackedJoinable):
    """Lets any rank ask for a checkpoint, after its optimizer's step; all ranks then save the state after that step.

    The optimizer and all else that a step changes must be in the join too, or be stepped by a function that is. A save
    costs what the checkpointer's ``save`` costs; without one, each step has one small blocking exchange.

    When a rank gets a signal to leave, SIGTERM or SIGUSR1, ranks with data and without save after the next step for
    which ``maybe`` or ``ask`` is called, and leave together.

    It comes first in the list and announces the rank for the model, so that the exchange comes before the model's own
    collectives on every rank. In torch's ``Join``, make a new ``Join`` for each epoch.

    Args:
        checkpointer: in a join its ``save`` is not called directly.
        state: what to save. Of entries that are plain values, ranks that have left the loop save those of one that has
            not.
        module: the model whose forward begins a step: what the loop calls. ``stagereg.Join`` fills in that of the first
            joinable that has one.
        hook: another hook in the place of ``checkpoint``.

    Raises:
        JoinError: the state has a position in data, which is a batch ahead when the next step begins.

    Example::

        saver = stagereg.build("joinable", "checkpoint", checkpointer=checkpointer, state=state, module=model)
        with stagereg.Join([saver, model, optimizer]):
            for step, batch in enumerate(loader, 1):
                train_one_step(batch)
                saver.maybe(step)
    """

    runs_first = True
    own_hook = CheckpointHook

    def __init__(
        self,
        checkpointer: Checkpointer,
        state: MutableMapping[str, Any],
        module: nn.Module | None = None,
        hook: Callable[..., JoinHook] | None = None,
    ) -> None:
        super().__init__(hook)
        if ahead := positions(state):
            raise JoinError(
                f"{ahead[0]!r} is a position in data. The joinable `checkpoint` saves when a loop has taken its next "
                "batch, which would be left out after a restore. Loop over join.iterate(...) instead, and call "
                "checkpointer.maybe_save(step, state) in its body."
            )
        self.checkpointer = checkpointer
        self.state = state
        checkpointer.remember(state)  # and count the steps of its optimizers
        self.module = module
        self._asked: int | None = None  # the step that this rank asks to save
        self._shadows = False  # whether this rank takes part by hooks
        self._active: list[int] = []  # ranks with data in the last step that had any
        self._channel: Any = None

    def ask(self, step: int) -> None:
        """Ask for a checkpoint of the step that has just ended; any rank that has data, after its optimizer's step.

        It is saved before the next step begins, or when the join ends. Outside a join it is saved at once, so there all
        ranks have to ask.

        Args:
            step: under which number; ranks that ask after the same step give the same one.

        Raises:
            JoinError: it is no whole number from 0 on.
        """
        if type(step) is not int or not 0 <= step < _MOST:
            raise JoinError(f"A step is a whole number from 0 on, not {step!r}.")
        if not self.handles or not self._join_config.enable:
            self.checkpointer.save(step, self.state)
        else:
            self._asked = step

    def maybe(self, step: int) -> bool:
        """Ask if the checkpointer says that a save is :meth:`due <stagereg.Checkpointer.due>`.

        Returns:
            Whether it asked. Ranks that call it after the same step get the same answer. It also asks where the ranks
            have agreed to leave.
        """
        due = self.checkpointer.due(step)
        if due:
            self.ask(step)
        return due

    def watch(self) -> None:
        """Watch the model's forward. Collective where it is the first time."""
        self._channel = control_channel(self.join_process_group, "checkpoint")
        super().watch()
        if self.checkpointer.preemption is not None:
            self.checkpointer.preemption.exchanged_by_join = True

    def detach(self) -> None:
        """Stop watching the model."""
        if self.handles and self.checkpointer.preemption is not None:
            self.checkpointer.preemption.exchanged_by_join = False
        self._asked, self._shadows, self._active, self._channel = None, False, [], None
        super().detach()

    @property
    def join_device(self) -> torch.device:
        """The model's device."""
        return self._model.join_device

    @property
    def join_process_group(self) -> Any:
        """The ranks that train the model."""
        return self._model.join_process_group

    def on_step(self, is_announced: bool) -> None:
        """A step begins on this rank: announce it, and exchange requests before anything else happens."""
        if not self._join_config.is_first_joinable:
            raise JoinError("the checkpoint joinable comes first in a join: Join([saver, model, optimizer])")
        if is_announced:
            return
        membership = self.membership
        if self._shadows and (membership is None or not membership.expects_empty_step):
            return  # another hook runs the model, to take part in a step of ranks with data
        self._shadows = False
        notify(self, self._model.will_reduce if torch.is_grad_enabled() else None)
        self.exchange(active=True)

    def shadow_step(self) -> None:
        """A step has begun on ranks with data, and this one has none: exchange ahead of the other hooks."""
        self._shadows = True
        self.exchange(active=False)

    def exchange(self, active: bool) -> None:
        """Exchange requests with all ranks, and save if there is one; every rank once a step, and once at the end.

        Args:
            active: whether this rank runs the loop's body in the step that begins.

        Raises:
            JoinError: on all ranks: they ask for different steps.
            CheckpointError: see :meth:`stagereg.Checkpointer.save`.
            SystemExit: on all ranks: they had a signal to leave, and this save was the last.
        """
        asked, self._asked = self._asked, None
        channel, consensus = self._channel, self.checkpointer.preemption
        values = [0.0] * channel.size
        values[channel.rank] = float(active) if asked is None else 2.0 * (asked + 1) + active
        signals = [0.0] * len(SIGNALS) if consensus is None else consensus.signal_flags()
        sums = channel.add([*values, *signals]).wait()
        requested = [int(value) for value in sums[: channel.size]]
        if consensus is not None:
            consensus.update(sums[channel.size :])
        # At the end no rank is active; those that were in the last step have its state.
        self._active = [rank for rank, value in enumerate(requested) if value % 2] or self._active
        requests = {rank: value // 2 - 1 for rank, value in enumerate(requested) if value > 1}
        if not requests:
            return
        step = next(iter(requests.values()))
        if set(requests.values()) != {step}:
            each = ", ".join(f"rank {rank} for step {asked}" for rank, asked in requests.items())
            raise JoinError(
                f"ranks asked for checkpoints of different steps at the same time: {each}. Count the steps that the "
                "ranks take together, not a rank's own batches."
            )
        left = bool(self._active) and self._channel.rank not in self._active
        self.checkpointer.save_in_join(step, self.state, follows=left)

    @property
    def _model(self) -> Any:
        """A joinable of the model, which knows its device, its ranks, and when it reduces its gradients."""
        if self.module is None:
            raise JoinError(
                "the checkpoint joinable needs to know the model whose forward begins a step: "
                "stagereg.build('joinable', 'checkpoint', checkpointer=..., state=..., module=model)"
            )
        if isinstance(self.module, (DistributedDataParallel, FSDPModule)):
            return auto(self.module)
        return ModuleJoinable(self.module, device=str(next((p.device for p in self.module.parameters()), "cpu")))
