"""What checkpoints have cost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CheckpointStats:
    """What this process's checkpoints have cost so far.

    Attributes:
        saves: checkpoints committed.
        tier_saves: steps written to the tier, by all ranks.
        bytes_staged: bytes of tensor data copied on this rank, over all committed saves.
        stall_seconds: how long each call of ``save`` held the training loop, in order of the calls.
        write_seconds: how long the background took to write and commit each checkpoint, in order of the commits.
        on_commit_calls: calls of ``on_commit`` components, of all together; on rank 0.
        on_commit_failures: what went wrong with these: raised, took too long, was left out, lost the checkpoint.
    """

    saves: int = 0
    tier_saves: int = 0
    bytes_staged: int = 0
    stall_seconds: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)
    on_commit_calls: int = 0
    on_commit_failures: int = 0
