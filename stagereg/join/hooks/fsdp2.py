"""``fsdp2``: take part in the forward and backward of a module sharded by ``torch.distributed.fsdp.fully_shard``.

Every rank owns a part of the parameters, so nobody can leave a step out, and nothing but the module knows its
collectives. A rank without data therefore runs the module itself: forward on an *empty* version of its last inputs,
backward from gradients of zero. All-gathers and reduce-scatters are then those of the active ranks, and the gradients
of this rank's shards end as the step's reduced ones. What it had accumulated without a reduction goes into the next
one, since FSDP2 adds it there by itself.

Left to the loop's own code: anything collective outside of the module's forward and backward. The internals of FSDP2
used here are those of torch 2.13 (``distributed/fsdp/_fully_shard``).
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from stagereg.errors import JoinError
from stagereg.join.carryover import Memory as Habits
from stagereg.join.empty import emptied, fetch, publish
from stagereg.join.joinable import JoinHook, notify
from stagereg.join.step_tracker import Announcer
from stagereg.kernel.shadow import TorchWire
from stagereg.registry import register

__all__ = ["Fsdp2Hook", "device_of", "group_of", "reduces"]

_EXAMPLE_S = 60.0
"""Seconds in which a rank that has begun a step makes known what its inputs look like."""
_ADVICE = (
    "Give the joinable a batch that can be emptied, stagereg.build('joinable', 'fsdp2', module=..., example=...), or "
    "use join.iterate, whose loop body runs on all ranks."
)


@register("join_hook", "fsdp2")
class Fsdp2Hook(JoinHook):
    """Shadows an FSDP2 module by running it on empty inputs, and leaves the reduced gradients in the shards' ``grad``.

    Args:
        module: the root, the module that the loop calls.
        divide_by_initial_world_size: whether gradients are divided by the number of ranks that train the module, or by
            the number of active ones. Where the module has a divisor of its own, that is scaled alike.
        example: inputs for ranks without any of their own, empty or to be emptied: a tuple of arguments, or a single
            one. Without it, a rank takes the inputs that it had last, or what another rank has told of its own.

    Attributes:
        reduced: whether the last ``main_hook`` ended with reduced gradients; False in a step that only accumulates,
            after which no optimizer is to be stepped.
    """

    def __init__(self, module: FSDPModule, divide_by_initial_world_size: bool = True, example: Any = None) -> None:
        self.module = module
        self.reduced = False
        self._root = cast(nn.Module, module)
        self._divide = divide_by_initial_world_size
        self._given = None if example is None else _as_inputs(example)
        self._group = group_of(module)
        self._joinable: Any = None
        self._loop: _Loop | None = None
        self._announcer: Announcer | None = None
        self._handles: list[Any] = []
        self._settings: list[tuple[Any, ...]] = []
        self._shadowing = False
        self._fresh = False
        self._reduces = True
        self._synchronized = 0

    @property
    def unfinished(self) -> bool:
        """Whether a step of this rank has begun without a backward."""
        return self._announcer is not None and self._announcer.open

    def attach(self, joinable: Any) -> None:
        """Announce the module's steps for ``joinable``, which has its configuration, until :meth:`detach`.

        Where it does so already, nothing changes; the configuration may be another one then.
        """
        if self._joinable is not None:
            return
        if self._root not in _loops:
            _loops[self._root] = _Loop(self._group)
        self._loop = _loops[self._root]
        self._joinable = joinable
        self._synchronized = 0
        self._settings = [(g, g.gradient_divide_factor, g.force_sum_reduction_for_comms) for g in _groups(self.module)]
        self._handles = [
            self._root.register_forward_pre_hook(self._look_at_inputs, prepend=True, with_kwargs=True),
            self._root.register_forward_hook(self._look_at_outputs),
        ]
        self._announcer = Announcer(
            self._root, self._begin, leaves=self._leave, expects=self._expects
        )  # runs before the look at the inputs
        if self._watched() is not None:
            self._loop.habits.enter()

    def detach(self) -> None:
        """Stop announcing, and leave the module as it was."""
        if self._announcer is not None:
            self._announcer.remove()
            self._announcer = None
        for handle in self._handles:
            handle.remove()
        for group, factor, force in self._settings:
            group.gradient_divide_factor, group.force_sum_reduction_for_comms = factor, force
        self._handles, self._settings = [], []
        self._joinable = None

    def main_hook(self) -> None:
        """Run one forward and backward on empty inputs.

        Raises:
            JoinError: the module cannot run on empty inputs, or no rank has told what inputs look like.
        """
        loop = self._loop
        if self._joinable is None or loop is None:
            raise JoinError(
                "an fsdp2 joinable has left its join, but ranks still take steps. torch's Join cannot be entered a "
                "second time with it: make a new one for every epoch, or use stagereg.Join."
            )
        loop.habits.leave()
        as_left = [(group, group.reduce_grads, group.all_reduce_grads) for group in _groups(self.module)]
        self._shadowing = True
        try:
            with torch.enable_grad():
                first, *others = self._inputs(loop)
                tensors = self._forward(first)
                reducing = self._reducing()  # active ranks tell after their first forward
                tensors += [tensor for inputs in others for tensor in self._forward(inputs)]
                self.reduced = reducing > 0
                self.module.set_requires_gradient_sync(self.reduced)
                if self.reduced and not self._divide:
                    self._divide_by(reducing)
                self._fresh = True
                if tensors:
                    torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])
        finally:
            self._shadowing = False
            for group, reduce, all_reduce in as_left:
                group.reduce_grads, group.all_reduce_grads = reduce, all_reduce
        self._synchronized += self.reduced

    def post_hook(self, is_last_joiner: bool) -> None:
        """Stop announcing. All shards are what they should be already; torch's ``Join`` calls nothing after this."""
        self.detach()
        if not is_last_joiner and self._loop is not None:
            self._forget(self._loop.habits)  # the others have done so after their last step, if that is their habit

    def _expects(self) -> bool:
        config = self._joinable._join_config
        membership = getattr(config, "membership", None)
        return membership is not None and config.is_first_joinable and bool(membership.expected)

    def _begin(self) -> None:
        if self._shadowing:
            return
        self._fresh = True
        self._reduces = torch.is_grad_enabled() and reduces(self.module)
        config = self._joinable._join_config
        membership = getattr(config, "membership", None)
        if membership is None:
            notify(self._joinable)
        elif config.is_first_joinable:
            membership.begin(self._reduces)
            if config.throw_on_early_termination:
                membership.raise_if_exhausted()  # ranks that are out of data would not take part in the forward
        if self._given is None and self._loop is not None:
            self._loop.inputs = []

    def _look_at_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loop = self._loop
        if self._shadowing or self._given is not None or loop is None or not self.unfinished:
            return
        if torch.is_grad_enabled():
            try:
                loop.tell((args, kwargs))
                loop.inputs.append(emptied((args, kwargs)))
            except JoinError as error:
                raise JoinError(f"The inputs of {type(module).__name__}: {error} {_ADVICE}") from error

    def _leave(self, began: bool) -> None:
        """The forward of an active rank has ended: say whether its backward will reduce, and learn the divisor."""
        if not began or self._shadowing:
            return
        config = self._joinable._join_config
        membership = getattr(config, "membership", None)
        if membership is None:
            work = TorchWire(self._group, device_of(self.module)).announce(self._reduces)
            if not self._divide:
                work.wait()
                self._divide_by(int(work.get_future().value()[0].item()))
        elif not self._divide:
            roll = membership.read()
            if roll.known:
                self._divide_by(roll.syncing)

    def _look_at_outputs(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in _differentiable(output):
                tensor.register_hook(self._before_gradients)

    def _before_gradients(self, _: torch.Tensor) -> None:
        """A backward has begun, which is about to add to the gradients. FSDP2 has gathered its first parameters.

        It is the moment on all ranks at which a rank without data may wait for an active one to tell its habit.
        """
        if not self._fresh or self._loop is None:
            return
        self._fresh = False
        if self._shadowing:
            if self._synchronized:  # in the first step nobody knows yet
                self._loop.habits.ask()
            self._forget(self._loop.habits)
            return
        if reduces(self.module) != self._reduces:
            raise JoinError(
                "set_requires_gradient_sync() was called between a forward and its backward, when ranks without data "
                "had been told already. In a join, call it before the forward."
            )
        watched = self._watched()
        if watched is not None:
            gradient = watched.grad
            nonzero = None if gradient is None else _local(gradient).ne(0).any()
            self._loop.habits.see(nonzero, in_doubt=self._synchronized == 0)
        self._synchronized += self._reduces

    def _reducing(self) -> int:
        """How many active ranks will reduce their gradients in this step."""
        membership = getattr(self._joinable._join_config, "membership", None)
        if membership is None:
            return TorchWire(self._group, device_of(self.module)).count_active()
        return int(membership.read().syncing)

    def _divide_by(self, count: int) -> None:
        """Have this step's backward divide as if ``count`` ranks trained the module; 0 where it does not reduce."""
        share = (count or self._group.size()) / self._group.size()
        for group, before, _ in self._settings:
            info = group.mesh_info
            whole = getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1)
            group.gradient_divide_factor = (whole if before is None else before) * share
            # With a divisor of one's own FSDP2 asks for a reduction that only NCCL has.
            group.force_sum_reduction_for_comms = self._group._get_backend(group.device).name() != "nccl"

    def _inputs(self, loop: _Loop) -> list[Any]:
        """The inputs of this rank's last step, of every forward in it; or those of another rank's."""
        if self._given is not None:
            return [self._given]
        if not loop.inputs:
            loop.inputs = [loop.hear(device_of(self.module))]
        return loop.inputs

    def _forward(self, inputs: Any) -> list[torch.Tensor]:
        args, kwargs = inputs
        try:
            return _differentiable(self._root(*args, **kwargs))
        except JoinError:
            raise
        except Exception as error:
            raise JoinError(
                f"{type(self._root).__name__} cannot run on an empty batch, as a rank without data has to: "
                f"{type(error).__name__}: {error}. Let its forward take tensors whose first dimension is 0. {_ADVICE}"
            ) from error

    def _forget(self, habits: Habits) -> None:
        """Do with the gradients of the step before what the loop of the active ranks has done."""
        habit = habits.habit()
        for param in _shards(self.module):
            if habit == "drops":
                param.grad = None
            elif habit == "zeroes" and param.grad is not None:
                param.grad.zero_()

    def _watched(self) -> torch.Tensor | None:
        """The smallest shard that says something of the loop's habit; a rank may have nothing but empty ones."""
        shards = [shard for shard in _shards(self.module) if shard.requires_grad and _local(shard).numel()]
        return min(shards, key=lambda shard: _local(shard).numel(), default=None)


class _Loop:
    """What is known of the loop of one module, here and through the store. All ranks make these in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.habits = Habits(group)
        self.inputs: list[Any] = []  # of each forward in the last step, empty
        self._store = PrefixStore(f"stagereg/fsdp2/{_numbers[group.group_name]}", group.get_group_store())
        _numbers[group.group_name] += 1
        self._told = False

    def tell(self, inputs: Any) -> None:
        """Make known once what inputs look like, or why they cannot be emptied; raises ``JoinError`` then."""
        if not self._told:
            self._told = True
            publish(self._store, "inputs", inputs)

    def hear(self, device: torch.device) -> Any:
        """Wait for what another rank tells; a rank that has begun a step does so first of all."""
        until = time.monotonic() + _EXAMPLE_S
        while time.monotonic() < until:
            try:
                told = fetch(self._store, "inputs", device)
            except JoinError as error:
                raise JoinError(f"This rank never had a batch, and no other's will do: {error} {_ADVICE}") from error
            if told is not None:
                return told
            time.sleep(0.001)
        raise JoinError(
            f"This rank never had a batch, and within {_EXAMPLE_S:g} s no other has told what one looks like. {_ADVICE}"
        )


_loops: weakref.WeakKeyDictionary[nn.Module, _Loop] = weakref.WeakKeyDictionary()
_numbers: Counter[str] = Counter()


def reduces(module: FSDPModule) -> bool:
    """Whether the module's next backward reduces its gradients (``set_requires_gradient_sync``).

    Raises:
        JoinError: parts of it do and others do not, or the reduction stops half-way (``set_requires_all_reduce``).
    """
    answers = set()
    for group in _groups(module):
        if group.reduce_grads and not group.all_reduce_grads and group._is_hsdp:
            raise JoinError(
                "in a join, gradients are reduced among all ranks or not at all: use set_requires_gradient_sync(), not "
                "set_requires_all_reduce()."
            )
        answers.add(bool(group.reduce_grads))
    if len(answers) > 1:
        raise JoinError(
            "some parts of an FSDP2 module reduce their gradients and others do not. In a join all of them do or none: "
            "call set_requires_gradient_sync() on the root."
        )
    return answers != {False}


def group_of(module: FSDPModule) -> Any:
    """Return the ranks that train the module together.

    Raises:
        JoinError: its mesh has several dimensions and not all ranks.
    """
    mesh = next(param.device_mesh for param in cast(nn.Module, module).parameters() if isinstance(param, DTensor))
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    raise JoinError(
        f"an FSDP2 module on a mesh of {mesh.ndim} dimensions can be joined if it has all ranks, not {mesh.size()} of "
        f"{dist.get_world_size()}. Build it on a mesh of one dimension, or start these ranks as a job of their own."
    )


def device_of(module: FSDPModule) -> torch.device:
    """Return the device on which the module's collectives run."""
    device: torch.device = module._get_fsdp_state()._device
    return device


def _groups(module: FSDPModule) -> list[Any]:
    parts = (part for part in cast(nn.Module, module).modules() if isinstance(part, FSDPModule))
    unique = {id(group): group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups}
    return list(unique.values())


def _shards(module: FSDPModule) -> Iterator[torch.Tensor]:
    """The sharded parameters, which the optimizer has; during a step the module's own may be whole ones."""
    return (param.sharded_param for group in _groups(module) for param in group.fsdp_params)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _differentiable(output: Any) -> list[torch.Tensor]:
    tensors = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if tensor.requires_grad]


def _as_inputs(example: Any) -> Any:
    return emptied(example if isinstance(example, tuple) else (example,)), {}
