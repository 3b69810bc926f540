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

from torch import nn
from torch.optim import Optimizer

__all__ = ["changed", "side_effects"]

_DEPTH = 4
_MANY = 64
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_SETS_ITSELF = {"_authoritative_rank"}
"""What torch sets on a module before each use of it, and never looks at before."""


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


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return what is not as it was: a text by where it was seen."""
    # What is reached on one side only was made or dropped; what leads to it has changed, and is listed.
    differ = [(place, was, after[place]) for place, was in before.items() if after.get(place, was) != was]
    return {place: f"{place}: {_text(was, now)}" for place, was, now in differ}


def _text(was: Any, now: Any) -> str:
    if isinstance(was, frozenset):
        came, went = sorted(now - was), sorted(was - now)
        return ", ".join([*(f"now also {name!r}" for name in came), *(f"no longer {name!r}" for name in went)])
    return "changed" if isinstance(was, list) else f"was {was}, is {now}"


def _visit(name: str, thing: Any, depth: int, found: dict[str, Any], known: dict[int, Any]) -> None:
    if depth == 0 or id(thing) in known:
        return
    known[id(thing)] = thing
    if isinstance(thing, nn.Module):
        for path, part in thing.named_modules(prefix=name):
            known[id(part)] = part
            found |= _own(path, part)
    elif isinstance(thing, Optimizer):
        found |= _own(name, thing)
    elif isinstance(thing, (list, tuple, Mapping)):
        members = list(thing.items() if isinstance(thing, Mapping) else enumerate(thing))
        for key, each in members[:_MANY]:
            _visit(f"{name}[{key!r}]", each, depth - 1, found, known)
    elif isinstance(thing, types.MethodType):
        _visit(name, thing.__self__, depth, found, known)
    elif _is_followed(thing):
        found |= _own(name, thing)
        for attribute, value in vars(thing).items():
            if attribute != "_join_config":
                simple = isinstance(value, _SIMPLE)
                found[f"{name}.{attribute}"] = value if simple else f"a {type(value).__name__}"
                _visit(f"{name}.{attribute}", value, depth - 1, found, known)


def _own(name: str, thing: Any) -> dict[str, Any]:
    """Which attributes an object has of its own, how many hooks in which of them, and whether it is in a join."""
    own = vars(thing)
    kept = {key: value for key, value in own.items() if key.endswith("hooks") and isinstance(value, (Mapping, list))}
    config = own.get("_join_config")
    return {
        f"attributes of {name}": frozenset(own) - _SETS_ITSELF,
        f"hooks on {name}": {key.strip("_").replace("_", " "): len(value) for key, value in kept.items() if value},
        f"join of {name}": "switched on" if config is not None and config.enable else "switched off",
    }


def _is_followed(thing: Any) -> bool:
    """Whether an object is neither one of torch's or Python's, which lead to all the world, nor a class or module."""
    foreign = type(thing).__module__.partition(".")[0] in ("torch", "builtins")
    return hasattr(thing, "__dict__") and not foreign
