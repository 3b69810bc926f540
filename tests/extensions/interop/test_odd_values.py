"""Kinds of values x ways to save them with ``DcpWriter``: each is loaded back as it was, or refused with its name."""

from __future__ import annotations

import datetime
import enum
import io
import shutil
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import stagereg
from stagereg.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1


class Mark(Tensor):
    """A plain subclass."""


@dataclass
class Box:
    """Tensors that may share memory."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    """One without a ``__dict__``."""

    x: Tensor


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    n = int(np.prod(shape))
    return torch.arange(1, n + 1).to(dtype).view(shape)


def raw(dtype: torch.dtype) -> Tensor:
    """Any bits that a dtype can have."""
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    return torch.arange(7, 7 + 6 * dtype.itemsize, dtype=torch.uint8).view(dtype)


def boxed() -> Box:
    x = ramp(6)
    return Box(x, x[2:])


def spread(x: Tensor, placement: Any) -> DTensor:
    return distribute_tensor(x, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), [placement])


def sharded() -> Any:
    ranks = range(torch.distributed.get_world_size())
    whole = sharded_tensor.zeros(ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in ranks]), 4, 3)
    for shard in whole.local_shards():
        shard.tensor.copy_(ramp(2, 3) + 6 * shard.metadata.shard_offsets[0])
    return whole


C = torch.complex64
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
]

VALUES: dict[str, Callable[[], Any]] = {
    **{f"tensor {name}": lambda name=name: raw(getattr(torch, name)) for name in DTYPES},
    "0-d": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "bits of NaN": lambda: torch.tensor([0x7FC00123, -1, -(2**31)], dtype=torch.int32).view(torch.float32),
    "transposed": lambda: ramp(3, 4).t(),
    "channels last": lambda: ramp(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "column": lambda: ramp(50, 40)[:, 3],
    "view of more": lambda: ramp(5000)[7:11],
    "expanded": lambda: ramp(3, 1).expand(3, 5),
    "windows": lambda: ramp(8).as_strided((5, 4), (1, 1)),
    "tied": lambda: [x := ramp(6), x[1:], x.view(2, 3)],
    "parameter": lambda: torch.nn.Parameter(ramp(3)),
    "leaf": lambda: ramp(3).requires_grad_(),
    "result": lambda: ramp(3).requires_grad_() * 2,
    "subclass": lambda: ramp(3).as_subclass(Mark),
    "conjugate": lambda: torch.complex(ramp(4), ramp(4)).conj(),
    "conjugate beside plain": lambda: [x := torch.complex(ramp(4), ramp(4)), x.conj()],
    "conjugate of a slice": lambda: torch.complex(ramp(9), ramp(9))[2:7:2].conj(),
    "conjugate, expanded": lambda: torch.tensor([[1 + 2j]], dtype=C).expand(2, 3).conj(),
    "conjugate, half": lambda: torch.complex(ramp(4), ramp(4)).to(torch.complex32).conj(),
    "negative": lambda: torch.complex(ramp(4), ramp(4)).conj().imag,
    "negative, double": lambda: torch.complex(ramp(4), ramp(4)).to(torch.complex128).conj().imag,
    "DTensor S(0)": lambda: spread(ramp(4, 3), Shard(0)),
    "DTensor S(1)": lambda: spread(ramp(3, 4), Shard(1)),
    "DTensor S(0), uneven": lambda: spread(ramp(3, 2), Shard(0)),
    "DTensor R": lambda: spread(ramp(3), Replicate()),
    "DTensor, conjugate": lambda: spread(torch.complex(ramp(4), ramp(4)), Shard(0)).conj(),
    "ShardedTensor": sharded,
    "list": lambda: [ramp(2), 1, "x", [ramp(1)]],
    "tuple": lambda: (ramp(2), (1, ramp(3))),
    "namedtuple": lambda: Pair(ramp(2), {"k": ramp(1)}),
    "OrderedDict": lambda: OrderedDict(b=ramp(2), a=1),
    "defaultdict": lambda: defaultdict(list, a=[ramp(2)]),
    "Counter": lambda: Counter("abca"),
    "empty containers": lambda: {"dict": {}, "list": [], "tuple": ()},
    "set": lambda: {1, "x"},
    "deque": lambda: deque([ramp(2), 1], maxlen=3),
    "dataclass": boxed,
    "dataclass, slots": lambda: Slotted(ramp(3)),
    "dataclass of a conjugate": lambda: Slotted(torch.complex(ramp(4), ramp(4)).conj()),
    "dataclass of a sparse one": lambda: Slotted(torch.eye(3).to_sparse()),
    "object": lambda: SimpleNamespace(x=ramp(3), more=[ramp(1)]),
    "module": lambda: torch.nn.Linear(2, 3),
    "int": lambda: 2**70,
    "float": lambda: 0.1,
    "nan": lambda: float("nan"),
    "bool": lambda: True,
    "None": lambda: None,
    "text": lambda: "ü",
    "bytes": lambda: b"x\0",
    "complex": lambda: 1 + 2j,
    "dtype, device, size": lambda: [torch.float16, torch.device("cpu"), torch.Size([2])],
    "range": lambda: range(3),
    "enum": lambda: Colour.RED,
    "path, time": lambda: [PurePosixPath("a/b"), datetime.datetime(2020, 1, 2), datetime.timedelta(3)],
    "np.float32": lambda: np.float32(0.1),
    "np.float64": lambda: np.float64(0.1),
    "np.int8": lambda: np.int8(-3),
    "np.ndarray": lambda: np.arange(6).reshape(2, 3),
    "np.ndarray of objects": lambda: np.array([None, "x"], dtype=object),
    "BytesIO": lambda: io.BytesIO(b"abc"),
    "generator": lambda: torch.Generator().manual_seed(5),
    "quantized": lambda: torch.quantize_per_tensor(ramp(4), 0.1, 3, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        ramp(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
    ),
    "sparse COO": lambda: torch.eye(3).to_sparse(),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "sparse BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([ramp(2, 3), ramp(1, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([ramp(2, 3), ramp(1, 3)], layout=torch.jagged),
    "mkldnn": lambda: ramp(4, 4).to_mkldnn(),
    "meta": lambda: torch.empty(3, device="meta"),
    "dataclass of a meta one": lambda: Slotted(torch.empty(3, device="meta")),
}
REFUSED = {
    *("quantized", "quantized by channel", "sparse COO", "nested", "jagged", "mkldnn"),
    *("subclass", "meta", "dataclass of a meta one"),
}
STAGERS = (None, "blocking", "overlapped", "pinned_cached")
WAYS = [("sync", None), *((kind, stager) for kind in ("thread", "process") for stager in STAGERS)]


def form(x: Any) -> Any:
    """What is to be the same of a value: types, and the bits that a tensor stands for."""
    if isinstance(x, DTensor):
        return "DTensor", x.placements, form(x.to_local())
    if isinstance(x, sharded_tensor.ShardedTensor):
        return "ShardedTensor", [(s.metadata.shard_offsets, form(s.tensor)) for s in x.local_shards()]
    if isinstance(x, Tensor):
        x = x.detach()
        if x.is_quantized:
            return str(x)
        if x.is_nested or x.layout is not torch.strided:
            return x.layout, [form(each) for each in (x.unbind() if x.is_nested else [x.to_dense()])]
        plain = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        return x.dtype, x.shape, plain.reshape(-1).view(torch.uint8).tolist() if x.numel() else []
    if isinstance(x, dict):
        return type(x), [(key, form(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple, deque)):
        return type(x), [form(each) for each in x], getattr(x, "maxlen", None)
    if isinstance(x, np.ndarray):
        return x.dtype, x.tolist()
    if isinstance(x, torch.Generator):
        return x.get_state().tolist()
    if isinstance(x, io.BytesIO):
        return x.getvalue()
    if isinstance(x, Box):
        return form([x.left, x.right]), x.right.data_ptr() - x.left.data_ptr()
    if isinstance(x, torch.nn.Module):
        return form(dict(x.state_dict()))
    if isinstance(x, (Slotted, SimpleNamespace)):
        return type(x), form({"x": x.x, "more": getattr(x, "more", None)})
    return type(x), str(sorted(map(repr, x)) if isinstance(x, (set, frozenset)) else x)  # which have no order


def blank(x: Any) -> Any:
    """Something of the same kind to load into."""
    if isinstance(x, DTensor):
        return DTensor.from_local(
            torch.zeros_like(x.to_local()), x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
        )
    if isinstance(x, sharded_tensor.ShardedTensor):
        for shard in x.local_shards():
            shard.tensor.zero_()
        return x
    if isinstance(x, Tensor):
        if x.is_quantized:
            return torch.quantize_per_tensor(torch.zeros(x.shape), 0.5, 1, x.dtype)
        if x.layout is not torch.strided or x.is_nested or x.device.type == "meta":
            return x.detach().clone().mul_(0) if x.device.type != "meta" and not x.is_mkldnn else x
        return torch.zeros(x.shape, dtype=x.dtype) if x.dtype.itemsize else x
    if isinstance(x, dict):
        return type(x)({key: blank(value) for key, value in x.items()}) if type(x) is not defaultdict else x.copy()
    if isinstance(x, Pair):
        return Pair(*map(blank, x))
    return type(x)(map(blank, x)) if type(x) in (list, tuple) else x


def try_way(rank: int, world_size: int, root: str, kind: str, stager: str | None) -> dict[str, str]:
    """Save and load each value; say of each whether it came back."""
    built = stagereg.build("stager", stager) if stager else None
    process = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD
    outcomes = {}
    for i, (name, make) in enumerate(VALUES.items()):
        path, value = f"{root}/{i}", make()
        expected = "a tensor without data" if "meta" in name else form(value)
        try:
            writer = stagereg.DcpWriter(path)
            if kind == "sync":
                dcp.save({"x": value}, storage_writer=writer)
            else:
                saving = dcp.async_save(
                    {"x": value}, storage_writer=writer, async_stager=built, async_checkpointer_type=process
                )
                getattr(saving, "upload_completion", saving).result(timeout=60)
            found = {"x": blank(make())}
            dcp.load(found, storage_reader=stagereg.DcpReader(path))
            same = form(found["x"]) == expected
            outcomes[name] = "right" if same else f"WRONG: {form(found['x'])} in place of {expected}"
        except BaseException as error:
            outcomes[name] = f"refused: {type(error).__name__}: {str(error)[-300:]}"
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    return outcomes


@pytest.mark.parametrize(
    ("kind", "stager"),
    [
        pytest.param(
            *way,
            marks=[pytest.mark.slow] * (way != ("thread", None)),
        )
        for way in WAYS
    ],
)
def test_no_value_comes_back_as_something_else(tmp_path: Path, kind: str, stager: str | None) -> None:
    for outcomes in run_ranks(try_way, nproc=2, args=(str(tmp_path / "a"), kind, stager)):
        assert [f"{name}: {seen}" for name, seen in outcomes.items() if seen.startswith("WRONG")] == []
        refused = {name: seen for name, seen in outcomes.items() if seen != "right"}
        assert refused.keys() <= REFUSED, refused
