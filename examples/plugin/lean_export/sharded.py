"""``ShardedTensor``, the tensors of FSDP1's sharded state dicts: one whose metadata says that it is bfloat16.

Its metadata names a dtype, which its shards must have. So they are cast first, each rank its own, and then copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

__all__ = ["with_narrow_shards"]


def with_narrow_shards(x: Any, wants: Callable[[str, torch.Tensor], bool]) -> Any:
    """Return a state dict with its ShardedTensors cast, as far as ``wants``; itself, where there are none.

    Containers on the way to one are copied, the others are the same ones; in tuples they stay as they are.

    Args:
        x: nested dicts and lists.
        wants: called with the dotted name of a ShardedTensor and the tensor; True casts it.
    """
    return _visit(x, "", wants, {})


def _visit(x: Any, name: str, wants: Callable[[str, torch.Tensor], bool], known: dict[int, Any]) -> Any:
    if isinstance(x, ShardedTensor):
        return _narrow(x) if wants(name, x) else x
    if not isinstance(x, (dict, list)):
        return x
    if id(x) not in known:
        known[id(x)] = x  # what a cycle leads back to
        items = x.items() if isinstance(x, dict) else enumerate(x)
        made = {key: _visit(value, f"{name}.{key}" if name else str(key), wants, known) for key, value in items}
        changed = {key: value for key, value in made.items() if value is not x[key]}
        if changed:
            known[id(x)] = rebuilt = copy.copy(x)
            for key, value in changed.items():
                rebuilt[key] = value
    return known[id(x)]


def _narrow(x: ShardedTensor) -> ShardedTensor:
    shards = [Shard(each.tensor.to(torch.bfloat16), copy.deepcopy(each.metadata)) for each in x.local_shards()]
    metadata = copy.deepcopy(x.metadata())
    metadata.tensor_properties.dtype = torch.bfloat16
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=x._process_group, init_rrefs=x._init_rrefs
    )
