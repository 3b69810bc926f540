"""The copy that shares: what did not change since the last copy is not copied again but handed out once more.

A :class:`DeltaCopier` deals the tensors into *groups*. What overlaps in memory is in one group, so that ties survive.
A group is treated in one of three ways:

- ``once``: copied once, and shared by all later copies until an address, shape, stride or dtype in it changes;
- ``compare``: its bytes are compared with those of its last copy, which is shared if they are equal;
- ``always``: copied on every call, with all others of its kind into one block.

Shared memory is never written again: a group that is copied anew gets other memory, unless nobody is left that holds
the old one. Which tensors may be treated how is the stager's business; moving bytes and memory itself that of ``moves``
and ``blocks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stagereg.errors import StagingError
from stagereg.kernel.copier import no_collection
from stagereg.kernel.layout import ALIGNMENT, Layout, Piece, Region, Signature, plan_layout, signature
from stagereg.kernel.memory import BlockRef, Lease, Pool, register_padding
from stagereg.kernel.transfer import Batch, CopyEngine, Move
from stagereg.stagers.byte_compare import Comparer, Pair, same_elements

__all__ = ["DeltaCopier", "Treatment"]

Treatment = Literal["once", "compare", "always"]

_PAGE = 4096  # a block is whole pages
_SLACK = 1.25  # a block may be so many times as large as what is asked for, and is used again rather than a new one
_COMPARED_TOGETHER = 2**22  # bytes: small neighbours are one group, and copied together when one of them differs
_PLACED_TOGETHER = 2**25  # bytes: what is copied once lies in blocks of this size, or each in its own if it is larger


@dataclass(slots=True)
class _Group:
    """Tensors that are shared or copied together.

    Attributes:
        members: their indices.
        how: how they are treated.
        layout: where each lies in the group's bytes; its signature is what must stay the same.
        block, base: where the last copy is, for groups that are shared; its first byte in the block.
    """

    members: list[int]
    how: Treatment
    layout: Layout
    block: BlockRef | None = None
    base: int = 0


@dataclass(slots=True)
class _Plan:
    signature: Signature
    treatments: list[Treatment]
    groups: list[_Group]


_Place = tuple[BlockRef, int]


class DeltaCopier:
    """Copies lists of tensors to host memory, and shares what did not change.

    Args:
        pool: where the memory comes from; closed together with the copier.
        threads: threads that copy and compare in host memory, the caller's among them.

    One thread at a time may call it.
    """

    def __init__(self, pool: Pool, threads: int = 2) -> None:
        self._engine = CopyEngine(threads)
        self._comparer = Comparer(threads)
        self.pool = pool
        self._margins = (0, 0)
        self._plan: _Plan | None = None

    def reserve_padding(self, before: int, after: int) -> None:
        """Leave bytes free around each tensor that is always copied, see :func:`.memory.padding_around`.

        Memory that several copies share has no room in it: its two writers would write there at the same time.
        """
        if self._margins != (before, after):
            self._margins = (before, after)
            self._plan = None

    def check_open(self) -> None:
        """Raise ``StagerClosedError`` after :meth:`close`."""
        self.pool.check_open()

    def copy_tensors(
        self, tensors: Sequence[torch.Tensor], treatments: list[Treatment], verify: bool = False
    ) -> tuple[list[torch.Tensor], Lease]:
        """Return copies of plain strided tensors, and their lease; what shares memory goes on sharing it.

        Args:
            tensors: on any devices.
            treatments: how each is to be treated. A group follows its members that are not ``once``, unless those which
                are cover all of its bytes.
            verify: compare what is copied once with its copy.

        Raises:
            StagingError: one cannot be staged, or is not what was copied once; ``path`` is its index. Or memory ran
                out. The copier stays usable.
            StagerClosedError: after :meth:`close`.
        """
        self.check_open()
        with no_collection():
            plan = self._fit(tensors, treatments)
        if verify:  # before there is a lease, which would live as long as the error that has this frame
            self._verify(plan, tensors)
        lease = self.pool.lease()
        anew = self._to_be_copied(plan, tensors)
        places = {id(g): (g.block, g.base) for g in plan.groups if g.block is not None}
        places.update(self._place(anew))
        views = {id(block): lease.view(block) for block, _ in places.values()}
        with no_collection():
            staged = _tensors_over(plan.groups, places, views, tensors)
        self._move(anew, places, views, staged, tensors)
        for group in anew:
            if group.how != "always":
                group.block, group.base = places[id(group)]
            elif self._margins != (0, 0):
                block, _ = places[id(group)]
                view = views[id(block)]
                register_padding(view, self._margins, group.layout.spans)
        return staged, lease

    def forget(self) -> None:
        """Share nothing with earlier copies at the next call."""
        self._plan = None

    def close(self) -> None:
        """Free plans, threads and kept memory. Copies handed out stay valid. Closing twice is harmless."""
        self._plan = None
        self.pool.close()
        self._engine.close()
        self._comparer.close()

    # -- the plan

    def _fit(self, tensors: Sequence[torch.Tensor], treatments: list[Treatment]) -> _Plan:
        plan = self._plan
        rows = signature(tensors)
        if plan is None or plan.signature != rows or plan.treatments != treatments:
            kept = {_key(g): g for g in plan.groups if g.block is not None} if plan is not None else {}
            groups = _groups(tensors, rows, treatments, self._margins)
            for group in groups:
                before = kept.get(_key(group))
                if before is not None:
                    group.block, group.base = before.block, before.base
            plan = self._plan = _Plan(rows, treatments, groups)
            self.pool.expect(sum(group.layout.nbytes + _PAGE for group in groups))
        return plan

    # -- what changed

    def _verify(self, plan: _Plan, tensors: Sequence[torch.Tensor]) -> None:
        frozen = [group for group in plan.groups if group.how == "once" and group.block is not None]
        wrong = [i for i in self._differing(frozen, tensors) if plan.treatments[i] == "once"]
        if wrong:
            raise StagingError(
                [min(wrong)],
                "it is declared frozen, but it is not what was staged first (or a reader wrote into its copy); take it "
                "out of 'frozen', or call forget() after loading other weights on purpose",
            )

    def _to_be_copied(self, plan: _Plan, tensors: Sequence[torch.Tensor]) -> list[_Group]:
        compared = [group for group in plan.groups if group.how == "compare" and group.block is not None]
        differing = self._differing(compared, tensors)
        for group in compared:
            if not differing.isdisjoint(group.members):
                group.block = None
        return [group for group in plan.groups if group.block is None]

    def _differing(self, groups: Iterable[_Group], tensors: Sequence[torch.Tensor]) -> set[int]:
        """Indices of tensors whose bytes are not those of the last copy; not all of a group need be told."""
        pairs: list[Pair] = []
        odd: set[int] = set()
        for group in groups:
            assert group.block is not None
            start = group.block.address + group.base
            for i, piece in zip(group.members, group.layout.pieces, strict=True):
                x = tensors[i]
                if piece.span == 0:
                    continue
                if x.device.type == "cpu" and piece.span == x.numel() and piece.stride == x.stride():
                    size = x.element_size()
                    at = start + piece.offset + piece.start * size
                    pairs.append(Pair(i, x.data_ptr(), at, piece.span * size))
                elif not same_elements(x, _tensor_over(group.block.view(), group.base, piece, x.dtype, {})):
                    odd.add(i)
        return odd | self._comparer.differing(pairs)

    # -- memory and bytes

    def _place(self, groups: Iterable[_Group]) -> dict[int, _Place]:
        """Find memory for groups that have none; what is copied once shares blocks."""
        places: dict[int, _Place] = {}
        for batch in _batches(groups):
            nbytes = sum(_aligned(group.layout.nbytes) for group in batch)
            block = self.pool.take(nbytes, at_most=max(_SLACK * nbytes, 2**16))
            cursor = 0
            for group in batch:
                places[id(group)] = block, cursor
                cursor += _aligned(group.layout.nbytes)
        return places

    def _move(
        self,
        groups: Sequence[_Group],
        places: dict[int, _Place],
        views: dict[int, memoryview],
        staged: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        moves: list[Move] = []
        away: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for group in groups:
            block, base = places[id(group)]
            start = block.address + base
            if group.how != "always":
                moves += [(start + offset, address, nbytes) for offset, address, nbytes in group.layout.moves]
            for region in group.layout.remote:
                owner = tensors[group.members[region.source]]
                away.setdefault(owner.device, []).append(_region_pair(views[id(block)], base, region, owner))
            for i in (group.members[k] for k in group.layout.packed):
                away.setdefault(tensors[i].device, []).append((staged[i], tensors[i]))
        events = [self._engine.fetch(device, pairs) for device, pairs in away.items()]
        if moves:
            self._engine.memmove(0, Batch(moves))
        for group in groups:
            if group.how == "always":  # whose moves are the same each time, and dealt out already
                block, base = places[id(group)]
                self._engine.memmove(block.address + base, group.layout.batch)
        for event in events:
            if event is not None:
                event.synchronize()


# -- groups


def _groups(
    tensors: Sequence[torch.Tensor], signature: Signature, treatments: Sequence[Treatment], margins: tuple[int, int]
) -> list[_Group]:
    always: list[int] = []
    compared: list[list[int]] = []
    groups: list[_Group] = []
    for members in _overlapping(tensors):
        how = _treatment_of(members, tensors, treatments)
        if how == "always":
            always += members
        elif how == "compare":
            compared.append(members)
        else:
            groups.append(_Group(members, how, _plan_part(members, tensors, signature)))
    for members in _merged(compared, tensors):
        groups.append(_Group(members, "compare", _plan_part(members, tensors, signature)))
    if always:
        groups.append(_Group(sorted(always), "always", _plan_part(sorted(always), tensors, signature, margins)))
    return groups


def _plan_part(
    members: Sequence[int], tensors: Sequence[torch.Tensor], signature: Signature, margins: tuple[int, int] = (0, 0)
) -> Layout:
    try:
        return plan_layout([tensors[i] for i in members], [signature[i] for i in members], margins)
    except StagingError as error:
        (k,) = error.path
        assert isinstance(k, int)
        raise StagingError([members[k]], error.reason) from error


def _key(group: _Group) -> tuple[object, ...]:
    return (group.how, *group.layout.signature)


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Deal out the indices: tensors whose spans have a byte in common are together. Ordered by each one's first."""
    found = [[i] for i, x in enumerate(tensors) if not x.numel()]
    end, device = 0, ""
    for where, begin, i in sorted((str(x.device), x.data_ptr(), i) for i, x in enumerate(tensors) if x.numel()):
        if where == device and begin < end:
            found[-1].append(i)
        else:
            found.append([i])
            end, device = 0, where
        end = max(end, begin + _span_bytes(tensors[i]))
    return sorted((sorted(members) for members in found), key=lambda members: members[0])


def _span_bytes(x: torch.Tensor) -> int:
    return x.element_size() * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))


def _treatment_of(
    members: Sequence[int], tensors: Sequence[torch.Tensor], treatments: Sequence[Treatment]
) -> Treatment:
    others = [i for i in members if treatments[i] != "once"]
    if not others:
        return "once"
    covered = _union(tensors[i] for i in members if treatments[i] == "once" and _is_dense(tensors[i]))
    for i in others:
        begin = tensors[i].data_ptr()
        end = begin + _span_bytes(tensors[i])
        if not any(a <= begin and end <= b for a, b in covered):
            return "always" if any(treatments[i] == "always" for i in others) else "compare"
    return "once"


def _is_dense(x: torch.Tensor) -> bool:
    return x.numel() > 0 and x.numel() * x.element_size() == _span_bytes(x)


def _union(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for begin, end in sorted((x.data_ptr(), x.data_ptr() + _span_bytes(x)) for x in tensors):
        if runs and begin <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], end)
        else:
            runs.append((begin, end))
    return runs


def _merged(groups: Iterable[list[int]], tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Join small groups up to a size that is worth a block; a large one stays by itself."""
    small: list[int] = []
    nbytes = 0
    for members in groups:
        size = sum(tensors[i].nbytes for i in members)
        if size >= _COMPARED_TOGETHER:
            yield members
            continue
        if nbytes + size > _COMPARED_TOGETHER:
            yield sorted(small)
            small, nbytes = [], 0
        small += members
        nbytes += size
    if small:
        yield sorted(small)


def _batches(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    batch: list[_Group] = []
    nbytes = 0
    for group in groups:
        if group.how != "once" or group.layout.nbytes >= _PLACED_TOGETHER:
            yield [group]
            continue
        if nbytes + group.layout.nbytes > _PLACED_TOGETHER:
            yield batch
            batch, nbytes = [], 0
        batch.append(group)
        nbytes += _aligned(group.layout.nbytes)
    if batch:
        yield batch


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# -- tensors over blocks


def _tensors_over(
    groups: Sequence[_Group],
    places: dict[int, _Place],
    views: dict[int, memoryview],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    made: list[torch.Tensor] = [_NOTHING] * len(tensors)
    for group in groups:
        block, base = places[id(group)]
        view = views[id(block)]
        shared: dict[int, torch.Tensor] = {}
        for i, piece in zip(group.members, group.layout.pieces, strict=True):
            dtype = tensors[i].dtype
            if piece.alone:
                flat = torch.frombuffer(view, dtype=dtype, count=piece.span, offset=base + piece.offset)
                made[i] = flat if len(piece.shape) == 1 else flat.resize_(piece.shape)
            else:
                made[i] = _tensor_over(view, base, piece, dtype, shared)
    return made


_NOTHING = torch.empty(0)


def _tensor_over(
    view: memoryview, base: int, piece: Piece, dtype: torch.dtype, shared: dict[int, torch.Tensor]
) -> torch.Tensor:
    if piece.span == 0:
        return torch.empty_strided(piece.shape, piece.stride, dtype=dtype, device="cpu")
    whole = shared.get(piece.offset)
    if whole is None:
        whole = torch.frombuffer(view, dtype=torch.uint8, count=piece.nbytes, offset=base + piece.offset)
        shared[piece.offset] = whole
    made = torch.empty(0, dtype=dtype, device="cpu")
    return made.set_(whole.untyped_storage(), piece.start, piece.shape, piece.stride)


def _region_pair(view: memoryview, base: int, region: Region, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A region as bytes: where it goes, and where it lies on its device."""
    source = torch.empty(0, dtype=torch.uint8, device=owner.device)
    source.set_(owner.untyped_storage(), region.address - owner.untyped_storage().data_ptr(), (region.nbytes,), (1,))
    return torch.frombuffer(view, dtype=torch.uint8, count=region.nbytes, offset=base + region.offset), source
