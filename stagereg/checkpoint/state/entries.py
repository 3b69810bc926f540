"""Converts the objects in the caller's state to the entries of a checkpoint.

An entry is a name with a state dict or a plain value. Modules and optimizers are saved by the names of parameters
(:mod:`.module_state`, :mod:`.optimizer_state`). A replicated value is stored once. Values in :class:`PerRank` and data
loader states (:mod:`stagereg.data`) are stored as one entry per rank, such as ``name.rank0``. Entries under
``stagereg.`` hold the step, the world size and each rank's random number generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_forms as optimizer_forms
import stagereg.checkpoint.state.optimizer_state as optimizer_state
import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.format.split_tensors import shape_of
from stagereg.checkpoint.format.wrappers import inner_tensors, wraps
from stagereg.data import is_position, is_stateful
from stagereg.errors import CheckpointError, StageregError, reason

RESERVED = "stagereg"  # first component of the names of the project's own entries
T = TypeVar("T")


class PerRank(Generic[T]):
    """A value that differs between ranks (:func:`per_rank`). ``value``: the given or the restored value."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"


def per_rank(value: T) -> PerRank[T]:
    """Mark ``value`` as different on each rank: each rank saves its value, and restores it at the same world size.

    Use it for values that differ between ranks, such as a position in a file or a list of losses: pass ``{"model":
    model, "losses": per_rank(losses)}`` as the state. Data loaders and samplers need no mark. At another world size, a
    restore leaves a marked loader unchanged, and raises an error for an unmarked loader.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``, or a plain value. After a restore, the attribute
            ``value`` of the result has the restored plain value.
    """
    return PerRank(value)


def rank_name(name: str, rank: int) -> str:
    """Return the name under which ``rank`` stores its own value of the entry ``name``."""
    return f"{name}.rank{rank}"


def rng_name(rank: int) -> str:
    """Return the name of the entry that stores the states of a rank's random number generators."""
    return rank_name(f"{RESERVED}.rng", rank)


def capture(
    state: Mapping[str, Any],
    step: int,
    rank: int,
    world_size: int,
    names: optimizer_state.ParameterNames,
    generators: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the entries to save. They contain the live tensors; a stager copies these tensors afterwards.

    ``generators``: states from :func:`.rng.note`, to save instead of the current states of the generators.

    Raises:
        CheckpointError: a name is not a string, or is reserved; two parameters have the same name; or a parameter is
            not initialized.
    """
    entries: dict[str, Any] = {f"{RESERVED}.step": step, f"{RESERVED}.world_size": world_size}
    entries[rng_name(rank)] = rng.capture(generators)
    for name, value in state.items():
        if not isinstance(name, str) or name.split(".")[0] == RESERVED:
            text = f"The state has an entry named {name!r}. Use a string that does not begin with {RESERVED!r}."
            raise CheckpointError(text)
        own = isinstance(value, PerRank) or is_position(value)
        try:
            entries[rank_name(name, rank) if own else name] = found = current_value(state, name, names)
        except StageregError:
            raise
        except Exception as error:
            raise CheckpointError(f"{name!r} cannot be saved: its state_dict() raised {reason(error)}") from error
        if module_state.modules_of(value_of(state, name)) and (lazy := [key for key in found if is_lazy(found[key])]):
            raise CheckpointError(
                f"'{name}.{lazy[0]}' cannot be saved: it is an uninitialized parameter of a lazy module, which gets "
                "its shape from the first batch. Run the module once before the first save."
            )
    return entries


def value_of(state: Mapping[str, Any], name: str) -> Any:
    """Return the value under a name. Unwraps :class:`PerRank`; wraps random generators in :class:`.GeneratorState`."""
    value = state[name]
    value = value.value if isinstance(value, PerRank) else value
    return rng.generator_state(value) or value


def current_value(state: Mapping[str, Any], name: str, names: optimizer_state.ParameterNames) -> Any:
    """Return the state dict of the object under a name. If the object has no state dict, return the object."""
    value = value_of(state, name)
    try:
        if modules := module_state.modules_of(value):
            return module_state.state_of(modules)
        if optimizers := optimizer_state.optimizers_of(value):
            each = [optimizer_state.state_of(one, names.for_optimizer(one, state)) for one in optimizers]
            return optimizer_forms.joined(each)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from error
    return value.state_dict() if is_stateful(value) else value


def buffers(state: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of the modules' buffers. The values of a buffer may drift apart between replicas.

    A buffer of a submodule has two names in the result, with and without the entry: ``model.bn.mean`` and ``bn.mean``.
    """
    found = {
        (name, module_state.plain_name(module, buffer))
        for name in state
        for module in module_state.modules_of(state[name])
        for buffer, _ in module.named_buffers(remove_duplicate=False)
    }
    return {f"{name}.{buffer}" for name, buffer in found} | {buffer for _, buffer in found if "." in buffer}


def written_in_forward(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the parameters that torch's layers modify in the forward pass: weights of embeddings with ``max_norm``."""
    modules = (module for name in state for top in module_state.modules_of(state[name]) for module in top.modules())
    return [x for module in modules if getattr(module, "max_norm", None) is not None for x in module.parameters(False)]


def positions(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the data loaders and samplers in the state, for which each rank saves a separate entry."""
    return [name for name in state if is_position(value_of(state, name))]


def replicated(state: Mapping[str, Any]) -> list[str]:
    return [name for name, x in state.items() if module_state.modules_of(x) or optimizer_state.optimizers_of(x)]


class TensorKind(NamedTuple):
    """The dtype and shape of a tensor. A saved tensor can only be loaded into a tensor of the same kind."""

    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, x: Any) -> TensorKind:
        """Return the kind of a tensor, or of a saved tensor that is described by :class:`.Stored`."""
        return cls(x.dtype, shape_of(x))

    def fits(self, other: TensorKind, cast: bool) -> bool:
        """Return whether the kinds are equal. With ``cast``, two different floating-point dtypes match too."""
        floating = cast and self.dtype.is_floating_point and other.dtype.is_floating_point
        return self.shape == other.shape and (self.dtype == other.dtype or floating)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {[*self.shape]}"


def memory_of(x: Any) -> object:
    """Return a key that is equal for tensors that share memory; 0 for a tensor without memory."""
    if isinstance(x, ShardedTensor):  # FSDP1 returns a copy of its parameter
        return id(x)
    x = local_part(x)
    if wraps(x):
        return next(map(memory_of, inner_tensors(x)), id(x))
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and not x.is_nested else id(x)


def chunks_of(x: DTensor, name: str) -> list[ChunkStorageMetadata]:
    """Return this rank's shards of a tensor.

    Raises:
        CheckpointError: a placement is ``Partial``, so each rank has only a summand of the values.
    """
    if any(placement.is_partial() for placement in x.placements):
        raise CheckpointError(
            f"{name!r} cannot be saved: it is a DTensor of placements {x.placements}, so each rank has only a summand. "
            "Save the sum: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)."
        )
    return x.__create_chunk_list__()


def local_part(x: Any) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return cast("torch.Tensor", x)
    return x._local_tensor if wraps(x) else x.to_local()  # to_local() would create a view
