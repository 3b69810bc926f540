"""Where the steps of a DDP module begin, and what its forward has to know of the ranks that take part.

On torch's wire DDP's own forward says all this. Where all ranks run stagereg's join, DDP says nothing by itself any
more: the step is announced here, the divisor and the rank whose buffers count come from the join's membership. On
either wire, a forward that is no step of its own (the second one before a backward, or one under ``no_grad``) is kept
from announcing and from sharing buffers, since ranks without data take no notice of it.

The internals of ``DistributedDataParallel`` used here are those of torch 2.13 (``nn/parallel/distributed.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import JoinError
from stagereg.join.joinable import JoinConfig
from stagereg.join.step_tracker import Announcer

__all__ = ["FLAG", "Pace", "reset_divisor", "set_divisor"]

FLAG = "_check_global_requires_backward_grad_sync"
_AUTHORITY = "_find_common_rank"


class Pace:
    """Watches one DDP module in one join, whose configuration it has already; until :meth:`remove`.

    Args:
        ddp: the module.
        divide: whether gradients are divided by the world size, and not by the number of active ranks.

    Attributes:
        first: whether the module is the one that announces the rank.
        begun: how many steps have begun.
        leader: the pace of the join's first joinable, if that is a DDP module too and another one.
    """

    def __init__(self, ddp: DistributedDataParallel, divide: bool) -> None:
        config = ddp._join_config
        self.first = config.is_first_joinable
        self.begun = 0
        self.leader: Pace | None = None
        self._ddp = ddp
        self._divide = divide
        self._throw = config.throw_on_early_termination
        self._membership = getattr(config, "membership", None)
        self._in_step = False
        self._before: tuple[Any, bool] | None = None
        self._announcer = Announcer(ddp, self._begin, self._enter, self._leave, self._expects)
        self._inner: Any = None
        if self._membership is not None:
            ddp._join_config = config._replace(is_first_joinable=False)  # DDP's forward itself says nothing
            setattr(ddp, FLAG, lambda is_joined_rank: None)
            setattr(ddp, _AUTHORITY, lambda rank, candidate: self._membership.read().highest)
            self._inner = ddp.module.register_forward_hook(self._inner_done)

    @property
    def unfinished(self) -> bool:
        """Whether a step has begun without a backward."""
        return self._announcer.open

    def remove(self) -> None:
        """Stop watching, and let DDP speak for itself again."""
        self._announcer.remove()
        if self._inner is not None:
            self._inner.remove()
            self._ddp.__dict__.pop(FLAG, None)
            self._ddp.__dict__.pop(_AUTHORITY, None)

    @property
    def _rebuilds(self) -> bool:
        """Whether DDP arranges its buckets anew in this step, which it does once, and all ranks together."""
        if self._ddp._has_rebuilt_buckets or (self._ddp.find_unused_parameters and not self._ddp.static_graph):
            return False  # it has, or never will
        return self.begun > 0 or int(self._ddp._get_ddp_logging_data().get("iteration", 0)) > 0

    def _expects(self) -> bool:
        return self.first and self._membership is not None and bool(self._membership.expected)

    def _begin(self) -> None:
        if self.leader is not None and self.leader.begun <= self.begun:
            raise JoinError(
                "a DDP module ran before the join's first joinable did in this step, so ranks without data would "
                "answer the wrong one. List the joinables in the order in which the loop uses them."
            )
        if self._membership is not None:
            if self.first:
                self._membership.begin(torch.is_grad_enabled() and bool(self._ddp.require_backward_grad_sync))
            else:
                self._membership.check()
            if self._throw and self._rebuilds:
                # DDP's forward begins with a collective, which ranks out of data do not join.
                self._membership.raise_if_exhausted()
        self.begun += 1

    def _enter(self, began: bool) -> None:
        self._in_step = began
        if not began:
            self._before = (self._ddp._join_config, self._ddp.require_forward_param_sync)
            self._ddp._join_config = JoinConfig.construct_disabled_join_config()
            self._ddp.require_forward_param_sync = False

    def _leave(self, began: bool) -> None:
        self._in_step = False
        if self._before is not None:
            self._ddp._join_config, self._ddp.require_forward_param_sync = self._before
            self._before = None

    def _inner_done(self, *_: Any) -> None:
        # The sum has had the whole forward to arrive, and nothing of the step has been prepared yet.
        if not self._in_step or self._membership is None:
            return
        if self._throw:
            self._membership.raise_if_exhausted()
        if not self._divide:
            roll = self._membership.read()
            if roll.known and roll.syncing:
                set_divisor(self._ddp, roll.syncing)


def set_divisor(ddp: DistributedDataParallel, count: int) -> None:
    """Have DDP divide the gradients of the step that is under way by ``count``."""
    ddp.reducer._set_forward_pass_work_handle(_done(float(count)), False)


def reset_divisor(ddp: DistributedDataParallel) -> None:
    """Make DDP divide by the world size again; the work it was given last would otherwise stay its divisor."""
    ddp.reducer._set_forward_pass_work_handle(_done(0.0), True)


def _done(value: float) -> Any:
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([torch.full((1,), value)])
    return _create_work_from_future(done)
