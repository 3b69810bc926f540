"""``stager=bf16``: a copy for a small export, its weights in bfloat16.

It stands beside the stager of the full checkpoint, in a checkpointer of its own. Casting happens while the bytes are
copied, so an export costs the training loop less than a full copy, and half the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from stagereg import AsyncStager
from stagereg.errors import StagingError, nearest
from stagereg.kernel.copier import HostCopier, naming
from stagereg.kernel.memory import Pool
from stagereg.kernel.state_dict import flatten
from stagereg.stagers.async_stager import StateDict
from torch.distributed.tensor import DTensor

from lean_export.casting import WIDE, CastingCopier
from lean_export.sharded import with_narrow_shards

__all__ = ["Bf16Stager"]


class Bf16Stager(AsyncStager):
    """Copies a state dict, its float32 and float64 tensors as bfloat16.

    Everything else of the contract of a stager holds as it does for stagereg's own: what is handed out never changes,
    structure, strides and tied weights stay, changes from call to call are planned anew. Of a DTensor
    or ShardedTensor each rank casts what it has. Other wrappers, sparse and quantized tensors, and tensors that are
    attributes of others are copied as they are.

    Args:
        include: patterns (``*``, ``?``, ``[a-z]``) over dotted names of tensors, such as ``"model.*"``; ``*`` takes in
            dots. What matches none is copied as it is.
        exclude: patterns likewise; what matches one is copied as it is, such as ``"*.norm.*"``.
        max_in_flight: copies that may be held by writers at once before ``stage`` waits for one to be dropped.
        wait_s: seconds, one at most, that ``stage`` waits for that; then it takes memory beyond the bound, which is
            logged once.

    Not for use from several threads at once.
    """

    def __init__(
        self,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        max_in_flight: int = 2,
        wait_s: float = 60.0,
    ) -> None:
        for option, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise StagingError([], f"{option} must be a list of patterns, not a single one: [{patterns!r}]")
        self._include, self._exclude = tuple(include), tuple(exclude)
        pin = torch.accelerator.is_available()
        self._cast = CastingCopier(Pool(max_in_flight, wait_s, pin=pin))
        self._rest = HostCopier(Pool(max_in_flight, wait_s, pin=pin))

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: when ``stage`` returns, the copy is complete."""
        return False

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory; blocks until the bytes are there.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), there is no memory for it, or a pattern
                matches no tensor; nothing is handed out then.
            StagerClosedError: after ``close()``.
        """
        self._rest.pool.check_open()
        with torch.no_grad():
            named = [(name, leaf) for name, leaf in _leaves(state_dict) if _castable(leaf)]
            self._refuse_idle([name for name, _ in named])
            spec = flatten(with_narrow_shards(state_dict, lambda name, x: self._wants(name) and _castable(x)))
            tensors = spec.tensors
            chosen = _chosen([leaf for name, leaf in named if self._wants(name)], tensors)
            others = [i for i in range(len(tensors)) if i not in chosen]
            with naming(state_dict):
                staged = _copied(self._cast.copy, tensors, sorted(chosen))
                staged |= _copied(self._rest.copy, [x.detach() for x in tensors], others)
            copy: StateDict = spec.unflatten([staged[i] for i in range(len(tensors))])
            return copy

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` has waited."""
        return

    def close(self) -> None:
        """Free the memory that is kept. Copies still held stay valid. Twice is harmless."""
        self._cast.close()
        self._rest.close()

    def _refuse_idle(self, names: Sequence[str]) -> None:
        """Refuse a pattern that matches none of the names, which is a mistake; but for ``*``."""
        for option, patterns in (("include", self._include), ("exclude", self._exclude)):
            for pattern in patterns:
                if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                    raise StagingError(
                        [],
                        f"the pattern {pattern!r} of {option!r} matches no float32 or float64 tensor."
                        f"{nearest(pattern, names)} Names are dotted paths, such as {', '.join(names[:3]) or '-'}",
                    )

    def _wants(self, name: str) -> bool:
        named, spared = (any(fnmatchcase(name, p) for p in patterns) for patterns in (self._include, self._exclude))
        return named and not spared


def _castable(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and x.dtype in WIDE


def _chosen(leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> set[int]:
    """The indices of the tensors that the leaves are, or have inside, and of whatever is tied to one of them."""
    wanted = {id(leaf.to_local() if isinstance(leaf, DTensor) else leaf) for leaf in leaves}
    places = {_place(x) for x in tensors if id(x) in wanted}
    return {i for i, x in enumerate(tensors) if id(x) in wanted or (x.numel() and _place(x) in places)}


def _copied(
    copy: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], tensors: Sequence[torch.Tensor], some: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Copy some of the tensors; an error about one of them gives its index among all."""
    if not some:
        return {}
    try:
        return dict(zip(some, copy([tensors[i] for i in some]), strict=True))
    except StagingError as error:
        if len(error.path) != 1 or not isinstance(error.path[0], int):
            raise
        raise type(error)([some[error.path[0]]], error.reason) from error


def _place(x: torch.Tensor) -> tuple[object, ...]:
    return x.device, x.data_ptr(), x.dtype


def _leaves(x: Any, name: str = "", entered: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a state dict with its dotted name, once for each place where it is."""
    entered = set() if entered is None else entered
    if isinstance(x, torch.Tensor):
        yield name, x
    elif isinstance(x, (dict, list, tuple)) and id(x) not in entered:
        entered.add(id(x))
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _leaves(value, f"{name}.{key}" if name else str(key), entered)
