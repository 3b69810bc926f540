"""Components of ``on_commit``: one that keeps the contract, and some that break one promise each."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.testing import OnCommitContract

Broken = Callable[[CommittedCheckpoint], object]


def _deletes(checkpoint: CommittedCheckpoint) -> None:
    shutil.rmtree(checkpoint.path)


def _writes_beside_the_files(checkpoint: CommittedCheckpoint) -> None:
    Path(checkpoint.path, "seen").touch()


def _knows_it_already(checkpoint: CommittedCheckpoint) -> None:
    Marks.folder.joinpath(str(checkpoint.step)).mkdir()


def _needs_metrics(checkpoint: CommittedCheckpoint) -> None:
    assert checkpoint.metrics


def _rounds_metrics(checkpoint: CommittedCheckpoint) -> None:
    assert all(math.floor(value) for value in checkpoint.metrics.values())


def _wants_a_directory(checkpoint: CommittedCheckpoint) -> None:
    list(Path(checkpoint.path).iterdir())


def _waits_for_all_ranks(checkpoint: CommittedCheckpoint) -> None:
    if dist.is_initialized():
        dist.barrier()


def _hangs(checkpoint: CommittedCheckpoint) -> None:
    threading.Event().wait()


def _is_right(checkpoint: CommittedCheckpoint) -> None:
    Marks.folder.joinpath(str(checkpoint.step)).touch()


class Marks(OnCommitContract):
    """The contract of a function, which ranks find by the name of its class."""

    folder: Path
    timeout_s = 2.0
    does: Broken

    def make(self) -> Marks:
        Marks.folder = self.folder
        return self

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        type(self).does(checkpoint)


def of(does: Broken, **more: object) -> type[Marks]:
    name = f"Of{does.__name__}"
    globals()[name] = contract = type(name, (Marks,), {"does": staticmethod(does), "__module__": __name__, **more})
    return contract


def _never_done(self: OnCommitContract, component: object, checkpoint: CommittedCheckpoint) -> None:
    self.broken("nothing was done")


RIGHT = [of(_is_right)]
WRONG = [
    ("test_each_checkpoint_in_turn", of(_hangs)),
    ("test_each_checkpoint_in_turn", type("OfNothing", (RIGHT[0],), {"verify": _never_done, "__module__": __name__})),
    ("test_checkpoint_stays_as_it_is", of(_deletes)),
    ("test_checkpoint_stays_as_it_is", of(_writes_beside_the_files)),
    ("test_same_checkpoint_again", of(_knows_it_already)),
    ("test_any_metrics", of(_needs_metrics)),
    ("test_any_metrics", of(_rounds_metrics)),
    ("test_url", of(_wants_a_directory)),
    ("test_rank_0_alone", of(_waits_for_all_ranks)),
]
