"""Applies a function to the memory of some tensors of a state dict, for stagers that round or cast.

A state dict may contain views, tied weights, wrappers and unusual strides. So the function is called once per
block of memory, not once per tensor. The new tensors view the result with the offsets and strides of the original
tensors. The source is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.base.many_tensors import span_of
from stagereg.errors import StagingError
from stagereg.kernel.state_dict import entries_of, flatten
from stagereg.stagers.async_stager import StateDict


def map_memory(
    state_dict: StateDict, function: Callable[[Tensor], Tensor], where: Callable[[Tensor, str], bool] | None
) -> StateDict:
    """Return ``state_dict`` with new memory for some tensors. See :meth:`.HostStager.map_memory`."""
    with torch.no_grad():
        spec = flatten(state_dict)
        chosen = _choose(state_dict, where)
        over: dict[object, list[int]] = {}  # tensor indices by storage
        for i, x in enumerate(spec.tensors):
            over.setdefault((x.device, x.dtype, x.untyped_storage().data_ptr()), []).append(i)
        made = [x.detach() for x in spec.tensors]  # new objects, so that the source gets no attributes
        for indices in over.values():
            paths = [chosen.get(id(spec.lazy.get(i, spec.tensors[i]))) for i in indices]
            if paths[0] is not None and all(paths) and all(_is_complete(spec.tensors[i]) for i in indices):
                mapped = _mapped([spec.tensors[i] for i in indices], function, paths[0])
                for i, x in zip(indices, mapped, strict=True):
                    made[i] = x
        found: StateDict = spec.unflatten(made)
        return found


def _choose(state: StateDict, where: Callable[[Tensor, str], bool] | None) -> dict[int, tuple[object, ...] | None]:
    """Map the ``id`` of each tensor to its path, or to ``None`` if it is not to be changed under one of its paths."""
    chosen: dict[int, tuple[object, ...] | None] = {}
    for path, x in _tensors(state, (), {}):
        has_floats = x.dtype.is_floating_point and x.ndim > 0  # excludes step counts
        takes = has_floats and (where is None or where(x, ".".join(map(str, path))))
        for part in _parts(x):
            chosen[id(part)] = path if takes and chosen.get(id(part), path) else None
    return chosen


def _tensors(x: Any, path: tuple[object, ...], entered: dict[int, Any]) -> Iterator[tuple[tuple[object, ...], Tensor]]:
    if isinstance(x, Tensor):
        yield path, x
    elif not isinstance(x, type) and id(x) not in entered:
        entered[id(x)] = x  # kept alive, so that no other value gets this id
        for key, item in entries_of(x):
            yield from _tensors(item, (*path, key), entered)


def _parts(x: Tensor) -> list[Tensor]:
    """Return the tensors that hold the data of a plain or distributed tensor; empty for other wrappers."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    if isinstance(x, ShardedTensor):
        return [shard.tensor for shard in x.local_shards()]
    return [] if is_traceable_wrapper_subclass(x) else [x]


def _is_complete(x: Tensor) -> bool:
    """Return whether the storage contains all elements. If not, the copy raises an error later."""
    return (x.storage_offset() + span_of(x)) * x.itemsize <= x.untyped_storage().nbytes() or not x.numel()


def _mapped(tensors: Sequence[Tensor], function: Callable[[Tensor], Tensor], path: Sequence[object]) -> list[Tensor]:
    """Apply ``function`` to the memory of ``tensors``, and return the corresponding tensors over the result."""
    begin = min(x.storage_offset() for x in tensors)
    end = max(x.storage_offset() + span_of(x) for x in tensors)
    storage = max((x.untyped_storage() for x in tensors), key=lambda each: each.nbytes())
    memory = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device).set_(storage, begin, (end - begin,), (1,))
    version = memory._version
    made = function(memory)
    if memory._version != version:
        raise StagingError(path, "the function of map_memory() wrote into the state. Return a new tensor instead")
    if type(made) is not Tensor or made.shape != memory.shape or made.layout is not torch.strided:
        shown = f"a {type(made).__name__} {[*made.shape]}" if isinstance(made, Tensor) else f"{made!r:.80}"
        text = f"the function of map_memory() returned {shown} for a Tensor {[*memory.shape]}. Keep the shape"
        raise StagingError(path, text)
    made = made.contiguous()
    at = made.storage_offset() - begin
    return [made.as_strided(x.shape, x.stride(), x.storage_offset() + at) for x in tensors]
