"""What single values need to be copied: the odd tensors, the odd tuples, and the words where it cannot be.

``tree`` walks, this room knows the things it meets. It plans nothing and holds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from stagereg.errors import StagingError, UnstageableTypeError

__all__ = ["attempt", "clone", "flip", "sharded_over", "tuple_maker", "why_without_data"]


def attempt(copier: Callable[[Any], Any], x: Any) -> Any:
    """Return ``copier(x)``; what that raises becomes an ``UnstageableTypeError`` that names the type."""
    try:
        return copier(x)
    except StagingError:
        raise
    except Exception as error:
        raise UnstageableTypeError(
            [], f"a {type(x).__module__}.{type(x).__qualname__} cannot be copied ({type(error).__name__}: {error})"
        ) from error


def why_without_data(x: torch.Tensor) -> str | None:
    """Say why a tensor that has a shape has no memory; None where it has."""
    what = None
    if x.device.type == "meta":
        what = "it lies on the meta device; materialize it first"
    elif isinstance(x, (UninitializedParameter, UninitializedBuffer)):
        what = "it is an uninitialized lazy parameter; run a forward pass first"
    elif isinstance(x, FakeTensor):
        what = "it is fake; stage outside of FakeTensorMode"
    return f"a {type(x).__name__} has no data to stage: {what}" if what else None


def clone(x: torch.Tensor) -> torch.Tensor:
    """An independent copy in host memory, by torch alone; for layouts that are no single strided block."""
    return x.detach().clone() if x.device.type == "cpu" else x.detach().to("cpu")


def flip(x: torch.Tensor, negative: bool, conjugate: bool) -> torch.Tensor:
    """Turn the lazy negation and conjugation of ``x`` on or off; its memory stays the same."""
    if negative:
        x = torch._neg_view(x)
    return x.conj() if conjugate else x


def tuple_maker(kind: type[tuple[Any, ...]]) -> Callable[[list[Any]], Any]:
    """Return what makes a tuple of that type out of its items, whatever its constructor takes."""
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make
    if hasattr(kind, "n_sequence_fields"):  # a struct sequence, such as those of torch.return_types
        return kind
    return lambda items: tuple.__new__(kind, items)


def sharded_over(shards: Sequence[torch.Tensor], like: ShardedTensor) -> ShardedTensor:
    """A ShardedTensor over staged local shards; its metadata says where they lie now: on the CPU."""
    metadata = copy.deepcopy(like.metadata())
    before = [shard.metadata for shard in like.local_shards()]
    local = [Shard(shard, copy.deepcopy(meta)) for shard, meta in zip(shards, before, strict=True)]
    for meta in [*metadata.shards_metadata, *(shard.metadata for shard in local)]:
        if meta.placement is not None:
            meta.placement._device = torch.device("cpu")
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, metadata, process_group=like._process_group, init_rrefs=like._init_rrefs
    )
