"""Converts optimizer state from torch's form, keyed by numbers, to the *form by name*, keyed by parameter names.

In the form by name, a group has the name of its first parameter (docs/format.md). Values that belong to no parameter
(state under other keys, keys next to ``state`` and ``param_groups``, groups without parameters) are stored under the
name of the optimizer's first parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch.optim import Optimizer

from stagereg.errors import CheckpointError, MissingEntryError, listed

STATE, GROUPS, PARAMS, ALIASES = "state", "param_groups", "params", "aliases"
OPTIMIZERS, TENSORS = "optimizers", "tensors"
BESIDE, EMPTY_GROUPS = "beside", "empty_groups"  # keys of the items of ``OPTIMIZERS``, next to ``STATE``
_DECOUPLED = "decoupled_weight_decay"  # distinguishes AdamW from Adam
_OF_THE_PARAMETERS = (PARAMS, "param_names")  # group keys with a list of one item per parameter


def is_by_name(saved: Any) -> bool:
    """Return whether a value, saved or decoded as a structure, is optimizer state in the form by name."""
    return (
        isinstance(saved, dict)
        and isinstance(saved.get(STATE), Mapping)
        and isinstance(saved.get(GROUPS), Mapping)
        and all(isinstance(saved.get(key, {}), Mapping) for key in (OPTIMIZERS, TENSORS))
        and all(
            isinstance(each, Mapping) and type(each.get(PARAMS)) is list
            for each in (*saved[GROUPS].values(), *saved.get(OPTIMIZERS, {}).values())
        )
    )


def as_by_name(saved: Any) -> Mapping[str, Any] | None:
    """Return optimizer state in the form by name, converted if it has torch's form; ``None`` for other values."""
    if is_by_name(saved):
        return cast("Mapping[str, Any]", saved)
    if not _is_torchs(saved):
        return None
    names = {param: str(param) for group in saved[GROUPS] for param in group[PARAMS]}
    groups = [([names[param] for param in group[PARAMS]], hyperparameters(group)) for group in saved[GROUPS]]
    return by_name(saved, names, groups)


def by_name(
    found: Mapping[str, Any], names: Mapping[Any, str], groups: Sequence[tuple[list[str], dict[str, Any]]]
) -> dict[str, Any]:
    """Convert optimizer state from torch's form to the form by name. ``names`` maps parameter numbers to names."""
    known = {names[key]: each for key, each in found[STATE].items() if key in names}
    state = {name: each for name, each in known.items() if not isinstance(each, Mapping) or each}
    whole = {STATE: state, GROUPS: {own[0]: {**options, PARAMS: own} for own, options in groups if own}}
    part = {
        STATE: {key: each for key, each in found[STATE].items() if key not in names},
        BESIDE: {key: each for key, each in found.items() if key not in (STATE, GROUPS)},
        EMPTY_GROUPS: {str(i): options for i, (own, options) in enumerate(groups) if not own},
    }
    if any(part.values()):
        own = [*names.values()]
        whole[OPTIMIZERS] = {next(iter(own), ""): {PARAMS: own, **{key: each for key, each in part.items() if each}}}
    return whole


def _is_torchs(saved: Any) -> bool:
    """Return whether a value is optimizer state in torch's form, with numbers or strings for the parameters."""
    if not (isinstance(saved, dict) and isinstance(saved.get(STATE), Mapping) and type(saved.get(GROUPS)) is list):
        return False
    groups = saved[GROUPS]
    if not all(isinstance(group, Mapping) and type(group.get(PARAMS)) is list for group in groups):
        return False
    return all(isinstance(param, (int, str)) for group in groups for param in group[PARAMS])


def groups_of(state: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    optimizers = {name: saved[GROUPS] for name, saved in state.items() if is_by_name(saved)}
    return {name: {of: each[PARAMS] for of, each in groups.items()} for name, groups in optimizers.items()}


def joined(each: Sequence[Mapping[str, Any]]) -> Any:
    """Merge the states of several optimizers into one.

    Raises:
        CheckpointError: two optimizers share a parameter, or one has a state dict that is not in torch's form.
    """
    if len(each) == 1:
        return each[0]
    if not all(map(is_by_name, each)):
        raise CheckpointError("one of several optimizers has a non-standard state dict; save it as a separate entry")
    whole: dict[str, Any] = {}
    for key in (STATE, GROUPS, ALIASES, OPTIMIZERS):
        parts = [one[key] for one in each if key in one]
        found = {name: item for part in parts for name, item in part.items()}
        if key != ALIASES and len(found) < sum(map(len, parts)):
            [(twice, _)] = Counter(name for part in parts for name in part).most_common(1)
            have = repr(twice) if twice else "no parameters"
            raise CheckpointError(f"two of the optimizers have {have}; save each optimizer under its own name")
        if found or key in (STATE, GROUPS):
            whole[key] = found
    for kind, notes in (pair for one in each for pair in one.get(TENSORS, {}).items()):
        whole.setdefault(TENSORS, {}).setdefault(kind, {}).update(notes)
    return whole


def is_numbered(found: Any, count: int) -> bool:
    """Return whether a value is optimizer state in torch's form, with parameters numbered from 0 to ``count - 1``."""
    if not _is_torchs(found):
        return False
    return [number for group in found[GROUPS] for number in group[PARAMS]] == [*range(count)]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_THE_PARAMETERS}


def refuse_another_kind(optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``MissingEntryError`` if the hyperparameters of the saved groups belong to another type of optimizer."""
    there, here = _options_of(saved), _options_of(optimizer.param_groups)
    more, own = there.keys() - here.keys(), here.keys() - there.keys()
    if not (more and own):  # if only one side has extra options, another version of torch has added them
        more = own = {_DECOUPLED} if {there.get(_DECOUPLED), here.get(_DECOUPLED)} == {True, False} else set()
    if more:
        kind = type(optimizer).__name__
        raise MissingEntryError(
            f"the state is of another kind of optimizer than {kind}: it has {_described(there, more)}; {kind} has "
            f"{_described(here, own)}"
        )


def _options_of(groups: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    every = {key: value for group in groups for key, value in hyperparameters(group).items()}
    return {key: value for key, value in every.items() if not str(key).endswith(("_lr", "_momentum"))}


def _described(options: Mapping[Any, Any], names: Iterable[Any]) -> str:
    return listed(sorted(f"{key}={options[key]}" if type(options[key]) is bool else str(key) for key in names))
