"""The contract of an ``on_commit`` component, as tests to inherit: the promises of ``extensions.callbacks.on_commit``.

Like in a ``Checkpointer``, the component gets real checkpoints on another thread and with a time limit: three
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
    """The promises of an ``on_commit`` component. Inherit this class, and override :meth:`make`.

    Define the subclass at the top of a module, so that ranks can import it.
    """

    folder: Path  # an empty folder for the component's files; deleted after each promise

    def make(self) -> OnCommit:
        """Return a new component. Called at least once per promise, with the same ``folder``."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def state(self) -> dict[str, Any]:
        """Return the content of the checkpoints; default: a small ``model`` and its ``optimizer``."""
        model = torch.nn.Linear(4, 2)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def verify(self, component: OnCommit, checkpoint: CommittedCheckpoint) -> None:
        """Call :meth:`broken` if the component did not do its job with a checkpoint. Default: no check."""

    def test_each_checkpoint_in_turn(self) -> None:
        """The component handles each checkpoint, one after the other, on a thread other than the main thread."""
        with self._committed() as checkpoints:
            self._call(self.make(), *checkpoints)

    def test_checkpoint_stays_as_it_is(self) -> None:
        """The component does not delete or change a checkpoint, or write into its directory."""
        with self._committed() as checkpoints:
            root = Path(checkpoints[0].path).parent
            before = _contents(root)
            self._call(self.make(), *checkpoints)
            after = _contents(root)
            if changed := [name for name in sorted(before | after) if before.get(name) != after.get(name)]:
                self.broken(f"it has changed, created or deleted {', '.join(changed[:4])}")

    def test_same_checkpoint_again(self) -> None:
        """A checkpoint that the component has already handled is not an error, in the same run or in the next one."""
        with self._committed() as (first, *_):
            self._call(self.make(), first, first)
            self._call(self.make(), first)

    def test_any_metrics(self) -> None:
        """A checkpoint may have no metrics, and metrics may be NaN or infinite."""
        with self._committed() as checkpoints:
            odd = {"loss": math.nan, "ratio": math.inf, "a/b": -math.inf}
            given = [replace(each, metrics=more) for each, more in zip(checkpoints, ({}, odd), strict=False)]
            self._call(self.make(), *given)

    def test_url(self) -> None:
        """A checkpoint in an object store, whose path is a URL, is accepted, or refused with a StageregError."""
        with self._committed("memory://") as checkpoints:
            try:
                self._call(self.make(), *checkpoints)
            except BrokenPromiseError:
                raise
            except StageregError as refusal:
                if str(checkpoints[0].path) not in str(refusal):
                    self.broken(f"its refusal does not name the URL: {refusal}")

    def test_rank_0_alone(self) -> None:
        """The component is constructed on all ranks but called only on rank 0, so it does not use the process group."""
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
    """Return the content of each file of the checkpoints, and their directories."""
    found = {each.relative_to(root).as_posix(): each for each in root.rglob("*") if each.name != ".lock"}
    return {name: each.read_bytes() if each.is_file() else b"" for name, each in found.items()}
