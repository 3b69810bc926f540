"""Puts together what ranks have of one entry: pipeline stages its parts, all of them what differs between ranks.

Each rank has encoded the structure of its own (:mod:`.encoding`), and sends a checksum of it; of alike ones rank 0 asks
for one. Where ranks compare (:mod:`.sharing`), the same goes for their tensors. Mappings are joined, key by key. A
plain value that differs between ranks, such as a loss or a position in the data, is kept for each of them::

    {"type": "per_rank", "value": {"0": 0.25, "1": 0.5}}

In the state of an optimizer that is refused: there it means that the ranks train different models.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import stagereg.checkpoint.sharing as sharing
from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.encoding import PER_RANK, Encoded, encode
from stagereg.checkpoint.optimizer_state import groups_of
from stagereg.checkpoint.sharing import Digests, EntryContents
from stagereg.errors import CheckpointError

__all__ = ["EntryDigests", "RankEntries", "Request", "Sent", "merge", "put_together", "requests"]


class EntryDigests(NamedTuple):
    """What a rank sends of its entries first: checksums of their structures, and what the ranks compare."""

    structures: dict[str, int]
    contents: dict[str, Digests]
    samples: dict[str, int]


class Request(NamedTuple):
    """What rank 0 asks a rank for, and tells it.

    Attributes:
        structures: the names of entries, each with the ranks whose structure is the same.
        comparisons: the names of entries, and whether parts of tensors are asked for as well.
        replicas: the ranks that have the same of an entry.
    """

    structures: dict[str, list[int]]
    comparisons: dict[str, bool]
    replicas: dict[str, list[int]]


class Sent(NamedTuple):
    """What a rank was asked for; of entries that are optimizers the groups of parameters as well."""

    structures: dict[str, Encoded]
    groups: dict[str, dict[str, list[str]]]
    comparisons: list[EntryContents]


class RankEntries:
    """What one rank has of the entries of a save.

    Args:
        copied: the staged copy.
        buffers: names of tensors in which ranks may differ; ``None`` in a save in which they do not compare.

    Raises:
        CheckpointError: something in them could not be read back.
    """

    def __init__(self, copied: Mapping[str, Any], buffers: Collection[str] | None) -> None:
        self._samples = sharing.sampled(copied)
        self._structures = {name: encode(value, name) for name, value in copied.items() if name != sharing.SAMPLES}
        self._groups = groups_of(copied)
        self.contents = {} if buffers is None else sharing.contents(copied, buffers)

    def digests(self) -> EntryDigests:
        """Return what the other ranks have to know of them."""
        structures = {name: crc32(each.text.encode()) for name, each in self._structures.items()}
        return EntryDigests(structures, {name: each.digests for name, each in self.contents.items()}, self._samples)

    def answer(self, request: Request) -> Sent:
        """Return what rank 0 asks for."""
        return Sent(
            {name: self._structures[name] for name in request.structures},
            {name: self._groups[name] for name in request.structures if name in self._groups},
            [
                self.contents[name] if parts else self.contents[name].plain
                for name, parts in request.comparisons.items()
            ],
        )


def requests(digests: Sequence[EntryDigests], order: Sequence[int]) -> list[Request]:
    """Return what to ask each rank for; of what several ranks have alike, the first one in ``order``.

    Raises:
        CheckpointError: ranks that share an entry have drifted apart.
    """
    sharing.expect_samples_alike([each.samples for each in digests])
    structures: list[dict[str, list[int]]] = [{} for _ in digests]
    first: dict[tuple[str, int], int] = {}
    for rank in order:
        for entry in digests[rank].structures.items():
            structures[first.setdefault(entry, rank)].setdefault(entry[0], []).append(rank)
    contents = [each.contents for each in digests]
    return list(map(Request, structures, sharing.doubtful(contents), sharing.groups(contents)))


def put_together(
    sent: Sequence[Sent], asked: Sequence[Request], order: Sequence[int], stale: Collection[int]
) -> dict[str, Encoded]:
    """Return one structure of each entry.

    Args:
        sent: what each rank has sent.
        asked: what :func:`requests` has returned.
        order: the ranks, those first whose values go before others'.
        stale: the ranks that have left their loop.

    Raises:
        CheckpointError: as :func:`merge`; ranks have different tensors of one name.
    """
    sharing.expect_alike({rank: sent[rank].comparisons for rank in order})
    parts: dict[str, list[tuple[Encoded, list[int]]]] = {}
    for rank in order:
        for name, encoded in sent[rank].structures.items():
            of = [each for each in asked[rank].structures[name] if each not in stale]
            parts.setdefault(name, []).append((encoded, of))
    return {name: merge(name, each) for name, each in parts.items()}


def merge(name: str, parts: Sequence[tuple[Encoded, Sequence[int]]]) -> Encoded:
    """Return one structure of those that ranks have of the entry ``name``.

    Args:
        name: of the entry.
        parts: each structure with the ranks that have it; none, if nothing of it goes for them where others have
            something else, as on ranks that have left their loop.

    Raises:
        CheckpointError: ranks have different kinds of values at one place, or different states of one optimizer.
    """
    if len(parts) == 1:
        return parts[0][0]
    differing: list[str] = []
    (first, ranks), *others = ((json.loads(encoded.text), list(ranks)) for encoded, ranks in parts)
    tree = first
    for other, of_other in others:
        if _is_optimizer(tree) and _is_optimizer(other):
            _join_parameters(_groups(tree), _groups(other))
        tree = _merge(name, tree, ranks, other, of_other, differing)
        ranks = ranks + of_other
    if _is_optimizer(tree):
        _expect_one_optimizer(name, tree, differing)
    objects = dict.fromkeys(of for encoded, _ in parts for of in encoded.objects)
    return Encoded(json.dumps(tree), [*objects])


def _merge(path: str, one: Any, ranks: Sequence[int], other: Any, of_other: Sequence[int], differing: list[str]) -> Any:
    if one == other:
        return one
    items, more = _items(one), _items(other)
    if items is not None and more is not None and one["type"] == other["type"]:
        joined = dict(items)
        for key, (shown, item) in more.items():
            if key in items:
                item = _merge(f"{path}.{shown}", items[key][1], ranks, item, of_other, differing)
            joined[key] = shown, item
        pairs = joined.values()
        texts = all(type(key) is str for key, _ in pairs)
        tree = {**one, "value": dict(pairs) if texts else [list(pair) for pair in pairs]}
        if "attributes" in one and "attributes" in other:
            tree["attributes"] = _merge(path, one["attributes"], ranks, other["attributes"], [], differing)
        return tree
    if _has_leaf(one) or _has_leaf(other):
        raise CheckpointError(
            f"Ranks have different kinds of values under the name {path!r}. What belongs to one rank is marked so: "
            "stagereg.per_rank(value)."
        )
    if not of_other:
        return one
    differing.append(path)
    values = one["value"] if type(one) is dict and one["type"] == PER_RANK else {str(rank): one for rank in ranks}
    return {"type": PER_RANK, "value": {**values, **{str(rank): other for rank in of_other}}}


def _items(tree: Any) -> dict[str, tuple[Any, Any]] | None:
    """Return keys and items of a mapping by the keys' text; ``None`` if it is none."""
    if type(tree) is not dict or not tree or tree["type"] == PER_RANK:
        return None
    value = tree["value"]
    if type(value) is dict:
        return {json.dumps(key): (key, item) for key, item in value.items()}
    is_mapping = tree["type"] in ("dict", "OrderedDict", "Counter")
    return {json.dumps(key): (key, item) for key, item in value} if is_mapping else None


def _has_leaf(tree: Any) -> bool:
    if type(tree) is list:
        return any(map(_has_leaf, tree))
    return type(tree) is dict and (not tree or _has_leaf(_children(tree)))


def _children(tree: Mapping[str, Any]) -> list[Any]:
    value = tree["value"]
    return list(value.values()) if type(value) is dict else value if type(value) is list else []


def _is_optimizer(tree: Any) -> bool:
    value = tree.get("value") if type(tree) is dict else None
    return type(value) is dict and {"state", "param_groups"} <= value.keys()


def _groups(tree: Any) -> dict[str, Any]:
    groups = tree["value"]["param_groups"]
    items = groups["value"] if type(groups) is dict else None
    is_by_name = type(items) is dict and all(
        type(group) is dict and type(group.get("value")) is dict and type(group["value"].get("params")) is list
        for group in items.values()
    )
    return cast("dict[str, Any]", items) if is_by_name else {}


def _join_parameters(ones: dict[str, Any], others: dict[str, Any]) -> None:
    """Have what both ranks call a group have the parameters of both: each may have some, as of experts, alone."""
    for first in ones.keys() & others.keys():
        one, other = ones[first]["value"], others[first]["value"]
        one["params"] = other["params"] = list(dict.fromkeys([*one["params"], *other["params"]]))


def _expect_one_optimizer(name: str, tree: Any, differing: Sequence[str]) -> None:
    if differing:
        raise CheckpointError(
            f"{differing[0]!r} is not the same on all ranks, so they do not train one model: give all ranks the same "
            "groups of parameters and options; or, if each rank trains a model of its own, save them under different "
            "names."
        )
    group_of: dict[str, str] = {}
    for first, group in _groups(tree).items():
        for param in group["value"]["params"]:
            if group_of.setdefault(param, first) != first:
                raise CheckpointError(
                    f"Ranks have {param!r} of {name!r} in different groups of parameters, those of "
                    f"{group_of[param]!r} and of {first!r}: make the same groups on all ranks."
                )
