"""The copy that shares: what did not change since the last copy is not copied again but handed out once more.

A :class:`DeltaCopier` deals the tensors into *groups*. What overlaps in memory is in one group, so that ties survive.
A group is treated in one of three ways:

- ``once``: copied once, and shared by all later copies until an address, shape, stride or dtype in it changes;
- ``compare``: its bytes are compared with those of its last copy, which is shared if they are equal;
- ``always``: copied on every call, with all others of its kind into one block.

Shared memory is never written again: a group that is copied anew gets other memory. Which tensors
may be treated how is for the stager to decide.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

import torch

from stagereg.errors import StagingError
from stagereg.forks import RenewedInChild
from stagereg.kernel.copier import HostCopier, PendingCopy, naming, no_collection
from stagereg.kernel.layout import ALIGNMENT, Layout, Signature, plan_layout, signature, tensors_over
from stagereg.kernel.memory import BlockRef, Lease, Pool
from stagereg.kernel.state_dict import span_of
from stagereg.kernel.transfer import CopyEngine

Treatment = Literal["once", "compare", "always"]

T = TypeVar("T")

_COMPARED_TOGETHER = 2**22  # bytes: small neighbours are one group, and copied together when one of them differs
_STORED_TOGETHER = 2**25  # bytes: groups that are copied once share blocks of this size
_SLACK = 1.25  # a kept block is used again if it is at most so many times as large as what is needed
_SMALL_BLOCK = 2**16  # bytes; one of up to this size is used in any case

_CHUNK_BYTES = 2**22  # compared at a time, by one of the threads
_WORTH_A_THREAD = 2**20

# Exact, and it reads both sides once, without the GIL. A hash would be wrong once in a while, and a wrong "equal" is a
# wrong checkpoint.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int

_Pair = tuple[int, int, int, int]
"""Two runs of bytes in host memory: a label, the two addresses, bytes of each."""


@dataclass(slots=True)
class _Group:
    """Tensors that are shared or copied together."""

    members: list[int]  # their indices
    treatment: Treatment
    layout: Layout  # where each lies in the group's bytes; its signature is what must stay the same
    ref: BlockRef | None = None  # the block of the last copy, if that may be shared
    base: int = 0  # the group's first byte in it

    @property
    def key(self) -> tuple[object, ...]:
        return (self.treatment, *self.layout.signature)

    @property
    def nbytes(self) -> int:
        return -(-self.layout.nbytes // ALIGNMENT) * ALIGNMENT


class DeltaCopier(HostCopier):
    """Copies state dicts to host memory, and shares what did not change.

    Args:
        pool: where the memory comes from; closed together with the copier.
        treat: returns how each of the tensors of a state dict is to be treated. If the ``once`` members of a group
            cover every byte of it, the group is copied once; otherwise it is treated like its other members.
        verify: compare what is copied once with its copy.
        threads: threads that copy and compare in host memory, the caller's among them.
        type_check: as for :class:`.HostCopier`.

    One thread at a time may call it.
    """

    def __init__(
        self,
        pool: Pool,
        treat: Callable[[Any, Sequence[torch.Tensor]], list[Treatment]],
        verify: bool,
        threads: int = 2,
        type_check: bool = False,
    ) -> None:
        super().__init__(pool, threads, type_check)
        self._treat = treat
        self._verify = verify
        self._signature: Signature = []
        self._treatments: list[Treatment] = []
        self._groups: list[_Group] = []
        _copiers.add(self)

    def copy(self, state: Any) -> Any:
        """As :meth:`.HostCopier.copy`.

        Raises:
            StagingError: also if a tensor is not what was copied once, with ``verify``.
        """
        spec = self.plan(state)
        with torch.no_grad(), naming(state):
            if self._verify:  # before there is a lease, which would live as long as the error that has this frame
                self._refuse_changed(spec.tensors)
            self._drop_changed(spec.tensors)
            lease = self.pool.lease()
            staged = self._copy_groups(spec.tensors, lease)
        with torch.no_grad(), no_collection():
            return lease.hand_out(spec.unflatten(staged))

    def forget(self) -> None:
        """Share nothing with earlier copies at the next call."""
        super().forget()
        self._signature, self._treatments, self._groups = [], [], []

    def _replan(self, state: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Deal the tensors into groups; what one of the last groups has copied is kept with it."""
        rows, treatments = signature(tensors), self._treat(state, tensors)
        if (rows, treatments) == (self._signature, self._treatments):
            return False
        groups = _deal(tensors, rows, treatments)
        before = {group.key: group for group in self._groups}
        for group in groups:
            if group.key in before:
                group.ref, group.base = before[group.key].ref, before[group.key].base
        self.pool.expected = sum(group.nbytes for group in groups)
        self._signature, self._treatments, self._groups = rows, treatments, groups
        return True

    def _refuse_changed(self, tensors: Sequence[torch.Tensor]) -> None:
        once = [group for group in self._groups if group.treatment == "once"]
        wrong = [i for i in self._differing(once, tensors) if self._treatments[i] == "once"]
        if wrong:
            raise StagingError(
                [min(wrong)],
                "it is declared frozen, but it is not what was staged first (or a reader wrote into its copy); take it "
                "out of 'frozen', or call forget() after loading other weights on purpose",
            )

    def _drop_changed(self, tensors: Sequence[torch.Tensor]) -> None:
        compared = [group for group in self._groups if group.treatment == "compare"]
        changed = self._differing(compared, tensors)
        for group in compared:
            if not changed.isdisjoint(group.members):
                group.ref = None

    def _differing(self, groups: Iterable[_Group], tensors: Sequence[torch.Tensor]) -> set[int]:
        """Return the indices of tensors whose bytes are not those of the last copy, at least one of each group."""
        pairs: list[_Pair] = []
        found: set[int] = set()
        for group in groups:
            if group.ref is None:
                continue
            begin, copies = group.ref.block.address + group.base, None
            for k, (i, piece) in enumerate(zip(group.members, group.layout.pieces, strict=True)):
                x, size = tensors[i], tensors[i].element_size()
                if x.device.type == "cpu" and piece.span == x.numel() and piece.stride == x.stride():
                    pairs.append((i, x.data_ptr(), begin + piece.offset + piece.start * size, x.nbytes))
                    continue
                if copies is None:
                    copies = tensors_over(group.ref.block.view()[group.base :], group.layout)
                if not same_elements(x, copies[k]):
                    found.add(i)
        return found | _unequal(pairs, self.engine)

    def _copy_groups(self, tensors: Sequence[torch.Tensor], lease: Lease) -> list[torch.Tensor]:
        """Copy the groups whose last copy is not shared; return all staged tensors."""
        where = {id(group): (group.ref, group.base) for group in self._groups if group.ref is not None}
        where.update(self._memory_for([group for group in self._groups if group.ref is None]))
        views = {ref: lease.view(ref) for ref in {ref for ref, _ in where.values()}}
        staged: list[Any] = [None] * len(tensors)
        for group in self._groups:
            ref, base = where[id(group)]
            sources = [tensors[i] for i in group.members]
            pending = PendingCopy(sources, group.layout, lease, views[ref][base:], ref.block.address + base)
            if group.ref is None:
                self.fill(pending)
            if group.treatment != "always":
                group.ref, group.base = ref, base
            for i, x in zip(group.members, pending.staged, strict=True):
                staged[i] = x
        return staged

    def _memory_for(self, groups: Sequence[_Group]) -> dict[int, tuple[BlockRef, int]]:
        found: dict[int, tuple[BlockRef, int]] = {}
        once = [group for group in groups if group.treatment == "once"]
        others = [[group] for group in groups if group.treatment != "once"]
        for batch in [*_batches(once, lambda group: group.nbytes, _STORED_TOGETHER), *others]:
            nbytes, base = sum(group.nbytes for group in batch), 0
            ref = self.pool.take(nbytes, at_most=max(_SLACK * nbytes, _SMALL_BLOCK))
            for group in batch:
                found[id(group)] = ref, base
                base += group.nbytes
        return found


_copiers = RenewedInChild(DeltaCopier.forget)  # a forked child does not share the copies of its parent


# -- groups


def _deal(tensors: Sequence[torch.Tensor], rows: Signature, treatments: Sequence[Treatment]) -> list[_Group]:
    dealt: dict[Treatment, list[list[int]]] = {"once": [], "compare": [], "always": []}
    for members in _overlapping(tensors):
        dealt[_treatment_of(members, tensors, treatments)].append(members)
    compared = _batches(dealt["compare"], lambda members: sum(tensors[i].nbytes for i in members), _COMPARED_TOGETHER)

    def group(members: list[int], treatment: Treatment) -> _Group:
        return _Group(members, treatment, _layout_of(members, tensors, rows))

    groups = [group(members, "once") for members in dealt["once"]]
    groups += [group(sorted(chain.from_iterable(batch)), "compare") for batch in compared]
    if dealt["always"]:
        groups.append(group(sorted(chain.from_iterable(dealt["always"])), "always"))
    return groups


def _layout_of(members: Sequence[int], tensors: Sequence[torch.Tensor], rows: Signature) -> Layout:
    try:
        return plan_layout([tensors[i] for i in members], [rows[i] for i in members])
    except StagingError as error:
        raise StagingError([members[int(str(error.path[0]))]], error.reason) from error


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Deal out the indices: tensors whose spans have a byte in common are together. Ordered by each one's first."""
    return sorted(map(sorted, overlapping((x.get_device(), x.data_ptr(), _end(x), i) for i, x in enumerate(tensors))))


def overlapping(runs: Iterable[tuple[int, int, int, T]]) -> Iterator[list[T]]:
    """Deal out items: those that have a byte in common are together.

    Args:
        runs: of each item the number of a memory, where in the memory the item begins and ends, and the item.
    """
    group: list[T] = []
    last, end = -1, 0
    for memory, begin, stop, item in sorted(runs, key=lambda run: run[:2]):
        if memory != last or begin >= end:
            if group:
                yield group
            group, last, end = [], memory, 0
        group.append(item)
        end = max(end, stop)
    if group:
        yield group


def _treatment_of(
    members: Sequence[int], tensors: Sequence[torch.Tensor], treatments: Sequence[Treatment]
) -> Treatment:
    """``once`` if all members are, or if those which are have every byte of the others; else what the others are."""
    others = {treatments[i] for i in members} - {"once"}
    ordered = sorted((tensors[i].data_ptr(), i) for i in members)
    covered, last = ordered[0][0], max(_end(tensors[i]) for i in members)
    for begin, i in ordered:
        x = tensors[i]
        if treatments[i] == "once" and begin <= covered and span_of(x) == x.numel():
            covered = max(covered, _end(x))
    return others.pop() if others and covered < last else "once"


def _end(x: torch.Tensor) -> int:
    return x.data_ptr() + span_of(x) * x.element_size()


def _batches(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Deal out items in lists of at most ``limit`` bytes; a larger item is alone in its list."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + nbytes(item) > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes(item)
    if batch:
        yield batch


# -- comparing memory with memory


def _unequal(pairs: Sequence[_Pair], engine: CopyEngine) -> set[int]:
    """Return the labels of the pairs that are not equal, compared on the threads of ``engine``."""
    found: set[int] = set()
    chunks = iter(  # taking from a list's iterator is one step under the GIL
        [
            (label, one + at, other + at, min(_CHUNK_BYTES, nbytes - at))
            for label, one, other, nbytes in pairs
            for at in range(0, nbytes, _CHUNK_BYTES)
        ]
    )

    def compare(base: int) -> None:
        for label, one, other, nbytes in chunks:
            if label not in found and _memcmp(one, other, nbytes):
                found.add(label)

    is_much = sum(nbytes for _, _, _, nbytes in pairs) >= _WORTH_A_THREAD
    engine.run(0, [compare] * (engine.threads if is_much else 1)).finish()
    return found


def same_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits, wherever they lie and however they are strided."""
    for dim, n in enumerate(x.shape):
        if n > 1 and x.stride(dim) == y.stride(dim) == 0:  # expanded: all of them are the first
            x, y = x.narrow(dim, 0, 1), y.narrow(dim, 0, 1)
    return torch.equal(_bytes_of(x), _bytes_of(y))


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    # Not contiguous(): a single element may be contiguous whatever its strides, and then keeps them.
    flat = torch.empty(x.numel(), dtype=x.dtype, device="cpu")
    flat.view(x.shape).copy_(x)
    return flat.view(torch.uint8)
