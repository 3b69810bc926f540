"""What a join could leave behind on a joinable and on what it watched, in a form that can be compared.

A walk from some objects through their attributes, a few levels deep. Of modules and optimizers it lists which
attributes they have of their own and how many hooks; of other objects also the values of simple attributes, since a
flag that stays set is a side effect too. The caller finds what training itself changes, by a walk before and after
training without a join.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["changed", "side_effects", "strict"]

_DEPTH = 4
_MANY = 64
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_SETS_ITSELF = {"_authoritative_rank"}
"""What torch sets on a module before each use of it, and never looks at before."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.GeneratorType)
_STRICT = ("hooks on", "attributes of", "join of", "Python's warning filters")


def side_effects(roots: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """List what there is to compare, by where it was seen, in values that are comparable by ``==``.

    Args:
        roots: objects, each with what to call it.
    """
    found: dict[str, Any] = {"Python's warning filters": list(warnings.filters)}
    known: dict[int, Any] = {}  # an id is one only while its object lives
    for name, thing in roots:
        _visit(name, thing, _DEPTH, found, known)
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is not as it was: where, and a text; of attributes one for each that came or went."""
    # What is reached on one side only was made or dropped; what leads to it has changed, and is listed.
    differ = [(place, was, after[place]) for place, was in before.items() if after.get(place, was) != was]
    return [(place, f"{place}: {text}") for place, was, now in differ for text in _texts(was, now)]


def strict(place: str) -> bool:
    """Whether training itself changes nothing at this place, once it has taken a step."""
    return place.startswith(_STRICT)


def _texts(before: Any, after: Any) -> list[str]:
    if isinstance(before, frozenset):
        came = [f"now also {name!r}" for name in sorted(after - before)]
        return came + [f"no longer {name!r}" for name in sorted(before - after)]
    return ["changed" if isinstance(before, list) else f"was {before}, is {after}"]


def _visit(name: str, thing: Any, depth: int, found: dict[str, Any], known: dict[int, Any]) -> None:
    if depth == 0 or id(thing) in known or isinstance(thing, (*_SIMPLE, type, types.ModuleType)):
        return
    known[id(thing)] = thing
    if isinstance(thing, Tensor):
        found[f"hooks on {name}"] = len(thing._backward_hooks or ())
    elif isinstance(thing, nn.Module):
        for path, part in thing.named_modules(prefix=name):
            known[id(part)] = part
            found |= _own(path, part)
        for path, parameter in thing.named_parameters(prefix=name):
            _visit(path, parameter, 1, found, known)
    elif isinstance(thing, Optimizer):
        found |= _own(name, thing)
    elif isinstance(thing, (list, tuple, Mapping)):
        members = list(thing.items() if isinstance(thing, Mapping) else enumerate(thing))
        for key, each in members[:_MANY]:
            _visit(f"{name}[{key!r}]", each, depth - 1, found, known)
    elif isinstance(thing, types.MethodType):
        _visit(name, thing.__self__, depth, found, known)
    elif hasattr(thing, "__dict__") and not isinstance(thing, _FUNCTIONS) and not _is_torchs(thing):
        found |= _own(name, thing)
        for attribute, value in vars(thing).items():
            if attribute != "_join_config":
                found[f"{name}.{attribute}"] = _worth(value)
                _visit(f"{name}.{attribute}", value, depth - 1, found, known)


def _own(name: str, thing: Any) -> dict[str, Any]:
    """Which attributes an object has of its own, how many hooks in which of them, and whether it is in a join."""
    own = vars(thing)
    kept = {key: value for key, value in own.items() if key.endswith("hooks") and isinstance(value, (Mapping, list))}
    hooks = {key.strip("_").replace("_", " "): len(value) for key, value in kept.items() if value}
    config = own.get("_join_config")
    return {
        f"attributes of {name}": frozenset(own) - _SETS_ITSELF,
        f"hooks on {name}": hooks or "none",
        f"join of {name}": "switched on" if config is not None and config.enable else "switched off",
    }


def _worth(value: Any) -> Any:
    if isinstance(value, _SIMPLE):
        return repr(value) if isinstance(value, str) else value
    kind = type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the {kind} {value.__qualname__}"
    return f"a {kind} of {len(value)}" if isinstance(value, (list, dict, set, tuple)) else f"a {kind}"


def _is_torchs(thing: Any) -> bool:
    """Whether an object is one of torch's or Python's, which lead to all the world."""
    return type(thing).__module__.partition(".")[0] in ("torch", "builtins")
