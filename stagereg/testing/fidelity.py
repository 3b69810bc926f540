"""Fidelity, as tests to inherit: the copy of a state dict is the source in everything but its memory."""

from __future__ import annotations

from collections import OrderedDict

import torch

from stagereg.stagers.async_stager import StateDict
from stagereg.testing.stager_trial import StagerTrial, promise, promise_on_a_rank
from stagereg.testing.state_samples import DTYPES, Pair, odd_values

__all__ = ["Fidelity"]


class Fidelity(StagerTrial):
    """Structure, dtypes, strides, shared memory, placements and attributes are kept; a view costs its own bytes."""

    @promise
    def test_structure_is_kept(self) -> None:
        """Containers keep their types and the order of their items, empty ones too."""
        ordered = OrderedDict([("w", self.ones(2)), ("b", self.ones(1))])
        state: StateDict = {
            "z first": [self.ones(2), (self.ones(1), [self.ones(1), "x"], ())],
            "pair": Pair(self.ones(2), {"k": 1}),
            "ordered": ordered,
            "leaves": {"int": 1, "float": 0.5, "none": None, "bool": True, "text": "x", "bytes": b"y"},
            "empty": {"dict": {}, "list": []},
            "numbers": {1: self.ones(1), 0: "zero"},
        }
        noted = self.noted(state)
        self.agree(self.settled(self.opened(), state), noted, "of nested containers")

    @promise
    def test_every_dtype_keeps_its_bits(self) -> None:
        """Each dtype is staged as it is, bit by bit, with NaNs and signed zeros."""
        state = {str(dtype): odd_values(dtype).to(self.device) for dtype in DTYPES}
        noted = self.noted(state)
        self.agree(self.settled(self.opened(), state), noted, "of a tensor of each dtype")

    @promise
    def test_strides_are_kept(self) -> None:
        """Transposed, permuted and channels-last tensors keep their strides; empty and 0-dim ones their shape."""
        state = {
            "transposed": self.counted(24).view(4, 6).t(),
            "permuted": self.counted(24).view(2, 3, 4).permute(2, 0, 1),
            "channels_last": self.counted(120).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "scalar": self.counted(1).view(()),
            "empty": self.counted(0),
            "no rows": self.counted(0).view(0, 5),
        }
        noted = self.noted(state)
        self.agree(self.settled(self.opened(), state), noted, "of tensors with strides of their own")

    @promise
    def test_tied_tensors_stay_tied(self) -> None:
        """Tensors that share memory, such as tied weights, are staged once and share it in the copy."""
        w = self.counted(32)
        state = {"embed": w, "head": w.view(w.shape), "again": w, "tail": w[8:], "other": self.ones(8)}
        noted = self.noted(state)
        copied = self.settled(self.opened(), state)
        self.agree(copied, noted, "of tied tensors")
        for name, offset in (("head", 0), ("again", 0), ("tail", 8)):
            self.tied(copied, "embed", name, offset)

    @promise
    def test_a_view_costs_its_own_bytes(self) -> None:
        """The copy of a view takes the view's bytes, not those of its storage; an expanded tensor is not inflated."""
        whole = self.counted(2**21)
        state = {"slice": whole[10:20], "row": whole.view(-1, 1024)[3], "expanded": whole[5].expand(2**18)}
        for name, x in state.items():
            copied = self.settled(self.opened(), {name: x})[name]
            taken, limit = copied.untyped_storage().nbytes(), 2**16
            shape_text = f"{name} of {x.untyped_storage().nbytes()} bytes"
            if taken > limit:
                self.broken(f"the copy of a view ({shape_text}) takes {taken} bytes, more than {limit}")
            wanted = self.expected(x)
            if copied.dtype != wanted.dtype or not torch.equal(copied, wanted.cpu()):
                self.broken(f"the copy of a view ({shape_text}) has other values")

    @promise
    def test_tensors_keep_what_makes_them_more(self) -> None:
        """Parameters stay parameters; requires_grad and attributes of tensors are kept, and copied."""
        p = torch.nn.Parameter(self.counted(3))
        p.tags = ["decay"]  # type: ignore[attr-defined]
        state = {
            "p": p,
            "frozen": torch.nn.Parameter(self.counted(3), requires_grad=False),
            "leaf": self.counted(3).requires_grad_(),
        }
        noted = self.noted(state)
        copied = self.settled(self.opened(), state)
        self.agree(copied, noted, "of parameters")
        p.tags.append("later")  # type: ignore[attr-defined]
        tags = getattr(copied["p"], "tags", None)
        if tags != ["decay"]:
            self.broken(f"the attribute tags = ['decay'] of a parameter is {tags!r} in the copy")

    @promise_on_a_rank
    def test_dtensors_keep_their_placement(self) -> None:
        """A DTensor is staged as one, with its mesh and placements, and costs a rank its own shard."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh(torch.device(self.device).type, (1,))
        stager = self.opened()
        for placement in (Shard(0), Shard(1), Replicate()):
            source = distribute_tensor(self.counted(35).view(5, 7), mesh, [placement])
            local = source.to_local()
            noted = self.noted({"x": local})
            copied = self.settled(stager, {"x": source})["x"]
            with torch.no_grad():
                local.fill_(-1)
            if type(copied) is not DTensor:
                self.broken(f"the copy of a DTensor is a {type(copied).__name__}")
            if (copied.placements, copied.device_mesh) != (source.placements, source.device_mesh):
                self.broken(f"the copy of a DTensor placed {source.placements} is placed {copied.placements}")
            self.agree({"x": copied.to_local()}, noted, f"of a DTensor placed {source.placements}")

    @promise_on_a_rank
    def test_sharded_tensors_keep_their_shards(self) -> None:
        """A ShardedTensor is staged as one, with its shards and their offsets."""
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        spec = ChunkShardingSpec(dim=0, placements=[f"rank:0/{self.device}"])
        source = sharded_tensor.rand(spec, 5, 3)
        (shard,) = source.local_shards()
        noted = self.noted({"x": shard.tensor})
        copied = self.settled(self.opened(), {"x": source})["x"]
        shard.tensor.fill_(-1)
        if type(copied) is not type(source):
            self.broken(f"the copy of a ShardedTensor is a {type(copied).__name__}")
        (part,) = copied.local_shards()
        if (part.metadata.shard_offsets, part.metadata.shard_sizes) != ([0, 0], [5, 3]):
            self.broken(f"the copy of a ShardedTensor has other shards: {part.metadata}")
        self.agree({"x": part.tensor}, noted, "of a ShardedTensor")
