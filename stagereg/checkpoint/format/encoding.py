"""Encodes the structure of a state as JSON: containers, plain values, and a placeholder for each tensor and object.

Each entry of a checkpoint has its structure in ``index.json`` (docs/format.md). A *leaf*, written as ``{}``, stands for
a tensor, or for an object that JSON cannot represent (:mod:`.pickled`). Its value is stored under a dotted name, as in
torch's ``traverse_state_dict``: ``optimizer.state.0.exp_avg``. A save rejects values that could not be read back.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch

import stagereg.checkpoint.format.configs as configs
import stagereg.checkpoint.format.pickled as pickled
from stagereg.checkpoint.format.wrappers import wraps
from stagereg.errors import CheckpointError
from stagereg.kernel.copier import no_collection

PER_RANK = "per_rank"  # type of a value that differs between ranks (:mod:`.merging`)
PLAIN, REPLICATED = "plain", "replicated"
"""Placements of an optimizer's tensor for a ``DTensor`` parameter, used if its shape does not determine them."""
DEEPEST = 200  # maximum depth of nested containers
_LONGEST_INTEGER_BITS = 255 * 8 - 1  # bits of the longest integer that torch reads back
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_NUMPY = "numpy."  # prefix of the type of a NumPy scalar, which is read as a Python number without NumPy
_NUMBERS = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_CONFIG = "OmegaConf.to_container(cfg, resolve=True, enum_to_str=True), and other objects as text"
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (tuple, set, frozenset)}


class Encoded(NamedTuple):
    """The structure of one entry."""

    text: str  # JSON
    # dotted names of the values that are stored as pickles: objects, and tensors that wrap others (:mod:`.wrappers`)
    objects: list[str]


@dataclass(slots=True, eq=False)
class Leaf:
    """Placeholder for a tensor or an object in a decoded structure."""

    name: str  # dotted name in the checkpoint
    stored: Any = None  # location in the files (:class:`.Stored`), once it was looked up
    live: torch.Tensor | None = None  # the program's tensor of that name, once it was looked up
    in_place: bool = False  # whether to read into the memory of ``live``
    dtype: torch.dtype | None = None  # the dtype to convert to, if any
    strides: tuple[int, ...] | None = None  # the strides of the tensor, if they are not row-major
    placed: str | None = None  # ``PLAIN`` or ``REPLICATED``; ``None`` if ``live`` and the shape determine it
    value: Any = None  # the value that was read


def walk(value: Any, *path: str | int) -> list[tuple[tuple[str | int, ...], Any]]:
    """Return each tensor, object and plain value in a state or structure, with its path of keys and list indexes."""
    found: list[tuple[tuple[str | int, ...], Any]] = []
    _collect(value, path, found)
    return found


def _collect(value: Any, path: tuple[str | int, ...], found: list[tuple[tuple[str | int, ...], Any]]) -> None:
    if type(value) is torch.Tensor:
        found.append((path, value))
    elif isinstance(value, (dict, Mapping)):
        if configs.is_config(value):
            value = configs.content_of(value)
            if not isinstance(value, dict):  # the config itself is missing, None or an interpolation
                found.append((path, value))
                return
        for key, item in value.items():
            _collect(item, (*path, str(key)), found)
    elif _is_walked(value):
        for i, item in enumerate(value):
            _collect(item, (*path, i), found)
    else:
        found.append((path, value))


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the results of :func:`walk`, with dotted names that begin with ``name``, the name of the state."""
    return ((".".join(map(str, path)), leaf) for path, leaf in walk(value, name))


def marks(structure: Any) -> Iterator[Leaf]:
    """Yield each :class:`Leaf` of a structure."""
    return (leaf for _, leaf in walk(structure) if type(leaf) is Leaf)


def _is_walked(value: object) -> bool:
    """Return whether a value is a list that contains a tensor, leaf or mapping, directly or in nested lists."""
    holders = (torch.Tensor, Leaf, Mapping)
    return isinstance(value, list) and any(isinstance(item, holders) or _is_walked(item) for item in value)


# -- writing


@no_collection()
def encode(value: Any, name: str) -> Encoded:
    """Encode the entry ``name``. Raises: ``CheckpointError`` if the value could not be read back."""
    found: list[str] = []
    try:
        return Encoded(json.dumps(_encode(value, name, found, 0)), found)
    except RecursionError:
        raise CheckpointError(f"{name[:200]!r} is nested more than {DEEPEST} levels deep. Flatten it.") from None


def _encode(value: Any, name: str, objects: list[str], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        pickled.expect_loadable(name, value)
        if wraps(value):
            objects.append(name)
        return {}
    is_mapping = isinstance(value, Mapping) and not configs.is_config(value)
    if not is_mapping and not _is_walked(value):
        try:
            return _plain(value)
        except TypeError as error:
            if configs.is_config(value):
                text = f"{name!r} would not load back: {error}. Save it as plain data: {_CONFIG}"
                raise CheckpointError(text) from error
            objects.append(name)
            pickled.expect_loadable(name, value)
            return {}
    if depth == DEEPEST:
        raise CheckpointError(f"{name[:200]!r} is nested more than {DEEPEST} levels deep. Flatten it.")
    if not is_mapping:
        return [_encode(item, f"{name}.{i}", objects, depth + 1) for i, item in enumerate(value)]
    try:
        return _mapping(value, lambda key, item: _encode(item, f"{name}.{key}", objects, depth + 1))
    except TypeError as error:
        raise CheckpointError(f"{name!r} would not load back: {error}.") from error


def _plain(value: Any) -> Any:
    """Encode a value without tensors as JSON. Raises: ``TypeError`` if the value is not plain data."""
    kind = type(value)
    if kind in (NoneType, bool, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is int and value.bit_length() <= _LONGEST_INTEGER_BITS:
        return value
    if kind is list:
        return [_plain(item) for item in value]
    if kind is float:
        return {"type": "float", "value": str(value)}
    if kind is bytes:
        return {"type": "bytes", "value": base64.b64encode(value).decode()}
    if _COLLECTIONS.get(kind.__name__) is kind:
        return {"type": kind.__name__, "value": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return _mapping(value, lambda key, item: _plain(item))
    if configs.is_config(value):
        configs.expect_whole(value)
        return {"type": kind.__name__, "value": [_plain(configs.content_of(value)), configs.flags_of(value)]}
    numpy = sys.modules.get("numpy")
    is_number = numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf"
    if is_number and value.dtype.itemsize <= 8:  # Python has no wider number
        return {"type": f"{_NUMPY}{value.dtype.name}", "value": _plain(value.item())}
    raise TypeError(f"a {kind.__name__} is not plain data")


def _mapping(value: Mapping[Any, Any], encode: Callable[[Any, Any], Any]) -> dict[str, Any]:
    kind = type(value)
    if _CONTAINERS.get(kind.__name__) is not kind:
        raise TypeError(f"it is a {kind.__module__}.{kind.__qualname__}; save dict(x) instead")
    items: Any = {key: encode(key, item) for key, item in value.items()}
    if any(type(key) is not str for key in items):
        items = [[_key(key), item] for key, item in items.items()]
    made = {"type": kind.__name__, "value": items}
    attributes = getattr(value, "__dict__", None) if kind is not dict else None
    if attributes:  # for example the versions of modules in a state dict
        made["attributes"] = _plain(attributes)
    return made


def _key(key: Any) -> Any:
    try:
        return _plain(key)
    except TypeError:
        raise TypeError(f"a {type(key).__name__} cannot be a key; use a string or a number") from None


# -- reading


@no_collection()
def decode(tree: Any, name: str, rank: int | None = None) -> Any:
    """Decode the structure of an entry, with a :class:`Leaf` for each tensor and object. Runs no code.

    If a value differs between ranks, decode the value of ``rank``, or of the lowest rank if ``rank`` has none.
    Raises: ``CheckpointError`` if the structure is invalid.
    """
    try:
        return _decode(tree, name, str(rank), 0)
    except RecursionError:
        raise CheckpointError(f"the structure of {name!r:.100} is invalid: it is nested too deeply.") from None
    except Exception as error:
        raise CheckpointError(f"the structure of {name!r:.100} is invalid: {str(error)[:200]}.") from error


def _decode(tree: Any, name: str | None, rank: str, depth: int) -> Any:
    """Decode recursively; ``name`` is ``None`` inside a value that cannot contain leaves."""
    if type(tree) not in (list, dict):
        return tree
    if not tree and type(tree) is dict and name is not None:
        return Leaf(name)
    if depth == DEEPEST:
        raise RecursionError
    depth += 1
    if type(tree) is list:
        return [_decode(item, None if name is None else f"{name}.{i}", rank, depth) for i, item in enumerate(tree)]
    kind, value = tree["type"], tree["value"]
    if kind == PER_RANK:
        return _decode(value[rank if rank in value else min(value, key=int)], None, rank, depth)
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](_decode(item, None, rank, depth) for item in value)
    if kind in configs.KINDS:
        return configs.made(kind, *(_decode(item, None, rank, depth) for item in value))
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind == "float":
        return float(value)
    if kind.startswith(_NUMPY):
        return _of_numpy(kind.removeprefix(_NUMPY), _decode(value, None, rank, depth))
    if kind not in _CONTAINERS:
        raise ValueError(f"unknown type {kind:.100}")
    made = _CONTAINERS[kind]()
    pairs = value.items() if type(value) is dict else ((_decode(key, None, rank, depth), item) for key, item in value)
    for key, item in pairs:
        made[key] = _decode(item, None if name is None else f"{name}.{key}", rank, depth)
    attributes = _decode(tree["attributes"], None, rank, depth) if "attributes" in tree else {}
    for attribute, item in attributes.items():
        if hasattr(type(made), attribute):
            raise ValueError(f"a container overrides the attribute {attribute:.50} of its class")
        setattr(made, attribute, item)
    return made


def _of_numpy(dtype: str, number: Any) -> Any:
    if not _NUMBERS.fullmatch(dtype) or type(number) not in (bool, int, float):
        raise ValueError(f"invalid number of dtype {dtype:.100}")
    try:
        import numpy
    except ImportError:
        return number
    return numpy.dtype(dtype).type(number)


def fill(structure: Any) -> Any:
    """Replace the leaves of a structure with their values, in place, and return the structure."""
    if type(structure) is Leaf:
        return structure.value
    if isinstance(structure, dict) or type(structure) is list:
        items: Any = structure.items() if isinstance(structure, dict) else enumerate(structure)
        for key, item in list(items):
            structure[key] = fill(item)
    return structure
