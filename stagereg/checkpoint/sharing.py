"""What several ranks have alike: found by comparing, and then each writes a share of it, and stages no more than that.

Under DDP all ranks have the same parameters and optimizer state, under HSDP those that hold the same shards, under
tensor parallelism what is not split. Nothing declares that, so in the first save and every ``verify_replicas``-th one
ranks stage all that they have, and compare checksums of the bytes before they write. What has one name and is not alike
is refused: of two values one would be lost without a word. Ranks that have the same parts of the tensors of an entry,
or the same whole ones, are a group of replicas, and each writes a share: the bytes in order, cut at rows into as many
parts as there are ranks. Large tensors are cut, small ones stay whole. From the next save on a rank stages its share
alone. Buffers are no part of it, since replicas may drift there (running statistics): of them the lowest rank's is
stored. Every save carries which comparison its shares are of, so ranks never put together shares of different ones; and
a few elements of what is shared from each rank, which find out at once where ranks have begun to train apart.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.encoding import walk
from stagereg.errors import CheckpointError, name_ranks
from stagereg.kernel.memory import view_of

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


Kind: TypeAlias = tuple[str, bool]
"""Of tensors: those of one entry that are whole on the ranks that have them, or those that are split."""


class HeldTensor(NamedTuple):
    """What a rank has of one tensor, but for its bytes."""

    path: tuple[str | int, ...]
    part: Part
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int  # that ranks have of it on the average; the same on all of them
    tied: int  # to the piece with that number; its own number if to none

    @property
    def name(self) -> str:
        """Its dotted name."""
        return ".".join(map(str, self.path))


class EntryContents(NamedTuple):
    """What a rank has of one kind of tensors of an entry.

    Attributes:
        pieces: of its tensors.
        checksums: of their bytes, in the same order.
    """

    pieces: list[HeldTensor]
    checksums: list[int]


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
    """What one rank stages and writes of what others have as well.

    Attributes:
        of: the number of the save in which that was found.
        cuts: by kind.
        parts: where it lies in the whole by dotted name; ``None`` for what others write.
        first: of the ranks that share a kind, the lowest.
    """

    of: int
    cuts: dict[Kind, list[Cut]]
    parts: dict[str, Part | None]
    first: dict[Kind, int]


class Place(NamedTuple):
    """Of a rank among those that have the same of a kind: their first, how many there are, and its number."""

    first: int
    ranks: int
    number: int


class Compared(NamedTuple):
    """What rank 0 tells a rank of what they have compared.

    Attributes:
        differing: the kinds of which others have something else, for the rank to send all that it knows of them.
        places: of the rank, among those that have the same of a kind.
        mixed: the names that are not shared, since ranks have them that have other things beside.
    """

    differing: list[Kind]
    places: dict[Kind, Place]
    mixed: set[str]


class Replicas:
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
        self._known: dict[int, Shares | None] = {-2: None, -1: None}  # what goes after the last saves that have ended

    def begin(self) -> int:
        """Return the number of the save that begins. On any thread."""
        return next(self._numbers)

    def end(self, number: int, found: Shares | None = None, failed: bool = False) -> None:
        """Note how a save has ended, once all ranks know it, and the shares found in it. On the background thread.

        After one that has failed nothing is shared that was found before.
        """
        after = None if failed else found or self._known.get(number - 1)
        self._known = {number - 1: self._known.get(number - 1), number: after}

    def cut(self, number: int, entries: Mapping[str, Any]) -> tuple[dict[str, Any], Shares] | None:
        """Return what this rank writes of entries in a save, and its shares in that.

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


def cut(entries: Mapping[str, Any], shares: Shares) -> dict[str, Any] | None:
    """Return entries with shares in place of what others have as well, and samples of these.

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


def contents(
    copied: Mapping[str, Any], buffers: Collection[str], objects: Collection[str]
) -> dict[Kind, EntryContents]:
    """Return what this rank has of the entries of a staged copy, without ``buffers`` and what is no dense tensor.

    A tensor whose name ends like a buffer's, as in a moving average of the module's state, counts as a buffer.
    ``objects`` that JSON cannot carry are compared under a name of their own, as empty tensors with a checksum.
    """
    found: dict[Kind, EntryContents] = {}
    first: dict[tuple[Kind, int, torch.Size], int] = {}
    for name, value in copied.items():
        for path, x in walk(value, name):
            dotted = ".".join(map(str, path))
            if dotted in objects:
                others = found.setdefault((_OBJECTS, True), EntryContents([], []))
                nothing = torch.Size([0])
                piece = HeldTensor(path, Part(nothing, nothing), nothing, torch.uint8, 0, len(others.pieces))
                others.pieces.append(piece)
                others.checksums.append(_checksum_of_object(x))
                continue
            part = _part(x) if isinstance(x, torch.Tensor) else None
            if part is None or _ends_like_one(dotted, buffers):
                continue
            local = (x.to_local() if isinstance(x, DTensor) else x).detach()
            parts = _parts_of(x)
            kind = name, parts == 1
            pieces, checksums = found.setdefault(kind, EntryContents([], []))
            at = len(pieces)
            tied = first.setdefault((kind, local.data_ptr(), local.shape), at) if local.numel() else at
            nbytes = part.whole.numel() * local.dtype.itemsize // parts
            pieces.append(HeldTensor(path, part, local.shape, local.dtype, nbytes, tied))
            checksums.append(_checksum(x))
    return found


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


def _parts_of(x: torch.Tensor) -> int:
    """Return into how many parts a tensor is split; 1 if each rank that has it has all of it."""
    if not isinstance(x, DTensor):
        return 1
    split = [not each.is_replicate() for each in x.placements]
    return math.prod(itertools.compress(x.device_mesh.shape, split))


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
                    f"{name.split('.', 2)[2]!r} was the same on {name_ranks([other, rank])}, so each staged a share, "
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


def content_digests(contents: Mapping[Kind, EntryContents]) -> dict[tuple[str, bytes], bytes]:
    """Return the digests in which replicas must agree, by the name of the entry and, of split tensors, the layout."""
    return {(name, b"" if whole else digest(each.pieces)): digest(each) for (name, whole), each in contents.items()}


def compare(
    digests: Sequence[Mapping[tuple[str, bytes], bytes]], names: Sequence[Mapping[Kind, Sequence[str]]]
) -> list[Compared]:
    """Return what to tell each rank. On rank 0.

    Args:
        digests: of what each rank has, as :func:`content_digests` returns them.
        names: of these tensors; one object where ranks have the same.
    """
    lists = {id(one): {kind: tuple(found) for kind, found in one.items()} for one in names}
    each_once = {item for one in lists.values() for item in one.items()}
    counts = Counter(name for _, found in each_once for name in found)
    told = [Compared([], {}, {name for name, count in counts.items() if count > 1}) for _ in digests]
    groups = alike(digests, range(len(digests)))
    kinds = Counter(key for key, _ in groups)
    for ((name, parts), _), ranks in groups.items():
        kind = name, not parts
        if kinds[name, parts] > 1:
            told[ranks[0]].differing.append(kind)
        for number, rank in enumerate(ranks):
            told[rank].places[kind] = Place(ranks[0], len(ranks), number)
    sizes: dict[Any, set[int]] = {}
    for each, one in zip(told, names, strict=True):
        for item in lists[id(one)].items():
            sizes.setdefault(item, set()).add(each.places[item[0]].ranks)
    for each, one in zip(told, names, strict=True):
        for item in lists[id(one)].items():
            if len(sizes[item]) > 1:
                del each.places[item[0]]
    return told


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


def shares(
    number: int, own: Mapping[Kind, EntryContents], places: Mapping[Kind, Place], mixed: Collection[str] = ()
) -> Shares:
    """Return this rank's shares of what others have as well, as found in the save ``number``."""
    found = Shares(number, {}, {}, {})
    for kind, (first, ranks, at) in places.items():
        pieces = [piece._replace(nbytes=0) if piece.name in mixed else piece for piece in own[kind].pieces]
        cuts = {piece.name: each for piece, each in zip(pieces, _cuts(pieces, ranks, at), strict=True)}
        kept = {name: each for name, each in cuts.items() if name not in mixed}
        if ranks > 1 and kept:
            found.cuts[kind], found.first[kind] = [*kept.values()], first
            found.parts.update({name: each.part for name, each in kept.items()})
    return found


def _cuts(pieces: Sequence[HeldTensor], count: int, index: int) -> list[Cut]:
    """Return the share of one of ``count`` ranks.

    It depends on the averages of sizes, so ranks that have other parts of some tensors cut the rest at the same rows.
    """
    sizes = [piece.nbytes if piece.tied == i else 0 for i, piece in enumerate(pieces)]
    # The last rank has what is at the end, also if that is empty.
    begin, end = (sum(sizes) * each // count + (each == count) for each in (index, index + 1))
    rows: list[tuple[int, int, int] | None] = []
    cuts: list[Cut] = []
    at = 0
    for i, piece in enumerate(pieces):
        rows.append(rows[piece.tied] if piece.tied != i else _rows(piece.shape, piece.nbytes, begin - at, end - at))
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


def _rows(shape: torch.Size, nbytes: int, begin: int, end: int) -> tuple[int, int, int] | None:
    """Return the rows of a tensor between two bytes of it, the nearest ones; of a small one all, if it begins there."""
    dim = next((i for i, size in enumerate(shape) if size > 1), None)
    if dim is None or nbytes < _LEAST_BYTES or not shape.numel():
        return (0, 0, shape[0] if shape else 1) if begin <= 0 < end else None
    rows = shape[dim]
    first, last = (min(max(0, round(byte * rows / nbytes)), rows) for byte in (begin, end))
    return (dim, first, last - first) if first < last else None
