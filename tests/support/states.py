"""What the tests of stagers share: the stagers by name, and how a copy is compared with what was staged, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

import stagereg

LOCK_TIMEOUT_S = 60.0
KINDS = ("blocking", "overlapped", "pinned_cached")
"""The stagers of the registry, but for torch's own."""


def build(kind: str, **options: Any) -> Any:
    return stagereg.build("stager", kind, **options)


def settled(staged: Any) -> Any:
    """The copy, which may have been promised only."""
    return staged.result(timeout=LOCK_TIMEOUT_S) if isinstance(staged, Future) else staged


def plain_state(value: float, n: int = 5000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((n,), value), "v": torch.full((7,), value)}


def bits(x: torch.Tensor) -> bytes:
    # Not contiguous(), which leaves odd strides alone where there is one element.
    plain = torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


class Leaf(NamedTuple):
    """A tensor as it was."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    content: bytes
    facts: tuple[Any, ...]


Piece = tuple[tuple[object, ...], Any]


def pieces(x: Any, path: tuple[object, ...] = ()) -> Iterator[Piece]:
    """The containers and leaves of a state dict in order, with their paths."""
    if isinstance(x, (dict, list, tuple)):
        yield path, (type(x), len(x), getattr(x, "__dict__", None))
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from pieces(value, (*path, key))
    elif isinstance(x, DTensor):
        yield path, x.placements
        yield from pieces(x.to_local(), path)
    else:
        yield path, x


def kept(state: Any) -> list[Piece]:
    """What a copy of ``state`` has to be, whatever becomes of it."""
    return [(path, _leaf(x) if isinstance(x, torch.Tensor) else x) for path, x in pieces(state)]


def _leaf(x: torch.Tensor) -> Leaf:
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    facts = (type(x), x.requires_grad and x.is_leaf, vars(x))
    # Only holes may be left out.
    return Leaf(x.dtype, x.shape, () if span > x.numel() > 0 else x.stride(), bits(x), facts)


def same(piece: Piece, expected: Piece) -> bool:
    (path, x), (expected_path, y) = piece, expected
    if isinstance(y, Leaf):
        x = _leaf(x)._replace(stride=x.stride() if y.stride else ())
    return path == expected_path and type(x) is type(y) and bool(x == y)


def assert_whole(staged: Any, expected: list[Piece]) -> None:
    found = list(pieces(staged))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine, theirs), mine[0]


def assert_same(copy: Any, source: Any) -> None:
    """The same in all that a copy has to have, in host memory, with no lazy flips, and no memory in common."""
    assert_whole(copy, kept(source))
    for (_, mine), (_, theirs) in zip(pieces(copy), pieces(source), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (mine.device.type, mine.is_conj(), mine.is_neg()) == ("cpu", False, False)
            assert not theirs.numel() or mine.data_ptr() != theirs.data_ptr()
