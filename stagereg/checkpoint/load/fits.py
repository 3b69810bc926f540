"""Checks whether the objects of a program accept their saved state, before any object is changed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.module_state as module_state
from stagereg.base.option_text import option
from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.wrappers import name_of, wraps
from stagereg.checkpoint.state.name_map import NameMap, advice, by_new_name, moved
from stagereg.checkpoint.state.nested import is_module_state, state_dicts
from stagereg.checkpoint.state.rng import GeneratorState
from stagereg.data import ResumableSampler, is_stateful
from stagereg.errors import CheckpointError, MissingEntryError, listed

_LISTS = ("_schedulers", "lr_lambdas")  # lists in a scheduler's state, one item per inner scheduler or function
_DATA_PARALLEL = "module."  # prefix that DataParallel and DistributedDataParallel add to names


def select_of_modules(
    name: str, modules: Sequence[torch.nn.Module], structure: Any, exact: bool, cast: bool, name_map: NameMap
) -> tuple[Any, dict[str, Any]]:
    """Split the saved state dict of the entry ``name`` into the values that the modules load and the remaining values.

    ``exact``: whether the modules use torch's ``load_state_dict``. If so, ``CheckpointError`` is raised unless all
    names, shapes and dtypes match.
    """
    if not isinstance(structure, Mapping):
        raise CheckpointError("it is not the state of a module")
    live, extra = module_state.state_of(modules), module_state.extra_states(modules)
    taken = dict.fromkeys([*(key for key in live if not module_state.is_extra_state(key)), *extra])
    structure = _without_wrappers(structure, name_map.possible(name, taken))
    moves = name_map.moves(name, structure)
    saved = by_new_name(moves, structure)
    own = OrderedDict((key, structure[saved[key]]) for key in taken if key in saved)
    versions = getattr(structure, "_metadata", None) or {}
    own._metadata = {moved(path, moves): each for path, each in versions.items()}  # type: ignore[attr-defined]
    rest = {key: structure[old] for key, old in saved.items() if key not in taken}
    missing = [key for key in taken if key not in own]
    known = (key for key in missing if key in live and not is_lazy(live[key]))
    may_miss = [key for key in known if name_map.may_miss(key, f"{name}.{key}")]
    if may_miss:
        name_map.missing[name] = may_miss
    if exact or module_state.has_flat_parameters(modules):
        missing = [key for key in missing if key not in may_miss]
        wrong, converts = _misfits(name, live, missing, own, rest, cast)
        more = f". If that is intended, {option('checkpoint.restore.cast', True)} converts them" if converts else ""
        if wrong:
            proposed = advice(name, missing, rest, own, partial(_is_alike, live, rest, cast))
            raise CheckpointError(f"{'; '.join(wrong)}{more}{proposed}")
    return own, rest


def _without_wrappers(saved: Mapping[str, Any], wanted: set[str]) -> Mapping[str, Any]:
    plain = plain_names(saved, wanted)
    if [*plain] == [*plain.values()]:
        return saved
    found = OrderedDict((plain[key], item) for key, item in saved.items())
    versions = getattr(saved, "_metadata", None) or {}
    strips = not any(key.startswith(_DATA_PARALLEL) for key in plain.values())
    found._metadata = {_plain(f"{path}.", strips)[:-1]: each for path, each in versions.items() if path}  # type: ignore[attr-defined]
    return found


def plain_names(saved: Iterable[str], wanted: set[str]) -> dict[str, str]:
    """Map each saved parameter name to the name without the prefixes that wrappers add.

    DataParallel adds ``module.`` to all names, torch.compile adds ``_orig_mod`` to some. If removing the prefixes
    does not make more names match the names in ``wanted``, each name is mapped to itself.
    """
    same = {name: name for name in saved}
    strips = all(_plain(name).startswith(_DATA_PARALLEL) for name in same) and not wanted & same.keys()
    plain = {name: _plain(name, strips) for name in same}
    found = {*plain.values()}
    return plain if len(found) == len(plain) and len(found & wanted) > len(same.keys() & wanted) else same


def _plain(name: str, strips: bool = False) -> str:
    plain = module_state.without_wrappers(name)
    return plain.removeprefix(_DATA_PARALLEL) if strips else plain


def _misfits(
    name: str,
    live: Mapping[str, Any],
    missing: Sequence[str],
    saved: Mapping[str, Any],
    rest: Mapping[str, Any],
    cast: bool,
) -> tuple[list[str], bool]:
    """Return messages for the parameters that do not match, and whether ``cast=True`` would accept all of these."""
    other: list[str] = []
    unfilled, converts = [], True
    for key, leaf in saved.items():
        here = live.get(key)
        if not isinstance(here, torch.Tensor) or module_state.is_extra_state(key):
            continue
        if not isinstance(leaf, Leaf):
            other.append(f"{key} (a {type(leaf).__name__} in the checkpoint, a tensor here)")
            converts = False
        elif (there := _kind_of(leaf)) is not None:
            wanted = entries.TensorKind(here.dtype, there.shape) if is_lazy(here) else entries.TensorKind.of(here)
            if leaf.stored.is_subclass != wraps(here):
                converts = False
                own = name_of(here) if wraps(here) else wanted
                other.append(f"{key} ({there}{' of a subclass' * leaf.stored.is_subclass} saved, {own} here)")
            elif not there.fits(wanted, cast):
                converts &= there.fits(wanted, True)
                other.append(f"{key} ({there} in the checkpoint, {wanted} here)")
        if why := module_state.unfilled(here):
            unfilled.append(f"'{name}.{key}' {why}")
    wrong = [f"{len(missing)} missing in the checkpoint: {listed(missing)}"] if missing else []
    wrong += [f"{len(rest)} in the checkpoint but not here: {listed(sorted(rest))}"] if missing and rest else []
    wrong += [f"{len(other)} of another shape or dtype: {listed(other)}"] if other else []
    wrong += unfilled[:1]
    return wrong, bool(other and converts and not missing and not unfilled)


def expect_state_dicts(name: str, value: Any, structure: Any, cast: bool) -> None:
    """Raise ``CheckpointError`` if ``value`` contains a module's state dict that does not match the saved state dict.

    Names, shapes and dtypes must match, because a restore would change only the dict, and not the module.
    """
    saved = structure if isinstance(structure, Mapping) else {}
    if not is_module_state(value):
        for key, item in value.items() if isinstance(value, dict) else ():
            if any(kind == "module" for _, kind in state_dicts(item, name)):
                expect_state_dicts(f"{name}.{key}", item, saved.get(key), cast)
        return
    missing, rest = [key for key in value if key not in saved], {key: saved[key] for key in saved if key not in value}
    own = {key: saved[key] for key in value if key in saved}
    wrong, _ = _misfits(name, value, missing, own, rest, cast)
    if rest and not missing:
        wrong.append(f"{len(rest)} in the checkpoint but not here: {listed(sorted(rest))}")
    if wrong:
        raise CheckpointError(
            f"{'; '.join(wrong)}. {name!r} is the state dict of a module here, and restore() would change that dict "
            "and leave the module as it is. Put the module itself into the state, as in {'model': model}: restore() "
            "then handles names that wrappers such as torch.compile have changed, and has options for renamed layers"
        )


def not_filled(path: str, value: Any, structure: Any, cast: bool) -> Iterator[str]:
    """Yield a message, with the reason, for each tensor in nested dicts that a restore does not overwrite."""
    if isinstance(value, torch.Tensor):
        there = _kind_of(structure)
        if structure is None:
            yield f"{path} (missing in the checkpoint)"
        elif there and value.numel() and not wraps(value) and not there.fits(entries.TensorKind.of(value), cast):
            yield f"{path} ({there} in the checkpoint, {entries.TensorKind.of(value)} here)"
    elif isinstance(value, dict) and (structure is None or isinstance(structure, Mapping)):
        for key, item in value.items():
            yield from not_filled(f"{path}.{key}", item, (structure or {}).get(key), cast)


def _is_alike(live: Mapping[str, Any], saved: Mapping[str, Any], cast: bool, here: str, there: str) -> bool:
    one, kind = live.get(here), _kind_of(saved[there])
    if kind is None or not isinstance(one, torch.Tensor) or is_lazy(one):
        return False
    return kind.fits(entries.TensorKind.of(one), cast)


def _kind_of(saved: Any) -> entries.TensorKind | None:
    """Return dtype and shape of a saved tensor, or ``None`` if the saved value is not a tensor."""
    return entries.TensorKind.of(saved.stored) if isinstance(saved, Leaf) and saved.stored.dtype is not None else None


def expect_kind(value: Any, structure: Any, rank: int | None = None) -> None:
    """Raise ``CheckpointError`` if an object is certain to reject its saved state. ``rank``: as in :func:`.assign`."""
    if isinstance(value, GeneratorState):
        value.expect_loadable(structure)
    elif isinstance(value, ResumableSampler) and isinstance(structure, list):
        copy.copy(value).load_state_dicts(structure, rank)  # sets attributes of the copy only
    elif is_stateful(value) and type(value).__module__.startswith("torch."):
        live = value.state_dict()
        if live and structure == {}:
            raise MissingEntryError("the saved state dict is empty, because the saved object was disabled")
        if isinstance(live, Mapping) and not isinstance(structure, Mapping):
            raise CheckpointError(f"it is not the state of a {type(value).__name__}")
        for key in _LISTS if isinstance(value, LRScheduler) else ():
            there, here = structure.get(key, ()), live.get(key, ())
            if len(there) != len(here):
                raise CheckpointError(f"{key} has {len(there)} items in the checkpoint, but {len(here)} here")
        there, here = (len(each.get("base_lrs", ())) for each in (structure, live))
        if isinstance(value, LRScheduler) and there != here:  # torch would leave the other groups without a schedule
            raise MissingEntryError(
                f"it was saved with {there} parameter groups, but the optimizer here has {here}. Put new parameters "
                "into an existing group"
            )
