"""Tensor subclasses that wrap other tensors and have no storage of their own, such as quantized weights of torchao.

``__tensor_flatten__`` names the inner tensors, which have the bytes and may wrap other tensors. A copy to a plain
tensor of the outer dtype would round values, so the inner tensors are saved and compared. The functions here treat a
``DTensor`` as its local tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.kernel.state_dict import flatten, has_storage

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def wraps(x: Any) -> bool:
    """Return whether a value is a tensor of a subclass that has no storage of its own."""
    if type(x) in _PLAIN or not isinstance(x, torch.Tensor):
        return False
    if isinstance(x, DTensor):
        return wraps(x._local_tensor)
    if isinstance(x, ShardedTensor) or is_lazy(x):
        return False
    return x.layout is torch.strided and (is_traceable_wrapper_subclass(x) or not has_storage(x))


def inner_tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner tensors with storage; ``x`` if it wraps no tensor; nothing if its class does not list them."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    if not wraps(x):
        yield x
    elif is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(x, name))


def is_plain_memory(x: torch.Tensor) -> bool:
    """Return whether the values of ``x`` are the bytes at its address: on the CPU, row-major, not lazily changed."""
    return x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def form_of(x: torch.Tensor) -> str:
    """Describe a tensor except its bytes: its class, and the dtypes and shapes of its inner tensors."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    kind = f"{x.dtype} {[*x.shape]}"
    if not is_traceable_wrapper_subclass(x):
        return kind if x.layout is torch.strided and not x.is_quantized else f"{kind} {x.layout}"
    names, context = x.__tensor_flatten__()
    inner = ", ".join(f"{name}: {form_of(getattr(x, name))}" for name in names)
    return f"{name_of(x)} {kind} {_ADDRESS.sub('', repr(context))} ({inner})"


def name_of(x: torch.Tensor) -> str:
    """Return the dotted name of the class of a tensor, or of the local tensor of a ``DTensor``."""
    kind = type(x._local_tensor if isinstance(x, DTensor) else x)
    return f"{kind.__module__}.{kind.__qualname__}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same form (:func:`form_of`), and inner tensors with the same bytes."""
    with torch.no_grad():
        return form_of(one) == form_of(other) and all(map(_same_elements, inner_tensors(one), inner_tensors(other)))


def _same_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits. Strides and devices may differ."""
    for dim, n in enumerate(x.shape):
        if n > 1 and x.stride(dim) == y.stride(dim) == 0:  # expanded: all elements equal the first
            x, y = x.narrow(dim, 0, 1), y.narrow(dim, 0, 1)
    return torch.equal(_bytes_of(x), _bytes_of(y))


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    # contiguous() would keep the strides of a tensor with one element, which may be any numbers.
    flat = torch.empty(x.numel(), dtype=x.dtype, device="cpu")
    flat.view(x.shape).copy_(x)
    return flat.view(torch.uint8)


def cloned(x: torch.Tensor) -> torch.Tensor:
    """Return a copy whose inner tensors are in host memory, each in a storage without other elements."""
    spec = flatten(x)
    return spec.unflatten([each.detach().cpu().clone() for each in spec.tensors])


def owning(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` if its inner tensors are in host memory, in storages without other elements; otherwise a copy."""
    own = all(each.is_cpu and each.untyped_storage().nbytes() == each.nbytes for each in inner_tensors(x))
    return x if own else cloned(x)
