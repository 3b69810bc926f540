"""Shards of a ``ZeroRedundancyOptimizer``, numbered so that any number of ranks can put them together.

Torch's ``ZeroRedundancyOptimizer`` gives each rank some of the parameters, to an optimizer of its own that numbers them
from 0. A shard as it is saved has the numbers that the whole optimizer's parameters have, in the order of its groups::

    {"state": {3: {"exp_avg": ...}, 7: {}}, "param_groups": [{"lr": ..., "params": [3, 7]}], "group_sizes": [12]}

Every parameter of the rank is in ``state``, one without state as an empty dict, so its keys are the rank's parameters.
The whole of some shards, and a part of it, are the state dict of the optimizer class inside: what a run without ZeRO
saves and restores.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from stagereg.errors import CheckpointError

__all__ = ["is_shard", "is_whole", "load", "numbers", "shard", "whole"]

_STATE, _GROUPS, _PARAMS, _SIZES = "state", "param_groups", "params", "group_sizes"
_OF_THE_PARAMETERS = (_PARAMS, "param_names")
"""What a group has one of for each parameter; all else goes for the group."""


def numbers(optimizer: ZeroRedundancyOptimizer) -> list[int]:
    """Return the numbers, in the whole optimizer, of the parameters that are this rank's, in its own order."""
    every = itertools.chain.from_iterable(group[_PARAMS] for group in optimizer.param_groups)
    number = {id(param): index for index, param in enumerate(every)}
    return [number[id(param)] for group in optimizer.optim.param_groups for param in group[_PARAMS]]


def shard(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Return this rank's shard: references to live tensors.

    Raises:
        CheckpointError: the optimizer has ``overlap_with_ddp``, whose inner one has no state dict.
    """
    local = _inner(optimizer).state_dict()
    own = numbers(optimizer)
    # A scheduler writes into the outer groups, and the local optimizer gets it at its next step only.
    groups = [
        {**part, **_hyperparameters(group), _PARAMS: [own[index] for index in part[_PARAMS]]}
        for part, group in zip(local[_GROUPS], optimizer.param_groups, strict=True)
    ]
    state = {number: local[_STATE].get(index, {}) for index, number in enumerate(own)}
    return {_STATE: dict(sorted(state.items())), _GROUPS: groups, _SIZES: _sizes(optimizer.param_groups)}


def load(optimizer: ZeroRedundancyOptimizer, saved: Mapping[str, Any]) -> None:
    """Load this rank's part of a whole state dict, which needs to have no other rank's state.

    Raises:
        CheckpointError: it is of an optimizer with other groups, or as :func:`shard` raises.
    """
    there, here = _sizes(saved[_GROUPS]), _sizes(optimizer.param_groups)
    if there != here:
        raise CheckpointError(f"it is of groups of {there} parameters, the optimizer here has {here}")
    inner = _inner(optimizer)
    local = inner.state_dict()
    local[_STATE] = {
        index: saved[_STATE][number] for index, number in enumerate(numbers(optimizer)) if saved[_STATE].get(number)
    }
    local[_GROUPS] = [
        {**part, **_hyperparameters(group)} for part, group in zip(local[_GROUPS], saved[_GROUPS], strict=True)
    ]
    inner.load_state_dict(local)
    for group, part in zip(optimizer.param_groups, inner.param_groups, strict=True):
        group.update(_hyperparameters(part))


def is_whole(saved: Any) -> bool:
    """Return whether an entry, or its structure, is the state dict of an optimizer."""
    return isinstance(saved, Mapping) and _GROUPS in saved and isinstance(saved.get(_STATE), Mapping)


def is_shard(saved: Any) -> bool:
    """Return whether an entry, or its structure, is a shard."""
    return is_whole(saved) and _SIZES in saved


def whole(shards: Iterable[Mapping[str, Any]], wanted: Collection[int]) -> tuple[dict[str, Any], set[int]]:
    """Return the state dict of the whole optimizer, and which of the parameters ``wanted`` are in no shard.

    Args:
        shards: of one optimizer, or its whole state dict, or the structures of these; no more are asked for than are
            needed. The state of a parameter is taken from the first that has it, and the groups from the first of all.
        wanted: the numbers of the parameters whose state is to be in it.
    """
    missing = set(wanted)
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    for part in shards:
        if not groups:
            sizes = part[_SIZES] if _SIZES in part else _sizes(part[_GROUPS])
            groups = [
                {**_hyperparameters(group), _PARAMS: list(range(end - size, end))}
                for group, size, end in zip(part[_GROUPS], sizes, itertools.accumulate(sizes), strict=True)
            ]
        state |= {number: part[_STATE][number] for number in missing & part[_STATE].keys()}
        missing -= part[_STATE].keys()
        if not missing:
            break
    return {_STATE: {number: state[number] for number in sorted(state) if state[number]}, _GROUPS: groups}, missing


def _inner(optimizer: ZeroRedundancyOptimizer) -> Optimizer:
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise CheckpointError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state that can be saved; leave that out"
        )
    return inner


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group[_PARAMS]) for group in groups]


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_THE_PARAMETERS}
