"""Shard replicated tensors: each rank stages and writes only its shard.

In the first save and in every ``replicas.verify_every``-th save, the ranks stage all their tensors and compare them
(:mod:`.comparing`). In the other saves, each rank stages only its shard: about an equal portion of the bytes, split at
rows of tensors; small tensors stay whole. With its shard, a rank sends the number of the save with the comparison, so
that shards of different comparisons are never merged. It also sends checksums of a few elements of the replicated
tensors, so that each save detects whether replicas have diverged.
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
import stagereg.extensions.replicas.comparing as comparing
from stagereg.base.pages import view_of
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.state.entries import local_part
from stagereg.checkpoint.targets import Part, Question, ReplicaSave, ReplicaSharding
from stagereg.checkpoint.targets import Shards as WrittenShards
from stagereg.errors import RankMismatchError, name_ranks
from stagereg.extensions.replicas.comparing import Compared, EntryContents, HeldTensor, Kind, compare

_COMPARING = -1  # marks a save in which ranks compare, instead of the number of an earlier comparison
_LEAST_BYTES = 1 << 16  # smaller tensors are not split
_SAMPLED = 16  # number of sampled tensors, and of sampled elements of each tensor
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
SAMPLES = "stagereg.samples"
"""The entry of a staged copy with samples of replicated tensors, which each save compares and does not write."""


class RowSlice(NamedTuple):
    """The slice of a replicated tensor that one rank stages."""

    holder: tuple[str | int, ...]  # the keys that lead from the entry to the mapping or list with the tensor
    key: str | int  # the key of the tensor in its holder
    shape: torch.Size  # the shape of the whole tensor
    dtype: torch.dtype
    # the dimension, the first row and the number of rows; ``None`` if the rank stages all rows or no rows
    rows: tuple[int, int, int] | None
    part: Part | None  # the position of the slice in the whole tensor; ``None`` if the rank stages nothing


class Shares(NamedTuple):
    """The slices of replicated tensors that one rank stages and writes."""

    found_in: int  # the number of the save in which the ranks compared
    cuts: dict[Kind, list[RowSlice]]  # slices by kind
    parts: dict[str, Part | None]  # position in the whole tensor by dotted name; ``None`` if other ranks write it
    first: dict[Kind, int]  # the lowest rank of the group of replicas, by kind
    names: frozenset[str] = frozenset()  # dotted names of all values of this rank that were compared


class ReplicaShards(ReplicaSharding):
    """Decides in which saves the ranks compare tensors, and which shards they write in the other saves.

    The decision depends on the outcomes of the two previous saves. Both saves have ended on all ranks before a rank
    writes, so all ranks decide identically. A rank that already knows its shard while it stages copies only the shard.
    Otherwise it stages the whole state, and slices the copy before the write.

    ``every``: the ranks compare tensors in every ``every``-th save; with 0, only in the first save. ``share``: whether
    replicated tensors are sharded.
    """

    def __init__(self, every: int, share: bool) -> None:
        self.share = share
        self._every = every
        self._numbers = itertools.count()
        self._buffers: tuple[dict[str, Any], Collection[str]] | None = None  # keys of the entries, and their buffers
        self._known: dict[int, Shares | None] = {-2: None, -1: None}  # number of a save -> shards known after this save
        self._compared: tuple[int, frozenset[str]] = -1, frozenset()  # last save with a comparison; names compared

    def begin_save(self) -> ShardedSave:
        return ShardedSave(self, next(self._numbers))

    def buffers(self, state: Mapping[str, Any], captured: Mapping[str, Any]) -> Collection[str]:
        """Return the names of the state's buffers. Searches again only if the keys of an entry have changed."""
        keys = {name: tuple(value) for name, value in captured.items() if isinstance(value, Mapping)}
        if self._buffers is None or self._buffers[0] != keys:
            self._buffers = keys, state_entries.buffers(state)
        return self._buffers[1]

    def note_compared(self, number: int, names: Iterable[str]) -> None:
        """Record the dotted names of all values that the ranks compare in a save. Called on rank 0."""
        self._compared = number, frozenset(names)

    def expect_not_compared(self, found_in: int, names: Iterable[tuple[int, str]]) -> None:
        """Raise ``RankMismatchError`` if other ranks already compared a value that is new on a rank. Called on rank 0.

        ``found_in``: the number of the save in which the ranks compared. ``names``: pairs of a rank and the dotted name
        of a value that is new on the rank.
        """
        number, compared = self._compared
        for rank, name in names:
            if number == found_in and name in compared:
                raise RankMismatchError(
                    f"{name!r} is new on {name_ranks([rank])}, but other ranks compared their values of that name in "
                    "an earlier save. Nothing was written. Save again: within two saves, all values are compared again."
                )

    def end_save(self, number: int, found: Shares | None = None, failed: bool = False) -> None:
        """Record that a save ended on all ranks, and the shards found in it. Called on a background thread.

        After a failed save, shards of earlier saves are no longer used.
        """
        after = None if failed else found or self._known.get(number - 1)
        self._known = {number - 1: self._known.get(number - 1), number: after}

    def cut(self, number: int, entries: Mapping[str, Any]) -> tuple[dict[str, Any], Shares] | None:
        """Return the entries, with replicated tensors reduced to this rank's slices, and the rank's shards.

        Returns ``None`` if the ranks compare tensors in this save, or if no earlier comparison can be used (yet).
        """
        known = self._known
        if self._every > 0 and number % self._every == 0:
            return None
        # Try the older result first: another rank may have had only this result when it staged.
        for before in (number - 2, number - 1):
            if before not in known:
                return None
            shares = known[before]
            if shares is not None and (found := cut(entries, shares)) is not None:
                return found, shares
        return None


class _Post(NamedTuple):
    """The message about its tensors that a rank sends to rank 0."""

    found_in: int  # the number of the save in which the ranks compared the tensors
    samples: Mapping[str, int] = {}
    differing: Sequence[EntryContents] = ()  # tensors that are new, or differ between ranks
    digests: Mapping[tuple[str, bytes], bytes] = {}  # digests of all tensors, if the ranks compare in this save


class ShardedSave(ReplicaSave):
    """One save, in which the ranks either compare all tensors or write the shards that an earlier save has found."""

    def __init__(self, book: ReplicaShards, number: int) -> None:
        super().__init__()
        self.number, self._book = number, book
        # Written by the training thread.
        self._buffers: Collection[str] | None = None  # tensors that may differ; ``None`` if values are stale
        self._replicated: Collection[str] = ()  # entries that may be sharded
        # Written by the training thread if it has the shards when it stages, otherwise by the first target's thread.
        self._shares: Shares | None = None
        # Written by the thread that writes to the first target, for example the checkpoint directory.
        self._compares = False
        self._samples: dict[str, int] = {}
        self._contents: dict[Kind, EntryContents] = {}

    def stage(self, state: Mapping[str, Any], captured: dict[str, Any], follows: bool) -> dict[str, Any]:
        if not follows:
            self._buffers = self._book.buffers(state, captured)
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
        # Values that are new since the last comparison are not sharded, so the ranks compare them in each save.
        known = () if self._shares is None else self._shares.names
        if self._buffers is not None:
            self._contents = comparing.contents(self._entries, self._buffers, objects, known)
        if self._shares is not None:
            post = _Post(self._shares.found_in, self._samples, [*self._contents.values()])
            return WrittenShards(self._entries, self._shares.parts, post)
        names = {kind: [piece.name for piece in each.pieces] for kind, each in self._contents.items()}
        return Question(_Post(_COMPARING, digests=comparing.content_digests(self._contents)), names)

    def answer(self, posts: Sequence[_Post], lasting: Sequence[Mapping[Kind, Sequence[str]]]) -> Sequence[Compared]:
        self._book.note_compared(self.number, (name for held in lasting for each in held.values() for name in each))
        return compare([each.digests for each in posts], lasting)

    def take(self, answer: Compared) -> WrittenShards:
        self._shares = shares(self.number, self._contents, answer, self._replicated)
        if (found := cut(self._entries, self._shares)) is None:  # the state has a container with non-string keys
            self._shares, found = self._shares._replace(cuts={}, parts={}, first={}), self._entries
        self._entries = {name: value for name, value in found.items() if name != SAMPLES}
        post = _Post(self.number, differing=[self._contents[kind] for kind in answer.differing])
        return WrittenShards(self._entries, self._shares.parts, post)

    def check(self, posts: Sequence[_Post], order: Sequence[int]) -> None:
        if len({each.found_in for each in posts}) > 1:
            raise RankMismatchError(
                "The ranks disagree on which rank writes which shard of the replicated state. Nothing was written. "
                "Save again: within two saves, all values are compared again."
            )
        if not self._compares:
            new = ((rank, piece.name) for rank in order for x in posts[rank].differing for piece in x.pieces)
            self._book.expect_not_compared(posts[0].found_in, new)
        comparing.expect_alike({rank: posts[rank].differing for rank in order})
        expect_samples_alike([each.samples for each in posts])

    def ended(self, error: BaseException | None) -> None:
        found = self._shares if self._compares and error is None else None
        self._book.end_save(self.number, found, failed=error is not None)


def cut(entries: Mapping[str, Any], shares: Shares) -> dict[str, Any] | None:
    """Return the entries with slices instead of replicated tensors, and with samples of these tensors.

    Returns ``None`` if a tensor is missing, or if its shape or dtype has changed since the comparison.
    """
    found = dict(entries)
    for (name, _), cuts in shares.cuts.items():
        if (staged := _staged(found.get(name), cuts)) is None:
            return None
        found[name] = staged
    if shares.cuts:
        kinds = {f"{first}.{kind[1]:d}.{kind[0]}": kind for kind, first in shares.first.items()}
        found[SAMPLES] = {name: _sample(entries[kind[0]], shares.cuts[kind]) for name, kind in kinds.items()}
    return found


def _sample(value: Any, cuts: Sequence[RowSlice]) -> list[torch.Tensor]:
    """Return a few elements of a few tensors of an entry. All ranks select the same elements in each save."""
    found = []
    for each in cuts[:: max(1, len(cuts) // _SAMPLED)]:
        x = local_part(functools.reduce(lambda at, step: at[step], (*each.holder, each.key), value)).detach()
        if x.is_contiguous():
            found.append(x.view(-1)[x.numel() // 2 :][:_SAMPLED])
    return found


def _staged(value: Any, cuts: Sequence[RowSlice]) -> Any:
    """Return an entry with slices instead of tensors; ``None`` if a tensor is missing or its shape or dtype differs."""
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
    """Return the checksum of each entry's samples, by a key that is unique to the entry and its group of replicas."""
    return {
        name: functools.reduce(lambda crc, x: crc32(view_of(x.cpu().contiguous()), crc), each, 0)
        for name, each in copied.get(SAMPLES, {}).items()
    }


def expect_samples_alike(ranks: Sequence[Mapping[str, int]]) -> None:
    """Raise ``RankMismatchError`` if the samples of a replicated entry differ between ranks."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(ranks):
        for name, crc in each.items():
            other, expected = seen.setdefault(name, (rank, crc))
            if crc != expected:
                raise RankMismatchError(
                    f"{name.split('.', 2)[2]!r} was identical on {name_ranks([other, rank])}, so each rank staged a "
                    "shard, but now differs. Replicas of one model must be identical: find out why they diverged. If "
                    "each rank trains its own model, use stagereg.per_rank(value)."
                )


def shares(number: int, own: Mapping[Kind, EntryContents], compared: Compared, of: Collection[str]) -> Shares:
    """Return this rank's shards of the replicated entries in ``of``, found by the comparison in save ``number``."""
    found = Shares(number, {}, {}, {}, frozenset(piece.name for each in own.values() for piece in each.pieces))
    for kind, (first, ranks, at) in compared.places.items():
        if ranks == 1 or kind[0] not in of:
            continue
        pieces = [piece._replace(nbytes=0) if piece.name in compared.mixed else piece for piece in own[kind].pieces]
        each = zip(pieces, _cuts(pieces, ranks, at), strict=True)
        kept = [*{piece.name: cut for piece, cut in each if piece.name not in compared.mixed}.values()]
        if kept:
            found.cuts[kind], found.first[kind] = kept, first
            found.parts.update({".".join(map(str, (kind[0], *cut.holder, cut.key))): cut.part for cut in kept})
    return found


def _cuts(pieces: Sequence[HeldTensor], count: int, index: int) -> list[RowSlice]:
    """Divide the tensors among ``count`` ranks, and return the slices of rank ``index``.

    Uses average sizes, so that ranks with different parts of some tensors split the other tensors at the same rows.
    """
    sizes = [piece.nbytes if piece.tied == i else 0 for i, piece in enumerate(pieces)]
    # The end of the last rank is 1 byte larger, so that it includes empty tensors at the end.
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
    """Return the rows nearest to the byte range ``begin``:``end``. A small tensor that starts in it stays whole."""
    dim = next((i for i, size in enumerate(shape) if size > 1), None)
    if dim is None or nbytes < _LEAST_BYTES or not shape.numel():
        return (0, 0, shape[0] if shape else 1) if begin <= 0 < end else None
    rows = shape[dim]
    first, last = (min(max(0, round(byte * rows / nbytes)), rows) for byte in (begin, end))
    return (dim, first, last - first) if first < last else None
