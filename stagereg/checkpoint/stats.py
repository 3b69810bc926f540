"""Statistics on the cost of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CheckpointStats:
    """The cost of the checkpoints of this process so far.

    Attributes:
        saves: number of committed checkpoints.
        tier_saves: number of steps that all ranks have written to the tier.
        bytes_staged: total bytes of tensor data that this rank has copied in committed saves.
        stall_seconds: time in seconds for which each call to ``save`` blocked the training loop, in order of the calls.
        write_seconds: time in seconds to write and commit each checkpoint in the background, in order of the commits.
        on_commit_calls: number of calls to all ``on_commit`` components, on rank 0.
        on_commit_failures: number of calls to ``on_commit`` components that raised an exception, timed out, were
            skipped, or ended after their checkpoint was deleted.
    """

    saves: int = 0
    tier_saves: int = 0
    bytes_staged: int = 0
    stall_seconds: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)
    on_commit_calls: int = 0
    on_commit_failures: int = 0
