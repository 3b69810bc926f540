"""Snapshots of what a copy has to be, taken before the source can change, and how a copy differs from one.

Compared are types, the order of keys, dtypes, shapes, strides, ``requires_grad`` and every bit of every tensor, so NaN
is equal to itself and minus zero is not zero. Values that are no tensors are compared with ``==``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TensorSnapshot", "bits", "difference", "note"]


@dataclass(frozen=True)
class TensorSnapshot:
    """What the copy of one tensor has to be; ``values`` is contiguous and shared with nothing."""

    kind: type[Tensor]
    values: Tensor
    stride: tuple[int, ...]
    requires_grad: bool


def note(value: Any, expected: Callable[[Tensor], Tensor]) -> Any:
    """Copy ``value`` (nested dicts, lists, tuples), with a :class:`TensorSnapshot` instead of each tensor.

    Args:
        value: what is going to be staged.
        expected: makes of a source tensor what its copy is to be; dtype, shape and bits are taken from there, and the
            strides too where the shape is another one.
    """
    if isinstance(value, Tensor):
        source = value.detach()
        wanted = expected(source).detach()
        stride = (source if wanted.shape == source.shape else wanted).stride()
        return TensorSnapshot(type(value), _plain(wanted), stride, value.requires_grad)
    if isinstance(value, dict):
        noted = copy.copy(value)
        for key in value:
            noted[key] = note(value[key], expected)
        return noted
    if isinstance(value, (list, tuple)):
        items = [note(item, expected) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copy.deepcopy(value)


def difference(copied: Any, noted: Any, where: str = "copy") -> str | None:
    """Return the first difference between a copy and a snapshot, with its path; ``None`` if there is none."""
    if isinstance(noted, TensorSnapshot):
        return _tensor_difference(copied, noted, where)
    if type(copied) is not type(noted):
        return f"{where} is a {type(copied).__name__}, and the source a {type(noted).__name__}"
    if isinstance(noted, dict):
        if list(copied) != list(noted):
            return f"the keys of the {where} are {list(copied)}, not {list(noted)}"
        return _first(copied, noted, list(noted), where)
    if isinstance(noted, (list, tuple)):
        if len(copied) != len(noted):
            return f"{where} has {len(copied)} items, not {len(noted)}"
        return _first(copied, noted, range(len(noted)), where)
    return None if copied == noted else f"{where} is {copied!r}, not {noted!r}"


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor's values in host memory, as a flat tensor of uint8."""
    return _plain(x).reshape(-1).view(torch.uint8)


def _plain(x: Tensor) -> Tensor:
    # Not contiguous(), which leaves odd strides alone where there is one element.
    return x.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)


def _first(copied: Any, noted: Any, keys: Sequence[Any], where: str) -> str | None:
    return next((found for key in keys if (found := difference(copied[key], noted[key], f"{where}[{key!r}]"))), None)


def _tensor_difference(copied: Any, noted: TensorSnapshot, where: str) -> str | None:
    if type(copied) is not noted.kind:
        return f"{where} is a {type(copied).__name__}, and the source a {noted.kind.__name__}"
    facts = (
        ("is on the device", copied.device.type, "cpu"),
        ("has the dtype", copied.dtype, noted.values.dtype),
        ("has the shape", tuple(copied.shape), tuple(noted.values.shape)),
        ("has the strides", copied.stride(), noted.stride),
        ("has requires_grad", copied.requires_grad, noted.requires_grad),
    )
    for what, seen, wanted in facts:
        if seen != wanted:
            return f"{where} {what} {seen}, not {wanted}"
    wrong = (bits(copied) != bits(noted.values)).view(-1, max(copied.element_size(), 1)).any(1).nonzero().flatten()
    if not len(wrong):
        return None
    at = int(wrong[0])
    is_, was = _plain(copied).flatten()[at].item(), noted.values.flatten()[at].item()
    return f"{len(wrong)} of {copied.numel()} elements of {where} are wrong: element {at} is {is_}, not {was}"
