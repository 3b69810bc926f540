"""The contract of a stager, as tests to inherit: what ``stagers.async_stager.AsyncStager`` promises, tried one by one.

The author of a stager writes one method, and pytest does the rest::

    class TestMine(stagereg.testing.StagerContract):
        def make(self):
            return MyStager(threads=2)

Stagers are called as torch's ``async_save`` calls them: a future is waited for; otherwise ``synchronize_staging`` is
called where ``should_synchronize_after_execute``. Every trial is bounded, so a stager that hangs fails. It knows no
stager of the project, and makes no claim about speed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tempfile
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from stagereg.errors import RegistryError, StageregError
from stagereg.kernel.memory import padding_around
from stagereg.spec import check
from stagereg.stagers.async_stager import (
    AsyncStager,
    ReleasesCopies,
    ReservesPadding,
    SharesMemory,
    StateDict,
    WatchesOptimizers,
)
from stagereg.testing.snapshot import difference
from stagereg.testing.stager_trial import StagerTrial, on_a_rank

__all__ = ["StagerContract"]

_DTYPES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32
float64 complex64 complex128"""
"""Those that checkpoints are made of."""

_LARGE = 36 * 2**20
"""Bytes that no malloc keeps for later: glibc maps what is above 32 MiB, and unmaps it at once."""

Pair = namedtuple("Pair", "left right")


@dataclass
class CustomValue:
    """A value of a state dict that is neither tensor nor container."""

    steps: list[int]


class StagerContract(StagerTrial):
    """Inherit from this, write ``make``, and each ``test_*`` tries one promise on your stager.

    What to override is described in :class:`~stagereg.testing.stager_trial.StagerTrial`: ``make``, and for stagers that
    are not like others ``expected``, ``timeout_s`` and ``device``.
    """

    # Fidelity: the copy is the source in everything but its memory

    def test_structure_is_kept(self) -> None:
        """Containers keep their types and the order of their items, empty ones too."""
        state: StateDict = {
            "z first": [self.ones(2), (self.ones(1), [self.ones(1), "x"], ())],
            "pair": Pair(self.ones(2), {"k": 1}),
            "ordered": OrderedDict([("w", self.ones(2)), ("b", self.ones(1))]),
            "leaves": {"int": 1, "float": 0.5, "none": None, "bool": True, "text": "x", "bytes": b"y"},
            "empty": {"dict": {}, "list": []},
            "numbers": {1: self.ones(1), 0: "zero"},
        }
        self.faithful(self.opened(), state)

    def test_every_dtype_keeps_its_bits(self) -> None:
        """Each dtype is staged as it is, bit by bit, with NaNs and signed zeros."""
        self.faithful(self.opened(), {name: _odd_values(name).to(self.device) for name in _DTYPES.split()})

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
        self.faithful(self.opened(), state)

    def test_tied_tensors_stay_tied(self) -> None:
        """Tensors that share memory, such as tied weights, are staged once and share it in the copy."""
        w = self.counted(32)
        state = {"embed": w, "head": w.view(w.shape), "again": w, "tail": w[8:], "other": self.ones(8)}
        copied = self.faithful(self.opened(), state)
        for name, offset in (("head", 0), ("again", 0), ("tail", 8)):
            self.tied(copied, "embed", name, offset)

    def test_a_view_costs_its_own_bytes(self) -> None:
        """The copy of a view takes the view's bytes, not those of its storage; an expanded tensor is not inflated."""
        whole, limit = self.counted(2**21), 2**16
        state = {"slice": whole[10:20], "row": whole.view(-1, 1024)[3], "expanded": whole[5].expand(2**18)}
        for name, x in state.items():
            copied = self.settled(self.opened(), {name: x})[name]
            taken, wanted = copied.untyped_storage().nbytes(), self.expected(x)
            what = f"the copy of a view ({name} of {x.untyped_storage().nbytes()} bytes)"
            if taken > limit:
                self.broken(f"{what} takes {taken} bytes, more than {limit}")
            if copied.dtype != wanted.dtype or not torch.equal(copied, wanted.cpu()):
                self.broken(f"{what} has other values")

    def test_tensors_keep_what_makes_them_more(self) -> None:
        """Parameters stay parameters; requires_grad and attributes of tensors are kept, and copied."""
        p: Any = torch.nn.Parameter(self.counted(3))
        p.tags = ["decay"]
        frozen = torch.nn.Parameter(self.counted(3), requires_grad=False)
        copied = self.faithful(self.opened(), {"p": p, "frozen": frozen, "leaf": self.counted(3).requires_grad_()})
        p.tags.append("later")
        if (tags := vars(copied["p"]).get("tags")) != ["decay"]:
            self.broken(f"the attribute tags = ['decay'] of a parameter is {tags!r} in the copy")

    @on_a_rank
    def test_dtensors_keep_their_placement(self) -> None:
        """A DTensor is staged as one, with its mesh and placements, and costs a rank its own shard."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh, stager = init_device_mesh(torch.device(self.device).type, (1,)), self.opened()
        for placement in (Shard(0), Shard(1), Replicate()):
            source = distribute_tensor(self.counted(35).view(5, 7), mesh, [placement])
            copied = self._of_parts(stager, source, lambda x: x.to_local())
            if (copied.placements, copied.device_mesh) != (source.placements, source.device_mesh):
                self.broken(f"the copy of a DTensor placed {source.placements} is placed {copied.placements}")

    @on_a_rank
    def test_sharded_tensors_keep_their_shards(self) -> None:
        """A ShardedTensor is staged as one, with its shards and their offsets."""
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        source = sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=[f"rank:0/{self.device}"]), 5, 3)
        copied = self._of_parts(self.opened(), source, lambda x: x.local_shards()[0].tensor)
        shards, wanted = ([shard.metadata for shard in x.local_shards()] for x in (copied, source))
        # Their placement differs where the source is on an accelerator.
        if [(m.shard_offsets, m.shard_sizes) for m in shards] != [(m.shard_offsets, m.shard_sizes) for m in wanted]:
            self.broken(f"the copy of a ShardedTensor has other shards: {shards}")

    # The shape

    def test_it_has_the_shape_of_a_stager(self) -> None:
        """It has stage, synchronize_staging, close and should_synchronize_after_execute, as torch calls them."""
        stager = self.opened()
        try:
            check("stager", type(stager).__name__, stager)
        except RegistryError as error:
            self.broken(str(error))
        if not isinstance(stager.should_synchronize_after_execute, bool):
            self.broken(f"should_synchronize_after_execute is {stager.should_synchronize_after_execute!r}, not a bool")
        if isinstance(stager, SharesMemory) and not isinstance(stager.shares_memory, bool):
            self.broken(f"shares_memory is {stager.shares_memory!r}, not a bool")

    # Isolation

    def test_later_writes_do_not_show(self) -> None:
        """Writes to the source after staging do not show in the copy, whatever the size of the tensor."""
        small, large, inner, last = self.ones(1000), self.ones(2**20), self.ones(3, 3), self.ones(5)
        state: StateDict = {"small": small, "large": large, "nested": [{"w": inner}, last]}
        with self.kept(self.opened(), state, "after in-place writes to the source"):
            for x in (small, large, inner, last):
                x.fill_(7)
        with self.kept(self.opened(), state, "after writes to the source's storage"):
            for x in (small, large, inner, last):
                x.untyped_storage().fill_(1)  # type: ignore[attr-defined]

    def test_writes_that_no_version_counter_sees_are_staged(self) -> None:
        """Writes that do not move torch's version counter (.data, numpy, collectives) are in the next copy."""
        stager, w = self.opened(), self.ones(100)
        storage: Any = w.untyped_storage()
        writes: dict[str, Callable[[], object]] = {
            "tensor.data": lambda: w.data.add_(1),
            "the storage": lambda: storage.fill_(3),
            **({"numpy": lambda: w.numpy().fill(2)} if self.device == "cpu" else {}),
        }
        self.settled(stager, {"w": w})
        for way, write in writes.items():
            write()
            self.faithful(stager, {"w": w}, f"staged after a write through {way}")

    def test_a_training_loop_is_staged_as_it_was(self) -> None:
        """The copy of a model and its optimizer is what they were, while training goes on."""
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        model.to(self.device)
        optimizer = torch.optim.AdamW(model.parameters())
        stager = self.opened()
        if isinstance(stager, WatchesOptimizers):
            stager.watch(optimizer)

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 8, device=self.device)).sum().backward()
            optimizer.step()

        for step in range(3):
            train()
            state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": step}
            with self.kept(stager, state, "after one more step of training"):
                train()

    def test_values_that_are_no_tensors_are_copied(self) -> None:
        """Lists, dicts, sets, buffers and objects in the state dict are copied, not shared with the source."""
        settings, value = SimpleNamespace(steps=[1]), CustomValue([1])
        state: StateDict = {"list": [1], "dict": {"k": 1}, "set": {1}, "bytes": bytearray(b"ab")}
        state |= {"object": settings, "dataclass": value}
        wanted = self.noted(state)
        copied = self.settled(self.opened(), state)
        state["list"].append(2)
        state["dict"]["l"] = 2
        state["set"].add(2)
        state["bytes"][0] = 0
        settings.steps.append(2)
        value.steps.append(2)
        for kind, value in wanted.items():
            if copied[kind] != value:
                self.broken(f"after a change to the source's {kind}, the copy's is {copied[kind]!r}, not {value!r}")

    def test_the_source_is_left_as_it_is(self) -> None:
        """Staging changes nothing in the source (keys, values, places), nor torch's settings and random state."""
        w = torch.nn.Parameter(self.counted(6))
        state: StateDict = {"z": w, "a": [self.ones(3), 5], "m": {"z": 1, "a": None}}
        noted, address, values = self.noted(state), w.data_ptr(), state["a"]
        stager, settings, drawn = self.opened(), _settings(), torch.random.get_rng_state()
        self.settled(stager, state)
        if (now := _settings()) != settings:
            self.broken(f"staging changed torch's settings (grad, inference, ...) from {settings} to {now}")
        if not torch.equal(torch.random.get_rng_state(), drawn):
            self.broken("staging drew from torch's random numbers: a run that saves trains on others than one without")
        if self.device == "cpu" and (problem := difference(state, noted, where="the source")):
            self.broken(f"after staging, {problem}")
        if state["z"] is not w or w.data_ptr() != address or state["a"] is not values:
            self.broken("after staging, the source's values lie elsewhere")
        if vars(w):
            self.broken(f"after staging, a tensor of the source has the attributes {sorted(vars(w))}")

    # In flight

    def test_a_copy_that_is_held_stays_as_it_is(self) -> None:
        """A copy that is still held is not overwritten by the next one."""
        stager, source = self.opened(), {"w": self.ones(1000), "b": self.ones(7)}
        held = []
        for step in range(2):
            for x in source.values():
                x.fill_(step)
            held.append((self.noted(source), self.settled(stager, source)))
        for noted, copied in held:
            self.agree(copied, noted, "with another copy made while it was held")

    def test_a_slice_keeps_its_copy(self) -> None:
        """Memory is not used again while a slice of a tensor of the copy is held, by whomever."""
        stager, source = self.opened(), {"w": self.ones(1000)}
        noted = self.noted({"slice": source["w"][100:200]})
        held = {"slice": self.settled(stager, source)["w"][100:200]}
        gc.collect(1)
        source["w"].fill_(2)
        later = self.settled(stager, source)
        self.agree(held, noted, "after the copy was dropped but for a slice, and another one made")
        del later

    def test_holding_copies_never_blocks(self) -> None:
        """However many copies their caller holds, the next stage comes back with a right one."""
        stager, source, held = self.opened(), {"w": self.ones(1000)}, []
        for step in range(4):
            source["w"].fill_(step)
            held.append(self.faithful(stager, source, f"with {step} copies held"))

    def test_two_stagers_keep_apart(self) -> None:
        """What one stager hands out is not touched by another one, nor by its close()."""
        one, other = self.opened(), self.opened()
        source = {"w": self.ones(1000)}
        with self.kept(one, source, "after another stager was used and closed"):
            source["w"].fill_(2)
            self.settled(other, source)
            other.close()

    def test_released_copies_end_and_what_is_held_of_them_stays(self) -> None:
        """If it has release(): a released copy is empty and not waited for; its tensors stay while they are held."""
        stager, source, held = self.opened(), {"x": self.ones(1000)}, []
        if not isinstance(stager, ReleasesCopies):
            return
        stager.expect_release()
        for step in range(3):
            source["x"].fill_(step)
            noted = self.noted(source)
            copied = self.settled(stager, source)
            held.append((noted, dict(copied)))
            stager.release(copied)
            if copied:
                self.broken(f"after release(), the copy still has the entries {list(copied)}")
        for noted, tensors in held:
            self.agree(tensors, noted, "after its release, with its tensors held and other copies made")

    def test_reserved_padding_belongs_to_no_other_tensor(self) -> None:
        """If it has reserve_padding(): what is written into the padding of a tensor shows in no tensor."""
        stager, source = self.opened(), {str(n): self.counted(n) for n in (100, 7, 1000)}
        if not isinstance(stager, ReservesPadding):
            return
        stager.reserve_padding(64, 32)
        with self.kept(stager, source, "after the padding of its tensors was written") as copied:
            for x in copied.values():
                padding = padding_around(x)
                if padding is not None:
                    ctypes.memset(x.data_ptr() - padding.before, 255, padding.before)
                    ctypes.memset(x.data_ptr() + x.nbytes, 255, padding.after)

    def test_dropped_copies_are_given_back(self) -> None:
        """The memory of dropped copies is freed or used again: staging for ever takes no more and more of it."""
        stager, source = self.opened(), {"w": self._large()}

        def stage_often() -> None:
            for step in range(6):
                source["w"].fill_(step)
                self.settled(stager, source)

        self._grows_at_most(3 * _LARGE, stage_often, f"6 copies of {_LARGE >> 20} MiB, each dropped at once")

    # Change

    def test_keys_may_change(self) -> None:
        """Keys and items may come and go between calls."""
        x, y = self.ones(3), self.counted(3)
        states: list[StateDict] = [{"a": x}, {"a": x, "b": y}, {"b": y, "a": x}, {"b": y}, {"b": [y, x]}, {"b": [y]}]
        self._one_after_another([*states, {}, {"a": {"b": y}}, {"a": x}])

    def test_shapes_may_change(self) -> None:
        """Shapes may change between calls, and nothing is broadcast."""
        shapes = [(6,), (1,), (), (3, 2), (2, 3), (1, 6), (12,), (6,)]
        self._one_after_another([{"w": self.counted(torch.Size(shape).numel()).view(shape)} for shape in shapes])

    def test_dtypes_may_change(self) -> None:
        """Dtypes may change between calls, and nothing is cast."""
        dtypes = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.float32]
        self._one_after_another([{"w": self.counted(6).to(dtype)} for dtype in dtypes])

    def test_a_tensor_may_be_resized_in_place(self) -> None:
        """A tensor that was resized in place is staged in its new size."""
        stager, w = self.opened(), self.counted(4)
        for size in (4, 100, 2):
            w.resize_(size).fill_(size)
            self.faithful(stager, {"w": w}, f"after resize_({size})")

    def test_a_tensor_may_move_to_other_memory(self) -> None:
        """A tensor that was given other memory (module.to, optimizer.load_state_dict) is staged from there."""
        stager, w = self.opened(), self.counted(6)
        before = w.detach()  # keeps the old memory from being given out again
        for value in (2.0, 3.0):
            self.settled(stager, {"w": w})
            w.data = torch.full_like(w, value)
            self.faithful(stager, {"w": w}, "after tensor.data was replaced")
        before.fill_(0)

    def test_ties_may_change(self) -> None:
        """Tensors may begin and cease to share memory between calls."""
        stager, x, y = self.opened(), self.counted(8), self.ones(8)
        for other in (x, y, x):
            copied = self.faithful(stager, {"a": x, "b": other.view(other.shape)}, "tied now, or no more")
            if other is x:
                self.tied(copied, "a", "b", 0)
            elif copied["a"].data_ptr() == copied["b"].data_ptr():
                self.broken("tensors that share memory no more still share it in the copy")

    # What cannot be staged

    def test_what_cannot_be_staged_is_named(self) -> None:
        """A value that cannot be staged is a StageregError with its path; nothing is left out in silence."""
        bad: dict[str, Any] = {"lock": threading.Lock(), "meta": torch.empty(3, device="meta")}
        for name, value in bad.items():
            state = {"model": {"layers": [self.ones(2), {name: value}]}, "ok": self.ones(3)}
            error = self._error_of(self.opened(), state)
            what = f"a {type(value).__name__} at model.layers.1.{name}"
            if not isinstance(error, StageregError):
                self.broken(f"{what} was {_shown(error)}; raise StagingError(path, reason)")
            if not re.search(f"model.*layers.*1.*{name}", str(error)):
                self.broken(f"the error for {what} does not name that path: {error}")

    def test_an_error_leaves_the_stager_usable(self) -> None:
        """After an error the stager goes on, and earlier copies stay as they are."""
        stager, state = self.opened(), {"w": self.ones(1000)}
        bad: StateDict = {"w": self.ones(1000) * 2, "bad": threading.Lock()}
        with self.kept(stager, state, "after an error, in an earlier copy"):
            for _ in range(3):
                self._error_of(stager, bad)
            if _fails_later(stager, bad):
                self._error_of(stager, state)  # it cannot know that its future was looked at, and may raise again
            self.faithful(stager, state, "after an error")

    @on_a_rank
    def test_a_storage_that_shrank_is_an_error(self) -> None:
        """A tensor whose storage has been freed or cut under it is an error, never a copy of something else."""
        for left in (0, 8):
            stager, w = self.opened(), self.ones(64)
            self.settled(stager, {"w": w})
            w.untyped_storage().resize_(left)
            if self._error_of(stager, {"w": w}) is None:
                self.broken(f"a tensor of 256 bytes over a storage of {left} was staged without an error")

    def test_errors_that_nobody_looked_at_surface(self) -> None:
        """An error of background work that nobody asked for is raised by the next call, or by close()."""
        bad: StateDict = {"w": self.ones(3), "bad": threading.Lock()}
        if not _fails_later(self.opened(), bad):
            return
        stager = self.opened()
        wait([stager.stage(bad)], self.timeout_s)  # type: ignore[list-item]
        try:
            stager.stage({"w": self.ones(3)})
            stager.close()
        except Exception:
            return
        self.broken("a future that failed and was not looked at left no trace in the next stage() and in close()")

    # The end

    def test_close_is_harmless_early_and_twice(self) -> None:
        """close() may be called twice, and before anything was staged."""
        unused, used = self.opened(), self.opened()
        self.settled(used, {"w": self.ones(3)})
        for stager, when in ((unused, "never used"), (unused, "closed"), (used, "used"), (used, "closed")):
            try:
                stager.close()
            except Exception as error:
                self.broken(f"close() of a stager that was {when} raised {_shown(error)}")

    def test_use_after_close_says_so(self) -> None:
        """stage() after close() is a StageregError that says that the stager is closed."""
        stager = self.opened()
        self.settled(stager, {"w": self.ones(3)})
        stager.close()
        error = self._error_of(stager, {"w": self.ones(3)})
        if not isinstance(error, StageregError) or "close" not in str(error):
            self.broken(f"stage() after close() was {_shown(error)}; raise StagerClosedError")

    def test_copies_outlive_the_stager(self) -> None:
        """Copies stay as they are when their stager is closed and gone."""
        state = {"w": self.ones(2**16), "b": self.ones(10)}
        noted = self.noted(state)
        copied = self.settled(self.opened(), state)
        self.close()
        gc.collect(1)
        # Would land in memory that was freed too early.
        fresh = [torch.full((2**16,), 9.0) for _ in range(4)]
        self.agree(copied, noted, "after its stager was closed")
        del fresh

    def test_close_ends_the_threads(self) -> None:
        """No thread of the stager is left after close()."""
        before = set(threading.enumerate())
        stager = self.opened()
        self.settled(stager, {"w": self.ones(2**18)})
        stager.close()
        left = set(threading.enumerate()) - before
        for thread in left:
            thread.join(1.0)
        if names := sorted(thread.name for thread in left if thread.is_alive()):
            self.broken(f"a second after close(), these threads are still there: {', '.join(names)}")

    def test_close_gives_the_memory_back(self) -> None:
        """After close(), no memory is kept but that of copies that are still held."""
        state = {"w": self._large()}

        def stage_and_close() -> None:
            stager = self.opened()
            self.settled(stager, state)
            stager.close()

        self._grows_at_most(_LARGE // 2, stage_and_close, f"a dropped copy of {_LARGE >> 20} MiB and close()")

    # torch

    def test_torchs_async_save_writes_what_was_staged(self) -> None:
        """torch's async_save takes the stager, early and late writers write what was staged, and load reads it."""
        stager = self.opened()
        for late in (False, True):
            sources = {"w": self.counted(1000), "t": self.counted(12).view(3, 4).t()}
            wanted = {name: self.expected(x).clone() for name, x in sources.items()}
            empty = {name: torch.zeros_like(x) for name, x in wanted.items()}
            state, got = ({"w": each["w"], "nested": {"t": each["t"]}} for each in (sources, empty))
            with tempfile.TemporaryDirectory(prefix="stagereg-contract-", ignore_cleanup_errors=True) as folder:
                self._save(stager, state, sources.values(), Path(folder), late)
                load(got, checkpoint_id=folder, no_dist=True)
            for name, x in wanted.items():
                if not torch.equal(empty[name], x):
                    order = "late" if late else "early"
                    self.broken(f"a checkpoint whose writer came {order} holds other values of {name}")

    # What the promises have in common

    def _of_parts(self, stager: AsyncStager, source: Any, part: Callable[[Any], Tensor]) -> Any:
        """Stage a distributed tensor, write this rank's part of it, and return the copy, whose part has to agree."""
        local = part(source).detach()
        noted = self.noted({"x": local})
        copied = self.settled(stager, {"x": source})["x"]
        local.fill_(-1)
        if type(copied) is not type(source):
            self.broken(f"the copy of a {type(source).__name__} is a {type(copied).__name__}")
        self.agree({"x": part(copied)}, noted, f"of a {type(source).__name__}")
        return copied

    def _large(self) -> Tensor:
        """A tensor whose copy has ``_LARGE`` bytes, whatever the stager makes of its dtype."""
        return self.ones(_LARGE // self.expected(self.ones(1)).element_size())

    def _save(self, stager: AsyncStager, state: StateDict, sources: Iterable[Tensor], folder: Path, late: bool) -> None:
        """Save as torch does, with a writer that writes as early, or as late, as the order of calls allows.

        The sources, which are the tensors of the state, are overwritten after staging.
        """
        written, overwritten, limit_s = threading.Event(), threading.Event(), self.timeout_s

        class Writer(FileSystemWriter):
            def write_data(self, *args: Any, **kwargs: Any) -> Any:
                if late:
                    overwritten.wait(limit_s)
                done = super().write_data(*args, **kwargs)
                written.set()
                return done

        def synchronize_staging() -> None:
            # A stager that makes the caller wait may wait for the writer, so there is nothing later than that.
            if not late:
                written.wait(limit_s)
            stager.synchronize_staging()

        seen_by_torch: Any = SimpleNamespace(
            stage=stager.stage,
            synchronize_staging=synchronize_staging,
            close=stager.close,
            should_synchronize_after_execute=stager.should_synchronize_after_execute,
        )
        if stager.should_synchronize_after_execute:
            overwritten.set()
        saved: Any = async_save(state, storage_writer=Writer(folder), async_stager=seen_by_torch, no_dist=True)
        if hasattr(saved, "staging_completion"):
            saved.staging_completion.result(limit_s)
        for x in sources:
            x.fill_(-1)
        overwritten.set()
        getattr(saved, "upload_completion", saved).result(limit_s)

    def _one_after_another(self, states: list[StateDict]) -> None:
        stager = self.opened()
        for state in states + states[::-1]:
            self.faithful(stager, state, f"after a change to the keys {list(state)}")

    def _error_of(self, stager: AsyncStager, state: StateDict) -> Exception | None:
        """What staging ``state`` raises: at once, in its future, when it is waited for, or later."""
        try:
            self.settled(stager, state)
            stager.synchronize_staging()
        except Exception as error:
            return error
        return None

    def _grows_at_most(self, limit: int, use: Callable[[], None], what: str) -> None:
        """Measure the process, and what is too much once more: a stager takes it again, and the others do not."""
        grown = []
        for _ in range(2):
            self.settled(self.opened(), {"w": self.ones(10)})
            gc.collect()
            before = _resident()
            use()
            gc.collect()
            grown.append(_resident() - before)
            if grown[-1] <= limit:
                return
        self.broken(f"after {what}, the process has {grown[-1] >> 20} MiB more")


def _resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _odd_values(name: str) -> Tensor:
    """Eight values of a dtype, two of bool: with zeros of both signs, and NaN where it has more than eight bits."""
    dtype: torch.dtype = getattr(torch, name)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.tensor([0.0, -0.0, 1.5, -3.0, float("nan"), 0.1, 100.0, -7.0])
        return values.to(dtype) if dtype.itemsize > 1 else values.nan_to_num().to(dtype)
    return torch.arange(2 if dtype is torch.bool else 8 * dtype.itemsize, dtype=torch.uint8).view(dtype)


def _settings() -> list[object]:
    """What would change how the caller trains on, if it were left otherwise."""
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()]
    return [*modes, torch.get_default_dtype(), torch.get_num_threads()]


def _shown(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}" if error else "no error"


def _fails_later(stager: AsyncStager, state: StateDict) -> bool:
    """Whether staging ``state`` returns a future that fails."""
    try:
        staged = stager.stage(state)
    except Exception:
        return False
    return isinstance(staged, Future) and staged.exception() is not None
