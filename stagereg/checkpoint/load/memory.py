"""The memory that a tensor of a checkpoint is read into: the live tensor, or a new one of the kind that was saved."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

import stagereg.checkpoint.format.split_tensors as split_tensors
import stagereg.checkpoint.load.subclasses as subclasses
from stagereg.checkpoint.format.encoding import PLAIN, REPLICATED, Leaf
from stagereg.checkpoint.format.index import Stored
from stagereg.checkpoint.format.wrappers import wraps


def memory_for(leaf: Leaf) -> torch.Tensor:
    if leaf.in_place and leaf.live is not None:
        if not isinstance(leaf.live, ShardedTensor):
            torch.autograd.graph.increment_version(leaf.live)
        return leaf.live
    dtype = leaf.dtype or leaf.stored.dtype
    live = leaf.live
    if split_tensors.is_split(live) and leaf.stored.shape == split_tensors.shape_of(live):
        split = cast("torch.Tensor", live)
        return split_tensors.carry(split, split.detach().to(dtype, copy=True))  # with the padding
    sharded = live if isinstance(live, DTensor) and leaf.placed != PLAIN else None
    if sharded is not None and leaf.placed is None and sharded.shape == leaf.stored.shape:
        if wraps(sharded):
            local = torch.empty(sharded._local_tensor.shape, dtype=dtype, device="cpu")
            return subclasses.dtensor_like(sharded, local)
        return torch.empty_like(sharded, dtype=dtype)
    is_replicated = leaf.placed == REPLICATED  # otherwise Adafactor's rows and columns are
    if sharded is not None and (is_replicated or len(leaf.stored.shape) == sharded.ndim > 1):
        whole, mesh = torch.empty(leaf.stored.shape, dtype=dtype, device="cpu"), sharded.device_mesh
        return DTensor.from_local(whole.to(sharded.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    if strides := leaf.strides or _strides_of(leaf.stored):
        return torch.empty_strided(leaf.stored.shape, strides, dtype=dtype, device="cpu")
    return torch.empty(leaf.stored.shape, dtype=dtype, device="cpu")


def _strides_of(stored: Stored) -> tuple[int, ...] | None:
    """Return the strides of a tensor that lies in a file as a whole, if they are not row-major."""
    [chunk] = stored.chunks if stored.chunks is not None and len(stored.chunks) == 1 else [None]
    return chunk.layout if chunk is not None and isinstance(chunk.layout, tuple) else None
