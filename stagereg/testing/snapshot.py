"""How a copy of a state dict differs from what it has to be.

Compared are types, the order of keys, dtypes, shapes, strides, ``requires_grad`` and every bit of every tensor, so NaN
is equal to itself and minus zero is not zero. Values that are no tensors are compared with ``==``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["difference"]


def difference(
    copied: Any, source: Any, expected: Callable[[Tensor], Tensor] = lambda tensor: tensor, where: str = "copy"
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
    if not isinstance(source, (dict, list, tuple)):
        return None if copied == source else f"{where} is {copied!r}, not {source!r}"
    keys, wanted = (list(x) if isinstance(x, dict) else list(range(len(x))) for x in (copied, source))
    if keys != wanted:
        return f"the keys of the {where} are {keys}, not {wanted}"
    found = (difference(copied[key], source[key], expected, f"{where}[{key!r}]") for key in keys)
    return next((each for each in found if each), None)


def _tensor_difference(copied: Tensor, source: Tensor, wanted: Tensor, where: str) -> str | None:
    stride = (source if wanted.shape == source.shape else wanted).stride()
    seen = (copied.device.type, copied.dtype, tuple(copied.shape), copied.stride(), copied.requires_grad)
    right = ("cpu", wanted.dtype, tuple(wanted.shape), stride, source.requires_grad)
    for what, is_, was in zip(("device", "dtype", "shape", "strides", "requires_grad"), seen, right, strict=True):
        if is_ != was:
            return f"{where} has the {what} {is_}, not {was}"
    # Not contiguous(), which leaves odd strides alone where there is one element.
    have, want = (x.detach().clone(memory_format=torch.contiguous_format).flatten() for x in (copied, wanted))
    wrong = (have.view(torch.uint8) != want.view(torch.uint8)).view(-1, have.element_size()).any(1).nonzero().flatten()
    if not len(wrong):
        return None
    at = int(wrong[0])
    numbers = f"element {at} is {have[at].item()}, not {want[at].item()}"
    return f"{len(wrong)} of {copied.numel()} elements of {where} are wrong: {numbers}"
