"""Implements ``join_uneven_inputs`` of an Accelerator with :class:`stagereg.Join`. Used by :mod:`.accelerate`.

The training loop is the user's, so a rank leaves the loop when its data ends. While other ranks continue, this rank
must still make the calls that follow ``backward`` in the loop; otherwise replicas diverge, and collectives of FSDP2 do
not match. So this module records the calls to accelerate in each step, and later repeats the calls of the last step.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object

from stagereg.errors import JoinError
from stagereg.join.context import Join

_ELSE = "For other loops, use stagereg.Join with join.iterate."


class AcceleratorJoin:
    """Replaces ``join_uneven_inputs`` of one Accelerator."""

    def __init__(self, accelerator: Any, end_step: Callable[[], object]) -> None:
        self._accelerator = accelerator
        self._last_step = _LastStep(end_step)

    @contextlib.contextmanager
    def join(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[Join | None]:
        """Run a ``with`` block in a :class:`stagereg.Join`, and yield the join, or ``None`` if there is one process."""
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
        stepped = [inner(each) for each in accelerator._optimizers]  # The repeated calls step these: do not join them.
        others = [each for each in joinables if not any(each is one for one in (*models, *stepped))]
        enable = not (accelerator.even_batches if even_batches is None else even_batches)
        with contextlib.ExitStack() as after:
            if even_batches is not None:
                _override_even_batches(after, accelerator._dataloaders, even_batches)
            elif not enable:
                check = partial(_expect_prepared, accelerator.gradient_state, itertools.count())
                after.callback(_replace(accelerator, "backward", check))
            noted = self._last_step.noted(accelerator, models[0]) if enable else contextlib.nullcontext()
            with Join([*models, *others, self._last_step.repeat], enable, mode="counted") as join, noted:
                yield join
            if enable:
                self._compare()

    def _compare(self) -> None:
        """Raise ``JoinError`` on all ranks if the calls of the last step or the scheduler counts differ. Collective."""
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
    """Records the calls that follow ``backward`` in this rank's last step. ``names``: descriptions of the calls.

    ``end_step`` is called when the loop has ended, and after each repeated step.
    """

    def __init__(self, end_step: Callable[[], object]) -> None:
        self._end_step = end_step
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
            self._end_step()

    def repeat(self) -> None:
        if not self._calls:
            raise JoinError(
                "This rank has had no batch yet, so it cannot repeat the calls that follow backward() in a step. "
                f"Give each rank at least one batch in the first epoch. {_ELSE}"
            )
        for call in self._calls:
            call()
        self._end_step()

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
            # A list can be iterated again when the call is repeated, unlike the generator model.parameters().
            kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            limits = ", ".join(f"{float(each):g}" for each in (*args, *kwargs.values()))
            return self._noting(f"{name}({limits})")(before, kept, *args, **kwargs)

        return noting


def inner(optimizer: Any) -> Any:
    """Return the torch optimizer that an ``AcceleratedOptimizer`` wraps, or ``optimizer`` itself."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> Callable[[], None]:
    """Make ``owner.name(...)`` call ``by(original method, ...)``. Return a function that undoes the replacement."""
    before, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, lambda *args, **kwargs: by(before, *args, **kwargs))
    return lambda: setattr(owner, name, before) if own else delattr(owner, name)


def _expect_prepared(state: Any, steps: Iterator[int], before: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call ``backward``. Raises: ``JoinError`` in the first step of a loop over a loader that was not prepared."""
    if next(steps) == 0 and not state.in_dataloader:  # later batches may come from a buffer
        raise JoinError(
            "join_uneven_inputs cannot join a loop over a loader that accelerator.prepare has not returned while "
            "even_batches is True. Prepare the loader and use DataLoaderConfiguration(even_batches=False), or pass "
            "even_batches=False to join_uneven_inputs; True if all ranks have the same number of batches."
        )
    return before(*args, **more)


def _override_even_batches(after: contextlib.ExitStack, loaders: Sequence[Any], even: bool) -> None:
    """Set ``even_batches`` of the data loaders, as accelerate does; ``after`` restores the old values."""
    sampled = [each.batch_sampler for each in loaders if not isinstance(each, DataLoaderDispatcher)]
    if len(sampled) < len(loaders):
        warnings.warn("even_batches only affects map-style datasets. Dispatched data loaders ignore it.", stacklevel=5)
    for each in (each for each in sampled if hasattr(each, "even_batches")):
        after.callback(setattr, each, "even_batches", each.even_batches)
        each.even_batches = even
