"""Archives of ``torch.save`` are read as torch writes them, by one reader; none takes memory that it does not have."""

from __future__ import annotations

import collections
import io
import mmap
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.format.pickled as pickled
from stagereg.checkpoint.format.archives import Archive, records
from stagereg.checkpoint.storage.envelope import MAP_NORESERVE
from stagereg.errors import CheckpointError

from ...support.examples import examples

_LOCAL, _ENTRY = 30, 46  # bytes of a header before the name


def saved(value: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **how)
    return stream.getvalue()


def rewritten(change: Callable[[bytes], bytes]) -> bytes:
    """An archive as torch writes it, with another pickle in it."""
    stream = io.BytesIO()
    writer: Any = torch._C.PyTorchFileWriter(stream)
    for name, content in records(saved((torch.ones(16, dtype=torch.uint8), 1))).items():
        if name not in ("version", ".data/serialization_id"):  # which the writer adds
            data = change(bytes(content)) if name == "data.pkl" else bytes(content)
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return stream.getvalue()


# -- what torch writes


def tensors() -> st.SearchStrategy[torch.Tensor]:
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16])
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(lambda dtype, shape: torch.ones(shape, dtype=dtype), dtypes, shapes)


PLAIN = st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text(max_size=5)
PLAIN |= st.binary(min_size=1, max_size=5) | st.binary(max_size=5).map(bytearray) | st.complex_numbers(allow_nan=False)
LEAVES = PLAIN | tensors() | tensors().map(lambda x: x.t() if x.ndim == 2 else x[None].expand(2, *x.shape))
LEAVES |= st.sampled_from([torch.float32, torch.strided, torch.Size((2, 0)), torch.device("cpu"), torch.uint8])
LEAVES |= st.builds(lambda x: torch.nn.Parameter(x.bfloat16()), tensors().filter(lambda x: not x.is_complex()))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers(0, 300) | st.tuples(st.integers(0, 9), st.text(max_size=2))
    dicts = st.dictionaries(keys, inner, max_size=3)
    several = st.lists(inner, max_size=3)
    return several | several.map(tuple) | dicts | dicts.map(collections.OrderedDict) | st.sets(keys, max_size=3)


@settings(max_examples=examples(150), deadline=None)
@given(st.recursive(LEAVES, containers, max_leaves=8))
def test_what_torch_saves_is_read_as_torch_reads_it(value: Any) -> None:
    data = saved(value)
    assert repr(pickled.load("x", data)) == repr(torch.load(io.BytesIO(data), weights_only=True))


def test_values_with_attributes_and_counts_are_read() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.mark = {"a": (1,)}  # type: ignore[attr-defined]
    ordered = collections.OrderedDict(a=weight)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]
    many = [torch.full((n,), n) for n in range(300)]
    found = pickled.load("x", saved((ordered, collections.Counter("aab"), many, weight, weight)))
    assert (found[0]["a"].mark, found[0]._metadata, found[1]["a"]) == ({"a": (1,)}, {"version": 1}, 2)
    assert [int(x.sum()) for x in found[2]] == [n * n for n in range(300)]
    assert found[3] is found[4] is found[0]["a"]


def test_tensors_without_dimensions_or_whole_bytes_are_read() -> None:
    numbers = torch.arange(12.0).reshape(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3)
    with warnings.catch_warnings(action="ignore"):
        halves = torch.quantize_per_channel(numbers, scales, zeros, 0, torch.quint4x2)
        given = torch.empty((), device="meta"), halves
        data = saved(given)
        assert repr(pickled.load("x", data)) == repr(given)


def test_records_of_more_than_four_gib_are_found(tmp_path: Path) -> None:
    """With the numbers of eight bytes that torch writes then."""
    sizes = [(1 << 32) - 2, 1000, 5 << 30, (1 << 32) - 1, 0, 3]
    given = []
    for size in sizes:
        memory: Any = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        given.append(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,)) if size else torch.empty(0))
    with (tmp_path / "sparse.pt").open("w+b") as file, torch.serialization.skip_data():
        torch.save(given, file)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        found = records(mapped)
        assert [len(found[f"data/{number}"]) for number in range(len(sizes))] == sizes
        reader: Any = torch._C.PyTorchFileReader(Archive(found))  # type: ignore[arg-type]
        assert reader.get_record("byteorder") == b"little"
        assert reader.has_record(f"data/{len(sizes) - 1}")


def test_records_are_not_copied_on_their_way_to_torch() -> None:
    data = bytearray(saved((torch.ones(1 << 22), 1)))
    tracemalloc.start()
    try:
        found = pickled.load("x", data)
        assert tracemalloc.get_traced_memory()[1] < len(data) // 4
    finally:
        tracemalloc.stop()
    assert found[0].sum() == 1 << 22


# -- what torch does not write

GOOD = saved((torch.ones(2), 1))
BEGIN = struct.unpack_from("<Q", GOOD, len(GOOD) - 50)[0]  # of the directory
ENTRY = next(i for i in range(BEGIN, len(GOOD)) if GOOD[i + _ENTRY :].startswith(b"archive/data/0"))


def put(at: int, data: bytes) -> bytes:
    return GOOD[:at] + data + GOOD[at + len(data) :]


def deflated() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in records(saved((torch.zeros(1 << 20), 1))).items():
            bomb.writestr(f"archive/{name}", content)
    return stream.getvalue()


def two_directories() -> bytes:
    """The end has the place of the first one, and the second one is directly before it."""
    data = deflated()
    end = data.rindex(b"PK\5\6")
    size, begin = struct.unpack_from("<2L", data, end + 12)
    return data[: begin + size] + data[begin : begin + size] + data[end:]


def old_format_with_tail() -> bytes:
    tail = io.BytesIO()
    with zipfile.ZipFile(tail, "w") as archive:
        archive.writestr("x/data.pkl", b"")
    return saved((torch.zeros(16), 1), _use_new_zipfile_serialization=False) + tail.getvalue()


def renamed(name: bytes, other: bytes) -> bytes:
    assert GOOD.count(name) == 2
    return GOOD.replace(name, other)


def overlapping() -> bytes:
    """Two records have the same bytes."""
    first = next(i for i in range(BEGIN, len(GOOD)) if GOOD[i : i + 4] == b"PK\1\2")
    return put(ENTRY + 42, GOOD[first + 42 : first + 46])


FORGED = {
    "nothing": b"",
    "a short one": GOOD[:60],
    "something before": b"x" + GOOD,
    "an empty zip after": GOOD + b"PK\5\6" + bytes(18),
    "compressed": deflated(),
    "two directories": two_directories(),
    "the old format with a zip behind": old_format_with_tail(),
    "another magic number": put(0, b"PK\3\5"),
    "a method in the directory": put(ENTRY + 10, b"\x08"),
    "encrypted": put(ENTRY + 8, b"\x09"),
    "a size in the directory": put(ENTRY + 24, b"\x09"),
    "both sizes in the directory": put(ENTRY + 20, struct.pack("<2L", 9, 9)),
    "sizes beyond the end": put(ENTRY + 20, struct.pack("<2L", 1 << 30, 1 << 30)),
    "the place of another record": overlapping(),
    "a place behind the end": put(ENTRY + 42, struct.pack("<L", 1 << 30)),
    "a name with a zero": renamed(b"archive/byteorder", b"archive/\0yteorder"),
}  # fmt: skip


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_torch_is_not_given_what_it_would_not_write(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(torch, "load", lambda *args, **how: pytest.fail("torch read it"))
    with pytest.raises(CheckpointError, match=r"'x' was not read: .{9,}") as refused:
        pickled.load("x", data)
    assert "MemoryError" not in str(refused.value)


def test_names_that_torch_does_not_tell_apart_are_refused() -> None:
    stream = io.BytesIO()
    writer: Any = torch._C.PyTorchFileWriter(stream)
    for name in ("data.pkl", "DATA.PKL"):
        writer.write_record(name, b"\x80\x02N.", 4)
    writer.write_end_of_file()
    with pytest.raises(CheckpointError, match="two records with the same name"):
        pickled.load("x", stream.getvalue())


# -- pickles that claim memory


class Call:
    """Becomes a call when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, Any]:
        return self.call[0], self.call[1:]


def expanded(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of 2^40 elements in the memory of one."""
    return torch.zeros(1, dtype=dtype).expand(1 << 40)


def repeated(value: bytes, function: bytes, given: bytes = b"h\1\x85", after: bytes = b"") -> bytes:
    """An archive with a value and what a function makes of it, a thousand times."""
    calls = (b"h\2" + given + b"R" + after) * 1000
    return rewritten(lambda data: b"\x80\x02](" + value + b"q\1" + function + b"q\2" + calls + b"e.")


UTILS, BYTE = torch._utils, torch.zeros(1, dtype=torch.uint8)
QUANTIZED = (torch.per_tensor_affine, 1.0, 0), False, None
TUPLES = b"\x80\x02)" + b"\x85" * 1_000_000
CLAIMS: dict[str, Callable[[], bytes]] = {
    "bytes": lambda: saved(Call(bytearray, 1 << 40)),
    "bytes by another codec": lambda: saved(Call(__import__("_codecs").encode, "x" * 9, "utf-32")),
    "a tensor": lambda: saved(Call(torch.Tensor, 1 << 40)),
    "a tensor of a type": lambda: saved(Call(torch.FloatTensor, 1 << 40)),
    "a storage": lambda: saved(Call(torch.UntypedStorage, 1 << 40)),
    "a parameter": lambda: saved(Call(torch.nn.Parameter, Call(torch.Tensor, 1 << 40))),
    "in another call": lambda: saved(
        Call(torch._tensor._rebuild_from_type_v2, torch.Tensor, torch.Tensor, (1 << 40,), {})
    ),
    "quantized": lambda: saved(
        Call(UTILS._rebuild_qtensor, BYTE.untyped_storage(), 0, (1 << 40,), (0,), *QUANTIZED)
    ),
    "converted": lambda: saved(
        Call(UTILS._rebuild_device_tensor_from_cpu_tensor, expanded(), torch.float64, "cpu", False)
    ),
    "converted after a change": lambda: saved(
        Call(
            *(UTILS._rebuild_device_tensor_from_cpu_tensor,),
            Call(torch._tensor._rebuild_from_type_v2, UTILS._rebuild_tensor_v2, torch.Tensor,
                 (BYTE.untyped_storage(), 0, (1,), (1,), False, None), {"data": expanded()}),
            *(torch.float64, "cpu", False),
        )
    ),
    "sparse": lambda: saved(
        Call(UTILS._rebuild_sparse_tensor, torch.sparse_coo, (expanded()[None], expanded(), torch.Size((2,)), False))
    ),
    "a set of a tensor": lambda: saved(Call(set, expanded())),
    "a size of a tensor": lambda: saved(Call(torch.Size, expanded())),
    "an ordered dict of a tensor": lambda: saved(Call(collections.OrderedDict, expanded())),
    "a record that is longer": lambda: rewritten(lambda data: data.replace(b"K\x10t", b"K\xc8t")),
    "a record that is shorter": lambda: rewritten(lambda data: data.replace(b"K\x10t", b"K\x08t")),
    "a record of larger elements": lambda: rewritten(lambda data: data.replace(b"ByteStorage", b"LongStorage")),
    "no such record": lambda: rewritten(lambda data: data.replace(b"X\1\0\0\x000", b"X\1\0\0\x001")),
    "deep tuples": lambda: rewritten(lambda data: TUPLES + b"."),
    "deep tuples as a key": lambda: rewritten(lambda data: b"\x80\x02}" + TUPLES[2:] + b"Ns."),
    "tuples in each other": lambda: rewritten(lambda data: b"\x80\x02})q\0" + b"h\0\x86q\0" * 60 + b"Ns."),
    "a call of lists in each other": lambda: rewritten(
        lambda data: b"\x80\x02]q\0" + b"](h\0h\0eq\0" * 60 + b")R."
    ),
    "one text in many calls": lambda: repeated(b"X" + struct.pack("<I", 50_000) + b"x" * 50_000,
                                              b"c_codecs\nencode\n", b"h\1X\6\0\0\0latin1\x86"),
    "one tuple in many calls": lambda: repeated(b"(" + b"K\1" * 50_000 + b"t", b"ctorch\nSize\n"),
    "one list in many calls": lambda: repeated(b"](" + b"K\1" * 50_000 + b"e", b"c__builtin__\nset\n"),
    "one dict in many calls": lambda: repeated(b"}(" + b"K\1N" * 50_000 + b"u", b"ccollections\nOrderedDict\n"),
    "one state of many": lambda: repeated(
        b"}(" + b"K\1N" * 50_000 + b"u", b"ccollections\nOrderedDict\n", b")", b"h\1b"
    ),
    "a state of a class": lambda: rewritten(lambda data: b"\x80\x02ctorch\nTensor\n}X\1\0\0\0aK\1sb."),
    "a state of a tensor": lambda: rewritten(lambda data: data[:-1] + b"h\x0bh\x0bb."),
}  # fmt: skip


@pytest.mark.parametrize("make", CLAIMS.values(), ids=CLAIMS)
def test_memory_that_a_pickle_claims_is_refused_before_torch_reads_it(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], bytes]
) -> None:
    data = make()
    records(data)  # it is right as an archive
    monkeypatch.setattr(torch, "load", lambda *args, **how: pytest.fail("torch read it"))
    with pytest.raises(CheckpointError, match=r"'x' was not read: .{9,}"):
        pickled.load("x", data)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_of_another_protocol_is_refused() -> None:
    """torch does not read it either, so it is refused when it is saved."""
    with pytest.raises(CheckpointError, match="was not read"):
        pickled.load("x", rewritten(lambda data: pickle.dumps([1], 4)))
