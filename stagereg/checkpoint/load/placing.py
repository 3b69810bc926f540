"""Loads the entries of a checkpoint into the objects and values of the program.

:func:`find` selects the leaves (saved tensors and values) for each object, :func:`pair_live` pairs each leaf with the
tensor to read into, and :func:`assign` loads the values. An entry that does not match is rejected before any read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import stagereg.checkpoint.load.fits as fits
import stagereg.checkpoint.load.sharing as sharing
import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_forms as optimizer_forms
import stagereg.checkpoint.state.optimizer_state as optimizer_state
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import RestoreRequest
from stagereg.checkpoint.format.encoding import Leaf, fill, leaves, marks
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.format.split_tensors import carry, is_split
from stagereg.checkpoint.format.wrappers import form_of, is_plain_memory, same_bits, wraps
from stagereg.checkpoint.state.name_map import NameMap
from stagereg.checkpoint.state.nested import NOTHING, NestedState, find_inside, outer_names
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.data import LoadsEveryRank, is_position, is_stateful
from stagereg.errors import CheckpointError, MissingEntryError, listed, nearest, reason

_log = logging.getLogger(__name__)

# Load hooks from these Python modules do not copy values, so modules with such hooks still load as torch's own modules.
_HOOKS = ("torch.distributed.fsdp._fully_shard.", "torch.nn.modules.lazy")
_RANKS_OWN = re.compile(r"\.rank\d+$")
_MORE_GROUPS = (
    ". No group of the optimizer here has these parameters. If the run that saved them added a group, call "
    "optimizer.add_param_group(...) before restore(), as that run did"
)
DO_NOT_TRAIN = "Do not train with them: restore another checkpoint, or start the program again"


def refusal(name: str, why: str) -> str:
    """Return the error message, with advice, for an object that does not accept its saved state."""
    return (
        f"{name!r} does not accept its saved state: {why.rstrip('.')}. If the checkpoint is of "
        f"another model, use another directory, {option('checkpoint.dir', 'PATH')}, or start from scratch "
        f"with {option('checkpoint.resume', 'never')}"
    )


def refused_late(name: str, why: str, changed: Sequence[str]) -> str:
    """Return the error message for an object that rejected its state after other objects had been loaded."""
    others = [each for each in changed if each != name]
    more = f" Objects that were restored before it have changed: {listed(others)}." if others else ""
    return f"{refusal(name, why)}. {name!r} may have changed in part.{more} {DO_NOT_TRAIN}"


def changed_in_part(error: Exception) -> str:
    """Return the error message for a restore that failed while values were loaded into objects."""
    return f"{error}. The objects have changed in part. {DO_NOT_TRAIN}"


def from_scratch(name: str) -> str:
    """Return the advice to start the entry ``name`` from scratch, because the checkpoint does not contain it."""
    return f"To begin {name!r} alone from scratch, add {option('checkpoint.restore.allow_missing', [name])}"


def find(
    files: CheckpointFiles, chosen: Checkpoint, asked: RestoreRequest, name_map: NameMap
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the saved structures for the objects and values of ``asked.state``. Not collective.

    ``name_map`` contains the renamed parameters, and the names that may be missing. If this rank had failed before the
    save, values that only this rank had may also be missing.

    Returns:
        First the structures by name, with unread leaves, for :func:`assign`. If the world size is unchanged, they
        include this rank's RNG states, under the name :func:`.rng_name`. Second, by entry, the saved parameters that
        this rank does not load.

    Raises:
        CheckpointError: an entry is missing, or its object does not accept it; or the state of a data loader was saved
            with another world size.
    """
    state, size = asked.state, chosen.manifest.world_size
    rank = asked.ranks.rank if size == asked.ranks.size else None  # None if ranks do not correspond
    found: dict[str, Any] = {}
    left: dict[str, dict[str, Any]] = {}
    for name in sorted(state, key=lambda name: not module_state.modules_of(state[name])):
        value = state[name]
        try:
            if isinstance(value, entries.PerRank) or (size and is_position(value)):
                if (own := _own(files, chosen, asked, name)) is not None:
                    with _refusing(name):
                        fits.expect_kind(entries.value_of(state, name), own, rank)
                    found[name] = own
                continue
            structure = _structure(files, name, rank)
            if structure == {} and name_map.may_miss(name):
                continue  # for example a disabled GradScaler, which has an empty state dict
            with _refusing(name):
                found[name], left[name] = _taken(asked, name, structure, name_map)
        except MissingEntryError:
            if not name_map.may_miss(name):
                raise
    for name in _beside(files, state) if size else ():
        found[name] = _structure(files, name, rank)
    own = entries.rng_name(asked.ranks.rank)
    has_own = rank is not None and (str(rank) not in chosen.manifest.lost or own in files.index.state)
    return {**found, own: files.structure(own)} if has_own else found, left


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except MissingEntryError as error:
        raise MissingEntryError(f"{refusal(name, str(error))}. {from_scratch(name)}") from None
    except Exception as error:
        raise CheckpointError(refusal(name, reason(error))) from error


def names_here(state: Mapping[str, Any], names: optimizer_state.ParameterNames) -> set[str]:
    """Return the valid names for ``allow_missing``: entries, parameters, and parameters with the entry as prefix."""
    found = {*state}
    for name, value in state.items():
        own: set[str] = set()
        if modules := module_state.modules_of(value):
            own = {*module_state.state_of(modules), *module_state.extra_states(modules)}
        for optimizer in optimizer_state.optimizers_of(value):
            own |= {*names.for_optimizer(optimizer, state).by_parameter.values()}
        found |= own | {f"{name}.{each}" for each in own}
    return found


def _beside(files: CheckpointFiles, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of saved values that a container in ``state`` accepts, but does not contain yet."""
    for name in files.index.state:
        if isinstance(state, NestedState) and state.takes(name) and not _RANKS_OWN.search(name):
            structure = files.structure(name)
            if not hasattr(structure, "_metadata") and optimizer_forms.as_by_name(structure) is None:
                yield name


def add_beside(state: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Add a placeholder for each saved value that a container in ``state`` lacks, so that the value is restored."""
    if isinstance(state, NestedState):
        for name in filter(state.takes, found):
            state.add(name)


def _own(files: CheckpointFiles, chosen: Checkpoint, asked: RestoreRequest, name: str) -> Any | None:
    """Return the value of a per-rank entry for this rank, or ``None`` for a ``PerRank`` entry that lacks this rank."""

    def of(rank: int) -> Any:
        own = entries.rank_name(name, rank)
        return files.structure(own) if own in files.index.state else _structure(files, name, rank)

    value, saved_size = entries.value_of(asked.state, name), chosen.manifest.world_size
    rank, size = asked.ranks.rank, asked.ranks.size
    if isinstance(value, LoadsEveryRank):
        return [of(each) for each in range(saved_size)]
    lost = str(rank) in chosen.manifest.lost and entries.rank_name(name, rank) not in files.index.state
    if saved_size == size and not lost:
        return of(rank)
    if isinstance(asked.state[name], entries.PerRank):
        return None
    raise CheckpointError(
        f"{name!r} is the state of a data loader that each of {saved_size} ranks saved, and the world size is "
        f"now {size}: a {type(value).__name__} can resume only with the same world size. Start {saved_size} ranks, or "
        f"start its data from the first sample with stagereg.per_rank({name}). A stagereg.data.ResumableSampler can "
        "resume with any world size."
    )


def _structure(files: CheckpointFiles, name: str, rank: int | None = None) -> Any:
    there = files.index.state
    if name in there:
        return files.structure(name, rank)
    for outer, keys in outer_names(name):  # the checkpoint may store the container as one value
        if outer in there and (inner := find_inside(files.structure(outer, rank), keys)) is not NOTHING:
            return inner
    if entries.rank_name(name, 0) in there:
        raise CheckpointError(f"{name!r} was saved per rank: restore it into per_rank({name}).")
    others = sorted(other for other in there if not other.startswith(f"{entries.RESERVED}."))
    only = f"only {listed(others)}.{nearest(name, others)} {from_scratch(name)}"
    raise MissingEntryError(f"The checkpoint has no {name!r}, {only}.")


def _taken(asked: RestoreRequest, name: str, structure: Any, name_map: NameMap) -> tuple[Any, dict[str, Any]]:
    """Split a saved entry into the structure that this rank loads and the parameters that it does not load."""
    state, value = asked.state, entries.value_of(asked.state, name)
    if modules := module_state.modules_of(value):
        return fits.select_of_modules(name, modules, structure, _are_torchs_own(modules), asked.cast, name_map)
    saved = optimizer_forms.as_by_name(structure)
    optimizers = optimizer_state.optimizers_of(value)
    if saved is None or not optimizers:
        if optimizers and _are_torchs_own(optimizers):
            raise CheckpointError("it is not the state of an optimizer")
        fits.expect_kind(value, structure)
        fits.expect_state_dicts(name, value, structure, asked.cast)
        return structure, {}
    if saved is not structure and any(optimizer_state.is_of_own_kind(one) for one in optimizers):
        return structure, {}
    every = [of for group in saved["param_groups"].values() for of in group["params"]]
    each = []
    for one in optimizers:
        own = asked.names.for_optimizer(one, state)
        owners = {of: own.owners.get(of, ("", of)) for of in own.by_parameter.values()}
        wanted = {likely for entry, of in owners.values() for likely in name_map.possible(entry, [of])}
        there = {here: known for known, here in fits.plain_names([*every, *saved.get("aliases", ())], wanted).items()}
        origins = {here: name_map.origins(entry, of, here, there) for here, (entry, of) in owners.items()}
        origins = {here: [there[likely] for likely in own if likely in there] for here, own in origins.items()}
        may_miss = [x for x, (entry, of) in owners.items() if name_map.may_miss(x, f"{name}.{x}", f"{entry}.{of}")]
        each.append(optimizer_state.select(one, own, saved, origins, may_miss))
        there_too = {of for group in each[-1][0]["param_groups"].values() for of in group["params"]}
        new = [x for x in may_miss if x not in there_too and owners[x][1] not in name_map.missing.get(owners[x][0], ())]
        if new:
            name_map.missing.setdefault(name, []).extend(new)
    known = set().union(*(names for _, names in each))
    return optimizer_forms.joined([one for one, _ in each]), {of: None for of in every if of not in known}


def take_rest(state: Mapping[str, Any], name: str, structure: Any, rest: Mapping[str, Any]) -> None:
    """Pass saved parameters that no rank requested to a custom loader. Without one, raise ``CheckpointError``."""
    modules = module_state.modules_of(state[name])
    if modules and not _are_torchs_own(modules):
        structure.update(rest)
    elif rest:
        why = f"{len(rest)} in the checkpoint but not here: {listed(sorted(rest))}"
        raise CheckpointError(refusal(name, why + ("" if modules else _MORE_GROUPS)))


def pair_live(asked: RestoreRequest, structure: Any, name: str) -> list[Leaf]:
    """Pair each leaf (saved tensor or value) with the live tensor that it is restored into, and return the leaves.

    Optimizer state that does not exist yet is paired with its parameter. A tensor is written in place only if torch
    would do the same. With ``asked.cast``, saved floating-point tensors get the dtype of their live tensors.
    """
    state, names, found = asked.state, asked.names, list(marks(structure))
    if name not in state or is_position(entries.value_of(state, name)):
        return found
    value = entries.value_of(state, name)
    modules, optimizers = module_state.modules_of(value), optimizer_state.optimizers_of(value)
    each = [*modules, *optimizers] or [value]
    live = entries.current_value(state, name, names)
    if modules:  # extra state is not paired: modules load it unchanged
        live = {key: each for key, each in live.items() if not module_state.is_extra_state(key)}
    _pair(structure, live, _are_torchs_own(each), asked.cast)
    for optimizer in optimizers if optimizer_forms.is_by_name(structure) else ():
        for param, of in names.for_optimizer(optimizer, state).by_parameter.items():
            form = carry(param, param.detach().new_zeros(()).expand(param.shape)) if is_split(param) else param
            for leaf in marks(structure["state"].get(of)) if isinstance(param, DTensor) or is_split(param) else ():
                leaf.live = form if leaf.live is None else leaf.live
    for leaf in found if not (modules or optimizers or is_stateful(value)) else ():
        live = leaf.live if leaf.dtype is not None or (leaf.live is not None and leaf.live.is_meta) else None
        if live is not None and (why := module_state.unfilled(live)):
            raise CheckpointError(refusal(name, f"{leaf.name!r} {why}"))
    return found


def written(state: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[dict[str, list[Leaf]], list[Leaf]]:
    """Return the leaves that a restore writes to the tensors of modules (by entry), and those for plain values."""
    modules: dict[str, list[Leaf]] = {}
    plain: list[Leaf] = []
    for name in (name for name in found if name in state):
        value = entries.value_of(state, name)
        leaves = [leaf for leaf in marks(found[name]) if leaf.live is not None and leaf.dtype is not None]
        if module_state.modules_of(value):
            modules[name] = leaves
        elif not (optimizer_state.optimizers_of(value) or is_stateful(value)):
            plain += leaves
    return modules, plain


def warn_of_not_filled(path: str, state: Mapping[str, Any], found: Mapping[str, Any], cast: bool) -> None:
    """Warn of tensors in plain dicts that are replaced, not overwritten: other references to them keep old values."""
    values = {name: entries.value_of(state, name) for name in found if name in state}
    plain = {name: x for name, x in values.items() if not (module_state.modules_of(x) or is_stateful(x))}
    lost = [each for name, value in plain.items() for each in fits.not_filled(name, value, found[name], cast)]
    if lost:
        _log.warning(
            "stagereg: the state has tensors that %s does not fill: %s. restore() replaces them in their dicts, or "
            "drops them, so modules and variables that refer to them keep the old values. If they are the weights of a "
            "module, put the module itself into the state, as in {'model': model}.",
            *(path, listed(lost)),
        )


def merger(state: Mapping[str, Any], found: Mapping[str, Any]) -> sharing.Merger:
    """Return the :class:`.Merger` for the plain values in ``state``. Raises the errors of :func:`.differing`."""
    own = sharing.buffers_of_ranks(state)  # these entries overwrite buffers of modules on purpose
    modules, plain = written(state, {name: each for name, each in found.items() if name not in own})
    exact = {name: _are_torchs_own(module_state.modules_of(entries.value_of(state, name))) for name in modules}
    return sharing.Merger(sharing.differing(modules, exact, plain))


def _pair(structure: Any, live: Any, in_place: bool, cast: bool) -> None:
    if isinstance(structure, Leaf):
        if isinstance(live, torch.Tensor) and not is_lazy(live):  # a lazy tensor gets memory in load_state_dict
            structure.live = live
            stored, wanted = structure.stored, entries.TensorKind.of(live)
            fits = stored.dtype is not None and entries.TensorKind.of(stored).fits(wanted, cast)
            structure.dtype = live.dtype if fits else None
            in_place = in_place and fits and stored.chunks is not None and not stored.is_subclass and _is_plain(live)
            as_stored = structure.strides is None and (structure.placed is None or type(live) is not DTensor)
            structure.in_place = (in_place and as_stored) or isinstance(live, ShardedTensor)
    elif isinstance(structure, dict) and isinstance(live, dict):
        for key, item in structure.items():
            if key in live:
                _pair(item, live[key], in_place, cast)
    elif isinstance(structure, list) and isinstance(live, list):
        for item, other in zip(structure, live, strict=False):
            _pair(item, other, in_place, cast)


def expect_forms(state: Mapping[str, Any], name: str, structure: Any) -> None:
    """Raise ``CheckpointError`` if loading would convert a saved tensor subclass, for example to another precision."""
    modules = module_state.modules_of(entries.value_of(state, name))
    for leaf in marks(structure) if modules and _are_torchs_own(modules) else ():
        if leaf.live is None or not (wraps(leaf.value) and wraps(leaf.live)):
            continue
        there, here = form_of(leaf.value), form_of(leaf.live)
        if there != here:
            kinds = f"{there} in the checkpoint, but {here} here"
            raise CheckpointError(refusal(name, f"{leaf.name!r:.100} is {kinds}"))


def _is_plain(live: torch.Tensor) -> bool:
    """Return whether bytes can be read directly into the memory of a tensor."""
    x = entries.local_part(live)
    return type(x) in (torch.Tensor, torch.nn.Parameter) and is_plain_memory(x) and not x.is_inference()


def _are_torchs_own(values: Iterable[Any]) -> bool:
    return all(map(_is_torchs_own, values))


def _is_torchs_own(value: Any) -> bool:
    """Return whether an object loads its state with torch's own code, which only copies saved tensors."""
    if isinstance(value, Optimizer):
        return type(value).__module__.startswith("torch.optim.") and not value._optimizer_load_state_dict_pre_hooks
    if isinstance(value, torch.nn.Module):
        return all(map(_loads_as_torch, value.modules()))
    return not is_stateful(value)


def _loads_as_torch(module: torch.nn.Module) -> bool:
    kind, plain = type(module), torch.nn.Module
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    return (
        kind.load_state_dict is plain.load_state_dict
        and kind.state_dict is plain.state_dict
        and kind._load_from_state_dict.__module__.startswith("torch.nn.")
        and not module._state_dict_hooks
        and all(getattr(hook, "hook", hook).__module__.startswith(_HOOKS) for hook in hooks)
    )


def assign(
    asked: RestoreRequest, name: str, structure: Any, merger: sharing.Merger, rank: int | None, missing: Sequence[str]
) -> None:
    """Load one entry, after it was read, into the object ``state[name]``, or replace the plain value there.

    ``rank`` is this rank if the entry was saved with the same world size, and otherwise ``None``. Modules keep their
    current values of the parameters ``missing``.

    Raises:
        CheckpointError: a tensor is still on the meta device, which torch would silently accept; or a tensor subclass
            does not have the saved bytes after loading. Other errors of the object are raised unchanged.
    """
    state, names, value = asked.state, asked.names, entries.value_of(asked.state, name)
    read = [*marks(structure)]
    loaded = fill(structure)
    wrapped = {path: x for path, x in leaves(loaded, name) if wraps(x)}
    if is_position(value):  # reading its state would start the workers of a loader
        if isinstance(value, LoadsEveryRank) and isinstance(loaded, list):  # plain torch saves one state for all ranks
            value.load_state_dicts(loaded, rank)
        else:
            value.load_state_dict(loaded)
        return
    if modules := module_state.modules_of(value):
        module_state.load(modules, loaded, missing)
    elif optimizers := optimizer_state.optimizers_of(value):
        for optimizer in optimizers:
            optimizer_state.load(optimizer, names.for_optimizer(optimizer, state), loaded)
    elif is_stateful(value):
        for leaf in (each for each in read if each.live is not None and each.live.requires_grad):
            if leaf.value is not leaf.live and isinstance(leaf.value, torch.Tensor) and leaf.value.is_floating_point():
                leaf.value.requires_grad_()
        value.load_state_dict(loaded)
    elif isinstance(state[name], entries.PerRank):
        state[name].value = merger.merged(value, loaded)
    else:
        state[name] = merger.merged(value, loaded)
    keeps = bool(optimizer_state.optimizers_of(value)) or _are_torchs_own(modules)
    for path, x in leaves(entries.current_value(state, name, names), name):
        if keeps and path in wrapped and not same_bits(x, wrapped[path]):
            kinds = f"expected {form_of(wrapped[path])}, got {form_of(x)}"
            raise CheckpointError(f"{path!r} does not have the saved bytes after it was loaded: {kinds}")
        shards = [each.tensor for each in x.local_shards()] if isinstance(x, ShardedTensor) else [x]
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in shards):
            why = "is on the meta device, which has no memory. Allocate memory first, for example by to_empty()"
            raise CheckpointError(f"{path!r} " + why)
