"""Saves and restores optimizers by the names of parameters, so that any parallelism layout can restore their state.

torch numbers the parameters of each optimizer from 0, so the numbers of two pipeline stages collide. Here each
parameter has a name, and a group has the name of its first parameter (docs/format.md). So the states of several ranks,
for example with pipeline stages, ``FSDP2`` or ``ZeroRedundancyOptimizer``, can be merged by name. The dotted names are
as in torch's ``StateDictOptions(flatten_optimizer_state_dict=True)``. ``aliases`` has the other names of tied
parameters, because another layout may not tie them.

A parameter that belongs to no module in the state has its number as name. If only the program or only the checkpoint
has names, parameters are matched by position, as in torch.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_forms as forms
import stagereg.checkpoint.state.optimizer_tensors as optimizer_tensors
from stagereg.checkpoint.format.encoding import marks
from stagereg.checkpoint.format.split_tensors import is_split
from stagereg.checkpoint.state.optimizer_forms import EMPTY_GROUPS, GROUPS, OPTIMIZERS, PARAMS, STATE, hyperparameters
from stagereg.errors import CheckpointError, MissingEntryError, listed

_log = logging.getLogger(__name__)


class Names(NamedTuple):
    """The names of the parameters of an optimizer."""

    by_parameter: dict[torch.Tensor, str]  # the name of each parameter, in the order of the groups
    aliases: dict[str, str]  # maps other names of tied parameters to the first name
    flat: torch.nn.Module | None  # the FSDP1 module that has flattened the parameters, if any
    owners: dict[str, tuple[str, str]]  # for each name: its module's entry, and the name in that module


class ParameterNames:
    """Finds and caches the names that the parameters of optimizers have in the modules of the state."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, Names] = WeakKeyDictionary()

    def for_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Names:
        """Return the names of the optimizer's parameters. Raises: ``CheckpointError`` if two have the same name."""
        params, found = parameters_of(optimizer), self._found.get(optimizer)
        if found is None or [*map(id, params)] != [*map(id, found.by_parameter)]:
            found = self._found[optimizer] = _names(optimizer, params, state)
        return found


def _names(optimizer: Optimizer, params: Sequence[torch.Tensor], state: Mapping[str, Any]) -> Names:
    wanted, owners = set(params), {}
    names = {param: str(number) for number, param in enumerate(params)}
    for group in optimizer.param_groups:
        names.update(zip(group[PARAMS], group.get("param_names", ()), strict=False))
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
    owner_of: dict[str, tuple[str, str]] = {}
    for name, (own, aliases) in owners.items():  # the entry's name distinguishes equal names in two modules
        before = f"{name}." if ambiguous and len(owners) > 1 else ""
        owner_of |= {f"{before}{of}": (name, of) for of in own.values()}
        names.update({param: f"{before}{of}" for param, of in own.items()})
        known |= {f"{before}{alias}": f"{before}{first}" for alias, first in aliases.items()}
    [(most, count)] = Counter(names[param] for param in wanted).most_common(1) or [("", 0)]
    if count > 1:
        raise CheckpointError(f"{count} parameters of the optimizer are named {most!r}; give them different names")
    return Names({param: names[param] for param in params}, known, flat, owner_of)


def optimizers_of(value: Any) -> list[Optimizer]:
    """Return the optimizers of ``value``, which is an optimizer or a list of optimizers; otherwise an empty list.

    A container of optimizers, such as torchtitan's ``OptimizersContainer``, counts as a list. An object without
    ``param_groups`` does not count as an optimizer: its class has not called ``Optimizer.__init__``.
    """
    of_many = isinstance(value, Optimizer) and isinstance(value, Iterable)
    each = list(value) if of_many or isinstance(value, (list, tuple)) else [value]
    return each if all(isinstance(one, Optimizer) and hasattr(one, GROUPS) for one in each) else []


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters in the order of the groups; for ``ZeroRedundancyOptimizer`` the parameters of all ranks."""
    return [param for group in optimizer.param_groups for param in group[PARAMS]]


# -- saving


def state_of(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Return the optimizer's state in the form by name. It contains the live tensors. Collective only with FSDP1.

    If the optimizer's state dict is not in torch's form, it is returned unchanged.

    Raises:
        CheckpointError: the optimizer has no state dict, for example a ``ZeroRedundancyOptimizer`` with
            ``overlap_with_ddp``; or it has state that would not be restored.
    """
    if names.flat is not None:
        return _flat_state(optimizer, names.flat)
    inner = _inner(optimizer)
    found = _state_dict(inner)
    params = parameters_of(inner)
    if not forms.is_numbered(found, len(params)):
        if forms.is_by_name(found):
            raise CheckpointError(
                f"its state_dict() has dicts as {STATE!r} and {GROUPS!r}, like the checkpoint's own form, and would "
                f"not be restored unchanged; make {GROUPS!r} a list, or give the keys other names"
            )
        return found
    groups = []
    for part, group in zip(found[GROUPS], optimizer.param_groups, strict=True):
        # A scheduler writes into the outer groups of ZeRO; the inner optimizer gets the values at its next step.
        outer = {} if inner is optimizer else hyperparameters(group)
        groups.append(([names.by_parameter[param] for param in group[PARAMS]], {**hyperparameters(part), **outer}))
    entry = forms.by_name(found, {number: names.by_parameter[param] for number, param in enumerate(params)}, groups)
    by_parameter = {name: param for param, name in names.by_parameter.items()}
    for name, own in entry[STATE].items():
        if is_split(by_parameter[name]):
            entry[STATE][name] = optimizer_tensors.split_as(by_parameter[name], own, f"state.{name}")
    rest = {OPTIMIZERS: entry[OPTIMIZERS]} if OPTIMIZERS in entry else {}
    if notes := optimizer_tensors.notes_of(entry[STATE], by_parameter, rest):
        entry[forms.TENSORS] = notes
    return entry | {forms.ALIASES: dict(names.aliases)} if names.aliases else entry


def _flat_state(optimizer: Optimizer, module: torch.nn.Module) -> dict[str, Any]:
    """Return the state that torch merges for FSDP1: only the state of parameters, cast to the parameters' dtypes."""
    beside = _beside(optimizer)
    states = [(str(i), param, optimizer.state.get(param, {})) for i, param in enumerate(parameters_of(optimizer))]
    given = {name: state for name, _, state in states}
    if optimizer_tensors.notes_of(given, {name: param for name, param, _ in states}, {}).get("dtypes"):
        beside.append("state whose dtype differs from its parameter's")
    if sum(not group[PARAMS] for group in optimizer.param_groups) > 1:
        beside.append("several groups without parameters")
    if beside:
        raise CheckpointError(
            f"torch's FSDP1 would not restore {listed(beside)} of {type(optimizer).__name__}; shard the model with "
            "fully_shard (FSDP2) instead"
        )
    whole: Any = get_optimizer_state_dict(module, optimizer)
    names = {name: name for group in whole[GROUPS] for name in group[PARAMS]}
    return forms.by_name(whole, names, [(group[PARAMS], hyperparameters(group)) for group in whole[GROUPS]])


def _beside(optimizer: Optimizer) -> list[str]:
    """List the parts of an optimizer's state that belong to no parameter, for messages."""
    keys = [repr(key) for key in optimizer.state if not isinstance(key, torch.Tensor)]
    return keys + ["keys from register_state_dict_post_hook"] * bool(optimizer._optimizer_state_dict_post_hooks)


def _state_dict(optimizer: Optimizer) -> Any:
    """Return the optimizer's state dict. Raises: ``CheckpointError`` if torch would not restore it."""
    params = parameters_of(optimizer)
    keys: Iterable[Any] = optimizer.state
    if taken := [key for key in keys if not isinstance(key, torch.Tensor) and key in range(len(params))]:
        text = f"it has state under the key {taken[0]!r}, which torch takes for a parameter's number; make it a string"
        raise CheckpointError(text)
    try:
        return optimizer.state_dict()
    except KeyError as error:
        known = set(params)
        others = [key for key in optimizer.state if isinstance(key, torch.Tensor) and key not in known]
        if not others:
            raise
        raise CheckpointError(
            f"it has state for {len(others)} tensor{'s' * (len(others) > 1)} in none of its param_groups, the first of "
            f"shape {[*others[0].shape]}. When the program replaces a parameter, remove the state of the old one: "
            "optimizer.state.pop(old)"
        ) from error


def is_of_own_kind(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's state dict is not in torch's form. Such a state is restored unchanged."""
    inner = _inner(optimizer)
    return not forms.is_numbered(_state_dict(inner), len(parameters_of(inner)))


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state. ``ZeroRedundancyOptimizer`` has an inner optimizer on each rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        text = "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state that can be saved; remove that option"
        raise CheckpointError(text)
    if own := _beside(optimizer):
        raise CheckpointError(
            f"a ZeroRedundancyOptimizer has {listed(own)}, but only the state of its inner optimizer is saved; move "
            "them to optimizer.optim"
        )
    return inner


# -- restoring


def select(
    optimizer: Optimizer,
    names: Names,
    saved: Mapping[str, Any],
    origins: Mapping[str, Sequence[str]],
    may_miss: Collection[str],
) -> tuple[dict[str, Any], set[str]]:
    """Select this rank's part of a saved state; return the part, and the saved names of its parameters.

    Args:
        origins: the names under which a parameter may have been saved, the most likely first.
        may_miss: the parameters that keep their current state if they were not saved.

    Raises:
        MissingEntryError: the hyperparameters belong to another type of optimizer; or some parameters of LBFGS, which
            has one state for all parameters, were not saved.
        CheckpointError: parameters are missing; a group was saved as several groups with different options; or a value
            that belongs to no parameter does not match the optimizer.
    """
    notes = saved.get(forms.TENSORS, {})
    optimizer_tensors.mark({key: saved[key] for key in (STATE, OPTIMIZERS) if key in saved}, notes)
    groups: Mapping[str, Any] = saved[GROUPS]
    group_of = {name: group for group in groups.values() for name in group[PARAMS]}
    here = _groups_here(optimizer, names)
    source = _sources([name for own in here for name in own], group_of, saved.get(forms.ALIASES, {}), origins)
    absent = [name for name in source if source[name] not in group_of]
    if missing := absent if names.flat is not None else [name for name in absent if name not in may_miss]:
        raise CheckpointError(f"no state was saved for {len(missing)} parameters of the optimizer: {listed(missing)}")
    if absent and isinstance(optimizer, torch.optim.LBFGS):
        raise MissingEntryError(f"LBFGS has one state for all parameters, and {listed(absent)} were not among them")
    source = {name: of for name, of in source.items() if of in group_of}
    forms.refuse_another_kind(optimizer, [group_of[name] for name in source.values()])  # only groups of this optimizer
    _warn_of_one_group(optimizer, [{id(group_of[source[x]]) for x in own if x in source} for own in here], here)
    found: dict[str, Any] = {}
    for own in here:
        there = [name for name in own if name in source]
        each = {id(group_of[source[name]]): group_of[source[name]] for name in there}
        first, *others = [hyperparameters(one) for one in each.values()] or [{}]
        for other in others:
            if not _alike(first, other):
                differing = sorted(str(key) for key in first if not _alike(first[key], other.get(key)))
                raise CheckpointError(
                    f"{own[0]!r} and others are in one parameter group here, but were saved in several with different "
                    f"{', '.join(differing)}; create the same groups as in the saved run"
                )
        if there:
            found[own[0]] = {**first, PARAMS: there}
    own = [*source]
    if names.flat is None:
        own = [names.by_parameter[param] for param in parameters_of(_inner(optimizer))]
    first_local, local = next(iter(own), ""), [name for name in own if name in source]
    state = {name: saved[STATE][source[name]] for name in local if source[name] in saved[STATE]}
    _keep_apart(state)
    _keep_apart(found)
    taken = {STATE: state, GROUPS: found}
    if part := _select_part(optimizer, names, saved, {source[name] for name in local}):
        taken[OPTIMIZERS] = {first_local: {PARAMS: local, **part}}
    if kept := optimizer_tensors.kept_dtypes(notes, {name: source[name] for name in local}):
        taken[forms.TENSORS] = kept
    return taken, {*source.values(), *names.aliases}


def _select_part(optimizer: Optimizer, names: Names, saved: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    """Return the values that belong to no parameter, from the saved optimizers with parameters in ``own``."""
    every = saved.get(OPTIMIZERS, {})
    parts = [each for each in every.values() if own & set(each[PARAMS])] if own else [every.get("", {})]
    found: dict[str, dict[Any, Any]] = {}
    for section in (STATE, forms.BESIDE):
        for key, each in ((key, each) for part in parts for key, each in part.get(section, {}).items()):
            known = found.setdefault(section, {})
            if key in known and not (known[key] is each or (not any(marks(each)) and known[key] == each)):
                raise CheckpointError(
                    f"several optimizers or ranks have saved different values of {key!r}, which belongs to no "
                    "parameter; restore with the same number of optimizers and ranks"
                )
            known[key] = each
    wrong = [repr(key) for key in found.get(STATE, {}) if key in range(len(names.by_parameter))]
    wrong += [repr(key) for section in found.values() for key in section] if names.flat is not None else []
    if wrong:
        raise CheckpointError(f"this optimizer cannot restore {listed(wrong)}, which belongs to no parameter")
    if empty := _select_empty_groups(optimizer, [part[EMPTY_GROUPS] for part in parts if EMPTY_GROUPS in part]):
        found[EMPTY_GROUPS] = empty
    return copy.deepcopy(found)


def _select_empty_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    here = [str(at) for at, group in enumerate(optimizer.param_groups) if not group[PARAMS]]
    there = [*saved[0].values()] if saved else []
    if any(not _alike(saved[0], other) for other in saved[1:]) or (there and here and len(there) != len(here)):
        raise CheckpointError(
            f"it has {sum(map(len, saved))} groups without parameters, which do not match the {len(here)} here; "
            "create the same groups"
        )
    if len(there) != len(here):
        effect = "Their options stay unchanged" if here else "The saved options are ignored"
        text = "%d groups without parameters were saved, and the optimizer has %d. %s."
        _log.warning(text, len(there), len(here), effect)
    return dict(zip(here, there, strict=True)) if len(there) == len(here) else {}


def _warn_of_one_group(optimizer: Optimizer, saved: Sequence[set[int]], here: Sequence[Sequence[str]]) -> None:
    """Warn if two groups with different options were saved as one. ``saved``: the saved groups of each group."""
    groups = [hyperparameters(group) for group in optimizer.param_groups]
    for (i, one), (j, other) in itertools.combinations(enumerate(saved[: len(groups)]), 2):
        if one & other and not _alike(groups[i], groups[j]):
            differing = sorted(str(key) for key in groups[i] if not _alike(groups[i][key], groups[j].get(key)))
            text = "%r and %r are in different parameter groups here, but were saved in one: both get its %s."
            _log.warning(text, here[i][0], here[j][0], ", ".join(differing))
            return


def _groups_here(optimizer: Optimizer, names: Names) -> list[list[str]]:
    if names.flat is not None:
        return [group[PARAMS] for group in state_of(optimizer, names)[GROUPS].values()]
    return [[names.by_parameter[param] for param in group[PARAMS]] for group in optimizer.param_groups]


def _keep_apart(structures: dict[str, Any]) -> None:
    """Copy leaves that two parameters share, because each parameter reads the saved value into its own memory."""
    seen: set[int] = set()
    for name, structure in structures.items():
        leaves = {id(leaf) for leaf in marks(structure)}
        if leaves & seen:
            structures[name] = copy.deepcopy(structure)
        seen |= leaves


def _sources(
    own: Sequence[str], saved: Mapping[str, Any], aliases: Mapping[str, str], origins: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Map each parameter to its saved name, or to an empty string if it was not saved."""
    if all(map(str.isdecimal, own)) != all(map(str.isdecimal, saved)) and len(own) == len(saved):
        return dict(zip(own, saved, strict=True))
    found = {}
    for name in own:
        likely = origins.get(name, [name])
        found[name] = next((each for each in (*likely, *(aliases.get(one, "") for one in likely)) if each in saved), "")
    return found


def _alike(one: Any, other: Any) -> bool:
    """Return whether two hyperparameters are equal. Two tensors count as equal, because their values are read later."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return type(one) is type(other) and (not isinstance(one, (str, bool, int, float, tuple, list)) or one == other)


def load(optimizer: Optimizer, names: Names, loaded: Any) -> None:
    """Load a result of :func:`select`, whose tensors have been read, into the optimizer. Errors of torch propagate."""
    inner = _inner(optimizer)
    if not forms.is_by_name(loaded):
        inner.load_state_dict(dict(loaded) if isinstance(loaded, Mapping) else loaded)
        return
    groups, parts, notes = (loaded.get(key, {}) for key in (GROUPS, OPTIMIZERS, forms.TENSORS))
    params = parameters_of(inner)
    there = dict.fromkeys(name for group in groups.values() for name in group[PARAMS])
    order = [names.by_parameter[param] for param in params] if names.flat is None else [*there]
    part = parts.get(next(iter(order), ""), {})
    empty = {int(at): options for at, options in part.get(EMPTY_GROUPS, {}).items()}
    if names.flat is not None:
        every = [*groups.values()]
        every += [{**x, **empty.get(at, {})} for at, x in enumerate(optimizer.param_groups) if not x[PARAMS]]
        set_optimizer_state_dict(names.flat, optimizer, {STATE: loaded[STATE], GROUPS: every})
        return
    current = inner.state_dict()
    state = {number: _counting(loaded[STATE][name]) for number, name in enumerate(order) if name in loaded[STATE]}
    options = []
    for at, (now, group) in enumerate(zip(current[GROUPS], optimizer.param_groups, strict=True)):
        found = groups.get(names.by_parameter[group[PARAMS][0]], {}) if group[PARAMS] else empty.get(at, {})
        options.append({**now, **hyperparameters(found)})
    beside = part.get(forms.BESIDE, {})
    if new := [repr(key) for key in current if key not in (STATE, GROUPS, *beside)]:
        _log.warning("%s of the optimizer was not saved, and keeps its current value.", listed(new))
    given = {**state, **part.get(STATE, {})}
    absent = [x for x, name in zip(params, order, strict=True) if name not in there and x in inner.state]
    kept = {x: inner.state[x] for x in absent}  # some optimizers create state before the first step
    inner.load_state_dict({**current, **beside, STATE: given, GROUPS: options})
    inner.state.update(kept)
    for (number, own), param in ((each, params[each[0]]) for each in state.items()):
        if param in inner.state:
            keeps = optimizer_tensors.keeps_dtypes(notes, order[number], param)
            inner.state[param] = optimizer_tensors.given_back(own, inner.state[param], keeps)
    if inner is not optimizer:
        for group, own in zip(optimizer.param_groups, inner.param_groups, strict=True):
            group.update(hyperparameters(own))


def _counting(saved: Any) -> Any:
    """Return a parameter's state with a float32 step counter. A bfloat16 counter would stop at 256."""
    step = saved.get("step") if isinstance(saved, Mapping) else None
    if isinstance(step, torch.Tensor) and step.is_floating_point() and step.itemsize < torch.float32.itemsize:
        return {**saved, "step": step.float()}
    return saved
