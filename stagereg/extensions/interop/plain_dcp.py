"""Read directories that ``torch.distributed.checkpoint.save`` wrote, for example in torchtitan or Lightning.

torch unpickles ``.metadata`` and all values, so torch may run code from these files. This module runs no code: it uses
:mod:`~stagereg.extensions.interop.torch_metadata` and :mod:`~stagereg.checkpoint.format.pickled` instead of pickle. As
in torch, integer keys of dicts become strings, and empty containers are lost.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint.metadata as torch_metadata
from torch.distributed.checkpoint._traverse import set_element

import stagereg.checkpoint.state.optimizer_forms as forms
from stagereg.base.small_files import read_small
from stagereg.checkpoint.format.encoding import DEEPEST, Leaf, walk
from stagereg.checkpoint.format.index import ArchiveResult, Index, tables
from stagereg.checkpoint.format.manifest import METADATA
from stagereg.checkpoint.format.pickled import QUANTIZED
from stagereg.checkpoint.state.optimizer_forms import EMPTY_GROUPS, GROUPS, OPTIMIZERS, PARAMS, STATE, hyperparameters
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.interop.torch_metadata import METADATA_BYTES, loads

_EMPTY = 10_000  # maximum number of list items without a saved value
_DOTTED = 1 << 24  # maximum characters in dotted names of containers, plus 16 for each character in a value's name
_LONGEST_OPTION = 1 << 20  # maximum number of values and characters in one option of a parameter group


def open_plain_dcp(path: str) -> tuple[CheckpointFiles, dict[str, Any]]:
    """Return a directory's files, and its state with an unread :class:`.Leaf` per value. Raises ``CheckpointError``."""
    folder = Path(path).expanduser()
    try:
        metadata = loads(read_small(os.path.realpath(folder / METADATA), METADATA_BYTES))
        places = _quantized_as_objects(metadata).items()
        results = [ArchiveResult(each, info.length, _located(folder, info)) for each, info in places]
        content = tables(metadata, [results], _pickled(metadata))
        sizes = {name: os.stat(name).st_size for name in content["files"]}
        files = CheckpointFiles(path, Index({**content, "state": {}}, sizes))
        ways = {name: (metadata.planner_data or {}).get(name, (name,)) for name in metadata.state_dict_metadata}
        _expect_apart(ways)
        state: dict[str, Any] = {}
        for name, way in ways.items():
            set_element(state, way, Leaf(name, files.index.find(name)))
    except Exception as error:
        raise CheckpointError(f"{path} was not read: {reason(error)[:400]}") from error
    return files, state


def _expect_apart(ways: Mapping[str, tuple[str | int, ...]]) -> None:
    """Raise ``ValueError`` if two values have the same path in the state, or if the nested state would be too large.

    A state is too large if it has many more containers or list items than values, or if its dotted names are much
    longer than the saved names. The pickle stores a long key only once, but every dotted name repeats the key.
    """
    inside: defaultdict[tuple[str | int, ...], set[int]] = defaultdict(set)
    dotted_left = 16 * sum(map(len, ways)) + _DOTTED
    for name, way in ways.items():
        if len(way) > DEEPEST:
            raise ValueError(f"the path of {name!r:.100} has more than {DEEPEST} nested containers")
        length = 0
        for at, key in enumerate(way):
            dotted_left -= 0 if way[:at] in inside else length
            length += len(str(key)) + 1
            inside[way[:at]].update([key] if type(key) is int else ())
        dotted_left -= length
        if dotted_left < 0:
            raise ValueError("the keys of containers are much longer than the names of values")
        if len(inside) > 8 * len(ways) + _EMPTY:
            raise ValueError("the state has many more containers than values")
    if len({*ways.values()}) < len(ways) or any(way in inside for way in ways.values()):
        raise ValueError("two values have the same path in the state")
    if sum(max(keys) + 1 - len(keys) for keys in inside.values() if keys) > len(ways) + _EMPTY:
        raise ValueError("the lists in the state have many more items than values")


def by_name(files: CheckpointFiles, structures: Mapping[str, Any]) -> dict[str, Any]:
    """Convert all optimizer states in ``structures`` to torch's form, with names instead of numbers for parameters.

    This reads the optimizer options, because parameters with equal options form one group. Read errors propagate.
    """
    found = {}
    for name, value in structures.items():
        if not isinstance(value, dict):
            found[name] = value
        elif any(key.split(".")[0] == "param_groups" for key in value):
            dotted = {".".join(map(str, path)): leaf for path, leaf in walk(value)}
            options = {key: leaf for key, leaf in dotted.items() if key.startswith("param_groups.")}
            if not options:  # an optimizer without groups: torch saved an empty list
                found[name] = value
                continue
            files.read([*options.values()])
            plain = {key: leaf.value for key, leaf in options.items() if leaf.stored.dtype is None}
            for key, option in plain.items():
                _expect_short_option(key, option)
            found[name] = _with_all(as_torchs(of_dotted({**dotted, **plain})), value)
        else:
            found[name] = by_name(files, value)
    return found


def of_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state by parameter name, built from values that other programs saved under dotted names.

    All programs save names like ``state.fc.weight.exp_avg``. torch's flattened state dicts and torchtitan save
    ``param_groups.fc.weight.lr`` for each parameter, so parameters with equal options form a group. Other programs
    save ``param_groups.0.lr`` and ``param_groups.0.params``. Options that are tensors must have been read.
    """
    options: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, rest = key.partition(".")
        if section == GROUPS:
            of, _, option = rest.rpartition(".")
            options.setdefault(of, {})[option] = value
    alike: dict[str, dict[str, Any]] = {}
    for of, own in options.items():
        shared = {key: x.value.tolist() if isinstance(x, Leaf) else x for key, x in hyperparameters(own).items()}
        shown = of if PARAMS in own else repr(shared)
        group = alike.setdefault(shown, {**hyperparameters(own), PARAMS: []})
        group[PARAMS] += map(str, own.get(PARAMS, [of]))
    groups = {group[PARAMS][0]: group for group in alike.values() if group[PARAMS]}
    state: dict[str, Any] = {name: {} for group in groups.values() for name in group[PARAMS]}
    for key, value in values.items():
        section, *way = key.split(".")
        ends = (end for end in range(len(way) - 1, 0, -1) if ".".join(way[:end]) in state)
        if section == STATE and (end := next(ends, 0)):
            at = state[".".join(way[:end])]
            for part in way[end:-1]:
                at = at.setdefault(part, {})
            at[way[-1]] = value
    return {STATE: {name: each for name, each in state.items() if each}, GROUPS: groups}


def as_torchs(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an optimizer state by parameter name to torch's form, a list of groups. Parameters keep their names.

    If there is one optimizer, values of its state that belong to no parameter keep their keys.
    """
    state, groups = {**saved[STATE]}, [*saved[GROUPS].values()]
    parts = [*saved.get(OPTIMIZERS, {}).values()]
    if len(parts) != 1 or parts[0].get(STATE, {}).keys() & {name for group in groups for name in group[PARAMS]}:
        return {STATE: state, GROUPS: groups, **({OPTIMIZERS: saved[OPTIMIZERS]} if parts else {})}
    [part] = parts
    for at, options in part.get(EMPTY_GROUPS, {}).items():
        groups.insert(int(at), {**options, PARAMS: []})
    return {**part.get(forms.BESIDE, {}), STATE: state | dict(part.get(STATE, {})), GROUPS: groups}


def _expect_short_option(key: str, option: Any) -> None:
    """Raise ``CheckpointError`` if the string of an option would be too large, for example with many nested lists."""
    left, length = [option], 0
    while left:
        value = left.pop()
        length += len(value) if isinstance(value, (str, bytes, bytearray)) else 1
        if isinstance(value, (dict, list, tuple, set)):
            left += [*value, *value.values()] if isinstance(value, dict) else value
        if length + len(left) > _LONGEST_OPTION:
            raise CheckpointError(f"the optimizer option {key:.100} is too large.")


def _with_all(saved: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``saved``, plus the values of a nested state dict ``value`` that do not belong to a parameter."""
    state, groups = value.get("state"), value.get("param_groups")
    if not isinstance(state, dict) or groups is None:
        return {**saved}
    known = {param for group in saved["param_groups"] for param in group["params"]}
    own = {key: each for key, each in state.items() if key not in known}
    return {**value, **saved, "state": {**saved["state"], **own}}


def _quantized_as_objects(metadata: torch_metadata.Metadata) -> dict[torch_metadata.MetadataIndex, Any]:
    """Declare quantized tensors as objects in the metadata, to read their scales too. Return all file locations."""
    quantized = {
        name: torch_metadata.BytesStorageMetadata()
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, torch_metadata.TensorStorageMetadata)
        and entry.properties.dtype in QUANTIZED
        and len(entry.chunks) == 1
    }
    metadata.state_dict_metadata.update(quantized)
    places = metadata.storage_data.items()
    return {replace(index, offset=None) if index.fqn in quantized else index: info for index, info in places}


def _pickled(metadata: torch_metadata.Metadata) -> set[str]:
    """Return the names of objects and of wrapper tensors, which are stored in fewer bytes than their elements need."""
    lengths: Counter[str] = Counter()
    for index, info in metadata.storage_data.items():
        lengths[index.fqn] += info.length
    return {
        name
        for name, entry in metadata.state_dict_metadata.items()
        if not isinstance(entry, torch_metadata.TensorStorageMetadata)
        or lengths[name] <= entry.size.numel() * entry.properties.dtype.itemsize
    }


def _located(folder: Path, info: Any) -> Any:
    """Return ``info`` with the real path of its file, because the file may be a symbolic link."""
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError("an extension of torch's format transformed the saved values, which is not supported.")
    return replace(info, relative_path=_real_path(folder, info.relative_path))


@cache
def _real_path(folder: Path, name: str) -> str:
    if Path(name).name != name:
        raise CheckpointError(f"the metadata names {name[:100]!r}, which is not a file in the directory.")
    return str((folder / name).resolve())
