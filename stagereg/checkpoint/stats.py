"""Statistics on the cost of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CheckpointStats:
    """The cost of this process's checkpoints so far.

    Attributes:
        saves: number of committed checkpoints.
        tier_saves: number of steps that all ranks have written to the tier.
        bytes_staged: bytes of tensor data copied on this rank, over all committed saves.
        stall_seconds: seconds that each call of ``save`` blocked the training loop, in order of the calls.
        write_seconds: seconds to write and commit each checkpoint in the background, in order of the commits.
        on_commit_calls: number of calls of all ``on_commit`` components; on rank 0.
        on_commit_failures: number of those calls that raised an exception, timed out, were skipped, or ended after
            their checkpoint was deleted.
    """

    saves: int = 0
    tier_saves: int = 0
    bytes_staged: int = 0
    stall_seconds: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)
    on_commit_calls: int = 0
    on_commit_failures: int = 0
