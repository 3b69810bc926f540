"""``ddp``: take part in the forward and backward of a ``DistributedDataParallel`` module.

The collectives are those of torch's own hook, in its order, through the same internals of ``DistributedDataParallel``
(torch 2.13, ``nn/parallel/distributed.py``). Three things differ. torch throws the reduced gradients away; here they
become the gradients of the parameters, so that an optimizer stepped afterwards takes the step that the active ranks
take. A loop that never zeroes its gradients, or that ran out in the middle of an accumulation, has a share in the next
reduction; here the joined rank goes on contributing it instead of zeros. And torch's joined ranks report the parameters
used long ago as used; here they report none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import JoinError
from stagereg.join.carryover import CarryWatch
from stagereg.join.joinable import JoinHook
from stagereg.join.pace import FLAG, Pace, reset_divisor
from stagereg.kernel.shadow import TorchWire
from stagereg.registry import register

__all__ = ["DdpHook"]

_DIVISOR = "_divide_by_initial_world_size"


@register("join_hook", "ddp")
class DdpHook(JoinHook):
    """Shadows a DDP module, and leaves the step's reduced gradients in ``param.grad``.

    Args:
        ddp: the module; its ``join_hook`` need not have been called.
        divide_by_initial_world_size: whether gradients are divided by the world size or by the number of active ranks.

    Attributes:
        reduced: whether the last ``main_hook`` ended with reduced gradients; False in a ``no_sync`` step, after which
            no optimizer is to be stepped.
        pace: watches where the module's steps begin, while the hook is attached.
    """

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool = True) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinError(f"the ddp join hook needs a DistributedDataParallel module, not a {type(ddp).__name__}")
        self.ddp = ddp
        self.reduced = False
        self._divide = divide_by_initial_world_size
        self._divided_before = getattr(ddp, _DIVISOR, None)
        self._carry: CarryWatch | None = None
        self.pace: Pace | None = None
        self._tell_ddp()

    def attach(self) -> None:
        """Watch the module's training steps, from which :meth:`main_hook` learns how to go on, until :meth:`detach`.

        Raises:
            JoinError: the module has sparse gradients, which DDP cannot shadow.
        """
        _, sparse = self.ddp._build_params_for_reducer()
        if any(sparse):
            raise JoinError(
                "a DDP module with sparse gradients cannot be joined, as joined ranks have no zeros to send for them. "
                "Build its Embedding layers with sparse=False, or the join with enable=False if all inputs are even."
            )
        self._tell_ddp()
        if self._carry is None:
            self._carry = CarryWatch(self.ddp)
        self._release()
        self.pace = Pace(self.ddp, self._divide)
        if getattr(self.ddp._join_config, "membership", None) is None and not (self._divide or self.pace.first):
            # Only the first joinable's announcement would tell this module the number of active ranks.
            setattr(self.ddp, FLAG, self._flag)

    def detach(self) -> None:
        """Stop watching, and leave the module as it was before this hook was made."""
        if self._carry is not None:
            self._carry.remove()
            self._carry = None
        self._release()
        reset_divisor(self.ddp)
        if self._divided_before is not None:
            setattr(self.ddp, _DIVISOR, self._divided_before)
        elif hasattr(self.ddp, _DIVISOR):
            delattr(self.ddp, _DIVISOR)

    def main_hook(self) -> None:
        """Match one forward and backward of the active ranks."""
        ddp = self.ddp
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            raise JoinError(
                "a DDP module with static_graph=True learns its graph in its first step, so a rank that never had a "
                "batch cannot shadow it. Give every rank a batch, or use join.iterate, whose body runs on all ranks."
            )
        if self._carry is not None:
            self._carry.join()
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        active = self._reducing()
        self.reduced = active > 0
        ddp.require_forward_param_sync = self.reduced
        if not self.reduced:
            return
        self._match_backward(active)
        if self._carry is not None:
            self._carry.settle()
        ddp.reducer._push_all_rebuilt_params()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take parameters and buffers from the last rank to join, as torch does."""
        self._release()
        self.ddp._sync_final_model(is_last_joiner)
        reset_divisor(self.ddp)
        if not is_last_joiner:
            for param in self.ddp.parameters():
                self._forget(param)

    def _release(self) -> None:
        if self.pace is not None:
            self.pace.remove()
            self.pace = None
        self.ddp.__dict__.pop(FLAG, None)

    def _reducing(self) -> int:
        """How many active ranks will reduce their gradients in this step."""
        membership = getattr(self.ddp._join_config, "membership", None)
        if membership is None:
            return TorchWire(self.ddp.process_group, self.ddp.device).count_active()
        return int(membership.read().syncing)

    def _tell_ddp(self) -> None:
        if self.ddp.logger is not None:
            self.ddp.logger._set_uneven_input_join()
        setattr(self.ddp, _DIVISOR, self._divide)  # DDP's forward reads it

    def _flag(self, is_joined_rank: bool) -> None:
        """Active rank: tell joined ranks whether to reduce, as DDP does; the sum is the number of ranks that will."""
        ddp = self.ddp
        work = TorchWire(ddp.process_group, ddp.device).announce(bool(ddp.require_backward_grad_sync))
        ddp.reducer._set_forward_pass_work_handle(work, False)

    @torch.no_grad()
    def _match_backward(self, active: int) -> None:
        reducer = self.ddp.reducer
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
        for param in self.ddp.parameters():
            if id(param) not in fresh:
                self._forget(param)

    def _share(self, active: int) -> float:
        """The factor by which this rank's gradients of steps before enter the reduction; 0 where they do not."""
        carry = self._carry
        if carry is None:
            return 0.0
        carry.ask()
        carries = carry.habit() == "carries"
        if not carries and not carry.unfinished:
            return 0.0
        if self.ddp._get_ddp_logging_data().get("comm_hook"):
            return 1.0  # a communication hook divides by itself
        if self._divide:
            return 1.0 / dist.get_world_size(self.ddp.process_group)
        # Of what all ranks carry alike, the mean over the active ranks has it in full.
        return 0.0 if carries else 1.0 / active

    def _match_used_map(self) -> set[int]:
        """Match DDP's exchange of the parameters used, where there is one; return the ids of those used nowhere."""
        ddp = self.ddp
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
        carry = self._carry
        if param.grad is None or (carry is not None and (carry.unfinished or carry.habit() == "carries")):
            return
        if carry is not None and carry.habit() == "zeroes":
            param.grad.zero_()
        elif param.grad.any():
            param.grad = None


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
