"""What a checkpoint holds: the caller's objects as entries, and entries back into the objects.

An entry is a name and a state dict or plain value. What is the same on all ranks is one entry, of which the lowest
rank's copy is stored; what belongs to a rank is an entry per rank, ``name.rank0``, ``name.rank1``. Beside the caller's
entries, those under ``stagereg.`` hold the step, the number of ranks and each rank's random number generators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stagereg.checkpoint.rng as rng
import stagereg.checkpoint.zero_shards as zero_shards
from stagereg.checkpoint.encoding import Leaf, leaves, marks
from stagereg.errors import CheckpointError

__all__ = ["RESERVED", "assign", "capture", "pair", "rank_name", "rng_name"]

RESERVED = "stagereg"


def rank_name(name: str, rank: int) -> str:
    """Return the name of a rank's own entry."""
    return f"{name}.rank{rank}"


def rng_name(rank: int) -> str:
    """Return the name of the entry with a rank's random number generators."""
    return rank_name(f"{RESERVED}.rng", rank)


def capture(state: Mapping[str, Any], step: int, rank: int, world_size: int) -> dict[str, Any]:
    """Return the entries to save: references to live tensors, which a stager has yet to copy.

    Raises:
        CheckpointError: a name that is no text, or one that belongs to the project.
    """
    entries: dict[str, Any] = {
        f"{RESERVED}.step": step,
        f"{RESERVED}.world_size": world_size,
        rng_name(rank): rng.capture(),
    }
    for name, value in state.items():
        if not isinstance(name, str) or name.split(".")[0] == RESERVED:
            raise CheckpointError(
                f"The state has an entry named {name!r}; use text that does not begin with {RESERVED!r}."
            )
        if isinstance(value, ZeroRedundancyOptimizer):
            entries[rank_name(name, rank)] = zero_shards.shard(value)
        else:
            entries[name] = _current(value)
    return entries


def pair(structure: Any, value: Any) -> list[Leaf]:
    """Give the leaves of a structure the tensors of the object or value that is to take it, and return them.

    A parameter of an optimizer stands for the state that there is not of it yet. Tensors may be written to in place
    only where taking the state is what torch does, and where no other tensor of the object shares their memory.
    """
    found = list(marks(structure))
    if isinstance(value, ZeroRedundancyOptimizer):
        return found
    _pair(structure, _current(value), _is_torchs_own(_unwrapped(value)))
    if isinstance(value, torch.optim.Optimizer) and zero_shards.is_whole(structure):
        for index, param in enumerate(param for group in value.param_groups for param in group["params"]):
            for leaf in marks(structure["state"].get(index)):
                leaf.live = param if leaf.live is None and isinstance(param, DTensor) else leaf.live
    last: Leaf | None = None
    end = 0
    for leaf in sorted((leaf for leaf in found if leaf.in_place), key=_address):
        if last is not None and _address(leaf) < end:
            last.in_place = leaf.in_place = False
        if _address(leaf) + _local(leaf).nbytes > end:
            last, end = leaf, _address(leaf) + _local(leaf).nbytes
    return found


def _pair(structure: Any, live: Any, in_place: bool) -> None:
    if isinstance(structure, Leaf):
        if isinstance(live, torch.Tensor):
            structure.live = live
            structure.in_place = in_place and _is_plain(_local(structure))
    elif isinstance(structure, Mapping) and isinstance(live, Mapping):
        for key, item in structure.items():
            if key in live:
                _pair(item, live[key], in_place)
    elif isinstance(structure, list) and isinstance(live, list):
        for item, other in zip(structure, live, strict=False):
            _pair(item, other, in_place)


def _local(leaf: Leaf) -> torch.Tensor:
    assert leaf.live is not None
    return leaf.live.to_local() if isinstance(leaf.live, DTensor) else leaf.live


def _address(leaf: Leaf) -> int:
    return _local(leaf).data_ptr()


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cpu and x.is_contiguous() and not x.is_inference()


def _is_torchs_own(value: Any) -> bool:
    """Whether the state of an object is its tensors themselves, and taking it only copies into them."""
    if isinstance(value, torch.optim.Optimizer):
        return type(value).__module__.startswith("torch.optim.") and not value._optimizer_load_state_dict_pre_hooks
    if isinstance(value, torch.nn.Module):
        return all(map(_loads_as_torch, value.modules()))
    return not _is_stateful(value)


def _loads_as_torch(module: torch.nn.Module) -> bool:
    kind, plain = type(module), torch.nn.Module
    return (
        kind.load_state_dict is plain.load_state_dict
        and kind.state_dict is plain.state_dict
        and kind._load_from_state_dict.__module__.startswith("torch.nn.")
        and not (module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks)
    )


def assign(state: MutableMapping[str, Any], name: str, loaded: Any) -> None:
    """Load one entry into ``state[name]``: into the object in place, or in place of the plain value.

    Raises:
        CheckpointError: a tensor of it is on the meta device still, where torch loads nothing and raises nothing. And
            what the object raises.
    """
    value = state[name]
    inner = _unwrapped(value)
    if isinstance(value, ZeroRedundancyOptimizer):
        zero_shards.load(value, loaded)
    elif _is_stateful(inner):
        inner.load_state_dict(loaded)
    else:
        state[name] = _merged(value, loaded)
    for path, x in _tensors(name, state[name]):
        if x.is_meta:
            raise CheckpointError(
                f"{path!r} is on the meta device, which holds nothing; give it memory first, as by to_empty()"
            )


def _tensors(entry: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an object by dotted name, and of an optimizer its parameters, as :func:`pair` has them."""
    if not isinstance(value, ZeroRedundancyOptimizer):  # whose state dict is only there when all ranks make it
        yield from ((name, x) for name, x in leaves(_current(value), entry) if isinstance(x, torch.Tensor))
    if isinstance(value, torch.optim.Optimizer):
        params = (param for group in value.param_groups for param in group["params"])
        yield from ((f"{entry}.state.{index}", param) for index, param in enumerate(params))


def _unwrapped(value: Any) -> Any:
    return value.module if isinstance(value, DistributedDataParallel) else value


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _current(value: Any) -> Any:
    """The state dict of an object that has one, else the value itself."""
    inner = _unwrapped(value)
    return inner.state_dict() if _is_stateful(inner) else inner


def _merged(value: Any, loaded: Any) -> Any:
    """Return ``loaded``, in the tensors and containers of ``value`` wherever they fit it."""
    if value is loaded:
        return value
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if value.shape == loaded.shape and value.dtype == loaded.dtype:
            with torch.no_grad():
                return value.copy_(loaded)
        return loaded.to(value.device)
    if isinstance(value, dict) and isinstance(loaded, dict):
        merged = {key: _merged(value.get(key), item) for key, item in loaded.items()}
        value.clear()
        value.update(merged)
        return value
    if isinstance(value, list) and isinstance(loaded, list):
        padded = value + [None] * (len(loaded) - len(value))
        value[:] = [_merged(old, item) for old, item in zip(padded, loaded, strict=False)]
        return value
    return loaded
