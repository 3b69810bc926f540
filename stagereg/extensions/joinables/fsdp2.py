"""``fsdp2``: joins a module sharded by ``torch.distributed.fsdp.fully_shard``, in stagereg's or torch's ``Join``.

The module runs its collectives only in its forward and backward. Therefore a rank without data runs a forward on an
*empty* version of its last inputs (first dimension 0), and a backward from zero gradients. Its all-gathers and
reduce-scatters then match the collectives of the active ranks, and its shards receive the step's reduced gradients.
Gradients that the rank has accumulated without a reduction enter the next reduction, because FSDP2 adds them.

This module uses internals of FSDP2 in torch 2.13 (``distributed/fsdp/_fully_shard``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stagereg.errors import JoinError
from stagereg.join.batches import Layout, emptied_or_error, fetch, publish
from stagereg.join.joinable import BuiltInHook, JoinHook, uncompiled
from stagereg.join.kinds.reduction import ReducingJoinable, local
from stagereg.join.tracked import differentiable
from stagereg.kernel.broken import is_broken_operation
from stagereg.registry import register


@register("join_hook", "fsdp2")
class Fsdp2Hook(BuiltInHook["Fsdp2Joinable"]):
    """Runs the module on empty inputs in steps of other ranks, so that its shards receive the reduced gradients."""

    def main_hook(self) -> None:
        """Run one forward and backward on empty inputs."""
        joinable, module = self.joinable, self.joinable.module
        if not joinable.handles:
            raise JoinError(
                "an fsdp2 joinable has left its join, but other ranks still take steps. Construct a new torch Join "
                "for every epoch, or use stagereg.Join."
            )
        joinable.shadow()
        as_left = joinable.will_reduce
        joinable.is_shadowing = True
        frozen = [(param, param.requires_grad) for param, _ in joinable.trained]
        for param, trains in joinable.trained:  # The loop may have frozen the module after its last step.
            param.requires_grad_(trains)
        try:
            with torch.enable_grad():
                first, *others = joinable.empty_inputs()
                tensors = self._forward(first)
                active = joinable.active_that_reduce()  # active ranks send this after their first forward
                for inputs in others:
                    tensors += self._forward(inputs)
                joinable.reduced = active > 0
                module.set_requires_gradient_sync(joinable.reduced)
                if joinable.reduced and not joinable.divides_by_world:
                    joinable.divide_by(active)
                joinable.reduces = joinable.reduced
                if tensors:
                    torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])
        finally:
            joinable.is_shadowing = False
            for param, trains in frozen:
                param.requires_grad_(trains)
            module.set_requires_gradient_sync(as_left)
        if joinable.reduced:
            joinable.shadowed()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Remove the hooks from the module; torch's ``Join`` makes no later call. All shards are already correct."""
        was_shadowed = self.joinable.was_shadowed
        self.joinable.detach()
        if was_shadowed:  # Keep, zero or drop the gradients, like the loop of the other ranks.
            self.joinable.forget_gradients()

    def _forward(self, inputs: Any) -> list[torch.Tensor]:
        args, kwargs = inputs[0].values(), inputs[1]
        module = self.joinable.module
        try:
            return differentiable(module(*args, **kwargs))
        except Exception as error:
            if isinstance(error, JoinError) or is_broken_operation(error):
                raise
            raise JoinError(
                f"{type(module).__name__} cannot run on an empty batch, but a rank without data must run it: "
                f"{type(error).__name__}: {error}. Make its forward accept tensors whose first dimension is 0."
            ) from error


@register("joinable", "fsdp2")
class Fsdp2Joinable(ReducingJoinable):
    """Joins an FSDP2 module. ``Join`` wraps a bare FSDP2 module in this class automatically.

    Joined ranks run the module on empty inputs. In each step, the ``grad`` of their shards receives the reduced
    gradients, so an optimizer after this joinable in the list keeps parameters and optimizer state correct. The forward
    of the module must accept tensors whose first dimension is 0. Call ``set_requires_gradient_sync`` before the
    forward, in the same steps on all ranks. With torch's ``Join``, construct a new ``Join`` for each epoch.

    Args:
        module: the root module, to which ``fully_shard`` was applied last, and which the loop calls.
        hook: a hook to use instead of ``fsdp2``.

    Keyword arguments of ``Join`` that it takes:
        divide_by_initial_world_size (bool): True (default): gradients are sums over the active ranks divided by the
            world size, as in FSDP2; False: divided by the number of active ranks. A custom divisor of the module is
            scaled in the same way.

    Raises:
        JoinError: the module is not an FSDP2 module, or its mesh has several dimensions and lacks some ranks.
    """

    own_hook = Fsdp2Hook
    gathers = True
    is_shadowing = False  # whether the hook runs the module, to take part in a step of other ranks
    trained: Sequence[tuple[torch.Tensor, bool]] = ()  # parameters, and whether the last step trained them
    _divisors: Sequence[tuple[Any, Any, bool]] = ()
    _params: Sequence[torch.Tensor] = ()

    def __init__(self, module: FSDPModule, hook: Callable[..., JoinHook] | None = None) -> None:
        module = uncompiled(module)
        if not isinstance(module, FSDPModule):
            raise JoinError(f"the fsdp2 joinable needs an FSDP2 module (fully_shard), not a {type(module).__name__}")
        super().__init__(hook, _group_of(module), module._get_fsdp_state()._device)
        self.module = module

    def watch(self) -> None:
        groups, self._params = _groups(self.module), list(self.module.parameters())
        self._divisors = [(each, each.gradient_divide_factor, each.force_sum_reduction_for_comms) for each in groups]
        # The smallest nonempty shard is checked for zeroed gradients. A rank may have only empty shards.
        shards = [shard for shard in _shards(self.module) if shard.requires_grad and local(shard).numel()]
        self.watched = sorted(shards, key=lambda shard: local(shard).numel())[:1]
        super().watch()

    def detach(self) -> None:
        for group, factor, force in self._divisors:
            group.gradient_divide_factor, group.force_sum_reduction_for_comms = factor, force
        super().detach()

    @property
    def will_reduce(self) -> bool:
        """Whether the next backward reduces gradients. Raises: ``JoinError`` if the submodules differ in this."""
        groups = _groups(self.module)
        reduces = {bool(group.reduce_grads) for group in groups}
        half_way = any(group._is_hsdp and group.reduce_grads and not group.all_reduce_grads for group in groups)
        if half_way or len(reduces) > 1:
            raise JoinError(
                "in a join, either all submodules of an FSDP2 module reduce their gradients or none does. Call "
                "set_requires_gradient_sync() on the root module, not set_requires_all_reduce()."
            )
        return reduces != {False}

    def on_step(self) -> None:
        """On a rank with data, announce the step to ranks without data."""
        if not self.is_shadowing:
            self.reduces = torch.is_grad_enabled() and self.will_reduce
            self.trained = [(param, param.requires_grad) for param in self._params]
            self._announce_step(self.reduces if torch.is_grad_enabled() else None)
            self.expect_forward()

    def leaves(self) -> Iterable[torch.Tensor]:
        """Return the unsharded parameters that the forward has used."""
        each = (param for group in _groups(self.module) for param in group.fsdp_params)
        return (param._unsharded_param for param in each if hasattr(param, "_unsharded_param"))

    def _on_other_backward(self) -> None:
        """Reject ``torch.autograd.grad`` in a plain loop, because it gathers parameters from all ranks."""
        self._refuse_in_plain_loop("torch.autograd.grad")

    def _on_second_backward(self) -> None:
        """Reject a second backward in a plain loop, because it runs additional collectives."""
        self._refuse_in_plain_loop("a second backward after one forward")

    def _refuse_in_plain_loop(self, what: str) -> None:
        session = self.session
        if session is not None and not self.is_shadowing and (session.loop is None or not session.loop.iterates):
            raise JoinError(
                f"{what} ran through {type(self.module).__name__} in a plain loop. This gathers the sharded "
                "parameters, but ranks without data do not take part. Loop over join.iterate(loader), in any mode but "
                "torch: all ranks then run the loop's body."
            )

    def before_forward(self, is_step: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store an empty version of a step's inputs. Publish the first one for ranks that never had data."""
        if self.is_shadowing or not torch.is_grad_enabled():
            return
        policy = self.policy
        empty = emptied_or_error((dict(enumerate(args)), kwargs), Layout(fields=True))
        if policy.inputs is None:
            publish(policy.store, "inputs", empty)
        if policy.inputs is None or is_step:
            policy.inputs = []
        policy.inputs.append(empty)

    def after_forward(self, is_step: bool) -> None:
        """On a rank with data, announce whether the next backward reduces gradients, and set the divisor."""
        if not is_step or self.is_shadowing:
            return
        membership = self.membership
        if membership is None:
            work = self.announce_reduction(bool(self.reduces))
            if not self.divides_by_world:
                work.wait()
                self.divide_by(int(work.get_future().value()[0].item()))
        elif not self.divides_by_world:
            self.divide_by(membership.read().syncing)

    def on_backward(self) -> None:
        """Called when a backward is about to add to the gradients.

        A rank without data may wait until another rank has published whether its loop keeps the gradients.
        """
        if self.is_shadowing and self.reduces is not None:
            self.reduces = None
            self.ask()
            self.forget_gradients()
        elif self.reduces is not None and self.will_reduce != self.reduces:
            raise JoinError(
                "set_requires_gradient_sync() was called between a forward and its backward. In a join, call it before "
                "the forward, which announces the setting to ranks without data."
            )
        super().on_backward()

    def empty_inputs(self) -> list[Any]:
        """Return the empty inputs of this rank's last step; if it had none, those of another rank's first step."""
        policy = self.policy
        if not policy.inputs:
            policy.wait("inputs", self.session, "publishing the first inputs")
            try:
                policy.inputs = [fetch(policy.store, "inputs", self.join_device)]
            except JoinError as error:
                text = f"This rank never had a batch, and it cannot use the batch of another rank: {error}"
                raise JoinError(text) from error
        for empty in policy.inputs:
            if isinstance(empty, JoinError):
                raise JoinError(f"The inputs of {type(self.module).__name__} are unsupported: {empty}") from empty
        return policy.inputs

    def divide_by(self, count: int) -> None:
        """Make this step's backward divide gradients as if ``count`` ranks trained; 0 keeps the usual divisor."""
        size = self._group.size()
        for group, before, _ in self._divisors:
            group.gradient_divide_factor = (size if before is None else before) * (count or size) / size
            # With a custom divisor, FSDP2 requests a reduction that only NCCL supports.
            group.force_sum_reduction_for_comms = self._group._get_backend(group.device).name() != "nccl"

    def forget_gradients(self) -> None:
        """Keep, zero or drop the previous step's gradients, as the training loop does on ranks with data."""
        for param in _shards(self.module):
            self.policy.forget(param)


def _group_of(module: FSDPModule) -> Any:
    """Return the module's process group. Raises: ``JoinError`` if a mesh of several dimensions lacks some ranks."""
    mesh = next(param.device_mesh for param in cast(nn.Module, module).parameters() if isinstance(param, DTensor))
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    raise JoinError(
        f"an FSDP2 module on a mesh of {mesh.ndim} dimensions can be joined only if the mesh has all ranks, but it has "
        f"{mesh.size()} of {dist.get_world_size()}. Build the module on a one-dimensional mesh."
    )


def _groups(module: FSDPModule) -> list[Any]:
    states = [part._get_fsdp_state() for part in cast(nn.Module, module).modules() if isinstance(part, FSDPModule)]
    # torch 2.11 has one group or None instead of a list.
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return list({id(group): group for each in groups for group in each if group is not None}.values())


def _shards(module: FSDPModule) -> list[torch.Tensor]:
    """Return the sharded parameters, which the optimizer uses; in a step, the module may hold unsharded parameters."""
    return [param.sharded_param for group in _groups(module) for param in group.fsdp_params]
