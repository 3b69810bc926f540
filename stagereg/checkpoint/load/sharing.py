"""Handles tensors that share memory in the program, but have different values in the checkpoint.

For example, a program starts with ``{"model": model, "best": model.state_dict()}``, but the saved ``best`` differs from
``model``. Modules keep their memory. A tensor outside modules gets new memory if its saved value differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.module_state as module_state
from stagereg.base.many_tensors import span_of
from stagereg.checkpoint.format.configs import is_config, of_type
from stagereg.checkpoint.format.encoding import Leaf, leaves
from stagereg.checkpoint.format.wrappers import same_bits, wraps
from stagereg.errors import CheckpointError


class _View(NamedTuple):
    """The byte range of a live tensor in its storage, and the leaf (saved tensor) that is restored into the tensor."""

    begin: int
    end: int
    leaf: Leaf
    local: torch.Tensor


def read_apart(leaves: Collection[Leaf]) -> None:
    """Set ``in_place`` to False for all leaves whose live tensors share memory with the tensor of another leaf."""
    users = Counter(entries.memory_of(leaf.live) for leaf in leaves if leaf.live is not None)
    for leaf in leaves:
        leaf.in_place = leaf.in_place and users[entries.memory_of(leaf.live)] == 1


def differing(modules: Mapping[str, Sequence[Leaf]], exact: Mapping[str, bool], plain: Iterable[Leaf]) -> set[int]:
    """Return the ids of the live tensors outside modules that need new memory, because their saved value differs.

    ``modules`` maps each entry to the leaves of its modules. ``plain`` contains all other leaves. All leaves have been
    read. ``exact`` maps each entry to whether its modules use torch's ``load_state_dict``. Raises ``CheckpointError``
    if two tensors of such modules share memory, but have different saved values.
    """
    refusing = {leaf for name, each in modules.items() if exact[name] for leaf in each}
    owners = dict.fromkeys(leaf for each in modules.values() for leaf in each)
    apart: set[int] = set()
    for views in _overlapping([*owners, *plain]):
        views.sort(key=lambda view: (view.leaf not in owners, view.leaf not in refusing))
        memory = torch.empty(max(view.end for view in views), dtype=torch.uint8, device="cpu")
        written: list[_View] = []
        for view in views:
            if id(view.leaf.live) in apart:
                continue
            target, value = _in(memory, view), _value(view)
            before = target.clone()
            target.copy_(value)
            near = (each for each in written if each.begin < view.end and view.begin < each.end)
            lost = next((each for each in near if not same_bits(_in(memory, each), _value(each))), None)
            if lost is None:
                written.append(view)
                continue
            target.copy_(before)
            if view.leaf not in owners:
                apart.add(id(view.leaf.live))
            elif view.leaf in refusing:
                raise CheckpointError(
                    f"{lost.leaf.name!r} and {view.leaf.name!r} share memory here, but the checkpoint has different "
                    "values for them. Give each its own tensor, as in the run that saved them"
                )
    return apart


def _overlapping(leaves: Iterable[Leaf]) -> Iterator[list[_View]]:
    """Yield each group of two or more live tensors whose bytes overlap."""
    by_storage: dict[int, list[_View]] = {}
    for view in filter(None, map(_view, leaves)):
        by_storage.setdefault(view.local.untyped_storage().data_ptr(), []).append(view)
    for views in by_storage.values():
        views.sort(key=lambda view: view.begin)
        groups, end = [[views[0]]], views[0].end
        for view in views[1:]:
            if view.begin < end:
                groups[-1].append(view)
            else:
                groups.append([view])
            end = max(end, view.end)
        yield from (group for group in groups if len(group) > 1)


def _view(leaf: Leaf) -> _View | None:
    if leaf.dtype is None or not isinstance(leaf.live, torch.Tensor) or wraps(leaf.live) or leaf.in_place:
        return None
    x, value = entries.local_part(leaf.live).detach(), leaf.value
    if x.layout is not torch.strided or x.is_nested or x.is_meta or not x.numel() or wraps(value):
        return None
    if entries.local_part(value).shape != x.shape:
        return None
    begin = int(x.storage_offset()) * x.itemsize
    return _View(begin, begin + span_of(x) * x.itemsize, leaf, x)


def _in(memory: torch.Tensor, view: _View) -> torch.Tensor:
    x = view.local
    typed = memory[: memory.numel() // x.itemsize * x.itemsize].view(x.dtype)
    found = typed.as_strided(x.shape, x.stride(), x.storage_offset())
    found = found.conj() if x.is_conj() else found
    return torch._neg_view(found) if x.is_neg() else found


def _value(view: _View) -> torch.Tensor:
    return entries.local_part(view.leaf.value).detach().cpu().to(view.local.dtype)


def buffers_of_ranks(state: Mapping[str, Any]) -> list[str]:
    """Return the names of per-rank entries that consist of module buffers, such as ``per_rank([*model.buffers()])``."""
    modules = (each for name in state for each in module_state.modules_of(entries.value_of(state, name)))
    buffers = {id(buffer) for module in modules for buffer in module.buffers()}
    ranks = {name: each.value for name, each in state.items() if isinstance(each, entries.PerRank)}
    tensors = {name: [id(x) for _, x in leaves(value, name)] for name, value in ranks.items()}
    return [name for name, found in tensors.items() if found and buffers.issuperset(found)]


class Merger:
    """Copies restored values into the existing tensors and containers of the program, if shape and dtype match.

    ``apart``: the ids of tensors that must get new memory, as returned by :func:`differing`.
    """

    def __init__(self, apart: set[int]) -> None:
        self._apart = apart
        self._met: dict[int, tuple[Any, Any]] = {}  # merged containers and their restored values, by id

    def merged(self, value: Any, loaded: Any) -> Any:
        """Return the restored value ``loaded``, copied into those tensors and containers of ``value`` that match it."""
        if value is loaded:
            return value
        if is_config(loaded):
            return of_type(value, loaded)
        if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
            return self._tensor(value, loaded)
        kind = next((kind for kind in (dict, list) if isinstance(value, kind) and isinstance(loaded, kind)), None)
        if kind is None:
            return loaded
        if id(value) in self._met:  # the state contains this container twice
            return value if _equal(self._met[id(value)][1], loaded) else self.merged(type(loaded)(), loaded)
        self._met[id(value)] = value, loaded
        if kind is dict:
            merged = {key: self.merged(value.get(key), item) for key, item in loaded.items()}
            value.clear()
            value.update(merged)
        else:
            padded = value + [None] * (len(loaded) - len(value))
            value[:] = [self.merged(old, item) for old, item in zip(padded, loaded, strict=False)]
        return value

    def _tensor(self, value: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
        if wraps(value) or wraps(loaded):  # copy_() of a quantized subclass would round
            return loaded if loaded.device == value.device else loaded.to(value.device)
        if id(value) not in self._apart and value.shape == loaded.shape and value.dtype == loaded.dtype:
            with torch.no_grad():
                return value.copy_(loaded)
        return loaded.to(value.device)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_equal, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other or (one != one and other != other))
