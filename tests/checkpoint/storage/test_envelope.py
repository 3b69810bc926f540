"""The bytes around a tensor's content are those that torch writes, for every kind of tensor."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from stagereg.checkpoint.storage.envelope import _asked


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
