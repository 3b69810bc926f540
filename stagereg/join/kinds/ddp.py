"""``ddp``: a ``DistributedDataParallel`` module, in stagereg's ``Join`` or in torch's ``Join``.

In torch's ``Join``, DDP's own forward announces each step; in stagereg's ``Join``, the joinable does. Unless torch's
protocol is used, the join determines the divisor of the gradients and the rank whose buffers are broadcast. The hook
runs the same collectives as torch's hook, in the same order, with three differences. It writes reduced gradients to the
parameters. Gradients accumulated without a reduction contribute to the next reduction. Ranks without data report no
parameter as used. This module uses internals of ``DistributedDataParallel`` in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from stagereg.base.option_text import option
from stagereg.errors import JoinError
from stagereg.join.joinable import BuiltInHook, JoinHook, uncompiled
from stagereg.join.kinds.reduction import ReducingJoinable
from stagereg.join.session import JoinSession
from stagereg.registry import register
from stagereg.stagers.guard import announce_write


@register("join_hook", "ddp")
class DdpHook(BuiltInHook["DdpJoinable"]):
    """Runs a DDP module's collectives on a rank without data. Writes reduced gradients to ``param.grad``."""

    def main_hook(self) -> None:
        """Run the collectives of one forward and one backward of the active ranks."""
        joinable, ddp = self.joinable, self.joinable.module
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            raise JoinError(
                "a DDP module with static_graph=True records its graph in its first step, so a rank that never had a "
                "batch cannot take part in it. Give every rank a batch, or use join.iterate."
            )
        joinable.shadow()
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        active = joinable.active_that_reduce()
        joinable.reduced = ddp.require_forward_param_sync = active > 0
        if active:
            joinable.ask()
            self._match_backward(self._share(active))
            joinable.shadowed()
            ddp.reducer._push_all_rebuilt_params()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy parameters and buffers from the last rank that left the loop, as torch does."""
        session, ddp = self.joinable.session, self.joinable.module
        self.joinable.end_steps()  # does not stop watching: torch's ``Join`` may be entered again
        if session is not None and session.all_took_every_step and not ddp.modules_buffers:
            return  # the model is equal on all ranks
        announce_write()  # a stager may still be copying these parameters
        ddp._sync_final_model(is_last_joiner)
        if self.joinable.was_shadowed:
            for param in ddp.parameters():
                self._forget(param)

    @torch.no_grad()
    def _match_backward(self, share: float) -> None:
        ddp = self.joinable.module
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        works = []
        for bucket in buckets:
            for view, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
                if share and param.grad is not None:
                    torch.mul(param.grad, share, out=view)
            works.append(ddp.reducer._run_comm_hook(bucket))
        reduced: dict[torch.Tensor, torch.Tensor] = {}
        for bucket, work in zip(buckets, works, strict=True):
            value, buffer = work.wait(), bucket.buffer()
            result = value[0] if isinstance(value, (list, tuple)) else value
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result.view_as(buffer))
            reduced.update(zip(bucket.parameters(), bucket.gradients(), strict=True))
        unused = self._unused_everywhere()
        for param in ddp.parameters():
            if param not in reduced or param in unused:
                self._forget(param)
            elif param.grad is None:
                param.grad = reduced[param].clone()
            else:
                param.grad.copy_(reduced[param])

    def _share(self, active: int) -> float:
        """Return the factor by which this rank's accumulated gradients enter the reduction; 0 to exclude them."""
        carries = self.joinable.policy.carries
        if not carries and not self.joinable.is_unfinished:
            return 0.0
        ddp = self.joinable.module
        if ddp._get_ddp_logging_data().get("comm_hook"):
            return 1.0  # communication hooks divide the gradients themselves
        if self.joinable.divides_by_world:
            return 1.0 / dist.get_world_size(ddp.process_group)
        # If every rank carries gradients over, the mean over the active ranks already contains them.
        return 0.0 if carries else 1.0 / active

    def _unused_everywhere(self) -> set[torch.Tensor]:
        """Take part in DDP's exchange of used parameters, if it runs one. Return the parameters that no rank used."""
        ddp = self.joinable.module
        used = ddp.reducer._get_local_used_map()
        if not ddp.static_graph:  # a static graph runs this exchange only once, in its first step
            if not ddp.find_unused_parameters:
                return set()
            used = torch.zeros_like(used)
            ddp.process_group.allreduce(used).wait()
        params, _ = ddp._build_params_for_reducer()
        return {param for param, count in zip(params, used.tolist(), strict=True) if not count}

    def _forget(self, param: torch.Tensor) -> None:
        if param.grad is not None and param.grad.any() and not self.joinable.is_unfinished:
            self.joinable.policy.forget(param)


@register("joinable", "ddp")
class DdpJoinable(ReducingJoinable):
    """Joins a DDP module. ``Join`` wraps a bare DDP module in this class automatically; torch's ``Join`` does not.

    After each step, ``param.grad`` has the reduced gradients also on ranks that left the loop. So an optimizer after
    this joinable in the list keeps parameters and optimizer state equal on all ranks.

    Args:
        module: the DDP module, or the result of ``torch.compile`` on it.
        hook: a hook to use instead of :class:`DdpHook`.

    Keyword arguments of ``Join`` that this joinable uses:
        divide_by_initial_world_size (bool): True (default): gradients are sums over the active ranks divided by the
            world size; False: divided by the number of active ranks.
    """

    own_hook = DdpHook
    # DDP's forward reads the first attribute. The other two replace methods of DDP.
    replaced = ("_divide_by_initial_world_size", "_check_global_requires_backward_grad_sync", "_find_common_rank")
    module: DistributedDataParallel
    _params: Sequence[torch.Tensor] = ()

    def __init__(self, module: DistributedDataParallel, hook: Callable[..., JoinHook] | None = None) -> None:
        module = uncompiled(module)
        if not isinstance(module, DistributedDataParallel):
            raise JoinError(f"the ddp joinable needs a DistributedDataParallel module, not a {type(module).__name__}")
        super().__init__(hook, module.join_process_group, module.join_device, stands_for=module)
        self.module = module

    def watch(self) -> None:
        """Start to watch the module. Its forward then announces steps through the join.

        Raises: ``JoinError`` if the module has sparse gradients.
        """
        ddp = self.module
        layers = (each for each in ddp.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
        if any(layer.sparse for layer in layers):
            raise JoinError(
                "a DDP module with sparse gradients cannot be joined, because joined ranks cannot send zeros for them. "
                f"Build its Embedding layers with sparse=False, or set {option('join.enable', False)} if all "
                "inputs are even."
            )
        # Watch only the smallest gradient, which is the cheapest to check, unless parameters may be unused in a step.
        self._params = list(ddp.parameters())
        params = sorted((param for param in self._params if param.requires_grad), key=torch.numel)
        self.watched = self.seen_at = params if ddp.find_unused_parameters or ddp.static_graph else params[:1]
        super().watch()
        ddp.logger._set_uneven_input_join()  # type: ignore[union-attr]  # report joins in DDP's logging data
        values = self.divides_by_world, self._announce_reduction, self._common_rank
        vars(ddp).update(zip(self.replaced, values, strict=True))

    def attach(self, session: JoinSession) -> None:
        super().attach(session)
        if session.terms.throw or not self.divides_by_world:
            self.handles = [*self.handles, self.module.module.register_forward_hook(self._inner_forward_done)]
            self.leave_out_of_copies(self.module.module)

    def end_steps(self) -> None:
        """Clear the divisor that the last step set, because no step follows."""
        self.module.reducer._set_forward_pass_work_handle(_done_work(0.0), True)

    def detach(self) -> None:
        self.end_steps()
        for name in self.replaced if self.handles else ():
            vars(self.module).pop(name, None)
        super().detach()

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        shares = self.module.broadcast_buffers and bool(self.module.modules_buffers)
        return shares or super().needs_active_ranks(divide_by_initial_world_size)

    @property
    def will_reduce(self) -> bool:
        return bool(self.module.require_backward_grad_sync)

    @property
    def trains(self) -> bool:
        return any(param.requires_grad for param in self._params)

    def leaves(self) -> Sequence[torch.Tensor]:
        return self._params

    def _on_second_backward(self) -> None:
        if self.session is not None and self.policy.step_begins and self.will_reduce:
            raise JoinError(
                f"a second backward ran through a forward of {type(self.module.module).__name__}. DDP reduces the "
                "gradients in the first backward after a forward only, so the second backward adds gradients of this "
                "rank alone. Sum the losses and run one backward, or run a forward before each backward."
            )

    def _on_other_backward(self) -> None:
        """Raise ``JoinError`` if ``torch.autograd.grad`` runs before the first backward of a static graph."""
        ddp = self.module
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            raise JoinError(
                f"torch.autograd.grad, or another backward that adds to no gradient of {type(ddp.module).__name__}, "
                "ran through a DDP module with static_graph=True before its first training step. DDP would then reduce "
                "no gradients in any step. Build the DDP module with static_graph=False."
            )

    def on_step(self) -> None:
        """Announce the step. In torch's ``Join``, do nothing: DDP's own forward announces it."""
        training = torch.is_grad_enabled() and self.trains
        self.reduces = training and self.will_reduce
        if self.session is None:
            return
        self._announce_step(self.reduces if training else None, throws_later=True)
        if not training:
            return
        membership, ddp = self.session.membership, self.module
        throws = self._join_config.throw_on_early_termination
        if membership is not None and throws and self._rebuilds_buckets(self.begun):
            # DDP's forward would begin with a collective that ranks without data do not run: raise before it.
            membership.raise_if_exhausted()
        if membership is None or ddp.will_sync_module_buffers():
            self.expect_forward()

    def before_forward(self, is_step: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let DDP's own forward announce a step only with torch's protocol, and only if this forward begins a step."""
        before = self.begun - (is_step and self.trains)  # a step of a frozen module counts too: DDP rebuilds
        if torch.is_grad_enabled() and self._rebuilds_buckets(before):
            self.expect_forward()
        settings = vars(self.module)  # faster than setting attributes of a module
        config = settings["_join_config"]
        # DDP's forward sets whether the next step broadcasts buffers. Undo this after forwards that begin no step.
        sets_next = is_step and torch.is_grad_enabled()
        kept = ("_join_config",) if sets_next else ("_join_config", "require_forward_param_sync")
        self._forward_settings = {name: settings[name] for name in kept}
        if not is_step:
            settings.update(_join_config=config._replace(enable=False), require_forward_param_sync=False)
        elif self.session is not None:  # the step is already announced
            settings["_join_config"] = config._replace(is_first_joinable=False)

    def after_forward(self, is_step: bool) -> None:
        vars(self.module).update(self._forward_settings)

    def _inner_forward_done(self, *_: Any) -> None:
        # At this point the count of active ranks has probably arrived, and DDP has not prepared its reduction yet.
        membership = self.membership if self.in_step else None
        if membership is None:
            return
        if self._join_config.throw_on_early_termination:
            membership.raise_if_exhausted()
        if not self.divides_by_world and (syncing := membership.read().syncing):
            self.module.reducer._set_forward_pass_work_handle(_done_work(float(syncing)), False)

    def _announce_reduction(self, is_joined_rank: bool) -> None:
        """Replace DDP's method: announce, with torch's protocol, whether this step reduces gradients.

        If gradients are averaged over the active ranks, their divisor is the number of ranks that reduce gradients.
        """
        if self.membership is None:
            work = self.announce_reduction(self.will_reduce)
            if not self.divides_by_world:
                self.module.reducer._set_forward_pass_work_handle(work, False)

    def _common_rank(self, rank: int, is_candidate: bool) -> int:
        """Replace DDP's method: return the rank whose buffers (after the loop: whose model) all ranks copy.

        The lowest rank with data is returned: rank 0 while it has data, as in checkpoints and in training without a
        join. With torch's protocol, the highest rank with data is returned, as in torch.
        """
        membership = self.membership
        if membership is None:
            return int(DistributedDataParallel._find_common_rank(self.module, rank, is_candidate))
        if not membership.over:
            return membership.read().ranks[0]
        if self.session is not None and self.session.all_took_every_step:  # no rank left early
            return 0
        size = self.module.process_group.size()
        lowest = torch.tensor([rank if is_candidate else size], dtype=torch.int64, device=self.module.device)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.module.process_group)
        return int(lowest.item())

    def _rebuilds_buckets(self, begun: int) -> bool:
        """Return whether DDP rebuilds its buckets in this forward. All ranks rebuild once, in the same forward.

        ``begun``: the number of earlier steps of this module in this join.
        """
        ddp = self.module
        if ddp._has_rebuilt_buckets or (ddp.find_unused_parameters and not ddp.static_graph):
            return False  # DDP has rebuilt them already, or never does
        return begun > 0 or int(ddp._get_ddp_logging_data().get("iteration", 0)) > 0


def _done_work(value: float) -> Any:
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([torch.full((1,), value, dtype=torch.float32, device="cpu")])
    return _create_work_from_future(done)
