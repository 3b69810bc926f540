"""Tests of the content of a stager's copies: a copy must equal the source, but in different memory."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.testing.stager_trial import StagerTrial, on_a_rank

_DTYPES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32
float64 complex64 complex128"""
"""The dtypes that a stager must support."""

Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    """An object that contains tensors but is not a list, tuple or dict."""

    tensor: Tensor
    more: dict[str, Tensor]


class StagerFidelity(StagerTrial):
    """The tests of :class:`~stagereg.testing.StagerContract` that compare a copy with its source."""

    def test_structure_is_kept(self) -> None:
        """Containers in the copy have the same types and the same order of items; empty containers are included."""
        state: StateDict = {
            "z first": [self.ones(2), (self.ones(1), [self.ones(1), "x"], ())],
            "pair": Pair(self.ones(2), {"k": 1}),
            "ordered": OrderedDict([("w", self.ones(2)), ("b", self.ones(1))]),
            "leaves": {"int": 1, "float": 0.5, "none": None, "bool": True, "text": "x", "bytes": b"y"},
            "empty": {"dict": {}, "list": []},
            "numbers": {1: self.ones(1), 0: "zero"},
        }
        self.faithful(self.opened(), state)

    def test_dtypes_and_strides_are_kept(self) -> None:
        """Tensors of each dtype are copied bit for bit, including NaNs and signed zeros, and shapes and strides."""
        self.faithful(self.opened(), {name: _odd_values(name).to(self.device) for name in _DTYPES.split()})
        state = {
            "transposed": self.counted(24).view(4, 6).t(),
            "permuted": self.counted(24).view(2, 3, 4).permute(2, 0, 1),
            "channels_last": self.counted(120).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "scalar": self.counted(1).view(()),
            "empty": self.counted(0),
            "no rows": self.counted(0).view(0, 5),
        }
        self.faithful(self.opened(), state)

    def test_tied_tensors_stay_tied(self) -> None:
        """Tensors that share memory, such as tied weights, also share memory in the copy, even if ties change later."""
        w = self.counted(32)
        state = {"embed": w, "head": w.view(w.shape), "again": w, "tail": w[8:], "other": self.ones(8)}
        copied = self.faithful(self.opened(), state)
        for name, offset in (("head", 0), ("again", 0), ("tail", 8)):
            if copied[name].data_ptr() != copied["embed"].data_ptr() + offset * copied[name].element_size():
                self.broken(f"'embed' and {name!r} share memory in the source, but not in the copy")
        stager, x, y = self.opened(), self.counted(8), self.ones(8)
        for other in (x, y, x):
            copied = self.faithful(stager, {"a": x, "b": other.view(other.shape)}, "after a tie changed")
            if (copied["a"].data_ptr() == copied["b"].data_ptr()) != (other is x):
                self.broken("two tensors began or ceased to share memory, but their copies did not")

    def test_a_view_costs_its_own_bytes(self) -> None:
        """The copy of a view needs memory only for the view's elements, and an expanded tensor stays expanded."""
        whole, limit = self.counted(2**23), 2**16
        rows = whole.view(-1, 1024)
        for x in (whole[10:20], rows[3], rows[:, 3], whole[5].expand(2**18)):
            copied = self.settled(self.opened(), {"view": x})["view"]
            taken = copied.untyped_storage().nbytes()
            if taken > limit:
                self.broken(f"the copy of a view of {tuple(x.shape)} takes {taken} bytes, more than {limit}")
            # Compare clones, because the strides of the copy may differ.
            self.agree({"view": copied.clone()}, {"view": x.clone()}, f"in a copy of a view of {tuple(x.shape)}")

        held: list[Any] = []
        last = {"view": whole[-10:]}
        what = f"a copy of the last 10 elements of a tensor of {whole.nbytes >> 20} MiB"
        self.grows_at_most(whole.nbytes // 2, lambda: held.append(self.settled(self.opened(), last)), what)

    def test_lazy_flips_are_carried_out(self) -> None:
        """The copy of a lazily conjugated or negated view contains the resolved values."""
        c = torch.complex(self.counted(6), self.ones(6))
        state = {"conjugate": c.conj(), "negative": c.conj().imag, "plain": c}
        noted = {name: x.resolve_conj().resolve_neg().contiguous().clone() for name, x in state.items()}
        copied = self.settled(self.opened(), state)
        c.fill_(-1)
        for name, x in copied.items():
            if x.is_conj() or x.is_neg():
                self.broken(f"the copy of {name!r} is lazily conjugated or negated, which other processes do not see")
        self.agree({name: x.contiguous() for name, x in copied.items()}, noted, "in copies of lazy views")

    def test_tensors_inside_objects_are_staged(self) -> None:
        """Tensors in dataclasses, deques and other objects are copied, and share memory as in the source."""
        w = self.counted(16)
        state: StateDict = {"w": w, "box": Box(w[4:], {"w": w}), "deque": deque([w])}
        noted = self.noted({"w": w, "tail": w[4:]})
        copied = self.settled(self.opened(), state)
        w.fill_(-1)
        box, queue = copied["box"], copied["deque"]
        if (type(box), type(queue)) != (Box, deque):
            self.broken(f"copies of a dataclass and a deque are a {type(box).__name__} and a {type(queue).__name__}")
        self.agree({"w": copied["w"], "tail": box.tensor}, noted, "in the copy of a dataclass")
        at, size = copied["w"].data_ptr(), copied["w"].element_size()
        if (box.tensor.data_ptr(), box.more["w"].data_ptr(), queue[0].data_ptr()) != (at + 4 * size, at, at):
            self.broken("a tensor in an object shares memory with another tensor in the source, but not in the copy")

    def test_tensors_keep_what_makes_them_more(self) -> None:
        """The copy of a parameter is a parameter; requires_grad and attributes of tensors are copied."""
        p: Any = torch.nn.Parameter(self.counted(3))
        p.tags = ["decay"]
        frozen = torch.nn.Parameter(self.counted(3), requires_grad=False)
        copied = self.faithful(self.opened(), {"p": p, "frozen": frozen, "leaf": self.counted(3).requires_grad_()})
        p.tags.append("later")
        if (tags := vars(copied["p"]).get("tags")) != ["decay"]:
            self.broken(f"the attribute tags = ['decay'] of a parameter is {tags!r} in the copy")

    @on_a_rank
    def test_distributed_tensors_keep_their_parts(self) -> None:
        """The copy of a DTensor or ShardedTensor has the same type and placement, and contains only the local shard."""
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh, stager = init_device_mesh(torch.device(self.device).type, (1,)), self.opened()
        for placement in (Shard(0), Shard(1), Replicate()):
            source = distribute_tensor(self.counted(35).view(5, 7), mesh, [placement])
            copied = self._of_parts(stager, source, lambda x: x.to_local())
            if (copied.placements, copied.device_mesh) != (source.placements, source.device_mesh):
                self.broken(f"the copy of a DTensor placed {source.placements} is placed {copied.placements}")
        shards = sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=[f"rank:0/{self.device}"]), 5, 3)
        copied = self._of_parts(self.opened(), shards, lambda x: x.local_shards()[0].tensor)
        # Do not compare placements, because they differ if the source is on an accelerator.
        have, wanted = ([shard.metadata for shard in x.local_shards()] for x in (copied, shards))
        if [(m.shard_offsets, m.shard_sizes) for m in have] != [(m.shard_offsets, m.shard_sizes) for m in wanted]:
            self.broken(f"the copy of a ShardedTensor has other shards: {have}")

    def _of_parts(self, stager: AsyncStager, source: Any, part: Callable[[Any], Tensor]) -> Any:
        """Stage a distributed tensor, overwrite this rank's shard, and return the copy after checking its shard."""
        local = part(source).detach()
        noted = self.noted({"x": local})
        copied = self.settled(stager, {"x": source})["x"]
        local.fill_(-1)
        if type(copied) is not type(source):
            self.broken(f"the copy of a {type(source).__name__} is a {type(copied).__name__}")
        self.agree({"x": part(copied)}, noted, f"in the copy of a {type(source).__name__}")
        return copied


def _odd_values(name: str) -> Tensor:
    """Return values of a dtype. Floats include both zeros, and NaN if the dtype has more than eight bits."""
    dtype: torch.dtype = getattr(torch, name)
    if dtype.is_floating_point or dtype.is_complex:
        odd = [0.0, -0.0, 1.5, -3.0, float("nan"), 0.1, 100.0, -7.0]
        values = torch.tensor(odd, dtype=torch.float32, device="cpu")
        return values.to(dtype) if dtype.itemsize > 1 else values.nan_to_num().to(dtype)
    count = 2 if dtype is torch.bool else 8 * dtype.itemsize
    return torch.arange(count, dtype=torch.uint8, device="cpu").view(dtype)
