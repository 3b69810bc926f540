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
    """List what there is to compare.

    Args:
        roots: objects, each with what to call it.

    Returns:
        What is comparable by ``==``, by where it was seen.
    """
    walk = _Walk()
    for name, thing in roots:
        walk.visit(name, thing, _DEPTH)
    return {**walk.found, "Python's warning filters": list(warnings.filters)}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return what is not as it was, by where, one text each."""
    # What is reached on one side only was made or dropped; what leads to it has changed, and is listed.
    return {place: _text(place, was, after[place]) for place, was in before.items() if after.get(place, was) != was}


def strict(place: str) -> bool:
    """Whether training itself changes nothing at this place, once it has taken a step."""
    return place.startswith(_STRICT)


def _text(place: str, before: Any, after: Any) -> str:
    if isinstance(before, frozenset) and isinstance(after, frozenset):
        parts = {"now also": after - before, "no longer": before - after}
        return f"{place}: " + "; ".join(f"{how} {', '.join(sorted(names))}" for how, names in parts.items() if names)
    return f"{place}: changed" if isinstance(before, list) else f"{place}: was {before}, is {after}"


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._known: dict[int, Any] = {}  # an id is one only while its object lives

    def visit(self, name: str, thing: Any, depth: int) -> None:
        if depth == 0 or id(thing) in self._known or isinstance(thing, (*_SIMPLE, type, types.ModuleType)):
            return
        self._known[id(thing)] = thing
        if isinstance(thing, Tensor):
            self._hooks(name, {"backward_hooks": thing._backward_hooks})
        elif isinstance(thing, nn.Module):
            for path, part in thing.named_modules(prefix=name):
                self._known[id(part)] = part
                self._own(path, part)
            for path, parameter in thing.named_parameters(prefix=name):
                self.visit(path, parameter, 1)
        elif isinstance(thing, Optimizer):
            self._own(name, thing)
        elif isinstance(thing, (list, tuple, Mapping)):
            members = list(thing.items() if isinstance(thing, Mapping) else enumerate(thing))
            for key, each in members[:_MANY]:
                self.visit(f"{name}[{key!r}]", each, depth - 1)
        elif isinstance(thing, types.MethodType):
            self.visit(name.removesuffix("()"), thing.__self__, depth)
        elif _is_plain(thing):
            self._own(name, thing)
            for attribute, value in vars(thing).items():
                if attribute != "_join_config":
                    self.found[f"{name}.{attribute}"] = _worth(value)
                    self.visit(f"{name}.{attribute}", value, depth - 1)

    def _own(self, name: str, thing: Any) -> None:
        self.found[f"attributes of {name}"] = frozenset(vars(thing)) - _SETS_ITSELF
        self._hooks(name, vars(thing))
        config = getattr(thing, "_join_config", None)
        if config is not None:
            self.found[f"join of {name}"] = "switched on" if getattr(config, "enable", False) else "switched off"

    def _hooks(self, name: str, attributes: Mapping[str, Any]) -> None:
        counts = {
            attribute.strip("_").replace("_", " "): len(hooks)
            for attribute, hooks in attributes.items()
            if attribute.endswith("hooks") and isinstance(hooks, Mapping) and hooks
        }
        self.found[f"hooks on {name}"] = counts or "none"


def _worth(value: Any) -> Any:
    if isinstance(value, _SIMPLE):
        return repr(value) if isinstance(value, str) else value
    kind = type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the {kind} {value.__qualname__}"
    return f"a {kind} of {len(value)}" if isinstance(value, (list, dict, set, tuple)) else f"a {kind}"


def _is_plain(thing: Any) -> bool:
    """Whether an object is written in Python, and not one of torch's, which lead to all the world."""
    foreign = type(thing).__module__.partition(".")[0] in ("torch", "builtins")
    return hasattr(thing, "__dict__") and not foreign and not isinstance(thing, _FUNCTIONS)
