"""Stagers that break one promise each, in a way in which a stager may well be wrong."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

from stagereg import BlockingAsyncStager
from stagereg.errors import StagerClosedError, StagingError, UnstageableTypeError
from stagereg.kernel.memory import register_padding

__all__ = ["MUTANTS", "RELEASE", "Plain", "ShardsOnAnAccelerator"]

State = dict[str, Any]
RELEASE = threading.Event()
"""Ends the threads that mutants have left behind."""
LEAKED: list[Any] = []


def paired(source: Any, copied: Any, change: Callable[[Tensor, Tensor], Any]) -> Any:
    """The copy with ``change(source tensor, copied tensor)`` instead of each tensor that is not distributed."""
    if isinstance(copied, (DTensor, ShardedTensor)):
        return copied
    if isinstance(copied, Tensor):
        return change(source, copied)
    if isinstance(copied, dict):
        for key in copied:
            copied[key] = paired(source[key], copied[key], change)
    elif isinstance(copied, list):
        copied[:] = [paired(*both, change) for both in zip(source, copied, strict=True)]
    elif isinstance(copied, tuple):
        items = [paired(*both, change) for both in zip(source, copied, strict=True)]
        return type(copied)(*items) if hasattr(copied, "_fields") else tuple(items)
    return copied


def is_nested(key: Any, copied: Any) -> bool:
    return key == "nested" and isinstance(copied, dict)


def with_shard(copied: Any, offset: int = 0, device: str = "cpu") -> Any:
    """The copy with another offset, or another placement, in the metadata of its shards, if it has shards."""
    if isinstance(copied, ShardedTensor):
        for shard in copied.local_shards():
            offsets = [at + offset for at in shard.metadata.shard_offsets]
            shard.metadata = ShardMetadata(offsets, shard.metadata.shard_sizes, f"rank:0/{device}")
    return copied


def is_plain(x: object) -> bool:
    return type(x) is Tensor


def single(state: State) -> Tensor | None:
    """The tensor of a state dict that is nothing but one, under "w"."""
    return state["w"] if list(state) == ["w"] and is_plain(state["w"]) and state["w"].dim() == 1 else None


class Plain(BlockingAsyncStager):
    """Right in everything; the mutants change one thing, and have some places to remember things in."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []
        self.seen: dict[Any, Any] = {}

    def close(self) -> None:
        super().close()
        self.held.clear()

    def stage(self, state_dict: State) -> Any:
        return self.change(state_dict, super().stage(state_dict))

    def change(self, source: State, copied: State) -> State:
        return paired(source, copied, self.change_tensor)

    def change_tensor(self, source: Tensor, copied: Tensor) -> Any:
        return copied


def of_tensors(name: str, change: Callable[[Tensor, Tensor], Any]) -> type[Plain]:
    """A mutant that does ``change(source, copied)`` to each tensor."""
    return type(name, (Plain,), {"change_tensor": lambda self, source, copied: change(source, copied)})


def of_states(name: str, change: Callable[[State, State], State]) -> type[Plain]:
    """A mutant that does ``change(source, copied)`` to each state dict."""
    return type(name, (Plain,), {"change": lambda self, source, copied: change(source, copied)})


def of_values(name: str, change: Callable[[Any, Any, Any], Any]) -> type[Plain]:
    """A mutant that does ``change(key, source, copied)`` to each entry of a state dict."""
    return of_states(name, lambda source, copied: {k: change(k, source[k], x) for k, x in copied.items()})


def of_errors(name: str, error: type[Exception], instead: Callable[[Any, State, Any], Any]) -> type[Plain]:
    """A mutant that does ``instead(stager, source, error)`` where ``stage`` raises an error."""

    def stage(self: Plain, state_dict: State) -> Any:
        try:
            return Plain.stage(self, state_dict)
        except error as raised:
            return instead(self, state_dict, raised)

    return type(name, (Plain,), {"stage": stage})


def raising(error: Exception) -> Any:
    raise error


class WithoutSynchronize:
    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self.stager = BlockingAsyncStager()
        self.stage, self.close = self.stager.stage, self.stager.close


class TrustsVersionCounters(Plain):
    known: Any = None
    last: Any = None

    def change(self, source: State, copied: State) -> State:
        seen: list[Any] = [(key, type(value)) for key, value in source.items()]
        paired(source, copied, lambda s, c: seen.append((s.data_ptr(), s._version, s.shape, s.dtype, s.stride())) or c)
        if seen != self.known or len(seen) == len(source) or self.last[0]() is None:
            first = next((x for x in copied.values() if is_plain(x)), None)
            if first is None:
                return copied
            self.known, self.last = seen, (weakref.ref(first), dict(copied))
        return dict(self.last[1])

    def close(self) -> None:
        self.known = self.last = None
        super().close()


class PaddingOfNeighbours(Plain):
    """Lays tensors side by side and calls each the padding of the next one."""

    margins: tuple[int, int] | None = None

    def reserve_padding(self, before: int, after: int) -> None:
        self.margins = before, after

    def change(self, source: State, copied: State) -> State:
        if self.margins is None or not copied:
            return copied
        view, offset, spans = memoryview(bytearray(2**14)), 64, {}
        for name, x in copied.items():
            spans[offset] = x.nbytes
            copied[name] = torch.frombuffer(view, dtype=x.dtype, count=x.numel(), offset=offset).copy_(x)
            offset += x.nbytes
        register_padding(view, self.margins, spans)
        return copied


class OneBlockForAll(Plain):
    """Copies states of several tensors into the memory that the last copy has."""

    last: State | None = None

    def change(self, source: State, copied: State) -> State:
        if len(copied) < 2 or not all(map(is_plain, copied.values())):
            return copied
        if len({x.untyped_storage().data_ptr() for x in copied.values()}) < len(copied):
            return copied
        last = self.last
        fits = last is not None and {k: (x.shape, x.dtype) for k, x in last.items()} == {
            k: (x.shape, x.dtype) for k, x in copied.items()
        }
        if not fits or last is None:
            self.last = copied
            return copied
        return {k: last[k].copy_(x) for k, x in copied.items()}


class LooksOnlyAtTensors(Plain):
    """Uses memory again when the tensor it handed out is gone, although views of it may exist."""

    def change(self, source: State, copied: State) -> State:
        new = single(copied)
        if new is None:
            return copied
        fitting = [x for x in self.held if (x.shape, x.dtype) == (new.shape, new.dtype)]
        self.held.clear()
        memory = fitting[0].copy_(new) if fitting else new
        handed_out = memory.view(memory.shape)
        weakref.finalize(handed_out, self.held.append, memory).atexit = False
        return {"w": handed_out}


class WaitsForThreeToBeDropped(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.slots = threading.Semaphore(3)

    def change(self, source: State, copied: State) -> State:
        if list(copied) == ["w", "b"]:
            self.slots.acquire()
            weakref.finalize(copied["w"], self.slots.release).atexit = False
        return copied


class SharesItsBuffers(Plain):
    """Has its buffers in the class, and knows only of its own copies."""

    buffers: dict[torch.Size, tuple[int, Any]] = {}  # noqa: RUF012

    def change(self, source: State, copied: State) -> State:
        new = single(copied)
        if new is None:
            return copied
        owner, old = self.buffers.get(new.shape, (id(self), lambda: None))
        tensor = old()
        if owner != id(self) and tensor is not None and tensor.dtype == new.dtype:
            new = tensor.copy_(new)
        self.buffers[new.shape] = (id(self), weakref.ref(new))
        return {"w": new}


class KeepsEveryCopy(Plain):
    def change(self, source: State, copied: State) -> State:
        self.held.append(dict(copied))
        return copied


class WholeStorages(Plain):
    def change_tensor(self, source: Tensor, copied: Tensor) -> Tensor:
        if not is_plain(source) or 0 in source.stride():
            return copied
        whole = torch.empty(source.untyped_storage().nbytes() // source.element_size(), dtype=source.dtype)
        large = whole.numel() > 4 * source.numel() > 0
        return whole.as_strided(source.shape, source.stride()).copy_(source.detach()) if large else copied


class KeysOfTheFirst(Plain):
    keys: list[str] | None = None

    def change(self, source: State, copied: State) -> State:
        self.keys = list(copied) if self.keys is None else self.keys
        return {key: value for key, value in copied.items() if key in self.keys}


class TiesOfTheFirst(Plain):
    ties: list[tuple[str, str]] | None = None

    def change(self, source: State, copied: State) -> State:
        plain = {k: x for k, x in copied.items() if is_plain(x) and x.numel()}
        if self.ties is None:
            found = {k: (x.data_ptr(), x.shape) for k, x in plain.items()}
            self.ties = [(a, b) for a in plain for b in plain if a < b and found[a] == found[b]]
        for a, b in self.ties:
            copied[b] = copied[a]
        return copied


class LeavesGradOff(Plain):
    def stage(self, state_dict: State) -> State:
        copied = super().stage(state_dict)
        torch.set_grad_enabled("optimizer" in state_dict)  # training that continues at once would fail anyway
        return copied


class GivesUp(Plain):
    failed = False

    def stage(self, state_dict: State) -> State:
        if self.failed:
            raise StagingError([], "something went wrong before")
        self.failed = True
        copied = super().stage(state_dict)
        self.failed = False
        return copied


class ZerosForWhatIsGone(Plain):
    def stage(self, state_dict: State) -> State:
        def there(x: Any) -> bool:
            return not is_plain(x) or x.untyped_storage().nbytes() >= x.numel() * x.element_size() or not x.numel()

        def owned(x: Any) -> bool:
            return is_plain(x) and x.device.type == "cpu" and x.is_contiguous() and not x.storage_offset()

        fine = {k: torch.zeros(x.shape) if owned(x) and not there(x) else x for k, x in state_dict.items()}
        return super().stage(fine)


class InTheBackground(Plain):
    """Right in all but one thing: an error that is not asked for is lost."""

    closed = False

    def __init__(self) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1)

    def stage(self, state_dict: State) -> Future[State]:
        if self.closed:
            raise StagerClosedError
        return self.thread.submit(super().stage, state_dict)

    def close(self) -> None:
        self.closed = True
        self.thread.shutdown()
        super().close()


class ClosesOnce(Plain):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class ClosesWhatItUsed(Plain):
    used: bool

    def stage(self, state_dict: State) -> State:
        self.used = True
        return super().stage(state_dict)

    def close(self) -> None:
        assert self.used
        super().close()


class GoesOnAfterClose(Plain):
    def close(self) -> None:
        super().close()
        BlockingAsyncStager.__init__(self)


class TakesCopiesBack(Plain):
    def change_tensor(self, source: Tensor, copied: Tensor) -> Tensor:
        if is_plain(copied) and not copied.requires_grad:
            self.held.append(weakref.ref(copied))
        return copied

    def close(self) -> None:
        for known in self.held:
            if (x := known()) is not None:
                x.zero_()
        super().close()


class LeavesAThread(Plain):
    def stage(self, state_dict: State) -> State:
        threading.Thread(target=RELEASE.wait, name="left-behind", daemon=True).start()
        return super().stage(state_dict)


class KeepsTheLast(Plain):
    def change(self, source: State, copied: State) -> State:
        LEAKED[:] = [dict(copied)]
        return copied


class CopiesWhenSynchronized(Plain):
    """Hands out memory in which large tensors are still to come: a writer that is early reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._synchronize_after_execute = True
        self.late: list[tuple[Tensor, Tensor]] = []

    def change_tensor(self, source: Tensor, copied: Tensor) -> Tensor:
        if is_plain(copied) and copied.is_contiguous() and copied.numel() >= 1000:
            self.late.append((copied, copied.clone()))
            copied.zero_()
        return copied

    def synchronize_staging(self) -> None:
        for copied, values in self.late:
            copied.copy_(values)
        self.late.clear()


class Broadcasts(Plain):
    """Remembers shapes by key, and broadcasts to them."""

    def change(self, source: State, copied: State) -> State:
        return {k: self.compare(k, x) if is_plain(x) else x for k, x in copied.items()}

    def compare(self, key: str, x: Tensor) -> Tensor:
        shape, self.seen[key] = self.seen.get(key, x.shape), x.shape
        try:
            return x.expand(shape).clone() if shape != x.shape else x
        except RuntimeError:
            return x


class Casts(Broadcasts):
    """Remembers dtypes by key and shape, and casts to them."""

    def compare(self, key: str, x: Tensor) -> Tensor:
        return x.to(self.seen.setdefault((key, x.shape), x.dtype))


class SizesOfTheFirst(Plain):
    """Remembers the size of each tensor by the object it is."""

    def change_tensor(self, source: Tensor, copied: Tensor) -> Tensor:
        if not is_plain(source) or source.dim() != 1 or not source.is_contiguous():
            return copied
        known, first = self.seen.get(id(source), (None, None))
        if known is None or known() is not source:
            first = source.detach()
            self.seen[id(source)] = (weakref.ref(source), first)
        return self.compare(first, source, copied)

    def compare(self, first: Tensor, source: Tensor, copied: Tensor) -> Tensor:
        return copied if first.shape == source.shape else torch.zeros(first.shape, dtype=source.dtype)


class MemoryOfTheFirst(SizesOfTheFirst):
    """Remembers where each tensor lies by the object it is."""

    def compare(self, first: Tensor, source: Tensor, copied: Tensor) -> Tensor:
        moved = first.shape == source.shape and first.data_ptr() != source.data_ptr()
        return first.clone() if moved else copied


def sort_source(source: State, copied: State) -> State:
    items = sorted(source.items(), key=lambda item: str(item[0]))
    source.clear()
    source.update(items)
    return copied


def clear_attributes(source: Tensor, copied: Tensor) -> Tensor:
    vars(copied).clear()
    return copied


def share_attributes(source: Tensor, copied: Tensor) -> Tensor:
    vars(copied).update(vars(source))
    return copied


ReleasesNothing = type("ReleasesNothing", (Plain,), {"release": lambda self, staged: None})
DrawsRandomNumbers = of_states("DrawsRandomNumbers", lambda source, copied: [copied, torch.rand(1)][0])
SortsTheSource = of_states("SortsTheSource", sort_source)
LargeOnesAsTheyAre = of_tensors("LargeOnesAsTheyAre", lambda s, c: s if is_plain(s) and s.nbytes > 2**20 else c)
ScalarsAsTheyAre = of_tensors("ScalarsAsTheyAre", lambda s, c: s if s.dim() == 0 else c)
ValuesAsTheyAre = of_values("ValuesAsTheyAre", lambda k, s, c: s if isinstance(c, (set, bytearray)) else c)
DataclassesAsTheyAre = of_values("DataclassesAsTheyAre", lambda k, s, c: s if is_dataclass(c) else c)
NestedOnesAsTheyAre = of_values("NestedOnesAsTheyAre", lambda k, s, c: s if is_nested(k, c) else c)
NamesOfTuplesAreLost = of_values("NamesOfTuplesAreLost", lambda k, s, c: tuple(c) if hasattr(c, "_fields") else c)
KeysAreSorted = of_values("KeysAreSorted", lambda k, s, c: dict(sorted(c.items())) if k == "numbers" else c)
Complex64Only = of_tensors("Complex64Only", lambda s, c: c.to(torch.complex64) if c.dtype is torch.complex128 else c)
ZeroHasNoSign = of_tensors("ZeroHasNoSign", lambda s, c: c.add_(0) if c.dtype is torch.float16 else c)
EverythingContiguous = of_tensors("EverythingContiguous", lambda s, c: c if 0 in c.stride() else c.contiguous())
OnlyWholeTies = of_tensors("OnlyWholeTies", lambda s, c: c.clone() if is_plain(c) and c.storage_offset() else c)
ParametersAreTensors = of_tensors(
    "ParametersAreTensors", lambda s, c: c.detach() if isinstance(c, torch.nn.Parameter) else c
)
WithoutAttributes = of_tensors("WithoutAttributes", clear_attributes)
AttributesAsTheyAre = of_tensors("AttributesAsTheyAre", share_attributes)
ExpandedOnesInflated = of_tensors("ExpandedOnesInflated", lambda s, c: c.contiguous() if 0 in c.stride() else c)
WithoutMeshes = of_values("WithoutMeshes", lambda k, s, c: c.to_local() if isinstance(c, DTensor) else c)
Replicates = of_values(
    "Replicates", lambda k, s, c: c.redistribute(placements=[Replicate()]) if isinstance(c, DTensor) else c
)
WithoutShards = of_values(
    "WithoutShards", lambda k, s, c: c.local_shards()[0].tensor if type(c) is ShardedTensor else c
)
ShardsAreMoved = of_values("ShardsAreMoved", lambda k, s, c: with_shard(c, offset=7))
ShardsOnAnAccelerator = of_values("ShardsOnAnAccelerator", lambda k, s, c: with_shard(c, device="cuda:0"))
"""Keeps every promise: of an accelerator's shards the copy is placed elsewhere, too."""
ErrorsWithoutPath = of_errors(
    "ErrorsWithoutPath", UnstageableTypeError, lambda *_: raising(StagingError([], "something cannot be copied"))
)
ErrorsOfItsOwn = of_errors("ErrorsOfItsOwn", UnstageableTypeError, lambda *error: raising(TypeError(str(error[-1]))))
LeavesOut = of_errors(
    "LeavesOut", UnstageableTypeError, lambda self, state, error: Plain.stage(self, {**state, error.path[0]: None})
)
OddErrorAfterClose = of_errors(
    "OddErrorAfterClose", StagerClosedError, lambda *_: raising(RuntimeError("cannot schedule after shutdown"))
)


MUTANTS: dict[str, tuple[type[Any], ...]] = {
    "test_it_has_the_shape_of_a_stager": (WithoutSynchronize,),
    "test_later_writes_do_not_show": (LargeOnesAsTheyAre,),
    "test_writes_that_no_version_counter_sees_are_staged": (TrustsVersionCounters,),
    "test_a_training_loop_is_staged_as_it_was": (ScalarsAsTheyAre,),
    "test_values_that_are_no_tensors_are_copied": (ValuesAsTheyAre, DataclassesAsTheyAre),
    "test_the_source_is_left_as_it_is": (SortsTheSource, DrawsRandomNumbers, LeavesGradOff),
    "test_held_copies_stay_as_they_are": (OneBlockForAll, LooksOnlyAtTensors, WaitsForThreeToBeDropped),
    "test_copies_outlive_stagers": (SharesItsBuffers, TakesCopiesBack),
    "test_released_copies_end_and_what_is_held_of_them_stays": (ReleasesNothing,),
    "test_reserved_padding_belongs_to_no_other_tensor": (PaddingOfNeighbours,),
    "test_memory_is_given_back": (KeepsEveryCopy, KeepsTheLast),
    "test_structure_is_kept": (NamesOfTuplesAreLost, KeysAreSorted),
    "test_dtypes_and_strides_are_kept": (Complex64Only, ZeroHasNoSign, EverythingContiguous),
    "test_tied_tensors_stay_tied": (OnlyWholeTies, TiesOfTheFirst),
    "test_a_view_costs_its_own_bytes": (WholeStorages, ExpandedOnesInflated),
    "test_tensors_keep_what_makes_them_more": (ParametersAreTensors, WithoutAttributes, AttributesAsTheyAre),
    "test_distributed_tensors_keep_their_parts": (WithoutMeshes, Replicates, WithoutShards, ShardsAreMoved),
    "test_keys_shapes_and_dtypes_may_change": (KeysOfTheFirst, Broadcasts, Casts),
    "test_a_tensor_may_get_other_memory": (SizesOfTheFirst, MemoryOfTheFirst),
    "test_what_cannot_be_staged_is_named": (ErrorsWithoutPath, ErrorsOfItsOwn, LeavesOut),
    "test_an_error_leaves_the_stager_usable": (GivesUp,),
    "test_a_storage_that_shrank_is_an_error": (ZerosForWhatIsGone,),
    "test_errors_that_nobody_looked_at_surface": (InTheBackground,),
    "test_close_is_the_end": (ClosesOnce, ClosesWhatItUsed, GoesOnAfterClose, OddErrorAfterClose, LeavesAThread),
    "test_torchs_async_save_writes_what_was_staged": (CopiesWhenSynchronized, NestedOnesAsTheyAre),
}
"""By the promise that each of them breaks; it keeps all others."""
