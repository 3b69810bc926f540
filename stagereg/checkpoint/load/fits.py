"""Whether objects take what was saved, decided before anything is written into one of them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.module_state as module_state
from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.wrappers import name_of, wraps
from stagereg.checkpoint.state.generators import GeneratorState
from stagereg.data import ResumableSampler, is_stateful
from stagereg.errors import CheckpointError, NothingSavedError, listed
from stagereg.option_text import option

_LISTS = ("_schedulers", "lr_lambdas")  # states of schedulers and functions that a scheduler passes on, one by one
_WRAPPER = "module."  # what DataParallel puts before names, and others take out


def select_of_modules(
    name: str, modules: Sequence[torch.nn.Module], structure: Any, exact: bool, cast: bool
) -> tuple[Any, dict[str, Any]]:
    """Return what modules take of the entry called ``name``, and the rest of it. Raises: ``CheckpointError``.

    ``exact``: they load as torch's own modules do, so everything must fit.
    """
    if not isinstance(structure, Mapping):
        raise CheckpointError("it is no state of a module")
    live, extra = module_state.state_of(modules), module_state.extra_states(modules)
    taken = dict.fromkeys([*(key for key in live if not module_state.is_extra_state(key)), *extra])
    structure = without_prefix(structure, taken)
    own = OrderedDict((key, structure[key]) for key in taken if key in structure)
    own.__dict__.update(getattr(structure, "__dict__", {}))
    rest = {key: item for key, item in structure.items() if key not in taken}
    if exact or module_state.has_flat_parameters(modules):
        _expect_all_fits(name, live, taken, own, [*rest], cast)
    return own, rest


def without_prefix(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state without the ``module.`` before each of its names, if ``wanted`` has the names without it."""
    if wanted.keys() & saved.keys() or not all(key.startswith(_WRAPPER) for key in saved):
        return saved
    plain = OrderedDict((key.removeprefix(_WRAPPER), item) for key, item in saved.items())
    if not wanted.keys() & plain.keys():
        return saved
    versions = getattr(saved, "_metadata", {})
    inner = {f"{path}.".removeprefix(_WRAPPER)[:-1]: each for path, each in versions.items() if path}
    plain._metadata = inner  # type: ignore[attr-defined]
    return plain


def _expect_all_fits(
    name: str,
    live: Mapping[str, Any],
    taken: Mapping[str, Any],
    saved: Mapping[str, Any],
    rest: Sequence[str],
    cast: bool,
) -> None:
    """Raise ``CheckpointError`` with all that is not saved, or otherwise than it is here."""
    missing = [key for key in taken if key not in saved]
    other: list[str] = []
    unfilled, converts = [], True
    for key, leaf in saved.items():
        here = live.get(key)
        if not isinstance(here, torch.Tensor) or module_state.is_extra_state(key):
            continue
        if not isinstance(leaf, Leaf):
            other.append(f"{key} (a {type(leaf).__name__} in it, a tensor here)")
            converts = False
        elif leaf.stored.dtype is not None:
            there = entries.TensorKind.of(leaf.stored)
            wanted = entries.TensorKind(here.dtype, there.shape) if is_lazy(here) else entries.TensorKind.of(here)
            if leaf.stored.is_subclass != wraps(here):
                converts = False
                own = name_of(here) if wraps(here) else wanted
                other.append(f"{key} ({there}{' of a subclass' * leaf.stored.is_subclass} in it, {own} here)")
            elif not there.fits(wanted, cast):
                converts &= there.fits(wanted, True)
                other.append(f"{key} ({there} in it, {wanted} here)")
        if why := module_state.unfilled(here):
            unfilled.append(f"'{name}.{key}' {why}")
    wrong = [f"{len(missing)} missing in it: {listed(missing)}"] if missing else []
    wrong += [f"{len(rest)} in it that are not here: {listed(sorted(rest))}"] if missing and rest else []
    wrong += [f"{len(other)} of another shape or dtype: {listed(other)}"] if other else []
    wrong += unfilled[:1]
    if wrong:
        only_dtypes = other and converts and not missing and not unfilled
        more = f". If that was meant, {option('checkpoint.restore.cast', True)} converts them" if only_dtypes else ""
        raise CheckpointError("; ".join(wrong) + more)


def parameters_without_prefix(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of an optimizer by name as :func:`without_prefix`; ``own`` has the names of its parameters."""
    every = dict.fromkeys(of for group in saved["param_groups"].values() for of in group["params"])
    if without_prefix(every, own) is every:
        return saved
    groups = {
        of.removeprefix(_WRAPPER): {**group, "params": [each.removeprefix(_WRAPPER) for each in group["params"]]}
        for of, group in saved["param_groups"].items()
    }
    state = {of.removeprefix(_WRAPPER): each for of, each in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def expect_kind(value: Any, structure: Any, rank: int | None = None) -> None:
    """Raise ``CheckpointError`` if an object surely refuses a state; ``rank`` as :func:`.placing.assign` has it."""
    if isinstance(value, GeneratorState):
        value.expect_loadable(structure)
    elif isinstance(value, ResumableSampler) and isinstance(structure, list):
        copy.copy(value).load_state_dicts(structure, rank)  # which sets attributes alone
    elif is_stateful(value) and type(value).__module__.startswith("torch."):
        live = value.state_dict()
        if live and structure == {}:
            raise NothingSavedError("the state dict is empty, as of an object that was turned off")
        if isinstance(live, Mapping) and not isinstance(structure, Mapping):
            raise CheckpointError(f"it is not the state of a {type(value).__name__}")
        for key in _LISTS if isinstance(value, LRScheduler) else ():
            there, here = structure.get(key, ()), live.get(key, ())
            if len(there) != len(here):
                raise CheckpointError(f"{key} has {len(there)} items in it, and {len(here)} here")
