"""What a checkpoint holds: the caller's objects as entries, and entries back into the objects.

An entry is a name and a state dict or plain value. What is the same on all ranks is one entry, of which the lowest
rank's copy is stored and every rank reads what it needs: of a ``DTensor`` its own shard, however many ranks it was
sharded over. What belongs to a rank is an entry per rank, ``name.rank0``, ``name.rank1``; so a
``ZeroRedundancyOptimizer`` is saved (:mod:`stagereg.checkpoint.zero_shards`), and a rank reads of each the state of
those parameters that are its own now. ZeRO and the optimizer class inside it restore what the other saved. Beside the
caller's entries, those under ``stagereg.`` hold the step, the number of ranks and each rank's random number generators.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import stagereg.checkpoint.rng as rng
import stagereg.checkpoint.zero_shards as zero_shards
from stagereg.checkpoint.encoding import Leaf, leaves, marks
from stagereg.checkpoint.index import Stored
from stagereg.checkpoint.reading import CheckpointFiles
from stagereg.errors import CheckpointError, nearest

__all__ = ["assign", "capture", "find", "listed", "pair", "parts", "rng_name"]

_RESERVED = "stagereg"
_SHOWN = 20


def _rank_name(name: str, rank: int) -> str:
    return f"{name}.rank{rank}"


def rng_name(rank: int) -> str:
    """Return the name of the entry with a rank's random number generators."""
    return _rank_name(f"{_RESERVED}.rng", rank)


def capture(state: Mapping[str, Any], step: int, rank: int, world_size: int) -> dict[str, Any]:
    """Return the entries to save: references to live tensors, which a stager has yet to copy.

    Raises:
        CheckpointError: a name that is no text, or one that belongs to the project.
    """
    entries: dict[str, Any] = {
        f"{_RESERVED}.step": step,
        f"{_RESERVED}.world_size": world_size,
        rng_name(rank): rng.capture(),
    }
    for name, value in state.items():
        if not isinstance(name, str) or name.split(".")[0] == _RESERVED:
            raise CheckpointError(
                f"The state has an entry named {name!r}; use text that does not begin with {_RESERVED!r}."
            )
        if isinstance(value, ZeroRedundancyOptimizer):
            entries[_rank_name(name, rank)] = zero_shards.shard(value)
        else:
            entries[name] = _current(value)
    return entries


# -- what there is in a checkpoint


def find(files: CheckpointFiles, state: Mapping[str, Any], saved_size: int, rank: int, size: int) -> dict[str, Any]:
    """Return the structures of what the objects and values of ``state`` take. Each rank on its own.

    Args:
        files: of the checkpoint.
        state: as given to ``Checkpointer.restore``.
        saved_size: how many ranks wrote it.
        rank: this rank.
        size: how many ranks there are now.

    Returns:
        For each name what :func:`assign` takes, with leaves that are yet to be read; under :func:`rng_name` this
        rank's random number generators, if as many ranks wrote it.

    Raises:
        CheckpointError: there is nothing for a name, or it is of another kind.
    """
    found = {name: _found(files, name, value, saved_size, rank) for name, value in state.items()}
    own = rng_name(rank)
    return {**found, own: files.structure(own)} if saved_size == size else found


def parts(files: CheckpointFiles) -> dict[str, Any]:
    """Return the structures of all there is, by the names that the caller's state had.

    The shards of a ``ZeroRedundancyOptimizer`` are the state dict of the optimizer inside.
    """
    found: dict[str, Any] = {}
    shards: dict[str, list[Any]] = defaultdict(list)
    for name in sorted(files.index.state):
        if name.split(".")[0] != _RESERVED:
            structure = files.structure(name)
            if zero_shards.is_shard(structure):
                shards[name.rpartition(".rank")[0] or name].append(structure)
            else:
                found[name] = structure
    for name, each in shards.items():
        found[name], _ = zero_shards.whole(each, {number for shard in each for number in shard["state"]})
    return dict(sorted(found.items()))


def listed(names: Sequence[str]) -> str:
    """Return the names of a checkpoint's entries for a message, of many the first: there may be some of each rank."""
    more = len(names) - _SHOWN
    # The names may come from elsewhere: no longer than a line, and no control sequence of a terminal.
    shown = [f"{name:.100}" if name.isprintable() else f"{name!r:.100}" for name in names[:_SHOWN]]
    shown += [f"and {more} more"] if more > 0 else []
    return ", ".join(shown) or "an empty state"


def _found(files: CheckpointFiles, name: str, value: Any, saved_size: int, rank: int) -> Any:
    there, is_zero = files.index.state, isinstance(value, ZeroRedundancyOptimizer)
    # Each rank has an entry at least, so a manifest that claims more ranks than that is no reason to count them all.
    ranks = sorted(range(min(saved_size, len(there))), key=lambda each: each != rank)
    shards = [entry for each in ranks if (entry := _rank_name(name, each)) in there]
    if shards and (is_zero or (isinstance(value, Optimizer) and name not in there)):
        return _from_shards(files, name, value, shards)
    if name in there:
        return _from_shards(files, name, value, [name]) if is_zero else files.structure(name)
    if shards:
        raise CheckpointError(
            f"{name!r} was saved by each rank for itself. Ask for {shards[0]!r} and so on; or, if it is of a "
            "ZeroRedundancyOptimizer, restore it into an optimizer."
        )
    others = sorted(other for other in there if not other.startswith(f"{_RESERVED}."))
    raise CheckpointError(f"There is no {name!r} in it, only {listed(others)}.{nearest(name, others)}")


def _from_shards(files: CheckpointFiles, name: str, value: Optimizer, shards: Sequence[str]) -> dict[str, Any]:
    """Return what an optimizer takes of shards; no further one is looked into once its parameters are complete.

    The state dict of a whole optimizer, under ``name`` itself, is one that need not have the state of each.
    """

    def structures() -> Iterator[Any]:
        for shard in shards:
            structure = files.structure(shard)
            if not (zero_shards.is_whole if shard == name else zero_shards.is_shard)(structure):
                raise CheckpointError(f"{name!r} is an optimizer, and {shard!r} in it is no optimizer's state.")
            yield structure

    every = range(len(_parameters(value)))
    own = zero_shards.numbers(value) if isinstance(value, ZeroRedundancyOptimizer) else every
    found, missing = zero_shards.whole(structures(), own)
    if missing and name not in shards:
        raise CheckpointError(
            f"{name!r}: of {len(own)} parameters {len(missing)} are in no rank's part, the first being number "
            f"{min(missing)}; was it an optimizer of as many parameters?"
        )
    return found


# -- into the objects


def pair(structure: Any, value: Any) -> list[Leaf]:
    """Give the leaves of a structure the tensors of the object or value that is to take it, and return them.

    A parameter of an optimizer stands for the state that there is not of it yet. Tensors may be written to in place
    only where taking the state is what torch does, and where no other tensor of the object shares their memory.
    """
    found = list(marks(structure))
    if isinstance(value, ZeroRedundancyOptimizer):
        return found
    _pair(structure, _current(value), _is_torchs_own(_unwrapped(value)))
    if isinstance(value, Optimizer) and zero_shards.is_whole(structure):
        for index, param in enumerate(_parameters(value)):
            for leaf in marks(structure["state"].get(index)):
                leaf.live = param if leaf.live is None and isinstance(param, DTensor) else leaf.live
    users = Counter(_memory(leaf.live) for leaf in found if leaf.in_place)
    for leaf in found:
        leaf.in_place = leaf.in_place and users[_memory(leaf.live)] == 1
    return found


def _pair(structure: Any, live: Any, in_place: bool) -> None:
    if isinstance(structure, Leaf):
        if isinstance(live, torch.Tensor):
            structure.live = live
            structure.in_place = in_place and _fits(live, structure.stored)
    elif isinstance(structure, Mapping) and isinstance(live, Mapping):
        for key, item in structure.items():
            if key in live:
                _pair(item, live[key], in_place)
    elif isinstance(structure, list) and isinstance(live, list):
        for item, other in zip(structure, live, strict=False):
            _pair(item, other, in_place)


def _local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _memory(x: Any) -> int:
    return _local(x).untyped_storage().data_ptr()


def _fits(live: torch.Tensor, stored: Stored) -> bool:
    """Whether bytes can go straight into the memory of a tensor."""
    x, alike = _local(live), (live.shape, live.dtype) == (stored.shape, stored.dtype)
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cpu and x.is_contiguous() and not x.is_inference()
    return plain and alike and stored.chunks is not None


def _is_torchs_own(value: Any) -> bool:
    """Whether the state of an object is its tensors themselves, and taking it only copies into them."""
    if isinstance(value, Optimizer):
        return type(value).__module__.startswith("torch.optim.") and not value._optimizer_load_state_dict_pre_hooks
    if isinstance(value, torch.nn.Module):
        return all(map(_loads_as_torch, value.modules()))
    return not _is_stateful(value)


def _loads_as_torch(module: torch.nn.Module) -> bool:
    kind, plain = type(module), torch.nn.Module
    return (
        kind.load_state_dict is plain.load_state_dict
        and kind.state_dict is plain.state_dict
        and kind._load_from_state_dict.__module__.startswith("torch.nn.")
        and not (module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks)
    )


def assign(state: MutableMapping[str, Any], name: str, loaded: Any) -> None:
    """Load one entry into ``state[name]``: into the object in place, or in place of the plain value.

    Raises:
        CheckpointError: a tensor of it is on the meta device still, where torch loads nothing and raises nothing. And
            what the object raises.
    """
    value = state[name]
    inner = _unwrapped(value)
    if isinstance(value, ZeroRedundancyOptimizer):
        zero_shards.load(value, loaded)
    elif _is_stateful(inner):
        inner.load_state_dict(loaded)
    else:
        state[name] = _merged(value, loaded)
    # The state dict of ZeRO is only there when all ranks make it.
    current = None if isinstance(value, ZeroRedundancyOptimizer) else _current(state[name])
    for path, x in leaves(current, name):
        if isinstance(x, torch.Tensor) and x.is_meta:
            raise CheckpointError(
                f"{path!r} is on the meta device, which holds nothing; give it memory first, as by to_empty()"
            )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _unwrapped(value: Any) -> Any:
    return value.module if isinstance(value, DistributedDataParallel) else value


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _current(value: Any) -> Any:
    """The state dict of an object that has one, else the value itself."""
    inner = _unwrapped(value)
    return inner.state_dict() if _is_stateful(inner) else inner


def _merged(value: Any, loaded: Any) -> Any:
    """Return ``loaded``, in the tensors and containers of ``value`` wherever they fit it."""
    if value is loaded:
        return value
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if value.shape == loaded.shape and value.dtype == loaded.dtype:
            with torch.no_grad():
                return value.copy_(loaded)
        return loaded.to(value.device)
    if isinstance(value, dict) and isinstance(loaded, dict):
        merged = {key: _merged(value.get(key), item) for key, item in loaded.items()}
        value.clear()
        value.update(merged)
        return value
    if isinstance(value, list) and isinstance(loaded, list):
        padded = value + [None] * (len(loaded) - len(value))
        value[:] = [_merged(old, item) for old, item in zip(padded, loaded, strict=False)]
        return value
    return loaded
