"""Find replicated tensors: each rank sends checksums, and rank 0 replies with the groups of identical ranks.

DDP, HSDP and tensor parallelism do not declare replicas, so the ranks compare checksums. Ranks that hold identical
tensors, or identical shards of tensors, for an entry form a group of replicas. Different values with the same name are
rejected, because a checkpoint could silently lose one of them. Buffers (running statistics) are not compared, because
they may differ between replicas: the checkpoint has the buffers of the lowest rank.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import stagereg.checkpoint.format.split_tensors as split_tensors
from stagereg.base.pages import view_of
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.encoding import walk
from stagereg.checkpoint.format.wrappers import form_of, inner_tensors, wraps
from stagereg.checkpoint.ranks.merging import alike, digest
from stagereg.checkpoint.state.entries import TensorKind, chunks_of, local_part
from stagereg.checkpoint.targets import Part
from stagereg.errors import RankMismatchError, name_ranks

_SHOWN = 10
_OBJECTS = "stagereg.objects"

Kind: TypeAlias = tuple[str, bool]
"""A set of tensors of one entry: the name of the entry, and whether the tensors are whole (True) or split (False)."""


class HeldTensor(NamedTuple):
    """Describes the part of one tensor that a rank holds."""

    path: tuple[str | int, ...]
    part: Part
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int  # average size of the parts of all ranks in bytes, equal on all ranks
    tied: int  # index of the first tensor that shares this tensor's memory, or the tensor's own index

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


class EntryContents(NamedTuple):
    """The tensors of one entry that a rank holds: either all whole tensors or all split tensors."""

    pieces: list[HeldTensor]  # one item for each tensor
    checksums: list[int]  # checksums of the tensors' bytes, in the same order


def contents(
    copied: Mapping[str, Any], buffers: Collection[str], objects: Collection[str], known: Collection[str] = ()
) -> dict[Kind, EntryContents]:
    """Return the tensors that this rank holds in a staged copy, with their checksums.

    Buffers, tensors that are not dense, and values with dotted names in ``known`` are excluded. A tensor counts as a
    buffer if its name ends with a buffer's name, for example in a moving average of the module's state. Some values
    are compared but never sharded: ``objects`` that JSON cannot represent, tensors of subclasses, and declared parts
    of tensors (:mod:`.split_tensors`). They are listed under a separate name, with size 0.
    """
    found: dict[Kind, EntryContents] = {}
    first: dict[tuple[Kind, int, torch.Size], int] = {}
    for name, value in copied.items():
        for path, x in walk(value, name):
            dotted = ".".join(map(str, path))
            if dotted in known:
                continue
            if not isinstance(x, torch.Tensor):
                if dotted in objects:
                    others = found.setdefault((_OBJECTS, True), EntryContents([], []))
                    nothing = torch.Size([0])
                    piece = HeldTensor(path, Part(nothing, nothing), nothing, torch.uint8, 0, len(others.pieces))
                    others.pieces.append(piece)
                    others.checksums.append(_checksum_of_object(x))
                continue
            if _ends_like_one(dotted, buffers):
                continue
            if split_tensors.is_split(x):
                others = found.setdefault((_OBJECTS, True), EntryContents([], []))
                for start, data in split_tensors.parts_of(x):
                    place = Part(start, split_tensors.shape_of(x))
                    others.pieces.append(HeldTensor(path, place, data.shape, x.dtype, 0, len(others.pieces)))
                    others.checksums.append(_checksum(data))
                continue
            if (part := _part(x, dotted)) is None:
                continue
            local = local_part(x).detach()
            is_shared = type(local) in (torch.Tensor, torch.nn.Parameter)
            parts = _parts_of(x) if is_shared else 1
            kind = (name if is_shared else _OBJECTS), parts == 1
            pieces, checksums = found.setdefault(kind, EntryContents([], []))
            at = tied = len(pieces)
            if local.numel() and is_shared:
                tied = first.setdefault((kind, local.data_ptr(), local.shape), at)
            nbytes = part.whole.numel() * local.dtype.itemsize // parts if is_shared else 0
            pieces.append(HeldTensor(path, part, local.shape, local.dtype, nbytes, tied))
            checksums.append(_checksum(x))
    return found


def _ends_like_one(dotted: str, buffers: Collection[str]) -> bool:
    parts = dotted.split(".")
    return any(".".join(parts[i:]) in buffers for i in range(len(parts) - 1))


def _checksum_of_object(value: Any) -> int:
    """Return the checksum of an object's string, for example of a tuple; 0 if the string shows a memory address."""
    leaves, structure = pytree.tree_flatten(value)
    text = repr((structure, list(map(_text, leaves))))
    return 0 if " at 0x" in text else crc32(text.encode())


def _text(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {x.shape} {_checksum(x) if _part(x, 'a tensor of an object') else 0}"
    return repr(sorted(map(repr, x))) if isinstance(x, (set, frozenset)) else repr(x)  # sets have no fixed order


def _checksum(x: torch.Tensor) -> int:
    crc = crc32(form_of(x).encode()) if wraps(x) else 0
    for each in inner_tensors(x):
        plain = each.detach().as_subclass(torch.Tensor)
        crc = crc32(view_of(plain.cpu().contiguous()), crc) if plain.numel() else crc
    return crc


def _part(x: torch.Tensor, name: str) -> Part | None:
    """Return the position of this rank's part in the tensor; ``None`` for several parts or a non-dense tensor."""
    if isinstance(x, DTensor):
        chunks = chunks_of(x, name)
        return Part(chunks[0].offsets, x.shape) if len(chunks) == 1 else None
    if isinstance(x, ShardedTensor):  # a ShardedTensor raises an error in the calls below
        return None
    plain = x.layout is torch.strided and not x.is_quantized and not x.is_nested
    return Part(torch.Size([0] * x.ndim), x.shape) if plain else None


def _parts_of(x: torch.Tensor) -> int:
    """Return the number of parts into which the ranks split a tensor; 1 if each rank holds the whole tensor."""
    if not isinstance(x, DTensor):
        return 1
    split = [not each.is_replicate() for each in x.placements]
    return math.prod(itertools.compress(x.device_mesh.shape, split))


def expect_alike(tables: Mapping[int, Sequence[EntryContents]]) -> None:
    """Raise ``RankMismatchError`` if two ranks sent different checksums for the same part of a value."""
    seen: dict[tuple[str, torch.Size], tuple[int, Any]] = {}
    wrong: list[str] = []
    for rank, of_rank in tables.items():
        for piece, checksum in (pair for each in of_rank for pair in zip(each.pieces, each.checksums, strict=True)):
            what = (piece.part.whole, TensorKind(piece.dtype, piece.shape), checksum)
            other, there = seen.setdefault((piece.name, piece.part.offset), (rank, what))
            if there != what:
                kind = "the values differ" if there[:2] == what[:2] else f"{what[1]}, not {there[1]}"
                wrong.append(f"{piece.name!r} is not the same on {name_ranks([other, rank])} ({kind})")
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise RankMismatchError(
            f"{'; '.join(wrong[:_SHOWN])}{more}. A checkpoint has one value per name. Replicas of a model must be "
            "identical: find out why they diverged. Shards of a tensor must be a DTensor. For a value that differs "
            "per rank, use stagereg.per_rank(value), or a different name on each rank."
        )


class Place(NamedTuple):
    """The place of a rank in a group of replicas, which is a group of ranks with identical tensors."""

    first: int  # the lowest rank of the group
    ranks: int  # the size of the group
    number: int  # the number of the rank within the group


class Compared(NamedTuple):
    """Rank 0's reply to a rank after a comparison."""

    # kinds of tensors that differ between ranks; the rank must send all its checksums of these tensors
    differing: list[Kind]
    places: dict[Kind, Place]  # the rank's place in its group of replicas, by kind
    mixed: set[str]  # names of tensors that are not sharded, because ranks of different groups hold them


def content_digests(contents: Mapping[Kind, EntryContents]) -> dict[tuple[str, bytes], bytes]:
    """Return a digest of each entry's tensors, equal on all replicas. Split tensors have one digest per layout."""
    return {(name, b"" if whole else digest(each.pieces)): digest(each) for (name, whole), each in contents.items()}


def compare(
    digests: Sequence[Mapping[tuple[str, bytes], bytes]], names: Sequence[Mapping[Kind, Sequence[str]]]
) -> list[Compared]:
    """Group the ranks by digests, and return the reply to each rank. Ranks with equal names must share one object."""
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
