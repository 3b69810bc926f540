"""``.metadata`` of plain torch is read as torch writes it; what others put into it changes nothing in the process."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

import stagereg.extensions.interop.torch_metadata as reader
from stagereg.errors import CheckpointError

MANY = b"(" + b"K\1" * 50_000 + b"tq\1"  # a tuple, in the memo
KIND = f"c{torch_metadata.__name__}\n".encode()


def seen() -> dict[str, Any]:
    """What a pickle could change of the types that it names."""
    of = {name: dict(vars(kind)) for name, kind in vars(torch_metadata).items() if isinstance(kind, type)}
    members = {each.name: dict(vars(each)) for each in torch_metadata._MEM_FORMAT_ENCODING}
    made = {name: vars(each) if hasattr(each, "__dict__") else None for name, each in reader._MADE.items()}
    return {"types": of, "members": members, "made": repr(made), "defaults": [
        getattr(each, "__defaults__", None) for each in reader._MADE.values()
    ]}  # fmt: skip


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read_as_pickle_reads_it(tmp_path: Path, protocol: int) -> None:
    chunk = torch_metadata.ChunkStorageMetadata(torch.Size((0, 2)), torch.Size((1 << 40, 3)))
    properties = torch_metadata.TensorProperties(dtype=torch.bfloat16, requires_grad=True)
    name, index = "model.w", torch_metadata.MetadataIndex("model.w", chunk.offsets, 0)
    metadata = torch_metadata.Metadata(
        {
            name: torch_metadata.TensorStorageMetadata(properties, chunk.sizes, [chunk]),
            "x" * 300: torch_metadata.BytesStorageMetadata(),
        },
        {name: ("model", 70_000, "w")},
        {index: _StorageInfo("__0_0.distcp", 1 << 40, 7)},
        torch_metadata.StorageMeta(checkpoint_id=PosixPath("/x/y"), save_id="a", modules=["m"]),
    )
    found = reader.loads(pickle.dumps(metadata, protocol))
    assert found == metadata
    assert found.storage_data[index] == metadata.storage_data[index]


FORGED = {
    "a place far out in the memo": b"\x80\x02}r" + struct.pack("<I", 1 << 24) + b".",
    "the same in text": b"}p16777216\n.",
    "bytes that are not there": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".",
    "a frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40),
    "no end": b"\x80\x04}",
    "nothing": b"",
    "deep tuples": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "deep tuples as a key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "tuples in each other": b"\x80\x02})q\0" + b"h\0\x86q\0" * 60 + b"Ns.",
    "indexes in each other": b"\x80\x02Nq\0"
    + (KIND + b"MetadataIndex\n)\x81}(X\3\0\0\0fqnh\0X\6\0\0\0offseth\0ubq\0") * 60
    + b"}h\0Ns.",
    "a code of a lookup in lists in each other": b"\x80\x02]q\0"
    + b"](h\0h\0eq\0" * 60
    + KIND
    + b"_MEM_FORMAT_ENCODING\nh\0\x85R.",
    "one size a thousand times": b"\x80\x02](" + MANY + b"ctorch\nSize\nq\2" + b"h\2h\1\x85R" * 1000 + b"e.",
    "one large tuple in many": b"\x80\x02](" + MANY + b"h\1\x85" * 10_000 + b"e.",
    "one state of many objects": b"\x80\x02](}q\1("
    + b"".join(b"M" + struct.pack("<H", i) + b"N" for i in range(50_000))
    + b"u"
    + KIND
    + b"ChunkStorageMetadata\nq\2"
    + b"h\2)\x81h\1b" * 1000
    + b"e.",
    "a state of a class": KIND + b"Metadata\nN}X\1\0\0\0aK\1s\x86b.",
    "a state of a member": KIND + b"_MEM_FORMAT_ENCODING\nK\0\x85R}X\7\0\0\0_value_K\7sb.",
    "a state of a function": b"ctorch.serialization\n_get_layout\nN}X\x0c\0\0\0__defaults__K\1\x85s\x86b.",
    "a state of a dtype": b"ctorch\nfloat32\n}X\1\0\0\0aK\1sb.",
    "an object with arguments by name": b"\x80\x04" + KIND + b"Metadata\n)}\x92.",
    "an object of the first protocol": b"(i" + KIND[1:] + b"Metadata\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent object": b"\x80\x02NQ.",
    "a call of no type": b"\x80\x02})R.",
    "a memo that is not there": b"\x80\x02h\7.",
    "an end in a number": b"\x80\x02M\1",
    "another type": pickle.dumps(7),
    "empty metadata": pickle.dumps(torch_metadata.Metadata({})),
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_other_pickles_are_refused_and_have_changed_nothing(content: bytes) -> None:
    before = seen()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"^the file \.metadata is not valid torch metadata") as refused:
            reader.loads(content)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(content) + 100_000
    finally:
        tracemalloc.stop()
    assert seen() == before
    assert len(str(refused.value)) < 500


def test_a_listing_refuses_other_pickles_without_torch(tmp_path: Path) -> None:
    """Importing torch takes a quarter of a gigabyte, whatever the file has."""
    (tmp_path / ".metadata").write_bytes(FORGED["a place far out in the memo"])
    code = (
        "import sys; from stagereg.checkpoint.store.open_store import open_parent_store\n"
        "found = open_parent_store(sys.argv[1]).look(sys.argv[1])\n"
        "print('corrupt' in str(found), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
