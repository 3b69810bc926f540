"""The contract of an ``on_commit`` component: what is called on rank 0 for each checkpoint that is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stagereg.checkpoint.format.manifest import Manifest


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint that is complete and flushed.

    Attributes:
        step: the training step.
        path: its directory, or its URL as text in an object store. It is not deleted while a call for it runs.
        manifest: of its files, with their sizes and checksums.
        metrics: the values that rank 0 logged for that step (:func:`stagereg.log`) before the step was saved; values
            may be NaN or infinite.
    """

    step: int
    path: Path | str
    manifest: Manifest
    metrics: Mapping[str, float]


class OnCommit(Protocol):
    """What ``Checkpointer(on_commit=[...])`` takes, and ``checkpoint.on_commit`` in a config.

    All ranks construct it; ``committed`` is called on rank 0 alone, on a thread of the component's own, for one
    checkpoint after the other in the order of their commits. So it holds up neither training nor the next save, and
    must not use the process group. What it raises is logged and counted, and fails nothing.
    """

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Do what is to be done with a checkpoint. It must neither change nor delete it.

        A call that has not returned after ``checkpoint.failure.timeout`` is given up; its thread cannot be ended, so
        the component is not called again before it has returned.
        """
