"""``stager=bf16``: a copy for a small export, its weights in bfloat16.

It stands beside the stager of the full checkpoint, in a checkpointer of its own. The tensors are cast where they are,
and copied to host memory by stagereg's own stager, so an export takes half the memory of a full copy there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from stagereg.plugin import HostCopier, HostStager, Pool, StateDict, flatten
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["WIDE", "Bf16Stager"]

WIDE = (torch.float32, torch.float64)
"""What is cast. float16 has as many bytes as bfloat16 has, and would only lose digits."""


class Bf16Stager(HostStager):
    """Copies a state dict, its float32 and float64 tensors as bfloat16.

    Everything else of the contract of a stager holds as it does for stagereg's own: what is handed out never changes,
    structure, strides and tied weights stay. Of a DTensor or ShardedTensor each rank casts its part. Other wrappers,
    sparse and quantized tensors, and tensors that are attributes of others are copied as they are.

    Each parameter is an option: its name, type, default and text are what users see.

    Args:
        max_in_flight: copies that may be held by writers at once before ``stage`` waits for one to be dropped.
        wait_s: seconds, one at most, that ``stage`` waits for that; then it takes memory beyond the bound, which is
            logged once.
    """

    def __init__(self, max_in_flight: int = 2, wait_s: float = 60.0) -> None:
        super().__init__(HostCopier(Pool(max_in_flight, wait_s)))

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory; blocks until the bytes are there.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or there is no memory for it.
            StagerClosedError: after ``close()``.
        """
        with torch.no_grad():
            spec = flatten(state_dict)
            return super().stage(spec.unflatten(_narrow(spec.tensors, _kept(state_dict))))


def _narrow(tensors: Sequence[torch.Tensor], kept: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, bfloat16 in place of wide ones that are not kept; those that shared memory share it again."""
    stays = {_memory(x) for x in kept}
    whole: dict[tuple[object, ...], torch.Tensor] = {}
    found = []
    for x in tensors:
        memory = _memory(x)
        if x.dtype in WIDE and memory not in stays and _is_complete(x):
            if memory not in whole:
                storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
                whole[memory] = storage.to(torch.bfloat16)
            x = whole[memory].as_strided(x.shape, x.stride(), x.storage_offset())
        found.append(x)
    return found


def _memory(x: torch.Tensor) -> tuple[object, ...]:
    return x.device, x.dtype, x.untyped_storage().data_ptr()


def _is_complete(x: torch.Tensor) -> bool:
    """Whether all of a tensor lies in its storage; one that does not is refused by the copier, with its path."""
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return not x.numel() or (last + 1) * x.itemsize <= x.untyped_storage().nbytes()


def _kept(x: Any) -> Iterator[torch.Tensor]:
    """What stays as it is: attributes of tensors, and what wrappers consist of that are no DTensor or ShardedTensor."""
    todo: list[Any] = [x]
    entered: set[int] = set()
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor) and not isinstance(x, (DTensor, ShardedTensor)):
            names = x.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(x) else vars(x)
            yield from (part for name in names if isinstance(part := getattr(x, name), torch.Tensor))
        elif isinstance(x, (dict, list, tuple)) and id(x) not in entered:
            entered.add(id(x))
            todo += x.values() if isinstance(x, dict) else x
