"""``ddp``: take part in the forward and backward of a ``DistributedDataParallel`` module.

The collectives are those of torch's own hook, in its order, through the same internals of ``DistributedDataParallel``
(torch 2.13, ``nn/parallel/distributed.py``). Two things differ. torch throws the reduced gradients away; here they
become the gradients of the parameters, so that an optimizer stepped afterwards takes the step that the active ranks
take. And a loop that never zeroes its gradients, or that ran out in the middle of an accumulation, has a share in the
next reduction; here the joined rank goes on contributing it instead of zeros.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import JoinError
from stagereg.join.protocol import JoinHook
from stagereg.registry import register

__all__ = ["CarryWatch", "DdpHook"]


class CarryWatch:
    """Sees whether a training loop carries gradients over from one step into the next.

    It looks at one parameter's ``grad`` at the moment a backward adds to it: absent or zero if the loop zeroes
    gradients. The answer stays on the device until it is asked for.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._seen: torch.Tensor | None = None
        self._fresh = True  # the last backward was synchronized, so this one begins a new step
        first = next(p for p in ddp.parameters() if p.requires_grad)
        self._param = weakref.ref(first)
        self._handle = first.register_hook(self._look)

    def _look(self, _: torch.Tensor) -> None:
        ddp, param = self._ddp(), self._param()
        if ddp is None or param is None:
            return
        if self._fresh:
            self._seen = None if param.grad is None else param.grad.detach().ne(0).any()
        self._fresh = bool(ddp.require_backward_grad_sync)

    @property
    def always(self) -> bool:
        """Whether the loop never zeroes gradients, as far as its last step shows."""
        return self._seen is not None and bool(self._seen.item())

    @property
    def unfinished(self) -> bool:
        """Whether the last backward was not synchronized, so that its gradients wait for the next one."""
        return not self._fresh

    def settle(self) -> None:
        """What waited has been contributed."""
        self._fresh = True

    def remove(self) -> None:
        """Stop looking."""
        self._handle.remove()


@register("join_hook", "ddp")
class DdpHook(JoinHook):
    """Shadows a DDP module, and leaves the step's reduced gradients in ``param.grad``.

    Args:
        ddp: the module; its ``join_hook`` need not have been called.
        divide_by_initial_world_size: whether gradients are divided by the world size or by the number of active ranks.
        carry: what is known of gradients carried over; without it none are.

    Attributes:
        reduced: whether the last ``main_hook`` ended with reduced gradients; False in a ``no_sync`` step, after which
            no optimizer is to be stepped.
    """

    def __init__(
        self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool = True, carry: CarryWatch | None = None
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinError(f"the ddp join hook needs a DistributedDataParallel module, not a {type(ddp).__name__}")
        self.ddp = ddp
        self.reduced = False
        self._carry = carry
        self._divide = divide_by_initial_world_size
        if ddp.logger is not None:
            ddp.logger._set_uneven_input_join()
        ddp._divide_by_initial_world_size = divide_by_initial_world_size  # type: ignore[assignment]  # DDP's forward reads it

    def main_hook(self) -> None:
        """Match one forward and backward of the active ranks."""
        ddp = self.ddp
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        self.reduced = bool(ddp._check_global_requires_backward_grad_sync(is_joined_rank=True))
        ddp.require_forward_param_sync = self.reduced
        if not self.reduced:
            return
        used = self._match_backward()
        for param in ddp.parameters():
            if param.requires_grad and param not in used:
                param.grad = None  # not used on any rank: the active ranks have no gradient for it either
        if self._carry is not None:
            self._carry.settle()
        ddp.reducer._push_all_rebuilt_params()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take parameters and buffers from the last rank to join, as torch does."""
        self.ddp._sync_final_model(is_last_joiner)
        reset_divisor(self.ddp)

    @torch.no_grad()
    def _match_backward(self) -> _ParamSet:
        ddp = self.ddp
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        contribute = self._share()
        works = []
        for bucket in buckets:
            if contribute:
                self._fill(bucket, contribute)
            works.append(ddp.reducer._run_comm_hook(bucket))
        reduced: list[tuple[torch.Tensor, torch.Tensor]] = []
        for bucket, work in zip(buckets, works, strict=True):
            reduced += _gradients(bucket, work.wait())
        counts = self._used_counts()
        used = _ParamSet()
        for param, gradient in reduced:
            if counts is not None and not counts[param]:
                continue
            used.add(param)
            if param.grad is None or param.grad.layout != gradient.layout:
                param.grad = gradient.clone()
            else:
                param.grad.copy_(gradient)
        return used

    def _share(self) -> float:
        """The factor by which this rank's carried gradients enter the reduction; 0 where there are none."""
        carry = self._carry
        if carry is None or not (carry.always or carry.unfinished):
            return 0.0
        if not self._divide:
            return 0.0  # the mean over the active ranks, who all carry the same, has it in full
        hooked = bool(getattr(self.ddp, "_comm_hooks", None))  # a communication hook divides by itself
        return 1.0 if hooked else 1.0 / dist.get_world_size(self.ddp.process_group)

    def _fill(self, bucket: Any, factor: float) -> None:
        for view, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
            if param.grad is not None:
                torch.mul(param.grad, factor, out=view)

    def _used_counts(self) -> _ParamCounts | None:
        """Match the exchange of used parameters, which DDP appends where it looks for unused ones."""
        ddp = self.ddp
        if not ddp.find_unused_parameters:
            return None
        counts = ddp.reducer._get_local_used_map()
        work = ddp.process_group.allreduce(counts)
        work.wait()
        order, _ = ddp._build_params_for_reducer()
        return _ParamCounts(order, counts.tolist())


class _ParamSet:
    """Parameters by identity; a tensor's ``==`` is elementwise."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def add(self, param: torch.Tensor) -> None:
        self._ids.add(id(param))

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self._ids


class _ParamCounts:
    def __init__(self, params: Any, counts: list[int]) -> None:
        self._counts = {id(param): count for param, count in zip(params, counts, strict=True)}

    def __getitem__(self, param: torch.Tensor) -> int:
        return self._counts[id(param)]


def _gradients(bucket: Any, value: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair a bucket's parameters with their reduced gradients; ``value`` is what the bucket's reduction returned."""
    reduced = value[0] if isinstance(value, (list, tuple)) else value
    buffer = bucket.buffer()
    if buffer.is_sparse:
        return [(bucket.parameters()[0], reduced)]
    if reduced.data_ptr() != buffer.data_ptr():
        buffer.copy_(reduced.view_as(buffer))
    return list(zip(bucket.parameters(), bucket.gradients(), strict=True))


def reset_divisor(ddp: DistributedDataParallel) -> None:
    """Make DDP divide by the world size again; the work it was given last would otherwise stay its divisor."""
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([torch.zeros(1)])
    ddp.reducer._set_forward_pass_work_handle(_create_work_from_future(done), True)
