"""Torch's distributed checkpoint: writing entries through a storage, reading them back with their types.

What is written is an ordinary torch checkpoint: ``torch.distributed.checkpoint.load`` with a template of the same names
and the storage's reader reads it, without this project. Each entry has a skeleton beside it
(:mod:`stagereg.checkpoint.structure`), and reading uses that instead of a template, so an optimizer that has not
stepped yet, or a scheduler with integer keys, comes back whole. Only tensors that are sharded over ranks (``DTensor``)
need a template: the current value.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor

import stagereg.checkpoint.pickled as pickled
import stagereg.checkpoint.structure as structure
from stagereg.checkpoint.entries import RESERVED
from stagereg.checkpoint.rank_group import reason, reasons
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError

__all__ = [
    "Plans",
    "entry_names",
    "expect_one_process",
    "kinds",
    "read",
    "read_leaves",
    "shapes",
    "skeletons",
    "write",
]

_STRUCTURE = f"{RESERVED}.structure."
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


def skeletons(entries: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the entries to be saved beside ``entries`` so that :func:`read` can give them back.

    Raises:
        CheckpointError: something in them could not be read back without running code, with its name and what to do.
    """
    return {_STRUCTURE + name: structure.dump(value, name) for name, value in entries.items()}


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
    path: str,
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
    except BaseException as failed:
        plans.forget()
        if not isinstance(failed, CheckpointException):
            raise
        errors = {rank: error for rank, (error, _) in sorted(failed.failures.items())}
        raise CheckpointError(f"{failing}: {reasons(errors, alone=group is None)}") from next(iter(errors.values()))


def expect_one_process() -> None:
    """Keep torch from warning at each save that there is only this process, where that is meant."""
    # Not around the save itself: it runs on a background thread, and the filters belong to the whole process.
    warnings.filterwarnings("ignore", message=_ALONE, category=UserWarning)


def entry_names(storage: Storage, path: str) -> set[str]:
    """Return the names of the entries that a checkpoint has, those of the project's own included."""
    known = storage.reader(path).read_metadata().state_dict_metadata
    return {name.removeprefix(_STRUCTURE) for name in known if name.startswith(_STRUCTURE)}


def shapes(storage: Storage, path: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the skeletons of entries by name, for :func:`read`: their containers, with ``...`` for each leaf.

    Raises:
        CheckpointError: one is damaged, or has a leaf that the checkpoint does not have.
    """
    reader = storage.reader(path)
    bones = _load(reader, dict.fromkeys(_STRUCTURE + name for name in names))
    found = {name.removeprefix(_STRUCTURE): structure.load(data) for name, data in bones.items()}
    known = reader.read_metadata().state_dict_metadata
    for name, skeleton in found.items():
        lost = next((leaf for leaf in structure.leaf_names(skeleton, name) if leaf not in known), None)
        if lost is not None:
            raise CheckpointError(f"{name!r:.100} has {lost!r:.100} by its structure, and nothing of that is stored.")
    return found


def read(storage: Storage, path: str, wanted: Mapping[str, Any], live: Mapping[str, DTensor]) -> dict[str, Any]:
    """Read entries, each rank on its own and into fresh host memory.

    Args:
        storage: the one that wrote them.
        path: a complete checkpoint, a path or a URL.
        wanted: their skeletons by name, from :func:`shapes`, or what is wanted of them.
        live: what tensors are sharded like, by dotted name. One under the name of a container goes for all tensors of
            its shape in that container. All others are read whole.

    Returns:
        The entries by name, in the containers and types they were saved from.
    """
    reader = storage.reader(path)
    metadata = reader.read_metadata()
    templates: dict[str, Any] = {}
    for name, skeleton in wanted.items():
        for leaf in structure.leaf_names(skeleton, name):
            templates[leaf] = _template(metadata, leaf, live.get(leaf, live.get(leaf.rpartition(".")[0])))
    values = _load(reader, templates)
    return {name: structure.rebuild(skeleton, name, values) for name, skeleton in wanted.items()}


def kinds(storage: Storage, path: str) -> dict[str, torch.Tensor | None]:
    """Return what the leaves of a checkpoint are, by dotted name: of a tensor a ``meta`` tensor, else ``None``."""
    known = storage.reader(path).read_metadata().state_dict_metadata
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        if isinstance(saved, TensorStorageMetadata)
        else None
        for name, saved in known.items()
    }


def read_leaves(storage: Storage, path: str, names: Iterable[str]) -> dict[str, Any]:
    """Read single leaves by dotted name, whole, in this process alone."""
    metadata = storage.reader(path).read_metadata()
    return _load(storage.reader(path), {name: _template(metadata, name, None) for name in names})


def _template(metadata: Metadata, leaf: str, live: Any) -> torch.Tensor | None:
    """Memory for one leaf: sharded as ``live`` is, whatever number of ranks it was sharded over when it was saved."""
    saved = metadata.state_dict_metadata[leaf]
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if isinstance(live, DTensor) and live.shape == saved.size:
        return torch.empty_like(live, dtype=saved.properties.dtype)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _load(reader: StorageReader, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ALONE)
            load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as failed:
        error = next(error for error, _ in failed.failures.values())
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise error from None
        raise CheckpointError(reason(error)) from error
    return wanted


class _Planner(DefaultLoadPlanner):
    """Reads what is no tensor without running it, where torch's own planner unpickles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = pickled.load(name, value)
