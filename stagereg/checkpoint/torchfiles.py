"""Torch's distributed checkpoint: writing entries through a storage.

What is written is an ordinary torch checkpoint: ``torch.distributed.checkpoint.load`` with a template of the same names
and the storage's reader reads it, without this project.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter

from stagereg.checkpoint.rank_group import reasons
from stagereg.errors import CheckpointError

__all__ = ["Plans", "expect_one_process", "write"]

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


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
