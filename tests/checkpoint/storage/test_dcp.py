"""``dcp`` writes what torch's writer does, for any tensors in any memory, and returns where their bytes are."""

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

import stagereg
from stagereg.checkpoint.format.index import TensorResult
from stagereg.checkpoint.storage.aligned import AlignedFile
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.envelope import _asked
from stagereg.checkpoint.store.local_files import mark_file
from stagereg.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUMBERS = "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 complex32 complex64 complex128 bool"
INTEGERS = "uint8 uint16 uint32 uint64 int8 int16 int32 int64"
DTYPES = [getattr(torch, name) for name in f"{NUMBERS} {INTEGERS}".split()]
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


def entries(path: Path) -> dict[str, Any]:
    """What ``torch.load`` makes of each entry, by name."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    found = {}
    for index, info in metadata.storage_data.items():
        data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found[index.fqn] = form(torch.load(io.BytesIO(data), weights_only=True))
    return found


def form(value: Any) -> Any:
    """Something to compare with: of a tensor its kind and bytes, also where torch cannot compare its elements."""
    if not isinstance(value, torch.Tensor):
        return value
    x = value.detach().resolve_conj().resolve_neg().contiguous()
    if x.dtype is torch.float16:  # torch makes a signaling NaN quiet where it carries out a lazy flip
        x = torch.where(x.isnan(), torch.nan, x)
    return type(value), value.dtype, x.shape, value.requires_grad, bytes(x.clone().untyped_storage())


def save(state: dict[str, Any], path: Path, writer: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)


class Kept(DcpStorage):
    """Keeps what ``finish`` is given."""

    def finish(self, metadata: Any, results: Any) -> None:
        self.results = {result.index.fqn: result for share in results for result in share}
        super().finish(metadata, results)


WRITER = Kept(buffer_mb=1)
STAGER = stagereg.build("stager", "pinned_cached", pin=False)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(deadline=None, max_examples=100)
@given(state=states(), staged=st.booleans())
def test_every_entry_loads_as_that_of_torchs_writer(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], staged: bool
) -> None:
    root = tmp_path_factory.mktemp("entries")
    given = STAGER.stage(state) if staged else state
    save(given, root / "torch", dcp.FileSystemWriter(root / "torch"))
    save(given, root / "dcp", WRITER)
    assert entries(root / "dcp") == entries(root / "torch")
    assert {name: mark_file(root / "dcp" / name) for name in os.listdir(root / "dcp")} == WRITER.marks
    for name, result in WRITER.results.items():
        x = state[name]
        assert isinstance(result, TensorResult) == (isinstance(x, torch.Tensor) and x.numel() > 0)
        if isinstance(result, TensorResult):
            file = (root / "dcp" / result.storage_data.relative_path).read_bytes()
            content = torch.frombuffer(bytearray(file[result.content : result.content + x.nbytes]), dtype=x.dtype)
            assert form(content.as_strided(x.shape, result.stride or x.stride()))[4] == form(x)[4]


def large() -> dict[str, torch.Tensor]:
    """Some MiB with every way through: runs, buffers filled several times over, tensors with holes."""
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
def counted() -> Iterator[list[int]]:
    """The sizes of memory that is written as it lies."""
    real, sizes = AlignedFile.write_memory, []

    def count(self: AlignedFile, data: memoryview) -> None:
        sizes.append(len(data))
        real(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignedFile, "write_memory", count)
        yield sizes


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("direct", ["auto", "never"])
def test_large_tensors_load_with_plain_torch(tmp_path: Path, staged: bool, direct: str) -> None:
    state = large()
    template = {name: torch.zeros_like(x) for name, x in state.items()}
    writer = DcpStorage(direct=direct, buffer_mb=1)
    copy = STAGER.stage(state) if staged else state
    with counted() as written:
        save(copy, tmp_path, writer)
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    for name, x in state.items():
        assert torch.equal(template[name], x), name
        assert torch.equal(copy[name], x), name
    assert {name: mark_file(tmp_path / name) for name in os.listdir(tmp_path)} == writer.marks
    assert written == [x.nbytes for x in state.values()]
    ends = [
        entry.offset + entry.length for entry in dcp.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    ]
    assert max(ends) == (tmp_path / "__0_0.distcp").stat().st_size


@pytest.mark.gpu
def test_tensors_on_an_accelerator_are_written(tmp_path: Path) -> None:
    state = {name: x.to("cuda") for name, x in large().items()}
    save(state, tmp_path, WRITER)
    template = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in state.items()}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(template[name], x.cpu()) for name, x in state.items())


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_a_refusal_of_o_direct_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, direct: str
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    writer = DcpStorage(direct=direct)
    for step in range(2):
        save({"x": torch.ones(5)}, tmp_path / str(step), writer)
        assert entries(tmp_path / str(step)) == {"x": form(torch.ones(5))}
    seen = [record.message for record in caplog.records if "O_DIRECT" in record.message]
    assert [str(tmp_path / "0") in message for message in seen] == ([True] if direct == "auto" else [])


@pytest.mark.parametrize("given", [{"buffer_mb": 0}, {"buffer_mb": True}, {"buffer_mb": 1.5}, {"direct": "always"}])
def test_an_option_without_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        DcpStorage(**given)


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


def test_one_storage_of_two_checkpointers_mixes_nothing_up(tmp_path: Path) -> None:
    storage = DcpStorage()
    states = {"a": {"x": torch.ones(3)}, "b": {"y": torch.zeros(500), "z": torch.ones(7)}}
    pairs = {name: stagereg.Checkpointer(str(tmp_path / name), keep=9, storage=storage) for name in states}
    for step in (1, 2, 3):  # from the second one on, nothing has changed
        for name, checkpointer in pairs.items():
            checkpointer.save(step, states[name])
            checkpointer.wait()
    for name, checkpointer in pairs.items():
        checkpointer.close()
        for step in (1, 2, 3):
            found = {key: torch.full_like(x, 2) for key, x in states[name].items()}
            dcp.load(found, checkpoint_id=tmp_path / name / f"step-{step:08d}", no_dist=True)
            assert all(torch.equal(x, states[name][key]) for key, x in found.items())
