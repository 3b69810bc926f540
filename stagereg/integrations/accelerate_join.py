"""Implements ``join_uneven_inputs`` of an Accelerator with :class:`stagereg.Join`; used by :mod:`.accelerate`.

The training loop is unchanged, so a rank leaves it when its data ends. For each further step of the other ranks, this
rank must repeat the calls that follow ``backward`` in their loop; otherwise replicas diverge and FSDP2's collectives do
not match. The adapter records the calls of accelerate's methods in each step, and repeats those of the last step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object

from stagereg.errors import JoinError
from stagereg.join.context import Join

_ELSE = "For other loops, use stagereg.Join with join.iterate."


class AcceleratorJoin:
    """Joins the loops of one Accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._last_step = _LastStep()

    @contextlib.contextmanager
    def join(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[Join | None]:
        """Replace :meth:`Accelerator.join_uneven_inputs`; yield the :class:`stagereg.Join`, ``None`` on one process."""
        accelerator = self._accelerator
        if accelerator.num_processes == 1:
            yield None
            return
        models = [each for each in joinables if isinstance(each, torch.nn.Module)]
        if len(models) != 1 or accelerator.gradient_accumulation_steps != 1:
            raise JoinError(
                "join_uneven_inputs requires one model and gradient_accumulation_steps of 1: accelerate ends an "
                f"accumulation on a rank whose data ends, but not on the other ranks. {_ELSE}"
            )
        stepped = [inner(each) for each in accelerator._optimizers]  # not joined, because the repeated calls step them
        others = [each for each in joinables if not any(each is one for one in (*models, *stepped))]
        enable = not (accelerator.even_batches if even_batches is None else even_batches)
        with contextlib.ExitStack() as after:
            if even_batches is not None:
                after.callback(_override_even_batches(accelerator._dataloaders, even_batches))
            noted = self._last_step.noted(accelerator, models[0]) if enable else contextlib.nullcontext()
            with Join([*models, *others, self._last_step.repeat], enable, mode="counted") as join, noted:
                yield join
            if enable:
                self._compare()

    def _compare(self) -> None:
        """Raise an error on all ranks if their last steps or scheduler counts differ. Collective."""
        counts = [each.scheduler.last_epoch for each in self._accelerator._schedulers]
        own = {"the calls of their last step": self._last_step.names, "their scheduler counts": counts}
        found = gather_object([own])
        for rank, theirs in enumerate(found):
            for what, first in found[0].items():
                if theirs[what] != first:
                    raise JoinError(
                        f"The ranks differ in {what}: rank 0 has {first}, rank {rank} has {theirs[what]}. A rank "
                        "without data repeats its own last step, so all steps must make the same calls. If a scheduler "
                        f"steps once per epoch, step it after the block. {_ELSE}"
                    )


class _LastStep:
    """Records the calls of this rank's last step except forward and backward; ``names`` lists them with clip limits."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._calls: list[Callable[[], object]] = []
        self._ended = True  # whether the next forward begins a new step

    @contextlib.contextmanager
    def noted(self, accelerator: Any, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            undo.callback(model.register_forward_pre_hook(self._begin).remove)
            undo.callback(_replace(accelerator, "backward", self._backward))
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                undo.callback(_replace(accelerator, name, self._noting_clip(name)))
            for name, objects in (("optimizer", accelerator._optimizers), ("scheduler", accelerator._schedulers)):
                for i, each in enumerate(objects):
                    undo.callback(_replace(each, "step", self._noting(f"step of {name} {i}")))
            yield

    def repeat(self) -> None:
        if not self._calls:
            raise JoinError(
                "This rank has had no batch yet, so it cannot repeat the calls that follow backward() in a step. "
                f"Give each rank at least one batch in the first epoch. {_ELSE}"
            )
        for call in self._calls:
            call()

    def _begin(self, *_: object) -> None:
        if self._ended and torch.is_grad_enabled():
            self.names, self._calls, self._ended = [], [], False

    def _backward(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._ended = True
        return before(*args, **kwargs)

    def _noting(self, name: str) -> Callable[..., Any]:
        def noting(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            self._calls.append(lambda: before(*args, **kwargs))
            return before(*args, **kwargs)

        return noting

    def _noting_clip(self, name: str) -> Callable[..., Any]:
        def noting(before: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
            kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)  # generators yield once
            limits = ", ".join(f"{float(each):g}" for each in (*args, *kwargs.values()))
            return self._noting(f"{name}({limits})")(before, kept, *args, **kwargs)

        return noting


def inner(optimizer: Any) -> Any:
    """Return the torch optimizer inside an optimizer of accelerate."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object with ``by(method, ...)``; return a function that restores the method."""
    before, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, lambda *args, **kwargs: by(before, *args, **kwargs))
    return lambda: setattr(owner, name, before) if own else delattr(owner, name)


def _override_even_batches(loaders: Sequence[Any], even: bool) -> Callable[[], None]:
    """Override ``even_batches`` as accelerate does; return a function that restores it."""
    sampled = [each.batch_sampler for each in loaders if not isinstance(each, DataLoaderDispatcher)]
    if len(sampled) < len(loaders):
        warnings.warn("even_batches only affects map-style datasets. Dispatched data loaders ignore it.", stacklevel=5)
    before = [(each, each.even_batches) for each in sampled if hasattr(each, "even_batches")]
    for each, _ in before:
        each.even_batches = even

    def undo() -> None:
        for each, value in before:
            each.even_batches = value

    return undo
