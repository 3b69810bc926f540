"""The contract of an ``on_commit`` component (see ``extensions.callbacks.on_commit``): a class of tests to inherit.

The tests call the component as a ``Checkpointer`` does, on another thread and with a time limit, with three real
checkpoints of a small model. Override ``verify`` to check effects outside this machine.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stagereg.assembly import Checkpointer
from stagereg.errors import BrokenPromiseError, StageregError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint, OnCommit
from stagereg.testing.contract import Contract


class OnCommitContract(Contract):
    """Tests of an ``on_commit`` component. Inherit this class, and override :meth:`make`.

    Define the subclass at module level, so that the ranks of a test can import it.
    """

    folder: Path  # folder for the component's files, empty at the start of each test and deleted at the end

    def make(self) -> OnCommit:
        """Return a new component. Called at least once per test; ``folder`` stays the same during a test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def state(self) -> dict[str, Any]:
        """Return the state to save in the checkpoints. Default: a small ``model`` and its ``optimizer``."""
        model = torch.nn.Linear(4, 2)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def verify(self, component: OnCommit, checkpoint: CommittedCheckpoint) -> None:
        """Check that the component processed a checkpoint; call :meth:`broken` otherwise. Default: no check."""

    def test_each_checkpoint_in_turn(self) -> None:
        """The component processes checkpoints one after the other, on a thread other than the main thread."""
        with self._committed() as checkpoints:
            self._call(self.make(), *checkpoints)

    def test_checkpoint_stays_as_it_is(self) -> None:
        """The component does not delete or change a checkpoint, or write into the checkpoint's directory."""
        with self._committed() as checkpoints:
            root = Path(checkpoints[0].path).parent
            before = _contents(root)
            self._call(self.make(), *checkpoints)
            after = _contents(root)
            if changed := [name for name in sorted(before | after) if before.get(name) != after.get(name)]:
                self.broken(f"it has changed, created or deleted {', '.join(changed[:4])}")

    def test_same_checkpoint_again(self) -> None:
        """The component accepts a checkpoint that it already processed, in the same run or in a previous run."""
        with self._committed() as (first, *_):
            self._call(self.make(), first, first)
            self._call(self.make(), first)

    def test_any_metrics(self) -> None:
        """The component accepts checkpoints without metrics, and with NaN or infinite metrics."""
        with self._committed() as checkpoints:
            odd = {"loss": math.nan, "ratio": math.inf, "a/b": -math.inf}
            given = [replace(each, metrics=more) for each, more in zip(checkpoints, ({}, odd), strict=False)]
            self._call(self.make(), *given)

    def test_url(self) -> None:
        """The component accepts a checkpoint in an object store, whose path is a URL, or raises a StageregError."""
        with self._committed("memory://") as checkpoints:
            try:
                self._call(self.make(), *checkpoints)
            except BrokenPromiseError:
                raise
            except StageregError as refusal:
                if str(checkpoints[0].path) not in str(refusal):
                    self.broken(f"its refusal does not name the URL: {refusal}")

    def test_rank_0_alone(self) -> None:
        """The component does not use the process group: all ranks construct the component, but only rank 0 calls it."""
        with self._committed() as (first, *_):
            self.on_rank_0("_call_on_rank_0", self.folder, first)

    def _call_on_rank_0(self, rank: int, folder: Path, checkpoint: CommittedCheckpoint) -> None:
        self.folder = folder
        component = self.make()
        if rank == 0:
            self._call(component, checkpoint)

    @contextmanager
    def _committed(self, root: str = "") -> Iterator[list[CommittedCheckpoint]]:
        found: list[CommittedCheckpoint] = []
        with tempfile.TemporaryDirectory(prefix="stagereg-") as parent:
            self.folder = Path(parent, "folder")
            self.folder.mkdir()
            where = f"{root}{parent.lstrip('/')}" if root else str(Path(parent, "checkpoints"))
            with Checkpointer(where, keep=9, on_commit=found.append) as checkpointer:
                for step in (1, 2, 3):
                    checkpointer.save(step, self.state())
                    checkpointer.wait()
            yield found

    def _call(self, component: OnCommit, *checkpoints: CommittedCheckpoint) -> None:
        for each in checkpoints:
            self.within(partial(component.committed, each))
            self.verify(component, each)


def _contents(root: Path) -> dict[str, bytes]:
    """Map each relative path in the checkpoint directory to the bytes of the file; a directory maps to ``b""``."""
    found = {each.relative_to(root).as_posix(): each for each in root.rglob("*") if each.name != ".lock"}
    return {name: each.read_bytes() if each.is_file() else b"" for name, each in found.items()}
