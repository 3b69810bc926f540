"""Directories that plain ``torch.distributed.checkpoint.save`` wrote, as torchtitan, Lightning and accelerate call it.

torch unpickles ``.metadata`` and all values, which may run code. Here ``.metadata`` is read by
:mod:`~stagereg.extensions.interop.torch_metadata`, and values by :mod:`~stagereg.checkpoint.format.pickled`. As in
torch, integer keys have become text, and empty containers are missing.
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

from stagereg.base.small_files import read_small
from stagereg.checkpoint.format.encoding import DEEPEST, Leaf, walk
from stagereg.checkpoint.format.index import ArchiveResult, Index, tables
from stagereg.checkpoint.format.manifest import METADATA
from stagereg.checkpoint.format.pickled import QUANTIZED
from stagereg.checkpoint.state.optimizer_forms import (
    BESIDE,
    EMPTY_GROUPS,
    GROUPS,
    OPTIMIZERS,
    PARAMS,
    STATE,
    hyperparameters,
)
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.interop.torch_metadata import METADATA_BYTES, loads

_EMPTY = 10_000  # items of lists of which nothing is saved
_DOTTED = 1 << 24  # characters of the dotted names of all containers, beyond those that the names of values account for
_LONGEST_OPTION = 1 << 20  # values and characters that are shown of an option of a group


def open_plain_dcp(path: str) -> tuple[CheckpointFiles, dict[str, Any]]:
    """Return the files of a directory, and the unread structure of its state. Raises: ``CheckpointError``."""
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
    """Raise ``ValueError`` for two in one place, and for many more containers, or items of lists, than are saved.

    The dotted names of containers must not be much longer than the names of the values. Pickle stores a long key once,
    however many containers have the key, but every dotted name repeats the key.
    """
    inside: defaultdict[tuple[str | int, ...], set[int]] = defaultdict(set)
    dotted_left = 16 * sum(map(len, ways)) + _DOTTED
    for name, way in ways.items():
        if len(way) > DEEPEST:
            raise ValueError(f"{name!r:.100} is said to be in more than {DEEPEST} containers inside each other")
        length = 0
        for at, key in enumerate(way):
            dotted_left -= 0 if way[:at] in inside else length
            length += len(str(key)) + 1
            inside[way[:at]].update([key] if type(key) is int else ())
        dotted_left -= length
        if dotted_left < 0:
            raise ValueError("the keys of its containers are too long for the names of its values")
        if len(inside) > 8 * len(ways) + _EMPTY:
            raise ValueError("its values are said to be in more containers than there can be")
    if len({*ways.values()}) < len(ways) or any(way in inside for way in ways.values()):
        raise ValueError("two of its values are said to be in one place")
    if sum(max(keys) + 1 - len(keys) for keys in inside.values() if keys) > len(ways) + _EMPTY:
        raise ValueError("its values are said to be in lists with more items than there are")


def by_name(files: CheckpointFiles, structures: Mapping[str, Any]) -> dict[str, Any]:
    """Return structures with the states of optimizers as torch has them, by the names of parameters.

    Reads the options of groups: flattened parameters with the same options are one group. Raises: as ``files.read``.
    """
    found = {}
    for name, value in structures.items():
        if not isinstance(value, dict):
            found[name] = value
        elif any(key.split(".")[0] == "param_groups" for key in value):
            dotted = {".".join(map(str, path)): leaf for path, leaf in walk(value)}
            options = {key: leaf for key, leaf in dotted.items() if key.startswith("param_groups.")}
            if not options:  # no groups, of which an empty list was saved
                found[name] = value
                continue
            files.read([*options.values()])
            plain = {key: leaf.value for key, leaf in options.items() if leaf.stored.dtype is None}
            for key, option in plain.items():
                _expect_short_option(key, option)
            saved = of_dotted({**dotted, **plain})
            found[name] = _with_all(as_torchs(saved), value)
        else:
            found[name] = by_name(files, value)
    return found


def of_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by name from values that others have saved with dotted names.

    ``state.fc.weight.exp_avg`` is the same with all. torch's flattened state dicts and torchtitan have
    ``param_groups.fc.weight.lr`` for each parameter, where groups are those with the same options; others have
    ``param_groups.0.lr``, and ``param_groups.0.params``. The leaves of options that are tensors have been read.
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
    """Return a state by name as torch has it: a list of groups, with names where torch may have numbers.

    Values of no parameter are under their own keys, as torch has it, if one optimizer has it and no name is its key.
    """
    state, groups = {**saved[STATE]}, [*saved[GROUPS].values()]
    parts = [*saved.get(OPTIMIZERS, {}).values()]
    if len(parts) != 1 or parts[0].get(STATE, {}).keys() & {name for group in groups for name in group[PARAMS]}:
        return {STATE: state, GROUPS: groups, **({OPTIMIZERS: saved[OPTIMIZERS]} if parts else {})}
    [part] = parts
    for at, options in part.get(EMPTY_GROUPS, {}).items():
        groups.insert(int(at), {**options, PARAMS: []})
    return {**part.get(BESIDE, {}), STATE: state | dict(part.get(STATE, {})), GROUPS: groups}


def _expect_short_option(key: str, option: Any) -> None:
    """Raise ``CheckpointError`` for a value that would take much memory to show, as what is in it many times does."""
    left, length = [option], 0
    while left:
        value = left.pop()
        length += len(value) if isinstance(value, (str, bytes, bytearray)) else 1
        if isinstance(value, (dict, list, tuple, set)):
            left += [*value, *value.values()] if isinstance(value, dict) else value
        if length + len(left) > _LONGEST_OPTION:
            raise CheckpointError(f"the option {key:.100} of an optimizer is too large to be one.")


def _with_all(saved: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with all that is of no parameter in the state dict of an optimizer that is not flattened."""
    state, groups = value.get("state"), value.get("param_groups")
    if not isinstance(state, dict) or groups is None:
        return {**saved}
    known = {param for group in saved["param_groups"] for param in group["params"]}
    own = {key: each for key, each in state.items() if key not in known}
    return {**value, **saved, "state": {**saved["state"], **own}}


def _quantized_as_objects(metadata: torch_metadata.Metadata) -> dict[torch_metadata.MetadataIndex, Any]:
    """Make quantized tensors objects in the metadata, since archives have their scales, and return all places."""
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
    """Return the names of objects, and of tensors whose archives are too short for the elements: these wrap others."""
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
    """Return where something lies, with the real path of the file, which the one in the directory may be a link to."""
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError("it is stored through an extension of torch's format, which is not read here.")
    return replace(info, relative_path=_real_path(folder, info.relative_path))


@cache
def _real_path(folder: Path, name: str) -> str:
    if Path(name).name != name:
        raise CheckpointError(f"it names {name[:100]!r}, which is no file of the directory.")
    return str((folder / name).resolve())
