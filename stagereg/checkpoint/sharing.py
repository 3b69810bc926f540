"""What several ranks have alike: found by comparing, and then each stages and writes a share of it.

Under DDP all ranks have the same parameters and optimizer state, under HSDP those that hold the same shards. Nothing
declares that, so a save in which ranks compare, the first one and every ``verify_replicas``-th, has checksums of the
bytes of each tensor. What has one name and is not alike is refused: of two values one would be lost without a word.
Ranks whose entry is alike are a group of replicas, and from the second save after that on each of them has a share:
the bytes of the entry in order, cut at rows into as many parts as there are ranks. Large tensors are cut, small ones
stay whole. Buffers are no part of it, since replicas may drift there (running statistics): of them the lowest rank's is
stored. Every save carries which comparison its shares are of, so ranks never put together shares of different ones; and
a few elements of what is shared from each rank, which find out at once where ranks have begun to train apart.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.encoding import walk
from stagereg.errors import CheckpointError, name_ranks
from stagereg.kernel.memory import view_of

__all__ = [
    "SAMPLES",
    "EntryContents",
    "Part",
    "Place",
    "Replicas",
    "Shares",
    "alike",
    "contents",
    "digest",
    "expect_alike",
    "expect_samples_alike",
    "sampled",
    "shares",
]

T = TypeVar("T", bound=Hashable)

_LEAST_BYTES = 1 << 16  # a tensor of fewer is not cut
_SHOWN = 10
_SAMPLED = 16  # tensors, and elements of each
_NOTHING = torch.empty(0)
_OBJECTS = "stagereg.objects"
SAMPLES = "stagereg.samples"
"""The entry of a staged copy that goes into no checkpoint: elements of what ranks share, to be compared each time."""


class Part(NamedTuple):
    """Where what a rank has of a tensor lies in the whole."""

    offset: torch.Size
    whole: torch.Size


class HeldTensor(NamedTuple):
    """What a rank has of one tensor, but for its bytes."""

    path: tuple[str | int, ...]
    part: Part
    shape: torch.Size
    dtype: torch.dtype
    tied: int  # to the piece with that number; its own number if to none

    @property
    def name(self) -> str:
        """Its dotted name."""
        return ".".join(map(str, self.path))

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all of the tensor."""
        return self.shape == self.part.whole


class EntryContents(NamedTuple):
    """What a rank has of one entry.

    Attributes:
        pieces: of its tensors.
        checksums: of their bytes, in the same order.
    """

    pieces: list[HeldTensor]
    checksums: list[int]

    @property
    def plain(self) -> EntryContents:
        """What the rank has as a whole."""
        pairs = [pair for pair in zip(self.pieces, self.checksums, strict=True) if pair[0].is_whole]
        return EntryContents([piece for piece, _ in pairs], [checksum for _, checksum in pairs])

    def digests(self, name: str) -> dict[tuple[str, bytes], bytes]:
        """Return the digests in which replicas must agree, by the name of the entry and the layout.

        Of the tensors that this rank has whole, with an empty layout; and of all that it has.
        """
        found, plain = {(name, digest(self.pieces)): digest(self)}, self.plain
        return found | {(name, b""): digest(plain)} if plain.pieces else found


class Cut(NamedTuple):
    """What one rank stages of a tensor that its replicas have as well.

    Attributes:
        holder: the keys that lead to the mapping or list with the tensor, in its entry.
        key: of the tensor, there.
        shape: of the whole tensor.
        dtype: of the tensor.
        rows: the dimension, the first row and how many; ``None`` if it stages all of it, or nothing.
        part: where that lies in the whole; ``None`` if it stages nothing.
    """

    holder: tuple[str | int, ...]
    key: str | int
    shape: torch.Size
    dtype: torch.dtype
    rows: tuple[int, int, int] | None
    part: Part | None


class Shares(NamedTuple):
    """What one rank stages of each entry.

    Attributes:
        cuts: by the names of entries.
        parts: where it lies in the whole by dotted name; ``None`` for what others stage.
        first: of the ranks that share an entry, the lowest.
    """

    cuts: dict[str, list[Cut]]
    parts: dict[str, Part | None]
    first: dict[str, int]


class Place(NamedTuple):
    """Of a rank among those that have the same of an entry: their first, how many there are, and its number."""

    first: int
    ranks: int
    number: int


class Replicas:
    """Decides in which saves ranks compare, and what this rank stages in the others. For the training thread.

    Args:
        every: they compare in every that many saves; 0 for the first alone.
        share: whether what is alike is shared.
    """

    def __init__(self, every: int, share: bool) -> None:
        self._every, self._share = every, share
        self._saves = 0
        self._compared = -1  # the last save that did
        self._anew = False  # whether the next save compares
        self._failed = [-2]  # the last saves that have; at first the next one compares as after a failure
        self._agreed: list[tuple[int, Shares]] = []  # the number of a save, and what came of it

    def begin(self) -> int:
        """Return the number of the save that begins."""
        number, self._saves = self._saves, self._saves + 1
        return number

    def compares(self, number: int) -> bool:
        """Whether ranks compare in a save that begins; once the second one before it is over."""
        anew = self._anew or self._compared < self._failed_before(number) + 2
        if anew or (self._every > 0 and number % self._every == 0):
            self._compared, self._anew = number, False
        return self._compared == number

    def agree(self, number: int, shares: Shares) -> None:
        """Note what the comparison in a save has come to. On the background thread."""
        self._agreed = [*self._agreed[-1:], (number, shares)] if self._share else []

    def forget(self, number: int) -> None:
        """Share nothing, and compare anew, once all ranks know that this save has failed. On the background thread."""
        self._failed = [*self._failed[-2:], number]

    def _failed_before(self, number: int) -> int:
        # A save is over when the second one after it begins, on each rank; so all of them know what came of it.
        return max((each for each in self._failed if each + 2 <= number), default=-2)

    def cut(self, number: int, entries: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part | None], int | None]:
        """Return entries with this rank's shares in place of what its replicas have as well.

        Returns:
            The entries; where each share lies in the whole, by dotted name, ``None`` for what others have; and the
            number of the comparison, ``None`` if nothing is shared.
        """
        failed = self._failed_before(number)
        known = [(of, shares) for of, shares in self._agreed if failed < of <= number - 2]
        if not known:
            return dict(entries), {}, None
        of, shares = known[-1]
        found = {**entries, **{name: _staged(entries.get(name), cuts) for name, cuts in shares.cuts.items()}}
        if any(found[name] is None for name in shares.cuts):  # as by an optimizer's first step
            self._anew = True
            return dict(entries), {}, None
        found[SAMPLES] = {
            f"{shares.first[name]}.{name}": _sample(entries[name], shares.cuts[name]) for name in shares.cuts
        }
        return found, shares.parts, of


def _sample(value: Any, cuts: Sequence[Cut]) -> list[torch.Tensor]:
    """Return some elements of some tensors, the same on all ranks and in each save."""
    found = []
    for holder, key, *_ in cuts[:: max(1, len(cuts) // _SAMPLED)]:
        x = functools.reduce(lambda at, step: at[step], (*holder, key), value)
        x = (x.to_local() if isinstance(x, DTensor) else x).detach()
        if x.is_contiguous():
            found.append(x.view(-1)[x.numel() // 2 :][:_SAMPLED])
    return found


def _staged(value: Any, cuts: Sequence[Cut]) -> Any:
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
                there[key] = (x.to_local() if isinstance(x, DTensor) else x).detach().narrow(*rows)
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


# -- comparing, on the background thread


def contents(copied: Mapping[str, Any], buffers: Collection[str], objects: Collection[str]) -> dict[str, EntryContents]:
    """Return what this rank has of each entry of a staged copy, without ``buffers`` and what is no dense tensor.

    A tensor whose name ends like a buffer's, as in a moving average of the module's state, counts as a buffer.
    ``objects`` that JSON cannot carry are compared under a name of their own, as empty tensors with a checksum.
    """
    found: dict[str, EntryContents] = {}
    others = EntryContents([], [])
    for name, value in copied.items():
        pieces: list[HeldTensor] = []
        checksums: list[int] = []
        first: dict[tuple[int, torch.Size], int] = {}
        for path, x in walk(value, name):
            dotted = ".".join(map(str, path))
            if dotted in objects:
                nothing = torch.Size([0])
                others.pieces.append(HeldTensor(path, Part(nothing, nothing), nothing, torch.uint8, len(others.pieces)))
                others.checksums.append(_checksum_of_object(x))
                continue
            part = _part(x) if isinstance(x, torch.Tensor) else None
            if part is None or _ends_like_one(dotted, buffers):
                continue
            local = (x.to_local() if isinstance(x, DTensor) else x).detach()
            tied = first.setdefault((local.data_ptr(), local.shape), len(pieces)) if local.numel() else len(pieces)
            pieces.append(HeldTensor(path, part, local.shape, local.dtype, tied))
            checksums.append(_checksum(x))
        if pieces:
            found[name] = EntryContents(pieces, checksums)
    return {**found, _OBJECTS: others} if others.pieces else found


def _ends_like_one(dotted: str, buffers: Collection[str]) -> bool:
    parts = dotted.split(".")
    return any(".".join(parts[i:]) in buffers for i in range(len(parts) - 1))


def _checksum_of_object(value: Any) -> int:
    """Return the checksum of a tuple and the like; 0 for what does not show its value as text."""
    leaves, structure = pytree.tree_flatten(value)
    text = repr((structure, list(map(_text, leaves))))
    return 0 if " at 0x" in text else crc32(text.encode())


def _text(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {x.shape} {_checksum(x) if _part(x) else 0}"
    return repr(sorted(map(repr, x))) if isinstance(x, (set, frozenset)) else repr(x)  # each process has its own order


def _checksum(x: torch.Tensor) -> int:
    local = (x.to_local() if isinstance(x, DTensor) else x).detach()
    return crc32(view_of(local.cpu().contiguous())) if local.numel() else 0


def digest(what: object) -> bytes:
    """Return what two values have in common only if their texts are the same."""
    return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()


def _part(x: torch.Tensor) -> Part | None:
    """Return where in the whole this rank's part of a tensor lies; ``None`` if it is not one dense part."""
    if isinstance(x, DTensor):
        chunks = x.__create_chunk_list__()
        return Part(chunks[0].offsets, x.shape) if len(chunks) == 1 else None
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_quantized
    return Part(torch.Size([0] * x.ndim), x.shape) if plain else None


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
                raise CheckpointError(
                    f"{name.partition('.')[2]!r} was the same on {name_ranks([other, rank])}, so each staged a share, "
                    "and is not any more. Replicas of one model have drifted apart; or, if each rank trains a model of "
                    "its own, mark it so: stagereg.per_rank(value)."
                )


def alike(digests: Sequence[Mapping[T, bytes]], order: Iterable[int]) -> dict[tuple[T, bytes], list[int]]:
    """Return the ranks that have the same under one name, in order, by name and digest."""
    found: dict[tuple[T, bytes], list[int]] = {}
    for rank in order:
        for entry in digests[rank].items():
            found.setdefault(entry, []).append(rank)
    return found


def expect_alike(tables: Mapping[int, Sequence[EntryContents]]) -> None:
    """Raise ``CheckpointError`` if ranks have different values of one name.

    Args:
        tables: what each rank has sent, or some.
    """
    seen: dict[tuple[str, torch.Size], tuple[int, Any]] = {}
    wrong: list[str] = []
    for rank, of_rank in tables.items():
        for piece, checksum in (pair for each in of_rank for pair in zip(each.pieces, each.checksums, strict=True)):
            what = (piece.part.whole, piece.shape, piece.dtype, checksum)
            other, there = seen.setdefault((piece.name, piece.part.offset), (rank, what))
            if there != what:
                same_kind = there[:3] == what[:3]
                kind = "other values" if same_kind else f"{_kind(*what[1:3])}, not {_kind(*there[1:3])}"
                wrong.append(f"{piece.name!r} is not the same on {name_ranks([other, rank])} ({kind})")
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"{'; '.join(wrong[:_SHOWN])}{more}. Of values with one name a checkpoint has one. If they are replicas "
            "of a model, they have drifted apart; parts of one tensor have to be a DTensor; and what each rank has for "
            "itself is marked stagereg.per_rank(value), or has a name of its own."
        )


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {[*shape]}"


def shares(own: Mapping[str, EntryContents], places: Mapping[str, Place]) -> Shares:
    """Return this rank's shares of the entries that others have as well."""
    found = Shares({}, {}, {})
    for name, (first, ranks, number) in places.items():
        if ranks > 1:
            pieces = own[name].pieces
            found.cuts[name] = _cuts(pieces, ranks, number)
            found.first[name] = first
            found.parts.update({piece.name: cut.part for piece, cut in zip(pieces, found.cuts[name], strict=True)})
    return found


def _cuts(pieces: Sequence[HeldTensor], count: int, index: int) -> list[Cut]:
    """Return the share of one of ``count`` ranks."""
    sizes = [_nbytes(piece) if piece.tied == i else 0 for i, piece in enumerate(pieces)]
    begin, end = (sum(sizes) * each // count for each in (index, index + 1))
    rows: list[tuple[int, int, int] | None] = []
    cuts: list[Cut] = []
    at = 0
    for i, piece in enumerate(pieces):
        rows.append(rows[piece.tied] if piece.tied != i else _rows(piece.shape, _nbytes(piece), begin - at, end - at))
        at += sizes[i]
        kind = (piece.path[1:-1], piece.path[-1], piece.part.whole, piece.dtype)
        if (mine := rows[i]) is None:
            cuts.append(Cut(*kind, None, None))
            continue
        offset = list(piece.part.offset)
        if offset:
            offset[mine[0]] += mine[1]
        is_all = not piece.shape or mine[2] == piece.shape[mine[0]]
        cuts.append(Cut(*kind, None if is_all else mine, Part(torch.Size(offset), piece.part.whole)))
    return cuts


def _nbytes(piece: HeldTensor) -> int:
    return piece.shape.numel() * piece.dtype.itemsize


def _rows(shape: torch.Size, nbytes: int, begin: int, end: int) -> tuple[int, int, int] | None:
    """Return the rows of a tensor between two bytes of it, the nearest ones; of a small one all, if it begins there."""
    dim = next((i for i, size in enumerate(shape) if size > 1), None)
    if dim is None or nbytes < _LEAST_BYTES:
        return (0, 0, shape[0] if shape else 1) if begin <= 0 < end else None
    rows = shape[dim]
    first, last = (min(max(0, round(byte * rows / nbytes)), rows) for byte in (begin, end))
    return (dim, first, last - first) if first < last else None
