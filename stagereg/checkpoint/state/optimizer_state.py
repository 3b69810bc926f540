"""The state of optimizers by the names of parameters, so that any split of a model over ranks restores it.

torch numbers the parameters of an optimizer from 0, and so do two pipeline stages, each for itself. Here a name stands
for each of them, and a group goes by that of its first parameter (docs/format.md), so what several ranks have, as
stages, ``FSDP2`` and ``ZeroRedundancyOptimizer`` do, is put together by name. The dotted names are those of torch's
flattened optimizer state dicts (``StateDictOptions(flatten_optimizer_state_dict=True)``). ``aliases`` are the other
names of tied parameters: in another split one may stand alone.

A parameter of no module in the state goes by its number. Numbers, and names where only numbers are known, are matched
by position, as torch does it.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import stagereg.checkpoint.state.module_state as module_state
from stagereg.checkpoint.format.encoding import Leaf, marks
from stagereg.errors import CheckpointError, NothingSavedError, listed

_log = logging.getLogger(__name__)

_STATE, _GROUPS, _PARAMS, _ALIASES = "state", "param_groups", "params", "aliases"
_OF_THE_PARAMETERS = (_PARAMS, "param_names")
"""What a group has one of for each parameter; all else goes for the group."""
_DECOUPLED = "decoupled_weight_decay"  # by which AdamW is no Adam


class Names(NamedTuple):
    """Of the parameters of an optimizer."""

    by_parameter: dict[torch.Tensor, str]  # the name of each, in the order of the groups
    aliases: dict[str, str]  # further names of tied ones, each with the first
    flat: torch.nn.Module | None  # the module of FSDP1 that has them, for torch to take apart


class ParameterNames:
    """Finds the names of the parameters of optimizers, in the modules of the state that they are saved with, once."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, Names] = WeakKeyDictionary()

    def for_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Names:
        """Return the names that go with ``state``.

        Raises:
            CheckpointError: two parameters have one name.
        """
        params, found = parameters_of(optimizer), self._found.get(optimizer)
        if (
            found is None
            or len(params) != len(found.by_parameter)
            or not all(map(operator.is_, params, found.by_parameter))
        ):
            found = self._found[optimizer] = _names(optimizer, params, state)
        return found


def _names(optimizer: Optimizer, params: Sequence[torch.Tensor], state: Mapping[str, Any]) -> Names:
    wanted, owners = set(params), {}
    names = {param: str(number) for number, param in enumerate(params)}
    for group in optimizer.param_groups:
        names.update(zip(group[_PARAMS], group.get("param_names", ()), strict=False))
    names.update({value: name for name, value in state.items() if isinstance(value, torch.Tensor) and value in wanted})
    flat = None
    for name, value in state.items():
        modules = module_state.modules_of(value)
        if len(modules) == 1 and module_state.has_flat_parameters(modules) and wanted <= set(modules[0].parameters()):
            flat = modules[0]
        found, aliases = module_state.names_of(modules)
        own = {param: of for param, of in found.items() if param in wanted}
        if own:
            owners[name] = own, {alias: first for alias, first in aliases.items() if first in own.values()}
    every = {(param, of) for own, _ in owners.values() for param, of in own.items()}
    ambiguous = len({of for _, of in every}) < len({param for param, _ in every})
    known: dict[str, str] = {}
    for name, (own, aliases) in owners.items():  # of two modules with like names each one's entry tells them apart
        before = f"{name}." if ambiguous and len(owners) > 1 else ""
        names.update({param: f"{before}{of}" for param, of in own.items()})
        known |= {f"{before}{alias}": f"{before}{first}" for alias, first in aliases.items()}
    [(most, count)] = Counter(names[param] for param in wanted).most_common(1) or [("", 0)]
    if count > 1:
        raise CheckpointError(f"{count} parameters of the optimizer are called {most!r}; give them different names")
    return Names({param: names[param] for param in params}, known, flat)


def optimizers_of(value: Any) -> list[Optimizer]:
    """Return the optimizer or optimizers that ``value`` is; none if it is something else.

    An optimizer that has others to go through, such as torchtitan's ``OptimizersContainer``, is those.
    """
    of_many = isinstance(value, Optimizer) and isinstance(value, Iterable)
    each = list(value) if of_many or isinstance(value, (list, tuple)) else [value]
    return each if all(isinstance(one, Optimizer) for one in each) else []


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return its parameters, in the order of its groups; of ``ZeroRedundancyOptimizer`` those of all ranks."""
    return [param for group in optimizer.param_groups for param in group[_PARAMS]]


def count_stale(optimizer: Optimizer) -> int:
    """Return how many tensors in none of its groups an optimizer has state for."""
    known = {id(param) for param in parameters_of(optimizer)}
    return sum(isinstance(key, torch.Tensor) and id(key) not in known for key in optimizer.state)


def is_by_name(saved: Any) -> bool:
    """Whether an entry, or its structure, is the state of an optimizer as :func:`state_of` returns it."""
    return (
        isinstance(saved, Mapping)
        and isinstance(saved.get(_STATE), Mapping)
        and isinstance(saved.get(_GROUPS), Mapping)
        and all(isinstance(group, Mapping) and type(group.get(_PARAMS)) is list for group in saved[_GROUPS].values())
    )


def as_by_name(saved: Any) -> Mapping[str, Any] | None:
    """Return the state of an optimizer, or its structure, by name, also where torch made it; ``None`` if it is none."""
    if is_by_name(saved):
        return cast("Mapping[str, Any]", saved)
    if not _is_torchs(saved):
        return None
    groups = [{**group, _PARAMS: [*map(str, group[_PARAMS])]} for group in saved[_GROUPS] if group[_PARAMS]]
    state = {str(key): part for key, part in saved[_STATE].items()}
    return {_STATE: state, _GROUPS: {group[_PARAMS][0]: group for group in groups}}


def of_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by name of what others have saved with dotted names.

    ``state.fc.weight.exp_avg`` is the same with all. torch's flattened state dicts and torchtitan have
    ``param_groups.fc.weight.lr`` for each parameter, where groups are those with the same options; others have
    ``param_groups.0.lr``, and ``param_groups.0.params``. The leaves of options that are tensors have been read.
    """
    options: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, rest = key.partition(".")
        if section == _GROUPS:
            of, _, option = rest.rpartition(".")
            options.setdefault(of, {})[option] = value
    alike: dict[str, dict[str, Any]] = {}
    for of, own in options.items():
        shared = {key: x.value.tolist() if isinstance(x, Leaf) else x for key, x in _hyperparameters(own).items()}
        shown = of if _PARAMS in own else repr(shared)
        group = alike.setdefault(shown, {**_hyperparameters(own), _PARAMS: []})
        group[_PARAMS] += map(str, own.get(_PARAMS, [of]))
    groups = {group[_PARAMS][0]: group for group in alike.values() if group[_PARAMS]}
    state: dict[str, Any] = {name: {} for group in groups.values() for name in group[_PARAMS]}
    for key, value in values.items():
        section, *way = key.split(".")
        ends = (end for end in range(len(way) - 1, 0, -1) if ".".join(way[:end]) in state)
        if section == _STATE and (end := next(ends, 0)):
            at = state[".".join(way[:end])]
            for part in way[end:-1]:
                at = at.setdefault(part, {})
            at[way[-1]] = value
    return {_STATE: {name: each for name, each in state.items() if each}, _GROUPS: groups}


def _is_torchs(saved: Any) -> bool:
    """Whether it is what torch has as the state of an optimizer, with numbers or names."""
    if not (isinstance(saved, Mapping) and isinstance(saved.get(_STATE), Mapping) and type(saved.get(_GROUPS)) is list):
        return False
    return all(isinstance(group, Mapping) and type(group.get(_PARAMS)) is list for group in saved[_GROUPS])


def as_torchs(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by name as torch has it: a list of groups, with names where torch may have numbers."""
    return {_STATE: saved[_STATE], _GROUPS: [*saved[_GROUPS].values()]}


def groups_of(state: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return the groups of each optimizer in a state: their parameters, by the first one's name."""
    optimizers = {name: saved[_GROUPS] for name, saved in state.items() if is_by_name(saved)}
    return {name: {of: each[_PARAMS] for of, each in groups.items()} for name, groups in optimizers.items()}


def joined(each: Sequence[Mapping[str, Any]]) -> Any:
    """Return the states of several optimizers as one.

    Raises:
        CheckpointError: two of them have a parameter in common, or one has a state dict of its own kind.
    """
    if len(each) == 1:
        return each[0]
    if not all(map(is_by_name, each)):
        raise CheckpointError("of several optimizers one has a state dict of its own kind; save it under its own name")
    whole: dict[str, Any] = {}
    for key in (_STATE, _GROUPS, _ALIASES):
        parts = [one[key] for one in each if key in one]
        found = {name: item for part in parts for name, item in part.items()}
        if key != _ALIASES and len(found) < sum(map(len, parts)):
            [(twice, _)] = Counter(name for part in parts for name in part).most_common(1)
            raise CheckpointError(f"two of the optimizers have {twice!r}; save each under a name of its own")
        if found or key != _ALIASES:
            whole[key] = found
    return whole


# -- saving


def state_of(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Return the state by name: references to live tensors. Collective with FSDP1 alone.

    An optimizer whose ``state_dict`` is not as torch's own is left as it is.

    Raises:
        CheckpointError: it is a ``ZeroRedundancyOptimizer`` with ``overlap_with_ddp``, which has no state dict.
    """
    if names.flat is not None:
        whole: Any = get_optimizer_state_dict(names.flat, optimizer)
        return {_STATE: whole[_STATE], _GROUPS: {each[_PARAMS][0]: each for each in whole[_GROUPS] if each[_PARAMS]}}
    inner = _inner(optimizer)
    found = inner.state_dict()
    every = [*names.by_parameter.values()]
    order = every if inner is optimizer else [names.by_parameter[param] for param in parameters_of(inner)]
    if not _is_torchs(found) or not all(type(number) is int for number in found[_STATE]):
        return found
    groups: dict[str, Any] = {}
    at = 0
    for part, group in zip(found[_GROUPS], optimizer.param_groups, strict=True):
        own = every[at : at + len(group[_PARAMS])]
        at += len(own)
        # A scheduler writes into the outer groups of ZeRO, and the inner optimizer gets it at its next step only.
        outer = {} if inner is optimizer else _hyperparameters(group)
        if own:
            groups[own[0]] = {**_hyperparameters(part), **outer, _PARAMS: own}
    by_name = {_STATE: {order[number]: each for number, each in found[_STATE].items() if each}, _GROUPS: groups}
    return by_name | {_ALIASES: dict(names.aliases)} if names.aliases else by_name


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state: of ZeRO the one inside, with the parameters of this rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise CheckpointError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state that can be saved; leave that out"
        )
    return inner


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_THE_PARAMETERS}


# -- restoring


def select(optimizer: Optimizer, names: Names, saved: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return what this rank takes of a saved state, or of its structure, and the saved names that it knows.

    Raises:
        NothingSavedError: it is the state of another kind of optimizer, as far as its options tell.
        CheckpointError: parameters are not in it; what is one group here was saved in groups that differ.
    """
    groups: Mapping[str, Any] = saved[_GROUPS]
    group_of = {name: group for group in groups.values() for name in group[_PARAMS]}
    here = _groups_here(optimizer, names)
    source = _sources([name for own in here for name in own], group_of, saved.get(_ALIASES, {}))
    missing = [name for name in source if source[name] not in group_of]
    if missing:
        raise CheckpointError(f"it has nothing of {len(missing)} parameters of the optimizer: {listed(missing)}")
    _refuse_another_kind(optimizer, [group_of[name] for name in source.values()])  # others are of other optimizers
    _warn_of_one_group(optimizer, [{id(group_of[source[name]]) for name in own} for own in here], here)
    found: dict[str, Any] = {}
    for own in here:
        each = {id(group_of[source[name]]): group_of[source[name]] for name in own}
        first, *others = [_hyperparameters(one) for one in each.values()] or [{}]
        for other in others:
            if not _alike(first, other):
                differing = sorted(key for key in first if not _alike(first[key], other.get(key)))
                raise CheckpointError(
                    f"{own[0]!r} and others are one group of parameters here, and were several with different "
                    f"{', '.join(differing)}; make as many groups as there were"
                )
        if own:
            found[own[0]] = {**first, _PARAMS: own}
    local = (
        [names.by_parameter[param] for param in parameters_of(_inner(optimizer))] if names.flat is None else [*source]
    )
    state = {name: saved[_STATE][source[name]] for name in local if source[name] in saved[_STATE]}
    _keep_apart(state)
    _keep_apart(found)
    return {_STATE: state, _GROUPS: found}, {*source.values(), *names.aliases}


def _refuse_another_kind(optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    there, here = _options_of(saved), _options_of(optimizer.param_groups)
    more, own = there.keys() - here.keys(), here.keys() - there.keys()
    if not (more and own):  # options that one side alone has more are those of another version of torch
        more = own = {_DECOUPLED} if {there.get(_DECOUPLED), here.get(_DECOUPLED)} == {True, False} else set()
    if more:
        kind = type(optimizer).__name__
        raise NothingSavedError(
            f"it is the state of another kind of optimizer than {kind}: it has {_described(there, more)}; {kind} has "
            f"{_described(here, own)}"
        )


def _options_of(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of all groups, without those that schedulers add."""
    every = {key: value for group in groups for key, value in _hyperparameters(group).items()}
    return {key: value for key, value in every.items() if not key.endswith(("_lr", "_momentum"))}


def _described(options: Mapping[str, Any], names: Iterable[str]) -> str:
    return listed([f"{key}={options[key]}" if type(options[key]) is bool else key for key in sorted(names)])


def _warn_of_one_group(optimizer: Optimizer, saved: Sequence[set[int]], here: Sequence[Sequence[str]]) -> None:
    """Warn where groups whose options differ were one when they were saved; ``saved`` are those that each was."""
    groups = [_hyperparameters(group) for group in optimizer.param_groups]
    for (i, one), (j, other) in itertools.combinations(enumerate(saved[: len(groups)]), 2):
        if one & other and not _alike(groups[i], groups[j]):
            differing = sorted(key for key in groups[i] if not _alike(groups[i][key], groups[j].get(key)))
            _log.warning(
                "%r and %r are in different groups of parameters here, and were in one: both get its %s.",
                here[i][0],
                here[j][0],
                ", ".join(differing),
            )
            return


def _groups_here(optimizer: Optimizer, names: Names) -> list[list[str]]:
    if names.flat is not None:
        return [group[_PARAMS] for group in state_of(optimizer, names)[_GROUPS].values()]
    return [[names.by_parameter[param] for param in group[_PARAMS]] for group in optimizer.param_groups]


def _keep_apart(structures: dict[str, Any]) -> None:
    """Give each its own leaves, where two stand for the same that was saved: each is read into memory of its own."""
    seen: set[int] = set()
    for name, structure in structures.items():
        leaves = {id(leaf) for leaf in marks(structure)}
        if leaves & seen:
            structures[name] = copy.deepcopy(structure)
        seen |= leaves


def _sources(own: Sequence[str], saved: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the name under which each parameter here was saved."""
    if all(map(str.isdecimal, own)) != all(map(str.isdecimal, saved)) and len(own) == len(saved):
        return dict(zip(own, saved, strict=True))
    return {name: name if name in saved else aliases.get(name, name) for name in own}


def _alike(one: Any, other: Any) -> bool:
    """Whether two hyperparameters are equal, or both tensors, whose values are yet to be read."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return type(one) is type(other) and (not isinstance(one, (str, bool, int, float, tuple, list)) or one == other)


def load(optimizer: Optimizer, names: Names, loaded: Mapping[str, Any]) -> None:
    """Load what :func:`select` has returned, and its tensors. Raises: what the optimizer raises."""
    inner = _inner(optimizer)
    if not is_by_name(loaded):
        inner.load_state_dict(dict(loaded))
        return
    groups = loaded[_GROUPS]
    if names.flat is not None:
        set_optimizer_state_dict(names.flat, optimizer, {_STATE: loaded[_STATE], _GROUPS: [*groups.values()]})
        return
    current = inner.state_dict()
    order = [names.by_parameter[param] for param in parameters_of(inner)]
    state = {number: _counting(loaded[_STATE][name]) for number, name in enumerate(order) if name in loaded[_STATE]}
    parts = []
    for part, group in zip(current[_GROUPS], optimizer.param_groups, strict=True):
        own = names.by_parameter[group[_PARAMS][0]] if group[_PARAMS] else None
        parts.append({**part, **_hyperparameters(groups.get(own, {}))})
    inner.load_state_dict({**current, _STATE: state, _GROUPS: parts})
    if inner is not optimizer:
        for group, part in zip(optimizer.param_groups, inner.param_groups, strict=True):
            group.update(_hyperparameters(part))


def _counting(saved: Any) -> Any:
    """Return the state of a parameter with its step as torch has it: in half precision it would stop at 256."""
    step = saved.get("step") if isinstance(saved, Mapping) else None
    if isinstance(step, torch.Tensor) and step.is_floating_point() and step.itemsize < torch.float32.itemsize:
        return {**saved, "step": step.float()}
    return saved
