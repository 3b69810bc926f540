"""Parts of a tensor that wraps others are put together only where the copy has their bytes."""

from __future__ import annotations

import io

import pytest
import torch

from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.index import SUBCLASS, Chunk, Stored
from stagereg.checkpoint.format.wrappers import same_bits
from stagereg.checkpoint.storage.subclasses import wholes_of
from stagereg.errors import CheckpointError
from tests.support.subclasses import Codes, Copied, OneScale, Whole, codes


def put_together(live: torch.Tensor | None, kind: type[Codes] = Codes) -> torch.Tensor:
    """Return what is read of two parts of two rows each."""
    chunks = tuple(Chunk("file", 0, 1, (row, 0), (2, 3), SUBCLASS) for row in (0, 2))
    leaf = Leaf("x.w", Stored(torch.float32, torch.Size([4, 3]), chunks), live=live)
    wholes = wholes_of(leaf)
    assert wholes is not None
    for whole, row in zip(wholes, (0, 2), strict=True):
        stream = io.BytesIO()
        part = codes(2, first=row, kind=kind)
        torch.save(part if kind is not OneScale else OneScale(part.codes, torch.tensor(row + 0.5)), stream)
        whole.take(bytearray(stream.getvalue()))
    return leaf.value


def test_parts_go_into_a_copy_of_what_the_program_has() -> None:
    live = codes(4, first=9)
    assert same_bits(put_together(live), codes(4))
    assert same_bits(live, codes(4, first=9))


@pytest.mark.parametrize(
    ("live", "kind", "why"),
    [
        (None, Codes, "at the same world size"),
        (torch.zeros(4, 3), Codes, "at the same world size"),
        (codes(4, kind=Whole), Whole, "cannot be written"),
        (codes(4, first=9, kind=Copied), Copied, "copies of its shards differ"),
        (OneScale(codes(4).codes, torch.tensor(9.0)), OneScale, "copies of its shards differ"),
        (codes(4, first=9), Whole, "cannot be copied|copies of its shards differ"),
    ],
    ids=["nothing there", "plain", "no slices", "slices are copies", "one scale", "another class"],
)
def test_what_cannot_be_put_together_is_refused_by_name(live: torch.Tensor | None, kind: type[Codes], why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'x\.w'.*in 2 shards.*({why})"):
        put_together(live, kind)
