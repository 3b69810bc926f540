"""Detects training steps: a step begins with the forward of a module.

A step begins with the first forward that builds a graph. It ends when a backward through one of the forward's outputs
begins to add to the gradients of parameters. A second forward before that backward does not begin a step. Nor does a
forward under ``no_grad``. ``torch.autograd.grad`` ends no step. With ``join.iterate``, the first forward on each batch
announces the step, because ranks without data then run the body. If that forward runs under ``no_grad``, it announces
the step of the training forward that follows on the same batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from stagereg.join.joinable import BuiltInJoinable, JoinConfig, JoinHook, announce, notify
from stagereg.kernel.membership import Membership
from stagereg.kernel.shadow import TorchWire


class TrackedJoinable(BuiltInJoinable):
    """A joinable whose steps begin with its module's forward. Watches the module from ``join_hook`` to ``detach``."""

    announces_itself = True
    begun = 0  # number of training steps that have begun
    in_step: bool | None = None  # whether the running forward begins a step; ``None``: no watched forward runs
    gathers = False  # whether each forward runs collectives, so that all ranks must run it
    divides_by_world = True  # whether to divide gradients by the world size, not by the active ranks
    handles: Sequence[Any] = ()  # handles of the hooks on the module; empty while it is not watched
    replaced: tuple[str, ...] = ()  # attributes of the module that are set while it is watched
    seen_at: Sequence[torch.Tensor] = ()  # parameters whose hooks detect a backward that the outputs miss
    _copyable: Sequence[nn.Module] = ()  # modules that are copied without the join's hooks
    _awaited: Sequence[Any] = ()  # handles of hooks on tensors, removed when the backward begins
    _outputs: Sequence[Any] = ()  # handles of hooks on outputs, removed when the next step begins
    _is_open = False  # whether a step has begun and has had no backward yet
    _has_ended = True  # whether the last backward has ended
    _outside: frozenset[str] | None = None  # names of this object's attributes before the join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook, and start to watch the module: torch's ``Join`` calls no other method."""
        self.detach()  # torch's ``Join`` does not call ``detach``
        self._outside = frozenset(vars(self))
        self.divides_by_world = bool(kwargs.get("divide_by_initial_world_size", True))
        hook = super().join_hook(**kwargs)
        self.watch()
        return hook

    def watch(self) -> None:
        """Start to watch the module: register hooks on its forward."""
        assert self.module is not None

        def uncompiled(hook: Callable[..., None]) -> Any:  # torch.compile of the module would compile its hooks, too
            return _disable_dynamo(lambda *args: hook(*args))

        self.handles = [
            self.module.register_forward_pre_hook(uncompiled(self._before), prepend=True, with_kwargs=True),
            self.module.register_forward_hook(uncompiled(self._after), always_call=True),
        ]
        self.leave_out_of_copies(self.module)

    def leave_out_of_copies(self, module: nn.Module) -> None:
        """Make ``copy.deepcopy`` and ``pickle`` omit the join's changes to a module. Lasts until :meth:`detach`."""
        self._copyable = [*self._copyable, module]
        vars(module)["__getstate__"] = functools.partial(self._state_without_join, module)

    def detach(self) -> None:
        """Stop watching the module, and remove the attributes that this object got in the join."""
        self._forget((*self.handles, *self._awaited, *self._outputs))
        for module in self._copyable:
            vars(module).pop("__getstate__", None)
        for name in set() if self._outside is None else vars(self).keys() - self._outside:
            del vars(self)[name]
        super().detach()

    @property
    def has_unfinished_step(self) -> bool:
        """Whether a step of this rank has begun without a backward."""
        return self._is_open

    @property
    def membership(self) -> Membership | None:
        """The ranks that still have data; ``None`` with torch's protocol."""
        return None if self.session is None else self.session.membership

    @property
    def will_reduce(self) -> bool:
        """Whether the next backward reduces gradients among the ranks."""
        return True

    def active_that_reduce(self) -> int:
        """Return, on a rank that left the loop, the number of active ranks that will reduce gradients in this step."""
        if (membership := self.membership) is not None:
            return int(membership.read().syncing)
        return TorchWire(self.join_process_group, self.join_device).count_active()

    @property
    def trains(self) -> bool:
        """Whether a forward that builds a graph belongs to a step of this module."""
        return True

    def on_step(self) -> None:
        """Announce the step that the module's next forward begins."""
        self._announce_step(True)

    def _announce_step(self, reduces: bool | None, throws_later: bool = False) -> None:
        if self.session is None:
            notify(self, reduces)
        elif self.session.starts_step(self, torch.is_grad_enabled() and self.trains):
            announce(self, reduces, throws_later)

    def before_forward(self, is_step: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when a forward begins. If the forward begins a step, called after :meth:`on_step`."""

    def after_forward(self, is_step: bool) -> None:
        """Called when a forward has ended or raised."""

    def on_backward(self) -> None:
        """Called once per backward pass that adds to the module's gradients, when the pass reaches an output."""

    def leaves(self) -> Iterable[torch.Tensor] | None:
        """Return the tensors whose gradients the backward of a step adds to. ``None``: any backward ends a step."""
        return None

    def _accumulates(self) -> bool:
        """Return whether the current backward adds to the module's gradients; ``torch.autograd.grad`` does not."""
        if (found := self.leaves()) is None:
            return True
        if any(leaf.requires_grad and _is_executed(leaf) for leaf in found):
            return True
        # Reentrant activation checkpointing adds to gradients in an inner backward, with a graph of its own.
        leaves = [leaf for leaf in self.leaves() or () if leaf.requires_grad]
        return bool(leaves) and not _is_reachable(leaves)

    def _on_second_backward(self) -> None:
        """Called when a second backward through a step's outputs adds to the module's gradients."""

    def _on_other_backward(self) -> None:
        """Called when a backward reaches an output but adds to no gradient of the module."""

    def _state_without_join(self, module: Any) -> Any:
        kind: Any = type(module)
        state = kind.__getstate__(module)
        if not isinstance(state, dict):  # the class itself chooses what a copy contains
            return state
        state = dict(state)
        for name in ("__getstate__", *self.replaced):
            state.pop(name, None)
        own = {handle.id for handle in self.handles}
        for name, hooks in state.items():
            if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
                state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in own)
        if "_join_config" in state:
            state["_join_config"] = JoinConfig.construct_disabled_join_config()
        return state

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config, session = self._join_config, self.session
        self.in_step = None
        if _in_backward() or not config.enable:
            return
        # The first forward after the loop has passed a batch to its body announces a step.
        loop = None if session is None else session.loop
        awaited = loop is not None and loop.awaits_step and (config.is_first_joinable or self.gathers)
        training = torch.is_grad_enabled() and self.trains
        was_open, begins = self._is_open, awaited or (training and not self._is_open)
        if begins:
            self.on_step()  # no step has begun if this raises
            if training:
                self._forget(self._outputs)
                self._outputs = ()
            self.begun += training
            self._is_open = training
        # In an evaluation loop, the first forward on each batch is a whole step.
        self.in_step = begins and (training or (loop is not None and not loop.trains))
        if session is not None:
            session.peers.count_forward(self.gathers, trains=begins and training and not was_open)
        self.before_forward(self.in_step, args, kwargs)

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        if self.in_step is None or _in_backward():
            return
        began, self.in_step = self.in_step, None
        self.after_forward(began)
        if torch.is_grad_enabled():
            outputs = differentiable(output)  # an empty batch's loss may not use them: hook parameters too
            trained = [param for param in self.seen_at[: 1 if outputs else None] if param.requires_grad]
            self._outputs = [*self._outputs, *(_hook_first(tensor, self._on_gradient) for tensor in outputs)]
            self._awaited = [*self._awaited, *(_hook_first(tensor, self._on_gradient) for tensor in trained)]
            if not outputs and not trained:  # no backward can be detected
                self._is_open = False

    @staticmethod
    def _forget(handles: Iterable[Any]) -> None:
        for handle in handles:
            handle.remove()

    def _end_backward(self) -> None:
        self._has_ended = True

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if not self._accumulates():
            self._on_other_backward()
            return
        self._forget(self._awaited)
        self._awaited = ()
        if not self._is_open:
            if self._has_ended:
                self._on_second_backward()
            return
        self._is_open = self._has_ended = False
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self.gathers and self.session is not None:
            self.session.peers.progress = self.session.peers.progress.mark()
        self.on_backward()


def _hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a hook that runs before the tensor's other hooks. For example, FSDP2's hook begins with a collective."""
    before = dict(tensor._backward_hooks or {})
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    for key, each in before.items():  # torch calls hooks in the insertion order of the keys
        del hooks[key]
        hooks[key] = each
    return handle


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors in ``output`` that require gradients."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    tensors = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if tensor.requires_grad]


def _is_executed(leaf: torch.Tensor) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:  # raised in torch.autograd.grad if this leaf is an input
        return False


def _is_reachable(leaves: Iterable[torch.Tensor]) -> bool:
    wanted = {id(leaf) for leaf in leaves}
    nodes: list[Any] = [torch._C._current_autograd_node()]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if id(getattr(node, "variable", None)) in wanted:
            return True
        below = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= below
        nodes += below
    return False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
