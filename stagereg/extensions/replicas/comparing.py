"""How ranks find what several of them have alike: each sends checksums, and rank 0 answers who has the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagereg.checkpoint.ranks.comparing import EntryContents, Kind, alike, digest


class Place(NamedTuple):
    """Of a rank among those that have the same of a kind: their first, how many there are, and its number."""

    first: int
    ranks: int
    number: int


class Compared(NamedTuple):
    """What rank 0 tells a rank of what they have compared."""

    # the kinds of which others have something else, for the rank to send all that it knows of them
    differing: list[Kind]
    places: dict[Kind, Place]  # of the rank, among those that have the same of a kind
    mixed: set[str]  # the names that are not shared, since ranks have them that have other things beside


def content_digests(contents: Mapping[Kind, EntryContents]) -> dict[tuple[str, bytes], bytes]:
    """Return the digests in which replicas must agree, by the name of the entry and, of split tensors, the layout."""
    return {(name, b"" if whole else digest(each.pieces)): digest(each) for (name, whole), each in contents.items()}


def compare(
    digests: Sequence[Mapping[tuple[str, bytes], bytes]], names: Sequence[Mapping[Kind, Sequence[str]]]
) -> list[Compared]:
    """Return what to tell each rank, by digests and names of what each has; of alike ``names`` it is one object."""
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
