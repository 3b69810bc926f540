"""Stagers that break one promise each, in a way in which a stager may well be wrong."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map, tree_map_with_path

from stagereg import BlockingAsyncStager
from stagereg.errors import StagingError, UnstageableTypeError

State = dict[str, Any]
RELEASE = threading.Event()  # ends the threads that mutants have left behind
SHARED: State = {}  # copies that mutants share


class Mutant(BlockingAsyncStager):
    """Right in everything; the mutants change one thing, and have some attributes to remember things in."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []
        self.seen: dict[Any, Any] = {}

    def stage(self, state_dict: State) -> Any:
        return self.change(state_dict, super().stage(state_dict))

    def change(self, source: State, copied: State) -> State:
        def changed(old: Any, new: Any) -> Any:
            return self.change_tensor(old, new) if isinstance(new, Tensor) else new

        return tree_map(changed, source, copied)

    def change_tensor(self, source: Tensor, copied: Tensor) -> Any:
        return copied


def mutant(name: str, **methods: Any) -> type[Mutant]:
    """A mutant that has other methods; ranks find it by its name."""
    return type(name, (Mutant,), {**methods, "__module__": __name__})


def of_tensors(name: str, change: Callable[[Tensor, Tensor], Any]) -> type[Mutant]:
    """A mutant that does ``change(source, copied)`` to each tensor."""
    return mutant(name, change_tensor=lambda self, source, copied: change(source, copied))


def of_states(name: str, change: Callable[[State, State], State]) -> type[Mutant]:
    """A mutant that does ``change(source, copied)`` to each state dict."""
    return mutant(name, change=lambda self, source, copied: change(source, copied))


def of_values(name: str, change: Callable[[Any, Any, Any], Any]) -> type[Mutant]:
    """A mutant that does ``change(key, source, copied)`` to each entry of a state dict."""
    return of_states(name, lambda source, copied: {k: change(k, source[k], x) for k, x in copied.items()})


def of_errors(name: str, error: type[Exception], instead: Callable[[Any, State, Any], Any]) -> type[Mutant]:
    """A mutant that does ``instead(stager, source, error)`` where ``stage`` raises an error."""

    def stage(self: Mutant, state_dict: State) -> Any:
        try:
            return Mutant.stage(self, state_dict)
        except error as raised:
            return instead(self, state_dict, raised)

    return mutant(name, stage=stage)


def raising(error: Exception) -> Any:
    raise error


class WithoutSynchronize:
    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self.stager = BlockingAsyncStager()
        self.stage, self.close = self.stager.stage, self.stager.close


class Some(Mutant):
    """Does ``instead`` to the tensors that have so many bytes, and are nested, or are not."""

    at_least, nested = 0, None

    def change(self, source: State, copied: State) -> State:
        def changed(path: tuple[Any, ...], old: Any, new: Any) -> Any:
            left = not isinstance(new, Tensor) or new.nbytes < self.at_least or self.nested is (len(path) == 1)
            return new if left else self.instead(path, old, new)

        return tree_map_with_path(changed, source, copied)


class Aliases(Some):
    def instead(self, path: tuple[Any, ...], source: Tensor, copied: Tensor) -> Tensor:
        return source


class Reuses(Some):
    """Writes into the copy of ``ring`` calls ago, which may be held."""

    ring, calls = 1, 0

    def stage(self, state_dict: State) -> Any:
        self.calls += 1
        return super().stage(state_dict)

    def instead(self, path: tuple[Any, ...], source: Tensor, copied: Tensor) -> Tensor:
        slot = self.seen.setdefault((self.calls % self.ring, path, copied.shape, copied.dtype), copied)
        return slot if slot is copied else slot.copy_(copied)


class SharesItsBuffers(Reuses):
    at_least, seen = 2**12, SHARED

    def __init__(self) -> None:
        BlockingAsyncStager.__init__(self)


class WritesBeforeItFails(Mutant):
    """Writes the entries before one that cannot be staged into the memory of the copy before."""

    def change(self, source: State, copied: State) -> State:
        self.held = [copied]
        return copied

    def stage(self, state_dict: State) -> Any:
        try:
            return super().stage(state_dict)
        except UnstageableTypeError:
            tree_map(lambda x: x.zero_() if x.nbytes >= 2**16 else x, self.held)
            raise


class LooksOnlyAtTensors(Some):
    """Uses memory again when the tensor it handed out is gone, although views of it may exist."""

    def instead(self, path: tuple[Any, ...], source: Tensor, copied: Tensor) -> Tensor:
        free = self.seen.setdefault((path, copied.shape), [])
        memory = free.pop().copy_(copied) if free else copied
        handed_out = memory.view(memory.shape)
        weakref.finalize(handed_out, free.append, memory).atexit = False
        return handed_out


def variant(kind: type[Mutant], **facts: Any) -> type[Mutant]:
    """A mutant like another one, with other attributes."""
    return type("_".join([kind.__name__, *map(str, facts.values())]), (kind,), {**facts, "__module__": __name__})


class GivesUp(Mutant):
    failed = False

    def stage(self, state_dict: State) -> State:
        if self.failed:
            raise StagingError([], "something went wrong before")
        self.failed = True
        copied = super().stage(state_dict)
        self.failed = False
        return copied


class ZerosForWhatIsGone(Mutant):
    def stage(self, state_dict: State) -> State:
        gone = [key for key, x in state_dict.items() if x.untyped_storage().nbytes() < x.nbytes]
        return super().stage(state_dict | {key: torch.zeros(state_dict[key].shape) for key in gone})


class ClosesOnce(Mutant):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class GoesOnAfterClose(Mutant):
    def close(self) -> None:
        super().close()
        BlockingAsyncStager.__init__(self)


class LeavesAThread(Mutant):
    def stage(self, state_dict: State) -> State:
        threading.Thread(target=RELEASE.wait, name="left-behind", daemon=True).start()
        return super().stage(state_dict)


class CopiesWhenSynchronized(Mutant):
    """Hands out memory in which the tensors are still to come: a writer that is early reads nothing."""

    should_synchronize_after_execute = True

    def change_tensor(self, source: Tensor, copied: Tensor) -> Tensor:
        self.held.append((copied, copied.clone()))
        return copied.zero_()

    def synchronize_staging(self) -> None:
        for copied, values in self.held:
            copied.copy_(values)


class SizesOfTheFirst(Mutant):
    """Remembers the size of each tensor by the object it is."""

    def change_tensor(self, source: Tensor, copied: Tensor) -> Tensor:
        _, shape = self.seen.setdefault(id(source), (source, source.shape))
        return copied if shape == source.shape else torch.zeros(shape, dtype=source.dtype)


def keys_of_the_first(self: Mutant, source: State, copied: State) -> State:
    return {key: copied[key] for key in self.seen.setdefault("keys", list(copied)) if key in copied}


def sort_source(source: State, copied: State) -> State:
    items = sorted(source.items(), key=lambda item: str(item[0]))
    source.clear()
    source.update(items)
    return copied


def copy_whole_storage(source: Tensor, copied: Tensor) -> Tensor:
    whole = torch.empty(source.untyped_storage().nbytes() // source.element_size(), dtype=source.dtype)
    return whole.as_strided(source.shape, source.stride()).copy_(source) if 0 not in source.stride() else copied


def share_attributes(source: Tensor, copied: Tensor) -> Tensor:
    vars(copied).update(vars(source))
    return copied


def as_lazy_as(source: Tensor, copied: Tensor) -> Tensor:
    if source.is_conj():
        return copied.conj().resolve_conj().conj()
    return torch._neg_view(-copied) if source.is_neg() else copied


def with_shard(copied: Any, offset: int = 0, device: str = "cpu") -> Any:
    """The copy with another offset, or another placement, in the metadata of its shards, if it has shards."""
    if isinstance(copied, ShardedTensor):
        for shard in copied.local_shards():
            offsets = [at + offset for at in shard.metadata.shard_offsets]
            shard.metadata = ShardMetadata(offsets, shard.metadata.shard_sizes, f"rank:0/{device}")
    return copied


ReleasesNothing = mutant("ReleasesNothing", release=lambda self, staged: None)
KeysOfTheFirst = mutant("KeysOfTheFirst", change=keys_of_the_first)
KeepsEveryCopy = mutant("KeepsEveryCopy", change=lambda self, s, c: [c, self.held.append(dict(c))][0])
Casts = mutant("Casts", change_tensor=lambda self, s, c: c.to(self.seen.setdefault(c.shape, c.dtype)))
InTheBackground = mutant("InTheBackground", stage=lambda self, s: ThreadPoolExecutor(1).submit(Mutant.stage, self, s))
TrustsVersionCounters = mutant(
    "TrustsVersionCounters",
    change=lambda self, s, c: self.seen.setdefault(tuple(x._version for x in s.values()), c),
)
DrawsRandomNumbers = of_states("DrawsRandomNumbers", lambda source, copied: [copied, torch.rand(1)][0])
SortsTheSource = of_states("SortsTheSource", sort_source)
ScalarsAsTheyAre = of_tensors("ScalarsAsTheyAre", lambda s, c: s if s.dim() == 0 else c)
ValuesAsTheyAre = of_values("ValuesAsTheyAre", lambda k, s, c: s if isinstance(c, (set, bytearray)) else c)
NestedOnesAsTheyAre = of_values("NestedOnesAsTheyAre", lambda k, s, c: s if isinstance(c, dict) else c)
WholeStorages = of_tensors("WholeStorages", copy_whole_storage)
NamesOfTuplesAreLost = of_values("NamesOfTuplesAreLost", lambda k, s, c: tuple(c) if hasattr(c, "_fields") else c)
KeysAreSorted = of_values("KeysAreSorted", lambda k, s, c: dict(sorted(c.items())) if k == "numbers" else c)
Complex64Only = of_tensors("Complex64Only", lambda s, c: c.to(torch.complex64) if c.dtype is torch.complex128 else c)
ZeroHasNoSign = of_tensors("ZeroHasNoSign", lambda s, c: c.add_(0) if c.dtype is torch.float16 else c)
EverythingContiguous = of_tensors("EverythingContiguous", lambda s, c: c.contiguous())
OnlyWholeTies = of_tensors("OnlyWholeTies", lambda s, c: c.clone() if c.storage_offset() else c)
LazyOnesStayLazy = of_tensors("LazyOnesStayLazy", as_lazy_as)
ObjectsAreDeepCopied = of_values("ObjectsAreDeepCopied", lambda k, s, c: copy.deepcopy(c) if is_dataclass(c) else c)
ParametersAreTensors = of_tensors(
    "ParametersAreTensors", lambda s, c: c.detach() if isinstance(c, torch.nn.Parameter) else c
)
AttributesAsTheyAre = of_tensors("AttributesAsTheyAre", share_attributes)
Replicates = of_values(
    "Replicates", lambda k, s, c: c.redistribute(placements=[Replicate()]) if isinstance(c, DTensor) else c
)
ShardsAreMoved = of_values("ShardsAreMoved", lambda k, s, c: with_shard(c, offset=7))
ShardsOnAnAccelerator = of_values("ShardsOnAnAccelerator", lambda k, s, c: with_shard(c, device="cuda:0"))
"""Keeps every promise: of an accelerator's shards the copy is placed elsewhere, too."""
ErrorsWithoutPath = of_errors(
    "ErrorsWithoutPath", UnstageableTypeError, lambda *_: raising(StagingError([], "something cannot be copied"))
)
ErrorsOfItsOwn = of_errors("ErrorsOfItsOwn", UnstageableTypeError, lambda *error: raising(TypeError(str(error[-1]))))
LeavesOut = of_errors(
    "LeavesOut", UnstageableTypeError, lambda self, state, error: Mutant.stage(self, {**state, error.path[0]: None})
)
REUSES = [(1, 256, True), (2, 2048, False), (3, 4096, True), (4, 2**16, False), (8, 2**20, True), (8, 2**22, False)]
"""Copies in the ring, bytes from which a tensor is in it, and whether it is nested."""
MUTANTS: dict[str, tuple[type[Any], ...]] = {
    "test_it_has_the_shape_of_a_stager": (WithoutSynchronize,),
    "test_later_writes_do_not_show": tuple(
        variant(Aliases, at_least=at_least, nested=nested) for _, at_least, nested in REUSES
    ),
    "test_writes_that_no_version_counter_sees_are_staged": (TrustsVersionCounters,),
    "test_a_training_loop_is_staged_as_it_was": (ScalarsAsTheyAre,),
    "test_a_future_does_not_hold_up_training": (InTheBackground,),
    "test_values_that_are_no_tensors_are_copied": (ValuesAsTheyAre,),
    "test_the_source_is_left_as_it_is": (SortsTheSource, DrawsRandomNumbers),
    "test_held_copies_stay_as_they_are": (
        *(variant(Reuses, ring=ring, at_least=at_least, nested=nested) for ring, at_least, nested in REUSES),
        *(variant(LooksOnlyAtTensors, at_least=at_least, nested=nested) for _, at_least, nested in REUSES[::2]),
    ),
    "test_copies_outlive_stagers": (SharesItsBuffers,),
    "test_released_copies_end_and_what_is_held_of_them_stays": (
        ReleasesNothing,
        variant(Reuses, ring=8, at_least=2**12, nested=False),
    ),
    "test_memory_is_given_back": (KeepsEveryCopy,),
    "test_structure_is_kept": (NamesOfTuplesAreLost, KeysAreSorted),
    "test_dtypes_and_strides_are_kept": (Complex64Only, ZeroHasNoSign, EverythingContiguous),
    "test_tied_tensors_stay_tied": (OnlyWholeTies,),
    "test_a_view_costs_its_own_bytes": (WholeStorages,),
    "test_lazy_flips_are_carried_out": (LazyOnesStayLazy,),
    "test_tensors_inside_objects_are_staged": (ObjectsAreDeepCopied,),
    "test_tensors_keep_what_makes_them_more": (ParametersAreTensors, AttributesAsTheyAre),
    "test_distributed_tensors_keep_their_parts": (Replicates, ShardsAreMoved),
    "test_keys_shapes_and_dtypes_may_change": (KeysOfTheFirst, Casts),
    "test_a_tensor_may_get_other_memory": (SizesOfTheFirst,),
    "test_what_cannot_be_staged_is_named": (ErrorsWithoutPath, ErrorsOfItsOwn, LeavesOut),
    "test_an_error_leaves_the_stager_usable": (GivesUp, WritesBeforeItFails),
    "test_a_storage_that_shrank_is_an_error": (ZerosForWhatIsGone,),
    "test_errors_that_nobody_looked_at_surface": (InTheBackground,),
    "test_close_is_the_end": (ClosesOnce, GoesOnAfterClose, LeavesAThread),
    "test_torchs_async_save_writes_what_was_staged": (CopiesWhenSynchronized, NestedOnesAsTheyAre),
}
"""By the promise that each of them breaks."""
