"""Torch's distributed checkpoint: writing entries through a storage, reading them back with their types.

What is written is an ordinary torch checkpoint: ``torch.distributed.checkpoint.load`` with a template of the same names
and the storage's reader reads it, without this project. Each entry has a skeleton beside it
(:mod:`stagereg.checkpoint.structure`), and reading uses that instead of a template, so an optimizer that has not
stepped yet, or a scheduler with integer keys, comes back whole. Only tensors that are sharded over ranks (``DTensor``)
need a template: the current value.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor

from stagereg.checkpoint import structure
from stagereg.checkpoint.agreement import reasons
from stagereg.checkpoint.entries import RESERVED
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError

__all__ = ["Plans", "entry_names", "expect_one_process", "read", "skeletons", "write"]

_STRUCTURE = f"{RESERVED}.structure."
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


def skeletons(entries: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the entries to be saved beside ``entries`` so that :func:`read` can give them back."""
    return {_STRUCTURE + name: structure.dump(value) for name, value in entries.items()}


class Plans:
    """The plans of one series of checkpoints, which torch makes anew only when what is saved has changed.

    Making them costs more than ten milliseconds of Python for a few hundred tensors, in which the training loop cannot
    run any. All ranks keep them together, or none.
    """

    _serials = itertools.count()

    def __init__(self) -> None:
        self._key = f"stagereg.{next(self._serials)}"

    def planner(self) -> DefaultSavePlanner:
        """Return the planner of the next checkpoint.

        Of an entry that several ranks have, it takes the lowest rank's: buffers that drift between replicas, such as
        running statistics under DDP, come from the rank that DDP broadcasts them from.
        """
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True, enable_plan_caching=True)
        planner._cached_plans_key = self._key  # by its own, all planners of a process share one
        return planner

    def forget(self) -> None:
        """Drop them: after a failure, since ranks may have kept different ones, and at the end."""
        for kept in (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_final_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
        ):
            kept.pop(self._key, None)


def write(
    entries: dict[str, Any],
    path: Path,
    writer: StorageWriter,
    plans: Plans,
    group: dist.ProcessGroup | None,
    failing: str,
) -> None:
    """Write this rank's part of a checkpoint into ``path`` through ``writer``. Collective over ``group``.

    Raises:
        CheckpointError: on all ranks, beginning with ``failing``, chained to the first error that some rank had.
    """
    try:
        save(
            entries,
            checkpoint_id=path,
            storage_writer=writer,
            planner=plans.planner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as failed:
        plans.forget()
        errors = {rank: error for rank, (error, _) in sorted(failed.failures.items())}
        raise CheckpointError(f"{failing}: {reasons(errors, alone=group is None)}") from next(iter(errors.values()))


def expect_one_process() -> None:
    """Keep torch from warning at each save that there is only this process, where that is meant."""
    # Not around the save itself: it runs on a background thread, and the filters belong to the whole process.
    warnings.filterwarnings("ignore", message=_ALONE, category=UserWarning)


def entry_names(storage: Storage, path: Path) -> set[str]:
    """Return the names of the entries that a checkpoint has, those of the project's own included."""
    known = storage.reader(path).read_metadata().state_dict_metadata
    return {name.removeprefix(_STRUCTURE) for name in known if name.startswith(_STRUCTURE)}


def read(storage: Storage, path: Path, templates: Mapping[str, Any]) -> dict[str, Any]:
    """Read entries, each rank on its own and into fresh host memory.

    Args:
        storage: the one that wrote them.
        path: a complete checkpoint.
        templates: the names of the entries, with their current values; of these only ``DTensor`` leaves are looked at.

    Returns:
        The entries by name, in the containers and types they were saved from.
    """
    metadata = storage.reader(path).read_metadata()
    bones = _load(storage.reader(path), dict.fromkeys(_STRUCTURE + name for name in templates))
    wanted: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    for name, template in templates.items():
        loaded[name] = structure.load(bones[_STRUCTURE + name])
        live = dict(structure.leaves(template, name))
        for leaf in structure.leaf_names(loaded[name], name):
            wanted[leaf] = _room(metadata, leaf, live.get(leaf))
    values = _load(storage.reader(path), wanted)
    return {name: structure.rebuild(skeleton, name, values) for name, skeleton in loaded.items()}


def _room(metadata: Metadata, leaf: str, live: Any) -> torch.Tensor | None:
    saved = metadata.state_dict_metadata[leaf]
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if isinstance(live, DTensor):
        return torch.empty_like(live)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _load(reader: StorageReader, wanted: dict[str, Any]) -> dict[str, Any]:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    return wanted
