"""``ddp``: a ``DistributedDataParallel`` module, in stagereg's ``Join`` or in torch's.

On torch's wire DDP's own forward announces the rank. Where all ranks run stagereg's join, the joinable does that, and
the divisor and the rank whose buffers count come from the join's membership. On either wire a forward that is no step
of its own (the second one before a backward, or one under ``no_grad``) neither announces nor shares buffers, since
ranks without data do not take part in it.

The hook's collectives are those of torch's own hook, in its order. Three things differ. torch throws the reduced
gradients away; here they become the gradients of the parameters, so that an optimizer stepped afterwards takes the
step that the active ranks take. A loop that never zeroes its gradients, or that ran out in the middle of an
accumulation, has a share in the next reduction; here the joined rank goes on contributing it instead of zeros. And
torch's joined ranks report the parameters used long ago as used; here they report none.

The internals of ``DistributedDataParallel`` used here are those of torch 2.13 (``nn/parallel/distributed.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import JoinError
from stagereg.join.carryover import GradCarryover
from stagereg.join.joinable import JoinConfig, JoinHook, serves
from stagereg.join.session import JoinSession
from stagereg.join.step_tracker import TrackedJoinable
from stagereg.kernel.shadow import TorchWire
from stagereg.registry import register

__all__ = ["DdpHook", "DdpJoinable"]

_DIVISOR = "_divide_by_initial_world_size"
_ANNOUNCE_REDUCTION = "_check_global_requires_backward_grad_sync"
_COMMON_RANK = "_find_common_rank"


@register("joinable", "ddp")
class DdpJoinable(TrackedJoinable):
    """Joins a DDP module.

    Joined ranks end every step with the step's reduced gradients in ``param.grad``, so an optimizer that follows in the
    list of joinables keeps parameters and optimizer state equal on all ranks. ``Join`` wraps a bare DDP module in this
    by itself; name it where torch's ``Join`` is used, or to pass it to ``step`` or ``zero``.

    Args:
        module: the DDP module.
        hook: another hook in the place of ``ddp``.

    Attributes:
        divides_by_world: whether gradients are divided by the world size, and not by the number of active ranks.
        carryover: knows what the loop does with its gradients, while the module is watched.

    Keyword arguments of ``Join`` that it takes:
        divide_by_initial_world_size (bool): True (default): gradients are sums over the active ranks divided by the
            world size; False: divided by the number of active ranks.
    """

    reduces_gradients = True
    module: DistributedDataParallel

    def __init__(self, module: DistributedDataParallel, hook: Callable[..., JoinHook] | None = None) -> None:
        if not isinstance(module, DistributedDataParallel):
            raise JoinError(f"the ddp joinable needs a DistributedDataParallel module, not a {type(module).__name__}")
        super().__init__(hook, stands_for=module)
        self.module = module
        self.reduced = False
        self.divides_by_world = True
        self.carryover: GradCarryover | None = None
        self._leader: DdpJoinable | None = None
        self._divided_before: bool | None = None
        self._forward_settings: tuple[Any, bool] | None = None
        self._inner: Any = None
        self._has_divisor = False  # whether some step got one from the join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the module's hook, and begin to watch the module: torch's ``Join`` calls nothing else."""
        self.detach()
        self.divides_by_world = bool(kwargs.get("divide_by_initial_world_size", True))
        hook = self.make_hook(DdpHook)
        if self.module.logger is not None:
            self.module.logger._set_uneven_input_join()
        self.watch()
        return hook

    def attach(self, session: JoinSession) -> None:
        """Begin to watch the module. Raises: ``JoinError`` if it has sparse gradients, which DDP cannot shadow."""
        self._refuse_sparse_gradients()
        super().attach(session)
        self._leader = next((each for each in session.joinables if isinstance(each, DdpJoinable)), None)

    def watch(self) -> None:
        """Have the module's forward announce through the join."""
        ddp = self.module
        self._divided_before = getattr(ddp, _DIVISOR, None)
        setattr(ddp, _DIVISOR, self.divides_by_world)  # DDP's forward reads it
        setattr(ddp, _ANNOUNCE_REDUCTION, self._announce_reduction)
        setattr(ddp, _COMMON_RANK, self._common_rank)
        self.carryover = GradCarryover(ddp)
        super().watch()
        self._inner = ddp.module.register_forward_hook(self._inner_forward_done)

    @property
    def ends_equal(self) -> bool:
        """Whether the module is the same on all ranks without an exchange: all took every step, and have no buffers."""
        session = self.session
        return session is not None and session.all_took_every_step and not any(True for _ in self.module.buffers())

    def end_steps(self) -> None:
        """No step follows: forget the divisor of the last step, if it had one."""
        if self._has_divisor:
            self.module.reducer._set_forward_pass_work_handle(_done_work(0.0), True)

    def detach(self) -> None:
        """Stop watching, and leave the module as it was."""
        if self.tracker is not None:
            self.end_steps()
            ddp = self.module
            ddp.__dict__.pop(_ANNOUNCE_REDUCTION, None)
            ddp.__dict__.pop(_COMMON_RANK, None)
            self._inner.remove()
            if self.carryover is not None:
                self.carryover.remove()
            self.reduced, self.carryover, self._inner = False, None, None
            if self._divided_before is not None:
                setattr(ddp, _DIVISOR, self._divided_before)
            elif hasattr(ddp, _DIVISOR):
                delattr(ddp, _DIVISOR)
        self._leader = None
        super().detach()

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        """Whether a step depends on which ranks are active: through the divisor, or through buffers that are shared."""
        shares = self.module.forward_sync_buffers and any(True for _ in self.module.module.buffers())
        return shares or not divide_by_initial_world_size

    @property
    def will_reduce(self) -> bool:
        """Whether the next backward reduces the gradients; not under ``no_sync``."""
        return bool(self.module.require_backward_grad_sync)

    def on_step(self) -> None:
        """Announce the step, except on torch's wire, where DDP's own forward does."""
        tracker, membership, config = self.tracker, self.membership, self._join_config
        assert tracker is not None
        self._has_divisor |= membership is None
        if self.session is None:
            if not tracker.begun:
                self._refuse_sparse_gradients()
            return
        leader = None if self._leader is self or self._leader is None else self._leader.tracker
        if leader is not None and leader.begun <= tracker.begun:
            raise JoinError(
                "a DDP module ran before the join's first joinable did in this step, so ranks without data would "
                "answer the wrong one. List the joinables in the order in which the loop uses them."
            )
        if membership is None:
            self.session.announced += config.is_first_joinable
            return
        if config.is_first_joinable:
            self.session.begin(torch.is_grad_enabled() and self.will_reduce)
        else:
            membership.check()
        if config.throw_on_early_termination and self._rebuilds_buckets(tracker.begun):
            # DDP's forward begins with a collective, in which ranks out of data do not take part.
            membership.raise_if_exhausted()

    def before_forward(self, is_step: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have DDP's forward announce only a step of torch's wire."""
        ddp = self.module
        config = ddp._join_config
        self._forward_settings = config, ddp.require_forward_param_sync
        if not is_step:
            ddp._join_config = JoinConfig.construct_disabled_join_config()
            ddp.require_forward_param_sync = False
        elif self.membership is not None:
            ddp._join_config = config._replace(is_first_joinable=False)
        if torch.is_grad_enabled() and self.carryover is not None:
            self.carryover.before_forward(self.will_reduce)

    def after_forward(self, is_step: bool) -> None:
        """Put DDP's settings back."""
        if self._forward_settings is not None:
            self.module._join_config, self.module.require_forward_param_sync = self._forward_settings
            self._forward_settings = None

    def _inner_forward_done(self, *_: Any) -> None:
        # The sum has had the whole forward to arrive, and nothing of the step has been prepared yet.
        membership = self.membership
        if membership is None or self.tracker is None or not self.tracker.in_step:
            return
        if self._join_config.throw_on_early_termination:
            membership.raise_if_exhausted()
        if not self.divides_by_world:
            syncing = membership.read().syncing
            if syncing:
                self._has_divisor = True
                self.module.reducer._set_forward_pass_work_handle(_done_work(float(syncing)), False)

    def _announce_reduction(self, is_joined_rank: bool) -> None:
        """In the place of DDP's own: announce to joined ranks whether this step reduces, on torch's wire."""
        ddp = self.module
        if self.membership is not None:
            return
        if self.divides_by_world or ddp._join_config.is_first_joinable:
            DistributedDataParallel._check_global_requires_backward_grad_sync(ddp, is_joined_rank)
            return
        # The announcement of the first joinable gives its module the number of active ranks; here this sum does.
        work = TorchWire(ddp.process_group, ddp.device).announce(self.will_reduce)
        ddp.reducer._set_forward_pass_work_handle(work, False)

    def _common_rank(self, rank: int, is_candidate: bool) -> int:
        """In the place of DDP's own: the rank whose buffers all ranks take in a step, or whose model in the end."""
        membership = self.membership
        if membership is not None and not membership.over:
            return membership.read().ranks[-1]
        if self.session is not None and self.session.all_took_every_step:  # all are candidates, and the last one wins
            return self.module.process_group.size() - 1
        return int(DistributedDataParallel._find_common_rank(self.module, rank, is_candidate))

    def _rebuilds_buckets(self, begun: int) -> bool:
        """Whether DDP arranges its buckets anew in this step, which it does once, and all ranks together."""
        ddp = self.module
        if ddp._has_rebuilt_buckets or (ddp.find_unused_parameters and not ddp.static_graph):
            return False  # it has, or never will
        return begun > 0 or int(ddp._get_ddp_logging_data().get("iteration", 0)) > 0

    def _refuse_sparse_gradients(self) -> None:
        layers = (each for each in self.module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
        if any(layer.sparse for layer in layers):
            raise JoinError(
                "a DDP module with sparse gradients cannot be joined, as joined ranks have no zeros to send for them. "
                "Build its Embedding layers with sparse=False, or the join with enable=False if all inputs are even."
            )


@register("join_hook", "ddp")
class DdpHook(JoinHook):
    """Shadows a DDP module, and leaves the step's reduced gradients in ``param.grad``.

    Args:
        joinable: the module's joinable.
    """

    def __init__(self, joinable: DdpJoinable, /) -> None:
        self.joinable = serves(self, joinable, DdpJoinable)

    def main_hook(self) -> None:
        """Match one forward and backward of the active ranks."""
        ddp, carryover = self.joinable.module, self._carryover
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            raise JoinError(
                "a DDP module with static_graph=True learns its graph in its first step, so a rank that never had a "
                "batch cannot shadow it. Give every rank a batch, or use join.iterate, whose body runs on all ranks."
            )
        carryover.policy.set_active(False)
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        active = self.joinable.active_that_reduce()
        self.joinable.reduced = ddp.require_forward_param_sync = active > 0
        if not active:
            return
        self._match_backward(active)
        carryover.after_shadowed_step()
        ddp.reducer._push_all_rebuilt_params()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take parameters and buffers from the last rank to join, as torch does."""
        self.joinable.end_steps()  # torch's ``Join`` may be entered again, so the watch goes on
        if self.joinable.ends_equal:
            return
        self.joinable.module._sync_final_model(is_last_joiner)
        if not is_last_joiner:
            for param in self.joinable.module.parameters():
                self._forget(param)

    @property
    def _carryover(self) -> GradCarryover:
        assert self.joinable.carryover is not None
        return self.joinable.carryover

    @torch.no_grad()
    def _match_backward(self, active: int) -> None:
        reducer = self.joinable.module.reducer
        buckets = reducer._get_zeros_like_grad_buckets()
        share = self._share(active)
        works = []
        for bucket in buckets:
            if share:
                _fill(bucket, share)
            works.append(reducer._run_comm_hook(bucket))
        reduced = [
            pair for bucket, work in zip(buckets, works, strict=True) for pair in _gradients(bucket, work.wait())
        ]
        unused = self._match_used_map()
        fresh = set()
        for param, gradient in reduced:
            if id(param) in unused:
                continue
            fresh.add(id(param))
            if param.grad is None:
                param.grad = gradient.clone()
            else:
                param.grad.copy_(gradient)
        for param in self.joinable.module.parameters():
            if id(param) not in fresh:
                self._forget(param)

    def _share(self, active: int) -> float:
        """The factor by which this rank's gradients of steps before enter the reduction; 0 where they do not."""
        self._carryover.policy.ask(self.joinable.session)
        carries = self._carryover.policy.current() == "carries"
        if not carries and not self._carryover.is_unfinished:
            return 0.0
        ddp = self.joinable.module
        if ddp._get_ddp_logging_data().get("comm_hook"):
            return 1.0  # a communication hook divides by itself
        if self.joinable.divides_by_world:
            return 1.0 / dist.get_world_size(ddp.process_group)
        # Of what all ranks carry alike, the mean over the active ranks has it in full.
        return 0.0 if carries else 1.0 / active

    def _match_used_map(self) -> set[int]:
        """Match DDP's exchange of the parameters used, where there is one; return the ids of those used nowhere."""
        ddp = self.joinable.module
        used = ddp.reducer._get_local_used_map()
        if not ddp.static_graph:  # else exchanged once for all, in the first step
            if not ddp.find_unused_parameters:
                return set()
            used = torch.zeros_like(used)
            ddp.process_group.allreduce(used).wait()
        params, _ = ddp._build_params_for_reducer()
        return {id(param) for param, count in zip(params, used.tolist(), strict=True) if not count}

    def _forget(self, param: torch.Tensor) -> None:
        """Drop a gradient of a step before, as the active ranks did when they zeroed theirs."""
        if param.grad is None or self._carryover.is_unfinished:
            return
        policy = self._carryover.policy.current()
        if policy == "zeroes":
            param.grad.zero_()
        elif policy == "drops" and param.grad.any():
            param.grad = None


def _done_work(value: float) -> Any:
    """A work that has ended with a value; DDP takes it for the divisor of the step that is under way."""
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([torch.full((1,), value)])
    return _create_work_from_future(done)


def _fill(bucket: Any, factor: float) -> None:
    for view, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
        if param.grad is not None:
            torch.mul(param.grad, factor, out=view)


def _gradients(bucket: Any, value: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair a bucket's parameters with their reduced gradients; ``value`` is what the bucket's reduction returned."""
    reduced = value[0] if isinstance(value, (list, tuple)) else value
    buffer = bucket.buffer()
    if reduced.data_ptr() != buffer.data_ptr():
        buffer.copy_(reduced.view_as(buffer))
    return list(zip(bucket.parameters(), bucket.gradients(), strict=True))
