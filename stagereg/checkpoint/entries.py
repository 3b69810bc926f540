"""What a checkpoint holds: the caller's objects as entries, and entries back into the objects.

An entry is a name and a state dict or plain value. What is the same on all ranks is one entry, of which the lowest
rank's copy is stored; what belongs to a rank is an entry per rank, ``name.rank0``, ``name.rank1``. Beside the caller's
entries, those under ``stagereg.`` hold the step, the number of ranks and each rank's random number generators.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stagereg.checkpoint import rng
from stagereg.errors import CheckpointError

__all__ = ["RESERVED", "assign", "capture", "current", "entry_name", "is_sharded", "rank_name", "rng_name"]

RESERVED = "stagereg"


def rank_name(name: str, rank: int) -> str:
    """Return the name of a rank's own entry."""
    return f"{name}.rank{rank}"


def rng_name(rank: int) -> str:
    """Return the name of the entry with a rank's random number generators."""
    return rank_name(f"{RESERVED}.rng", rank)


def is_sharded(value: object) -> bool:
    """Return whether each rank holds a part of its own, so that the parts need an entry each."""
    return isinstance(value, ZeroRedundancyOptimizer)


def entry_name(name: str, value: object, rank: int) -> str:
    """Return the name of the entry under which this rank stores ``value``."""
    return rank_name(name, rank) if is_sharded(value) else name


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
        entries[entry_name(name, value, rank)] = current(value)
    return entries


def current(value: Any) -> Any:
    """Return the state dict of an object that has one, a rank's shard of a ZeRO optimizer, else the value itself."""
    if isinstance(value, ZeroRedundancyOptimizer):
        return _zero_shard(value)
    inner = _unwrapped(value)
    return inner.state_dict() if _is_stateful(inner) else inner


def assign(state: MutableMapping[str, Any], name: str, loaded: Any) -> None:
    """Load one entry into ``state[name]``: into the object in place, or in place of the plain value."""
    value = state[name]
    inner = _unwrapped(value)
    if isinstance(value, ZeroRedundancyOptimizer):
        _load_zero_shard(value, loaded)
    elif _is_stateful(inner):
        if isinstance(inner, torch.optim.Optimizer):
            _shard(inner, loaded)
        inner.load_state_dict(loaded)
    else:
        state[name] = _merged(value, loaded)


def _unwrapped(value: Any) -> Any:
    return value.module if isinstance(value, DistributedDataParallel) else value


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _zero_shard(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    # A scheduler writes into the outer groups, and the local optimizer hears of it at its next step only.
    shard: dict[str, Any] = optimizer.optim.state_dict()
    for packed, group in zip(shard["param_groups"], optimizer.param_groups, strict=True):
        packed.update(_hyperparameters(group))
    return shard


def _load_zero_shard(optimizer: ZeroRedundancyOptimizer, shard: dict[str, Any]) -> None:
    optimizer.optim.load_state_dict(shard)
    for group, local in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
        group.update(_hyperparameters(local))


def _shard(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """Cut what was read of an optimizer's state as its parameters are; it had none yet to be read into."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        parts = loaded["state"].get(index, {})
        for name, whole in parts.items():
            if isinstance(param, DTensor) and type(whole) is torch.Tensor and whole.shape == param.shape:
                whole = whole.to(param.device)
                parts[name] = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


def _merged(value: Any, loaded: Any) -> Any:
    """Return ``loaded``, in the tensors and containers of ``value`` wherever they fit it."""
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
