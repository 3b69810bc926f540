"""Records the properties of optimizer tensors that neither their bytes nor ``load_state_dict`` restore.

``load_state_dict`` casts the state of a parameter to the parameter's dtype. A tensor that several
ranks write is stored in row-major order, and a plain tensor is stored like a replicated ``DTensor``. A save adds a note
for each tensor that a restore would otherwise change (docs/format.md). Most optimizers need no notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stagereg.checkpoint.format.encoding import PLAIN, REPLICATED, Leaf, walk
from stagereg.checkpoint.format.index import expect_strides
from stagereg.checkpoint.format.split_tensors import carry, is_split
from stagereg.checkpoint.format.wrappers import wraps
from stagereg.errors import CheckpointError

_DTYPES, _STRIDES, _PLACED = "dtypes", "strides", "placed"
_STEP = "step"  # key of the step counter; load_state_dict casts it to float32 or not at all
_NUMBERS = (int, float, bool, type(None))


def notes_of(states: Mapping[str, Any], parameters: Mapping[str, torch.Tensor], whole: Any) -> dict[str, Any]:
    """Return the notes on the tensors of an optimizer, by kind and dotted path; empty if no notes are needed.

    ``states``: the states of the ``parameters``, by name. ``whole``: the other values of the entry. Their notes have
    only strides.
    """
    notes: dict[str, dict[str, Any]] = {_DTYPES: {}, _STRIDES: {}, _PLACED: {}}
    for name, state in states.items():
        param = parameters[name]
        dtype, sharded = param.dtype, isinstance(param, DTensor)
        for key, x in state.items() if isinstance(state, Mapping) else ((None, state),):
            same_dtype = getattr(x, "dtype", None) is (torch.float32 if key == _STEP else dtype)
            if type(x) in _NUMBERS or (type(x) is torch.Tensor and same_dtype and not sharded and x.is_contiguous()):
                continue
            if param.is_floating_point() and any(each is not dtype for each in _dtypes(x, key)):
                notes[_DTYPES][name] = _shown(dtype)
            way = (name,) if key is None else (name, key)
            for path, leaf in walk(x, "state", *way):
                if isinstance(leaf, torch.Tensor):
                    _note(notes, ".".join(map(str, path)), leaf, param)
    for path, leaf in walk(whole):
        if isinstance(leaf, torch.Tensor):
            _note(notes, ".".join(map(str, path)), leaf, leaf)
    return {key: found for key, found in notes.items() if found}


def split_as(param: torch.Tensor, value: Any, path: str) -> Any:
    """Return a sharded parameter's state, with tensors that declare the same shards as the parameter.

    A tensor of the parameter's shape gets the parameter's shards (:mod:`~stagereg.checkpoint.format.split_tensors`),
    unless it declares its own. The tensors of the optimizer are not changed.

    Raises:
        CheckpointError: a tensor of the parameter's shape wraps other tensors, so it cannot be split into shards.
    """
    if isinstance(value, dict):
        return {key: split_as(param, item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [split_as(param, item, f"{path}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or is_split(value):
        return value
    if wraps(value):
        raise CheckpointError(
            f"{path!r} is a {type(value).__name__}, which cannot be saved as a shard of a larger tensor like its "
            "parameter. Use an optimizer with plain tensors as its state"
        )
    return carry(param, value.detach())


def _dtypes(value: Any, key: Any = None) -> Iterator[torch.dtype | None]:
    """Yield the dtype of each tensor in a value. Skips a float32 step counter; yields ``None`` for any other."""
    if isinstance(value, torch.Tensor):
        if key != _STEP:
            yield value.dtype
        elif value.dtype is not torch.float32:
            yield None
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _dtypes(item, inner)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _dtypes(item)


def _note(notes: Mapping[str, dict[str, Any]], path: str, x: torch.Tensor, param: torch.Tensor) -> None:
    strided = type(x) is torch.Tensor and x.layout is torch.strided and not is_split(x)
    if strided and x.numel() and not x.is_contiguous():
        strides = torch.empty_like(x, device="meta").stride()  # strides without gaps and overlaps
        if strides != torch.empty(x.shape, dtype=x.dtype, device="meta").stride():
            notes[_STRIDES][path] = [*strides]
    inferred = None if x.shape == param.shape else REPLICATED if x.ndim == param.ndim > 1 else PLAIN  # in a restore
    if isinstance(param, DTensor) and (placed := _placed(x, param)) != inferred:
        notes[_PLACED][path] = placed


def _placed(x: torch.Tensor, param: DTensor) -> str | None:
    """Return how a state tensor of a ``DTensor`` parameter is placed; ``None`` if it is placed like the parameter."""
    if not isinstance(x, DTensor):
        return PLAIN
    sharded_alike = x.shape == param.shape and any(not each.is_replicate() for each in x.placements)
    return None if sharded_alike or (x.shape == param.shape and x.placements == param.placements) else REPLICATED


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- restoring


def mark(entry: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Apply the notes to the leaves of an entry's structure. Raises: ``CheckpointError`` if a note is invalid."""
    strides, placed = notes.get(_STRIDES, {}), notes.get(_PLACED, {})
    for path, leaf in walk(entry) if strides or placed else ():
        if isinstance(leaf, Leaf) and leaf.stored.dtype is not None:
            dotted = ".".join(map(str, path))
            leaf.placed = placed.get(dotted)
            if dotted in strides:
                try:
                    expect_strides(leaf.stored.shape, strides[dotted])
                except (TypeError, ValueError):
                    raise CheckpointError(f"{dotted!r:.100} has strides that do not match its shape") from None
                leaf.strides = tuple(strides[dotted])


def kept_dtypes(notes: Mapping[str, Any], source: Mapping[str, str]) -> dict[str, Any]:
    """Return the dtype notes of the parameters in ``source``, which maps their current names to saved names."""
    dtypes = notes.get(_DTYPES, {})
    return {_DTYPES: found} if (found := {name: dtypes[of] for name, of in source.items() if of in dtypes}) else {}


def keeps_dtypes(notes: Mapping[str, Any], name: str, param: torch.Tensor) -> bool:
    """Return whether a parameter's state keeps its saved dtypes: only if the parameter has its saved dtype too."""
    return bool(notes.get(_DTYPES, {}).get(name) == _shown(param.dtype))


def given_back(given: Any, taken: Any, dtypes: bool) -> Any:
    """Undo what ``load_state_dict`` changed in a parameter's state: ``given`` is its input, ``taken`` its result.

    If ``dtypes`` is true, tensors get their saved dtypes back. Strings are always restored, because torch replaces each
    string, even in a set, with the ``repr`` of a generator.
    """
    if isinstance(given, torch.Tensor) and isinstance(taken, torch.Tensor):
        return given.to(taken.device) if dtypes and given.dtype != taken.dtype and given.shape == taken.shape else taken
    is_walked = isinstance(given, (Mapping, list, tuple, torch.Tensor))
    if isinstance(given, Iterable) and not is_walked and not any(isinstance(item, torch.Tensor) for item in given):
        return given
    if isinstance(given, Mapping) and isinstance(taken, dict):
        for key in taken.keys() & given.keys():
            taken[key] = given_back(given[key], taken[key], dtypes)
    elif type(given) in (list, tuple) and type(taken) is type(given) and len(taken) == len(given):
        return type(given)(given_back(one, other, dtypes) for one, other in zip(given, taken, strict=True))
    return taken
