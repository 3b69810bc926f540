"""How a copy of a state dict differs from what it has to be.

Compared are types, the order of keys, dtypes, shapes, strides, ``requires_grad`` and every bit of every tensor, so NaN
is equal to itself and minus zero is not zero. Values that are no tensors are compared with ``==``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["difference"]

_Expected = Callable[[Tensor], Tensor]


def difference(
    copied: Any, source: Any, expected: _Expected = lambda tensor: tensor, where: str = "copy"
) -> str | None:
    """Return the first difference between a copy and its source, with its path; ``None`` if there is none.

    Args:
        copied: nested dicts, lists and tuples.
        source: as it was when it was copied.
        expected: makes of a source tensor what its copy is to be; dtype, shape and bits are taken from there, and the
            strides too where the shape is another one.
        where: what ``copied`` is called.
    """
    if type(copied) is not type(source):
        return f"{where} is a {type(copied).__name__}, and the source a {type(source).__name__}"
    if isinstance(source, Tensor):
        return _tensor_difference(copied, source, expected(source.detach()).detach().cpu(), where)
    if isinstance(source, dict):
        if list(copied) != list(source):
            return f"the keys of the {where} are {list(copied)}, not {list(source)}"
        return _first(copied, source, list(source), expected, where)
    if isinstance(source, (list, tuple)):
        if len(copied) != len(source):
            return f"{where} has {len(copied)} items, not {len(source)}"
        return _first(copied, source, range(len(source)), expected, where)
    return None if copied == source else f"{where} is {copied!r}, not {source!r}"


def _first(copied: Any, source: Any, keys: Sequence[Any], expected: _Expected, where: str) -> str | None:
    found = (difference(copied[key], source[key], expected, f"{where}[{key!r}]") for key in keys)
    return next((each for each in found if each), None)


def _tensor_difference(copied: Tensor, source: Tensor, wanted: Tensor, where: str) -> str | None:
    stride = (source if wanted.shape == source.shape else wanted).stride()
    facts = (
        ("is on the device", copied.device.type, "cpu"),
        ("has the dtype", copied.dtype, wanted.dtype),
        ("has the shape", tuple(copied.shape), tuple(wanted.shape)),
        ("has the strides", copied.stride(), stride),
        ("has requires_grad", copied.requires_grad, source.requires_grad),
    )
    for what, seen, right in facts:
        if seen != right:
            return f"{where} {what} {seen}, not {right}"
    # Not contiguous(), which leaves odd strides alone where there is one element.
    is_, was = (x.detach().clone(memory_format=torch.contiguous_format).flatten() for x in (copied, wanted))
    wrong = (is_.view(torch.uint8) != was.view(torch.uint8)).view(-1, is_.element_size()).any(1).nonzero().flatten()
    if not len(wrong):
        return None
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {copied.numel()} elements of {where} are wrong: element {at} is {is_[at].item()}, not "
        f"{was[at].item()}"
    )
