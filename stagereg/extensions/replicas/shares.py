"""What ranks have alike each writes a share of, and stages no more than that.

In the first save and every ``replicas.verify_every``-th one ranks stage all that they have, and compare
(:mod:`.comparing`). From the next save on each stages its share alone: the bytes in order, cut at rows into as many
parts as there are ranks; small tensors stay whole. Every save carries which comparison its shares are of, so ranks
never put together shares of different ones; and a few elements of what is shared, which find out at once where ranks
have begun to train apart.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

import stagereg.checkpoint.state.entries as state_entries
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.state.entries import local_part
from stagereg.checkpoint.targets import Part, Question, ReplicaSave, ReplicaSharding
from stagereg.checkpoint.targets import Shards as WrittenShards
from stagereg.errors import RankMismatchError, name_ranks
from stagereg.extensions.replicas.comparing import (
    BufferNames,
    Compared,
    EntryContents,
    HeldTensor,
    Kind,
    compare,
    content_digests,
    contents,
    expect_alike,
)
from stagereg.kernel.memory import view_of

_COMPARING = -1  # in place of the number of a save in which ranks have compared
_LEAST_BYTES = 1 << 16  # a tensor of fewer is not cut
_SAMPLED = 16  # tensors, and elements of each
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
SAMPLES = "stagereg.samples"
"""The entry of a staged copy that goes into no checkpoint: elements of what ranks share, to be compared each time."""


class RowSlice(NamedTuple):
    """The slice that one rank stages of a replicated tensor."""

    holder: tuple[str | int, ...]  # the keys that lead to the mapping or list with the tensor, in its entry
    key: str | int  # of the tensor, there
    shape: torch.Size  # of the whole tensor
    dtype: torch.dtype  # of the tensor
    # the dimension, the first row and how many; ``None`` if it stages all of it, or nothing
    rows: tuple[int, int, int] | None
    part: Part | None  # where that lies in the whole; ``None`` if it stages nothing


class Shares(NamedTuple):
    """The slices of replicated tensors that one rank stages and writes."""

    found_in: int  # the number of the save in which ranks have compared that
    cuts: dict[Kind, list[RowSlice]]  # by kind
    parts: dict[str, Part | None]  # where it lies in the whole by dotted name; ``None`` for what others write
    first: dict[Kind, int]  # of the ranks that share a kind, the lowest
    names: frozenset[str] = frozenset()  # dotted names of all values of this rank that were compared, shared or not


class ReplicaShards(ReplicaSharding):
    """Decides in which saves ranks compare, and which shares of theirs they write in the others.

    That follows from how the two saves before have ended, which each rank knows when it writes, so all decide alike.
    The training thread may not know it yet when it stages: then it stages everything, and the copy is cut when it is
    written. One that knows stages its share.

    Args:
        every: they compare in every that many saves; 0 for the first alone.
        share: whether what is alike is shared.
    """

    def __init__(self, every: int, share: bool) -> None:
        self.share = share
        self._every = every
        self._numbers = itertools.count()
        self.buffers = BufferNames()
        self._known: dict[int, Shares | None] = {-2: None, -1: None}  # what goes after the last saves that have ended
        self._compared: tuple[int, frozenset[str]] = -1, frozenset()  # a save, and names of values compared in it

    def begin_save(self) -> ShardedSave:
        return ShardedSave(self, next(self._numbers))

    def note_compared(self, number: int, names: Iterable[str]) -> None:
        """Note the dotted names of the values of all ranks that are compared in a save. On rank 0."""
        self._compared = number, frozenset(names)

    def expect_not_compared(self, found_in: int, names: Iterable[tuple[int, str]]) -> None:
        """Raise ``RankMismatchError`` if a value that is new on a rank was compared among other ranks. On rank 0.

        Args:
            found_in: the number of the save in which the ranks compared.
            names: ranks, and the dotted names of values that are new there.
        """
        number, compared = self._compared
        for rank, name in names:
            if number == found_in and name in compared:
                raise RankMismatchError(
                    f"{name!r} is new on {name_ranks([rank])}, and other ranks have compared their values of that name "
                    "before. Nothing was written. Save again: one of the next two saves compares all values."
                )

    def end_save(self, number: int, found: Shares | None = None, failed: bool = False) -> None:
        """Note how a save has ended, once all ranks know it, and the shares found in it. On the background thread.

        After one that has failed nothing is shared that was found before.
        """
        after = None if failed else found or self._known.get(number - 1)
        self._known = {number - 1: self._known.get(number - 1), number: after}

    def cut(self, number: int, entries: Mapping[str, Any]) -> tuple[dict[str, Any], Shares] | None:
        """Return the slices of entries that this rank writes in a save, and its shares.

        Returns ``None`` if it is all of it: ranks compare in this save, or, on the training thread, that is not known.
        """
        known = self._known
        if self._every > 0 and number % self._every == 0:
            return None
        # What went before the save before this one goes first: a rank may have staged when it knew no more.
        for before in (number - 2, number - 1):
            if before not in known:
                return None
            shares = known[before]
            if shares is not None and (found := cut(entries, shares)) is not None:
                return found, shares
        return None


class _Post(NamedTuple):
    """What a rank sends to rank 0 of what it has."""

    found_in: int  # the number of the save in which ranks have compared what it writes
    samples: Mapping[str, int] = {}
    differing: Sequence[EntryContents] = ()  # what is new, or differs between ranks
    digests: Mapping[tuple[str, bytes], bytes] = {}  # of all that it has, if ranks compare


class ShardedSave(ReplicaSave):
    """One save: this rank's shards of what the ranks have compared, or the comparison."""

    def __init__(self, book: ReplicaShards, number: int) -> None:
        super().__init__()
        self.number, self._book = number, book
        # Written by the training thread.
        self._buffers: Collection[str] | None = None  # tensors in which ranks may differ; ``None``: values are stale
        self._replicated: Collection[str] = ()  # entries of which ranks may have a share
        # Written by the training thread if it knows them when it stages, otherwise by the thread of the first target.
        self._shares: Shares | None = None
        # Written by the thread of the first target.
        self._compares = False
        self._samples: dict[str, int] = {}
        self._contents: dict[Kind, EntryContents] = {}

    def stage(self, state: Mapping[str, Any], captured: dict[str, Any], follows: bool) -> dict[str, Any]:
        if not follows:
            self._buffers = self._book.buffers.find(state, captured)
        if (found := self._book.cut(self.number, captured)) is not None:
            captured, self._shares = found
        elif not follows:
            self._replicated = state_entries.replicated(state) if self._book.share else ()
        return captured

    def cut(self, copy: dict[str, Any]) -> dict[str, Any]:
        if self._shares is None:
            found = self._book.cut(self.number, copy)
            self._compares = found is None
            copy, self._shares = found or (copy, None)
        self._samples = sampled(copy)
        self._entries = {name: value for name, value in copy.items() if name != SAMPLES}
        return self._entries

    def post(self, objects: Collection[str]) -> WrittenShards | Question:
        # Values that are new since the ranks compared are compared in each save, and not shared.
        known = () if self._shares is None else self._shares.names
        if self._buffers is not None:
            self._contents = contents(self._entries, self._buffers, objects, known)
        if self._shares is not None:
            post = _Post(self._shares.found_in, self._samples, [*self._contents.values()])
            return WrittenShards(self._entries, self._shares.parts, post)
        names = {kind: [piece.name for piece in each.pieces] for kind, each in self._contents.items()}
        return Question(_Post(_COMPARING, digests=content_digests(self._contents)), names)

    def answer(self, posts: Sequence[_Post], lasting: Sequence[Mapping[Kind, Sequence[str]]]) -> Sequence[Compared]:
        self._book.note_compared(self.number, (name for held in lasting for each in held.values() for name in each))
        return compare([each.digests for each in posts], lasting)

    def take(self, answer: Compared) -> WrittenShards:
        self._shares = shares(self.number, self._contents, answer, self._replicated)
        if (found := cut(self._entries, self._shares)) is None:  # a container has other keys than texts
            self._shares, found = self._shares._replace(cuts={}, parts={}, first={}), self._entries
        self._entries = {name: value for name, value in found.items() if name != SAMPLES}
        post = _Post(self.number, differing=[self._contents[kind] for kind in answer.differing])
        return WrittenShards(self._entries, self._shares.parts, post)

    def check(self, posts: Sequence[_Post], order: Sequence[int]) -> None:
        if len({each.found_in for each in posts}) > 1:
            raise RankMismatchError(
                "The ranks disagree on which of them writes which part of the shared state. Nothing was written. Save "
                "again: one of the next two saves compares all values."
            )
        if not self._compares:
            new = ((rank, piece.name) for rank in order for x in posts[rank].differing for piece in x.pieces)
            self._book.expect_not_compared(posts[0].found_in, new)
        expect_alike({rank: posts[rank].differing for rank in order})
        expect_samples_alike([each.samples for each in posts])

    def ended(self, error: BaseException | None) -> None:
        found = self._shares if self._compares and error is None else None
        self._book.end_save(self.number, found, failed=error is not None)


def cut(entries: Mapping[str, Any], shares: Shares) -> dict[str, Any] | None:
    """Return entries with shares instead of replicated tensors, and with samples of these tensors.

    Returns ``None`` if a tensor is not there any more, or is another one.
    """
    found = dict(entries)
    for (name, _), cuts in shares.cuts.items():
        if (staged := _staged(found.get(name), cuts)) is None:
            return None
        found[name] = staged
    if shares.cuts:
        found[SAMPLES] = {
            f"{first}.{kind[1]:d}.{kind[0]}": _sample(entries[kind[0]], shares.cuts[kind])
            for kind, first in shares.first.items()
        }
    return found


def _name(kind: Kind, cut: RowSlice) -> str:
    return ".".join(map(str, (kind[0], *cut.holder, cut.key)))


def _local(value: Any, cut: RowSlice) -> torch.Tensor:
    """Return what this rank has of a tensor, out of its entry."""
    return local_part(functools.reduce(lambda at, step: at[step], (*cut.holder, cut.key), value)).detach()


def _sample(value: Any, cuts: Sequence[RowSlice]) -> list[torch.Tensor]:
    """Return some elements of some tensors, the same on all ranks and in each save."""
    found = []
    for each in cuts[:: max(1, len(cuts) // _SAMPLED)]:
        x = _local(value, each)
        if x.is_contiguous():
            found.append(x.view(-1)[x.numel() // 2 :][:_SAMPLED])
    return found


def _staged(value: Any, cuts: Sequence[RowSlice]) -> Any:
    """Return an entry with shares in it; ``None`` if a tensor is not there, or is another one."""
    copies: dict[tuple[str | int, ...], Any] = {(): copy.copy(value)}
    try:
        for holder, key, shape, dtype, rows, part in cuts:
            there = copies.get(holder) or _copied(copies, holder)
            x = there[key]
            if x.shape != shape or x.dtype is not dtype:
                return None
            if part is None:
                there[key] = _NOTHING
            elif rows is not None:
                there[key] = local_part(x).detach().narrow(*rows)
            elif isinstance(x, DTensor):
                there[key] = x.to_local()
    except (AttributeError, LookupError, TypeError):
        return None
    return copies[()]


def _copied(copies: dict[tuple[str | int, ...], Any], path: tuple[str | int, ...]) -> Any:
    if path not in copies:
        parent = _copied(copies, path[:-1])
        copies[path] = parent[path[-1]] = copy.copy(parent[path[-1]])
    return copies[path]


def sampled(copied: Mapping[str, Any]) -> dict[str, int]:
    """Return a checksum of what was sampled of each entry, by a name that only ranks that share it have."""
    return {
        name: functools.reduce(lambda crc, x: crc32(view_of(x.cpu().contiguous()), crc), each, 0)
        for name, each in copied.get(SAMPLES, {}).items()
    }


def expect_samples_alike(ranks: Sequence[Mapping[str, int]]) -> None:
    """Raise ``CheckpointError`` if ranks that share an entry do not have the same of it any more."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(ranks):
        for name, crc in each.items():
            other, expected = seen.setdefault(name, (rank, crc))
            if crc != expected:
                raise RankMismatchError(
                    f"{name.split('.', 2)[2]!r} was the same on {name_ranks([other, rank])}, so each staged a share, "
                    "and is not any more. Replicas of one model have drifted apart; or, if each rank trains a model of "
                    "its own, mark it so: stagereg.per_rank(value)."
                )


def shares(number: int, own: Mapping[Kind, EntryContents], compared: Compared, of: Collection[str]) -> Shares:
    """Return this rank's shares of the entries ``of`` which others have as well, as found in the save ``number``."""
    names = frozenset(piece.name for each in own.values() for piece in each.pieces)
    found = Shares(number, {}, {}, {}, names)
    for kind, (first, ranks, at) in compared.places.items():
        if ranks == 1 or kind[0] not in of:
            continue
        pieces = [piece._replace(nbytes=0) if piece.name in compared.mixed else piece for piece in own[kind].pieces]
        each = zip(pieces, _cuts(pieces, ranks, at), strict=True)
        kept = [*{piece.name: cut for piece, cut in each if piece.name not in compared.mixed}.values()]
        if kept:
            found.cuts[kind], found.first[kind] = kept, first
            found.parts.update({_name(kind, each): each.part for each in kept})
    return found


def _cuts(pieces: Sequence[HeldTensor], count: int, index: int) -> list[RowSlice]:
    """Return the share of one of ``count`` ranks.

    It depends on the averages of sizes, so ranks that have other parts of some tensors cut the rest at the same rows.
    """
    sizes = [piece.nbytes if piece.tied == i else 0 for i, piece in enumerate(pieces)]
    # The last rank has what is at the end, also if that is empty.
    begin, end = (sum(sizes) * each // count + (each == count) for each in (index, index + 1))
    rows: list[tuple[int, int, int] | None] = []
    cuts: list[RowSlice] = []
    at = 0
    for i, piece in enumerate(pieces):
        rows.append(rows[piece.tied] if piece.tied != i else _rows(piece.shape, piece.nbytes, begin - at, end - at))
        at += sizes[i]
        kind = (piece.path[1:-1], piece.path[-1], piece.part.whole, piece.dtype)
        if (mine := rows[i]) is None:
            cuts.append(RowSlice(*kind, None, None))
            continue
        offset = list(piece.part.offset)
        if offset:
            offset[mine[0]] += mine[1]
        is_all = not piece.shape or mine[2] == piece.shape[mine[0]]
        cuts.append(RowSlice(*kind, None if is_all else mine, Part(torch.Size(offset), piece.part.whole)))
    return cuts


def _rows(shape: torch.Size, nbytes: int, begin: int, end: int) -> tuple[int, int, int] | None:
    """Return the rows of a tensor between two bytes of it, the nearest ones; of a small one all, if it begins there."""
    dim = next((i for i, size in enumerate(shape) if size > 1), None)
    if dim is None or nbytes < _LEAST_BYTES or not shape.numel():
        return (0, 0, shape[0] if shape else 1) if begin <= 0 < end else None
    rows = shape[dim]
    first, last = (min(max(0, round(byte * rows / nbytes)), rows) for byte in (begin, end))
    return (dim, first, last - first) if first < last else None
