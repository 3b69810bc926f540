"""The plans of torch's distributed checkpoint, kept from one checkpoint to the next."""

from __future__ import annotations

import itertools

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

__all__ = ["Plans"]


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
