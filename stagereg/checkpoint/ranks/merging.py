"""Merges the values of all ranks for one state entry: parts from pipeline stages, and values that differ between ranks.

Each rank encodes its value as a JSON structure (:mod:`.encoding`), and sends the digest. Rank 0 requests one structure
for each digest, unless it has this structure from the previous save. Mappings are merged key by key. A plain value that
differs between ranks, such as a loss, is saved per rank. In an optimizer state, only floating-point numbers may differ,
such as the last loss of LBFGS. Other differences (tensors, counters, options of parameter groups) mean that the ranks
train different models, and raise an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from stagereg.checkpoint.format.encoding import PER_RANK, Encoded, encode
from stagereg.checkpoint.state.optimizer_forms import groups_of
from stagereg.errors import CheckpointError, RankMismatchError, name_ranks

Structures: TypeAlias = dict[tuple[str, bytes], Encoded]
"""Encoded structures, by the name of the entry and the digest of the structure."""

Asked: TypeAlias = list[str]  # the entries whose structures rank 0 requests from one rank
Sent: TypeAlias = dict[str, Encoded]  # the requested structures
_Differing: TypeAlias = list[tuple[str, bool]]
"""The paths of values that differ between ranks, and whether all differing values are floating-point numbers."""

T = TypeVar("T", bound=Hashable)


def digest(what: object) -> bytes:
    """Return a digest of ``repr(what)``."""
    return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()


def alike(digests: Sequence[Mapping[T, bytes]], order: Iterable[int]) -> dict[tuple[T, bytes], list[int]]:
    """Map each (name, digest) pair to the ranks that have the pair. ``order``: the ranks in the wanted order."""
    found: dict[tuple[T, bytes], list[int]] = {}
    for rank in order:
        for entry in digests[rank].items():
            found.setdefault(entry, []).append(rank)
    return found


class RankEntries:
    """The encoded values of one rank in a save. Raises: ``CheckpointError`` if a value cannot be encoded."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.structures = {name: encode(value, name) for name, value in entries.items()}
        self.objects = {name for each in self.structures.values() for name in each.objects}  # not in the JSON
        # Changes if the names of these objects or the parameter groups of optimizers change.
        self.kinds = digest(([each.objects for each in self.structures.values()], groups_of(entries)))

    def digests(self) -> dict[str, bytes]:
        return {name: digest(each) for name, each in self.structures.items()}


class EntryMerger:
    """Merges the encoded values of all ranks in one save. Used on rank 0.

    ``digests``: the digests of each rank, by entry. ``order``: the ranks by descending precedence; a replicated
    structure is requested from the first rank that has it. ``stale``: the ranks that have left their training loop, so
    their values are outdated. ``before``: the structures of the previous save, by entry and digest. ``numbers``: for
    each rank, its number in the checkpoint; by default the rank itself.
    """

    def __init__(
        self,
        digests: Sequence[Mapping[str, bytes]],
        order: Sequence[int],
        stale: Collection[int],
        before: Structures,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.entries: Structures = {}  # the structures of this save, after the merge
        self._numbers = range(len(digests)) if numbers is None else numbers
        self._digests, self._stale, self._before = digests, stale, before
        self._alike = alike(digests, order)

    def ask_ranks(self) -> list[Asked]:
        """Return, for each rank, the names of the entries whose structures rank 0 must request from that rank."""
        asked: list[Asked] = [[] for _ in self._digests]
        for (name, own), (rank, *_) in self._alike.items():
            if (name, own) not in self._before:
                asked[rank].append(name)
        return asked

    def put_together(self, sent: Sequence[Sent]) -> dict[str, Encoded]:
        """Return the merged structure of each entry. ``sent``: the structures from each rank, by entry.

        Raises: ``CheckpointError`` if a structure does not match its digest, or :func:`merge` fails.
        """
        parts: dict[str, list[tuple[Encoded, list[int]]]] = {}
        for (name, own), ranks in self._alike.items():
            found = self._before.get((name, own))
            if found is None:
                found = sent[ranks[0]][name]
                if digest(found) != own:
                    raise CheckpointError(
                        f"The structure of {name!r} that {name_ranks(ranks[:1])} sent does not match its digest. "
                        "Nothing was committed. The next save sends all structures again."
                    )
            self.entries[name, own] = found
            values = [self._numbers[rank] for rank in ranks if rank not in self._stale]
            parts.setdefault(name, []).append((found, values))
        return {name: merge(name, each) for name, each in parts.items()}


def groups_in(state: Mapping[str, Encoded]) -> dict[str, dict[str, list[str]]]:
    """Return, for each optimizer, the parameters of each group, by the name of the first parameter in the group."""
    trees = {name: json.loads(encoded.text) for name, encoded in state.items()}
    groups = {name: _groups(tree) for name, tree in trees.items() if _is_optimizer(tree)}
    return {name: {first: group["value"]["params"] for first, group in each.items()} for name, each in groups.items()}


def merge(name: str, parts: Sequence[tuple[Encoded, Sequence[int]]]) -> Encoded:
    """Merge the structures of the entry ``name``. Each part is a structure and the list of the ranks that have it.

    The list is empty for ranks that have left their training loop. Their structure adds missing values, but does not
    replace any value. Raises: ``CheckpointError`` if ranks have different types of values under one name, or different
    states of one optimizer.
    """
    if len(parts) == 1:
        return parts[0][0]
    unequal: _Differing = []
    (first, ranks), *others = ((json.loads(encoded.text), list(ranks)) for encoded, ranks in parts)
    tree = first
    for other, of_other in others:
        if _is_optimizer(tree) and _is_optimizer(other):
            for section in ("param_groups", "optimizers"):
                _join_parameters(_groups(tree, section), _groups(other, section))
        tree = _merge(name, tree, ranks, other, of_other, unequal)
        ranks = ranks + of_other
    if _is_optimizer(tree):
        _expect_one_optimizer(name, tree, unequal)
    return Encoded(json.dumps(tree), [*dict.fromkeys(of for encoded, _ in parts for of in encoded.objects)])


def _merge(path: str, one: Any, ranks: Sequence[int], other: Any, of_other: Sequence[int], unequal: _Differing) -> Any:
    if one == other:
        return one
    items, more = _items(one), _items(other)
    if items is not None and more is not None and one["type"] == other["type"]:
        joined = dict(items)
        for key, (shown, item) in more.items():
            if key in items:
                item = _merge(f"{path}.{shown}", items[key][1], ranks, item, of_other, unequal)
            joined[key] = shown, item
        pairs = joined.values()
        texts = all(type(key) is str for key, _ in pairs)
        tree = {**one, "value": dict(pairs) if texts else [list(pair) for pair in pairs]}
        if "attributes" in one and "attributes" in other:
            tree["attributes"] = _merge(path, one["attributes"], ranks, other["attributes"], [], unequal)
        return tree
    if _has_leaf(one) or _has_leaf(other):
        raise RankMismatchError(
            f"Ranks have different kinds of values under the name {path!r}. Mark a value that belongs to one rank: "
            "stagereg.per_rank(value)."
        )
    if not of_other:
        return one
    unequal.append((path, _is_real(one) and _is_real(other)))
    values = one["value"] if type(one) is dict and one["type"] == PER_RANK else {str(rank): one for rank in ranks}
    return {"type": PER_RANK, "value": {**values, **{str(rank): other for rank in of_other}}}


def _is_real(tree: Any) -> bool:
    """Return whether a value is a floating-point number, or a list of floating-point numbers."""
    if type(tree) is list:
        return bool(tree) and all(map(_is_real, tree))
    if type(tree) is not dict or not tree:
        return type(tree) is float
    if tree["type"] in (PER_RANK, "tuple"):
        return all(map(_is_real, _children(tree)))
    return str(tree["type"]).startswith(("float", "numpy.float"))


def _items(tree: Any) -> dict[str, tuple[Any, Any]] | None:
    """Map the JSON text of each key to the (key, item) pair. Return ``None`` if ``tree`` encodes no mapping."""
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


def _groups(tree: Any, section: str = "param_groups") -> dict[str, Any]:
    groups = tree["value"].get(section)
    items = groups.get("value") if type(groups) is dict else None
    is_by_name = type(items) is dict and all(
        type(group) is dict and type(group.get("value")) is dict and type(group["value"].get("params")) is list
        for group in items.values()
    )
    return cast("dict[str, Any]", items) if is_by_name else {}


def _join_parameters(ones: dict[str, Any], others: dict[str, Any]) -> None:
    """Merge the parameter lists of common groups, because a rank may lack some parameters, such as experts."""
    for first in ones.keys() & others.keys():
        one, other = ones[first]["value"], others[first]["value"]
        one["params"] = other["params"] = list(dict.fromkeys([*one["params"], *other["params"]]))


def _may_differ(path: str, is_real: bool) -> bool:
    """Return whether an optimizer's value may differ between ranks: only tensor metadata, and floats except steps."""
    section, _, rest = path.partition(".")
    if section == "tensors" or not is_real:
        return section == "tensors"
    in_state = section == "state" or (section == "optimizers" and ".empty_groups." not in rest)
    return in_state and not rest.endswith(".step")


def _expect_one_optimizer(name: str, tree: Any, differing: _Differing) -> None:
    wrong = [path for path, is_real in differing if not _may_differ(path.removeprefix(f"{name}."), is_real)]
    if wrong:
        raise RankMismatchError(
            f"{wrong[0]!r} is not the same on all ranks, so they do not train the same model. Use the same parameter "
            "groups and options on all ranks. If each rank trains its own model, save the models under different names."
        )
    group_of: dict[str, str] = {}
    for first, group in _groups(tree).items():
        for param in group["value"]["params"]:
            if group_of.setdefault(param, first) != first:
                raise RankMismatchError(
                    f"Ranks have {param!r} of {name!r} in different parameter groups: {group_of[param]!r} and "
                    f"{first!r}. Create the same parameter groups on all ranks."
                )
