"""The bytes around a tensor's content are those that torch writes, for every kind of tensor."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
import torch

from stagereg.checkpoint.storage.envelope import _asked, envelope


def saved(x: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def of_bytes(dtype: torch.dtype) -> torch.Tensor:
    storage = torch.arange(24 * dtype.itemsize).to(torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage).view(2, 3, 4).permute(1, 2, 0)


def torch_saves(dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            saved(of_bytes(dtype))
    except (RuntimeError, KeyError, NotImplementedError):
        return False
    return True


DTYPES = [d for d in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str) if torch_saves(d)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_content_and_tail_load_as_torchs_archive_does(dtype: torch.dtype) -> None:
    x = of_bytes(dtype)
    expected = saved(x)
    around = envelope(x)
    if around is None:
        assert x.is_quantized
        return
    content = bytes(x.untyped_storage())
    whole = around.head + content + around.tail
    assert len(whole) == len(expected)
    loaded, reference = (torch.load(io.BytesIO(data), weights_only=True) for data in (whole, expected))
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (x.dtype, x.shape, x.stride())
    assert bytes(loaded.untyped_storage()) == bytes(reference.untyped_storage()) == content


def test_the_dtypes_tried_are_those_of_models() -> None:
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn} <= set(DTYPES)


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
