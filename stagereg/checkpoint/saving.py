"""One save, from the staged copy to the committed checkpoint: what the background thread does, on all ranks at once.

The ranks first tell each other whether they have staged, so a rank that could not leaves nobody waiting. Then torch
writes the files, each rank flushes and checksums its own, and rank 0 commits. Whatever fails, on whichever rank, fails
the save on all of them, and the hidden directory goes away. The copy is let go of as soon as it is written.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stagereg.checkpoint import commit, torchfiles
from stagereg.checkpoint.agreement import Agreement
from stagereg.checkpoint.layout import FileMark
from stagereg.checkpoint.structure import leaves
from stagereg.errors import CheckpointError

__all__ = ["Outcome", "Save", "carry_out"]

_RANK_FILE = re.compile(r"__(\d+)_")


@dataclass
class Save:
    """One save on its way to the background.

    Attributes:
        step: the training step.
        staged: the copy, or the promise of one.
        skeletons: what is saved beside the copy, see :func:`stagereg.checkpoint.torchfiles.skeletons`.
        failure: why there is no copy, if this rank could not stage; its training loop has been told already. Text,
            since the training loop is still busy with the error itself.
    """

    step: int
    staged: dict[str, Any] | Future[dict[str, Any]] = field(default_factory=dict)
    skeletons: dict[str, bytes] = field(default_factory=dict)
    failure: str | None = None

    def take(self) -> dict[str, Any]:
        """Return all that is to be written and let go of it. Raises: what kept this rank from staging."""
        staged, self.staged = self.staged, {}
        if self.failure is not None:
            raise CheckpointError(self.failure)
        ready = staged.result() if isinstance(staged, Future) else staged
        return {**ready, **self.skeletons}


@dataclass(frozen=True)
class Outcome:
    """What one committed save was: bytes of tensor data this rank staged, seconds from agreement to commit."""

    bytes_staged: int
    seconds: float


def carry_out(save: Save, root: Path, keep: int, ranks: Agreement) -> Outcome:
    """Write and commit one save under ``root``, keeping the ``keep`` newest. Collective.

    Raises:
        CheckpointError: on all ranks, if it failed on any.
    """
    failing = f"Step {save.step} was not saved, earlier checkpoints are untouched"
    state: dict[str, Any] = {}

    def ready() -> tuple[int, str]:
        state.update(save.take())
        return save.step, commit.new_token()

    posts = ranks.together(failing, ready)
    started = time.perf_counter()
    if len({step for step, _ in posts}) > 1:
        raise CheckpointError(f"The ranks saved different steps at the same time: {[step for step, _ in posts]}.")
    written = commit.temporary(root, save.step, posts[0][1])
    try:
        torchfiles.write(state, written, ranks.group, failing)
        staged = _tensor_bytes(state)
        state.clear()
        _commit(failing, root, written, save.step, keep, ranks)
    except BaseException:
        if ranks.rank == 0:
            commit.discard(written)
        raise
    return Outcome(staged, time.perf_counter() - started)


def _commit(failing: str, root: Path, written: Path, step: int, keep: int, ranks: Agreement) -> None:
    marks = ranks.together(failing, lambda: {path.name: commit.flush(path) for path in _own_files(written, ranks.rank)})
    files: dict[str, FileMark] = {name: mark for share in marks for name, mark in share.items()}

    def publish() -> None:
        if ranks.rank == 0:
            commit.publish(root, written, step, ranks.size, files, keep)

    ranks.together(failing, publish)


def _own_files(written: Path, rank: int) -> list[Path]:
    """Return the files torch wrote on this rank, which it names after the rank; what has no rank is rank 0's."""

    def owner(path: Path) -> int:
        named = _RANK_FILE.match(path.name)
        return int(named[1]) if named else 0

    return [path for path in sorted(written.iterdir()) if owner(path) == rank]


def _tensor_bytes(state: dict[str, Any]) -> int:
    tensors = (
        leaf for name, value in state.items() for _, leaf in leaves(value, name) if isinstance(leaf, torch.Tensor)
    )
    return sum(tensor.nbytes for tensor in tensors)
