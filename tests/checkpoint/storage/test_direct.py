"""``direct`` writes the same as torch's writer, for any tensors in any memory."""

from __future__ import annotations

import errno
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import stagereg
from stagereg.checkpoint.storage.aligned import AlignedFile
from stagereg.checkpoint.storage.direct import DirectStorage
from stagereg.checkpoint.store.local_store import mark_file
from stagereg.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ODD = (torch.uint16, torch.float8_e4m3fn, torch.complex32, torch.complex128)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64, *ODD)
Kind = Callable[[torch.Tensor], torch.Tensor]
KINDS: dict[str, Kind] = {
    "plain": lambda x: x,
    "reversed": lambda x: x.permute(tuple(reversed(range(x.ndim)))),
    "holes": lambda x: x[..., ::2] if x.ndim else x,
    "tail": lambda x: x[1:] if x.ndim else x,
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "overlapping": lambda x: x.as_strided((2, 2), (1, 1)) if x.numel() >= 4 else x,
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: x.conj().imag if x.is_complex() else x,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "wants a gradient": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    numel = torch.Size(shape).numel()
    seed = draw(st.integers(0, 250))
    content = (torch.arange(numel * dtype.itemsize) * 7 + seed).to(torch.uint8)
    if dtype is torch.bool:
        content %= 2
    x = torch.empty(0, dtype=dtype).set_(content.untyped_storage()).view(shape)
    kind = draw(st.sampled_from(sorted(KINDS)))
    try:
        return KINDS[kind](x)
    except (RuntimeError, NotImplementedError):  # no such view of this dtype
        return x


def states() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.one_of(tensors(), tensors(), st.integers(), st.text(max_size=3), st.none())
    return st.dictionaries(st.sampled_from("abcdefgh"), leaves, min_size=1, max_size=8)


def blobs(path: Path) -> dict[str, Any]:
    """What ``torch.load`` makes of each entry, by name, as type, form and bytes."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    found = {}
    for index, info in metadata.storage_data.items():
        data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        value = torch.load(io.BytesIO(data), weights_only=True)
        found[index.fqn] = form(value) if isinstance(value, torch.Tensor) else value
    return found


def form(x: torch.Tensor) -> tuple[Any, ...]:
    flags = x.is_conj(), x.is_neg(), x.requires_grad, x.storage_offset()
    return type(x), x.dtype, x.shape, x.stride(), flags, bytes(x.untyped_storage())


def save(state: dict[str, Any], path: Path, writer: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)


WRITER = DirectStorage(buffer_mb=1)
STAGER = stagereg.build("stager", "pinned_cached", pin=False)
STAGER.reserve_padding(*WRITER.padding)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(deadline=None, max_examples=80)
@given(state=states(), staged=st.booleans())
def test_every_blob_equals_that_of_torchs_writer(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], staged: bool
) -> None:
    root = tmp_path_factory.mktemp("blobs")
    given = STAGER.stage(state) if staged else state
    save(given, root / "torch", FileSystemWriter(root / "torch"))
    save(given, root / "direct", WRITER)
    assert blobs(root / "direct") == blobs(root / "torch")
    assert {name: mark_file(root / "direct" / name) for name in os.listdir(root / "direct")} == WRITER.marks


def large() -> dict[str, torch.Tensor]:
    """Some MiB with every way through: runs, buffers filled several times over, pieces of a tensor with holes."""
    base = torch.randn(700, 1500)
    return {
        "matrix": torch.randn(1000, 1100),
        "small": torch.randn(3),
        "column": torch.randn(400_000, 3)[:, 1],
        "turned": torch.randn(20, 300, 500).permute(2, 0, 1)[::2],
        "tied": base,
        "tie": base.t(),
        "bytes": torch.randint(0, 255, (3_000_001,), dtype=torch.uint8),
    }


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """The bytes that pass through one method of :class:`AlignedFile`."""
    real = getattr(AlignedFile, name)
    sizes: list[int] = []

    def count(self: AlignedFile, *args: Any) -> Any:
        if len(args) < 4:  # not a part of a tensor that was counted already
            sizes.append(args[2] if name == "place" else args[0].numel())
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignedFile, name, count)
        yield sizes


@pytest.mark.parametrize("staged", [False, True])
def test_large_tensors_load_with_plain_torch_in_place_and_through_the_buffers(tmp_path: Path, staged: bool) -> None:
    state = large()
    template = {name: torch.zeros_like(x) for name, x in state.items()}
    with counted("write_tensor") as copied, counted("place") as placed:
        save(STAGER.stage(state) if staged else state, tmp_path, WRITER)
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    for name, x in state.items():
        assert torch.equal(template[name], x), name
    assert {name: mark_file(tmp_path / name) for name in os.listdir(tmp_path)} == WRITER.marks
    nbytes = {name: x.nbytes for name, x in state.items()}
    if staged:
        # A tensor with holes, or whose memory another one shares, has no padding; all others are written in place.
        in_place = nbytes["matrix"] + nbytes["small"] + nbytes["bytes"]
        assert sum(copied) == sum(nbytes.values()) - in_place
        assert sum(placed) >= in_place
        entries = pickle.loads((tmp_path / ".metadata").read_bytes()).storage_data.values()
        assert max(entry.offset + entry.length for entry in entries) == (tmp_path / "__0_0.distcp").stat().st_size
    else:
        assert sum(copied) == sum(nbytes.values())
        assert placed == []


def test_a_checkpointer_has_its_stager_reserve_padding(tmp_path: Path) -> None:
    with counted("place") as placed, stagereg.Checkpointer(str(tmp_path), storage=DirectStorage()) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(10, 10)})
        checkpointer.wait()
    assert placed


def test_a_staged_copy_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    state = large()
    staged = STAGER.stage(state)
    save(staged, tmp_path, WRITER)
    for name, x in state.items():
        assert torch.equal(staged[name], x), name


def test_views_of_one_staged_tensor_leave_each_others_padding_alone(tmp_path: Path) -> None:
    x = STAGER.stage({"x": torch.arange(600.0)})["x"]
    views = {"a": x, "b": x.view(20, 30), "c": x, "d": x.view(torch.int32), "e": x.view(20, 30).t()}
    save(views, tmp_path / "torch", FileSystemWriter(tmp_path / "torch"))
    with counted("place") as placed:
        save(views, tmp_path / "direct", WRITER)
    assert len(placed) == 1
    assert blobs(tmp_path / "direct") == blobs(tmp_path / "torch")


def test_too_little_padding_is_left_alone(tmp_path: Path) -> None:
    stager = stagereg.build("stager", "blocking")
    stager.reserve_padding(64, 64)
    state = large()
    staged = stager.stage(state)
    with counted("place") as placed:
        save(staged, tmp_path, WRITER)
    assert placed == []
    for name, x in state.items():
        assert torch.equal(staged[name], x), name


def test_no_tensor_is_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **_: pytest.fail("cloned"))
    state = large()
    with counted("write_tensor") as copied:
        save({"turned": state["turned"], "column": state["column"]}, tmp_path, WRITER)
    assert max(copied) <= 1 << 20
    assert sum(copied) == state["turned"].nbytes + state["column"].nbytes


@pytest.mark.gpu
def test_tensors_on_an_accelerator_come_over_in_pieces_of_a_buffer(tmp_path: Path) -> None:
    state = {name: x.to("cuda") for name, x in large().items()}
    torch.cuda.synchronize()
    with counted("place") as placed:
        save(state, tmp_path, WRITER)
    assert placed == []
    template = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in state.items()}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    for name, x in state.items():
        assert torch.equal(template[name], x.cpu()), name


def test_a_refusal_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stagereg.checkpoint.storage.aligned._O_DIRECT", 0)
    writer = DirectStorage()
    for step in range(2):
        save({"x": torch.ones(5)}, tmp_path / str(step), writer)
    (seen,) = [record.message for record in caplog.records if "O_DIRECT" in record.message]
    assert str(tmp_path / "0") in seen


@pytest.mark.parametrize("x", [torch.ones(1 << 22), torch.ones(1 << 20, dtype=torch.complex64).conj()])
def test_a_full_disk_is_the_operating_systems_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save({"x": x}, tmp_path, WRITER)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC


def test_a_failed_write_spoils_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = DirectStorage(buffer_mb=1)
    save({"x": torch.ones(5)}, tmp_path / "zero", writer)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: 1 // 0)
        with pytest.raises(dcp.api.CheckpointException):
            save({"x": torch.ones(1 << 20)}, tmp_path / "one", writer)
    assert writer.marks == {}
    save({"x": torch.ones(1 << 20)}, tmp_path / "two", writer)
    template = {"x": torch.zeros(1 << 20)}
    dcp.load(template, checkpoint_id=tmp_path / "two", no_dist=True)
    assert template["x"].sum() == 1 << 20


@pytest.mark.parametrize("buffer_mb", [0, True, 1.5])
def test_buffers_of_no_use_are_refused(buffer_mb: Any) -> None:
    with pytest.raises(ConfigError, match="buffer_mb"):
        DirectStorage(buffer_mb=buffer_mb)


def test_torch_is_asked_once_for_each_kind_of_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Size] = []
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda x, *more: (asked.append(x.shape), real(x, *more)))
    for step in range(2):
        save({name: torch.full((17, 19, 23), step) for name in "ab"}, tmp_path / str(step), WRITER)
    assert asked == [torch.Size((17, 19, 23))]
