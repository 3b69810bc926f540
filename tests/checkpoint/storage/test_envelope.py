"""The bytes around a tensor's content are those that torch writes, for every kind of tensor."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from stagereg.checkpoint.storage.envelope import _asked, envelope


def test_a_tensor_beyond_4_gib_has_an_envelope_too(tmp_path: Path) -> None:
    shape = torch.Size((5, 1 << 30))
    around = _asked(torch.uint8, shape, (1 << 30, 1))
    assert around is not None
    with (tmp_path / "sparse").open("wb") as file:  # a file with a hole costs no disk
        file.write(around.head)
        file.seek(shape.numel() - 1, io.SEEK_CUR)
        file.write(b"\7" + around.tail)
    loaded = torch.load(tmp_path / "sparse", weights_only=True, mmap=True)
    assert loaded.shape == shape
    assert loaded[-1, -1] == 7


def test_memory_for_the_tensor_is_not_taken() -> None:
    assert _asked(torch.float64, torch.Size((1 << 36,)), (1,)) is not None  # 512 GiB


@pytest.mark.parametrize(
    ("x", "stride"),
    [
        (torch.ones(2, 3), (3, 1)),
        (torch.ones(2, 3).t(), (1, 3)),
        (torch.ones(4, 6)[:, ::2], (3, 1)),
        (torch.ones(3, 1).expand(3, 4), (4, 1)),
        (torch.ones(()), ()),
        (torch.ones(6)[1:3], (1,)),
        (torch.ones(4).as_strided((2, 2), (1, 1)), (2, 1)),
    ],
)
def test_strides_are_kept_unless_there_are_holes_or_overlaps(x: torch.Tensor, stride: tuple[int, ...]) -> None:
    around = envelope(x)
    assert around is not None
    assert around.stride == stride


@pytest.mark.parametrize(
    "x",
    [torch.nn.Parameter(torch.ones(2)), torch.empty(0, 2), torch.ones(2).to_sparse(), torch.ones(2, device="meta")],
    ids=["subclass", "empty", "sparse", "meta"],
)
def test_a_tensor_with_more_than_bytes_is_left_to_torch(x: torch.Tensor) -> None:
    assert envelope(x) is None
