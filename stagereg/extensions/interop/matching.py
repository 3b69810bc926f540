"""Restore directories that other programs saved with ``torch.distributed.checkpoint``, under different entry names.

torch's recipes name a model ``model`` and its optimizer ``optim``; torchtitan saves parameters without a prefix;
Lightning uses ``state_dict`` and ``optimizer_0``. So a module or optimizer is restored from the name prefix under which
most of its parameters were saved. In a tie, the prefix that equals the entry's name wins. Other values match by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_forms as optimizer_forms
import stagereg.checkpoint.state.optimizer_state as optimizer_state
from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.manifest import MOST, Manifest
from stagereg.checkpoint.load.placing import from_scratch
from stagereg.checkpoint.state.entries import PerRank
from stagereg.checkpoint.state.name_map import NameMap
from stagereg.checkpoint.state.nested import NOTHING, find_inside, outer_names
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.errors import CheckpointError, MissingEntryError, listed, nearest
from stagereg.extensions.interop.plain_dcp import by_name, open_plain_dcp

_STEP_NAME = re.compile(r"\bstep[-=_](\d{1,18})\b")


class MatchedFiles(CheckpointFiles):
    """The files of a directory that torch wrote. :meth:`match` assigns the saved values to the entries of a state."""

    def __init__(self, path: str) -> None:
        files, self._tree = open_plain_dcp(path)
        super().__init__(path, files.index)

    def match(self, state: Mapping[str, Any], names: ParameterNames, name_map: NameMap) -> None:
        """Assign the saved values to the entries of ``state``. Raises ``CheckpointError`` if one has no match."""
        tree = {here: self._tree[saved] for here, saved in name_map.rename_entries(self._tree, state).items()}
        if any(map(optimizer_state.optimizers_of, state.values())):
            tree = by_name(self, tree)
        leaves: dict[str, Leaf] = {}
        optimizers: dict[str, Any] = {}
        _collect(tree, "", leaves, optimizers)
        found = {}
        for name, value in state.items():
            each = optimizer_state.optimizers_of(value)
            if modules := module_state.modules_of(value):
                own = name_map.possible(name, module_state.state_of(modules))
                structure = _module(name, tree, leaves, own, state)
            elif each:
                found_names = [names.for_optimizer(one, state) for one in each]
                own = {of for one in found_names for of in one.by_parameter.values()}
                for one in found_names:
                    own |= {old for entry, of in one.owners.values() for old in name_map.possible(entry, [of])}
                structure = _optimizer(name, optimizers, own)
            else:
                inner = (find_inside(tree.get(outer), keys) for outer, keys in outer_names(name))
                none: Any = {} if _is_empty(value) else None
                structure = tree.get(name, next((each for each in inner if each is not NOTHING), none))
            if structure is None and name not in tree and not isinstance(value, PerRank):
                if name_map.may_miss(name):
                    continue
                known = f"It has {listed(sorted(tree))}.{nearest(name, tree)} {from_scratch(name)}."
                raise MissingEntryError(f"The checkpoint has neither an entry {name!r} nor its parameters. {known}")
            found[name] = tree.get(name) if structure is None else structure
        self.index.state = found

    def structure(self, name: str, rank: int | None = None) -> Any:
        return self.index.state[name]


def described(path: str) -> Manifest:
    """Return a manifest without files for a directory that torch wrote.

    The step is the saved value ``train_state.step`` or ``step``, otherwise the number in the path, otherwise 0.
    """
    files, tree = open_plain_dcp(path)
    with files:
        train_state = tree.get("train_state")
        of_name = _STEP_NAME.search(Path(path).absolute().name)
        step: Any = int(of_name[1]) if of_name else 0
        for leaf in (train_state.get("step") if isinstance(train_state, dict) else None, tree.get("step")):
            if isinstance(leaf, Leaf):
                files.read([leaf])
                step = leaf.value.item() if isinstance(leaf.value, torch.Tensor) else leaf.value
                break
    is_step = type(step) is int and 0 <= step <= MOST
    return Manifest(step if is_step else 0, world_size=0, serial=0, files={})


def _is_empty(value: Any) -> bool:
    """Return whether a value has an empty state dict, for which torch saves nothing."""
    state = getattr(value, "state_dict", lambda: value)()
    return isinstance(state, Mapping) and not state


def _collect(tree: Mapping[str, Any], prefix: str, leaves: dict[str, Leaf], optimizers: dict[str, Any]) -> None:
    """Add the optimizer states in ``tree`` to ``optimizers``, and all other values to ``leaves``, by dotted name."""
    for key, value in tree.items():
        if isinstance(value, Leaf):
            leaves[f"{prefix}{key}"] = value
        elif (saved := optimizer_forms.as_by_name(value)) is not None:
            optimizers[f"{prefix}{key}"] = saved
        elif isinstance(value, dict):
            _collect(value, f"{prefix}{key}.", leaves, optimizers)


def _most_alike(entry: str, there: Iterable[str], wanted: Collection[str]) -> str | None:
    """Return the most frequent prefix of names ``there`` that end with a name in ``wanted``; ``None`` if none do."""
    counts: Counter[str] = Counter()
    for name in there:
        parts = name.split(".")
        ends = (i for i in range(len(parts)) if ".".join(parts[i:]) in wanted)
        counts.update(".".join(parts[:i]) for i in ends)
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) < 2 or entry in best:
        return entry if entry in best else next(iter(best), None)
    raise CheckpointError(f"{entry!r} matches {listed(best)} equally well. Rename the entry to one of these names.")


def _after(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    before = f"{prefix}." if prefix else ""
    return {name.removeprefix(before): value for name, value in values.items() if name.startswith(before)}


def _module(
    entry: str, tree: Mapping[str, Any], leaves: Mapping[str, Leaf], own: Collection[str], state: Mapping[str, Any]
) -> dict[str, Any] | None:
    prefix = _most_alike(entry, leaves, own)
    if prefix != "":
        return None if prefix is None else _after(prefix, leaves)
    at_top = {name: leaf for name, leaf in tree.items() if isinstance(leaf, Leaf)}
    others = {name for name, leaf in at_top.items() if leaf.stored.dtype is None or name in state}
    return {name: leaf for name, leaf in at_top.items() if name in own or name not in others}


def _optimizer(entry: str, optimizers: Mapping[str, Any], own: Collection[str]) -> dict[str, Any] | None:
    groups = {path: saved["param_groups"].values() for path, saved in optimizers.items()}
    params = (f"{path}.{name}" for path, each in groups.items() for group in each for name in group["params"])
    prefix = _most_alike(entry, params, own)
    if prefix is None:  # saved parameters have numbers instead of names, or this optimizer has no parameters
        return optimizers.get(entry, next(iter(optimizers.values())) if len(optimizers) == 1 else None)
    path = next(path for path in optimizers if f"{prefix}.".startswith(f"{path}."))
    saved, inside = optimizers[path], prefix[len(path) + 1 :]

    def inner(parts: Mapping[str, Any]) -> dict[str, Any]:
        each = ({**one, "params": [*_after(inside, dict.fromkeys(one["params"]))]} for one in parts.values())
        return {one["params"][0]: one for one in each if one["params"]}

    sections = ("param_groups", "optimizers")
    return {"state": _after(inside, saved["state"]), **{key: inner(saved[key]) for key in sections if key in saved}}
