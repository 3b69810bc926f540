"""What went wrong with a checkpoint can be told by the class of the error, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from stagereg.assembly import Checkpointer, Preemption
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks


def kind(act: Callable[[], object]) -> str:
    try:
        act()
    except CheckpointError as error:
        return type(error).__name__
    return "nothing"


def kinds(rank: int, world_size: int, root: str) -> dict[str, str]:
    seen: dict[str, str] = {}
    state = {"x": torch.arange(4.0)}
    checkpointer = Checkpointer(f"{root}/one", preemption=Preemption(grace_period=None), save_last=False)
    checkpointer.save(1, state)
    checkpointer.wait()
    seen["rank 1 alone does not save"] = kind(
        lambda: (checkpointer.save(2, state) if rank == 0 else checkpointer.save(3, state), checkpointer.wait())
    )
    checkpointer.close()
    seen["closed"] = kind(lambda: checkpointer.save(4, state))
    dist.barrier()
    if rank == 0:
        for file in Path(root, "one").glob("step-*/*.distcp"):
            file.write_bytes(b"nothing")
    dist.barrier()
    with Checkpointer(
        f"{root}/two", resume=f"{root}/one/latest", preemption=Preemption(grace_period=None), save_last=False
    ) as other:
        seen["damaged"] = kind(lambda: other.restore(state))
    return seen


def test_damage_disagreement_and_use_after_the_end_have_classes_of_their_own(tmp_path: Path) -> None:
    one, other = run_ranks(kinds, 2, args=(str(tmp_path),))
    assert one == other
    assert one == {
        "rank 1 alone does not save": "RankMismatchError",
        "closed": "ClosedError",
        "damaged": "CorruptCheckpointError",
    }
