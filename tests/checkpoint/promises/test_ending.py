"""The end of a run: all ranks come to it together, or each says in seconds what is wrong."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stagereg
import stagereg.checkpoint.ranks.rank_group as rank_group
import stagereg.checkpoint.ranks.requests as requests
from stagereg import Checkpointer
from stagereg.assembly import Preemption
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.save_thread import SaveThread
from stagereg.errors import CheckpointError
from stagereg.kernel.channel import wait_for_keys
from stagereg.testing import run_ranks

SECONDS = 20
STEP_2 = " The newest valid checkpoint is step 2, in ROOT."
ADVICE = (
    ". If their inputs are uneven, put the loop into a join: `with join:` and `for batch in join.iterate(loader)`. All "
    "ranks must take the same steps, and leave the Checkpointer's `with` block together."
)


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.store = store()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.store.set("warned", "")  # for the ranks that this one waits for


def skips_empty_batches(rank: int, checkpointer: Checkpointer, model: Any, state: Any) -> None:
    loader = [torch.ones(4, 8)] * (2 + 2 * rank)
    step = 0
    with stagereg.Join([model], mode="auto", timeout=SECONDS) as join:
        for x in join.iterate(loader):
            if len(x) == 0:
                continue
            model(x).sum().backward()
            step += 1
            checkpointer.maybe_save(step, state)


def forgets_the_join(rank: int, checkpointer: Checkpointer, model: Any, state: Any) -> None:
    for step in range(1, 3 + rank):
        model(torch.ones(4, 8)).sum().backward()
        checkpointer.maybe_save(step, state)
    checkpointer.wait()


def is_slow(rank: int, checkpointer: Checkpointer, model: Any, state: Any) -> None:
    requests._LONG_S = 0.5  # in this process, which no other test has
    for step in range(1, 4):
        model(torch.ones(4, 8)).sum().backward()
        checkpointer.maybe_save(step, state)
    if rank == 1:
        assert wait_for_keys(store(), ["warned"], 60)


def fails(rank: int, checkpointer: Checkpointer, model: Any, state: Any) -> None:
    checkpointer.maybe_save(1, state)
    if rank == 1:
        raise ValueError("a bad sample")


def trained(rank: int, world_size: int, root: str, train: Any) -> tuple[float, str, list[str]]:
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    state = {"model": model}
    messages = Messages()
    logging.getLogger("stagereg").addHandler(messages)
    error = ""
    began = time.monotonic()
    try:
        with Checkpointer(root, every=2) as checkpointer:
            checkpointer.restore(state)
            train(rank, checkpointer, model, state)
    except (CheckpointError, ValueError, RuntimeError) as raised:
        error = str(raised).replace(root, "ROOT")
    seconds = time.monotonic() - began
    if error and dist.is_initialized():
        dist.destroy_process_group()  # ends the collectives that others wait in, as the end of a process does
    return seconds, error, messages.texts


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (
            skips_empty_batches,
            "Step 4 was not saved: rank 1 called save(step 4), rank 0 did not: call save and maybe_save on all ranks, "
            f"with an empty batch too, and not under `if rank == 0`.{STEP_2}",
        ),
        (forgets_the_join, f"rank 0 reached the end after step 2, but rank 1 continued with another step{ADVICE}"),
        (fails, "The last step was not saved: rank 1 left the run with an error."),
    ],
)
def test_ranks_that_do_not_end_together_say_so_in_seconds(tmp_path: Path, train: Any, expected: str) -> None:
    ended = run_ranks(trained, 2, args=(str(tmp_path), train), timeout_s=60)
    assert ended[0][1] == expected
    assert ended[1][1]
    assert all(seconds < SECONDS for seconds, _, _ in ended)


def test_ranks_wait_for_a_slow_one_and_save_the_last_step(tmp_path: Path) -> None:
    ended = run_ranks(trained, 2, args=(str(tmp_path), is_slow), timeout_s=60)
    assert [error for _, error, _ in ended] == ["", ""]
    assert ended[0][2] == [f"stagereg: rank 0 reached the end after step 3, but rank 1 did not{ADVICE}"]
    assert (tmp_path / "step-00000003").is_dir()


def end_with_a_failed_save(rank: int, root: str, late: int) -> str:
    """Rank ``late`` hears of it only when the other has come to the last exchange."""
    fail, exchange = SaveThread._fail, RankGroup.max_async
    with pytest.MonkeyPatch.context() as patch:
        if rank == late:
            patch.setattr(SaveThread, "_fail", lambda *args: (wait_for_keys(store(), [root], 60), fail(*args))[1])
        else:
            patch.setattr(RankGroup, "max_async", lambda *args: (store().set(root, ""), exchange(*args))[1])
        try:
            with Checkpointer(root, every=1, preemption=Preemption(grace_period=None)) as checkpointer:
                checkpointer.save(1, {"x": torch.zeros(1, dtype=[torch.int32, torch.float32][rank])})
                if rank != late:
                    checkpointer._background.wait()
        except CheckpointError as error:
            return str(error)
    return ""


def end_with_failed_saves(rank: int, world_size: int, root: str) -> list[str]:
    return [end_with_a_failed_save(rank, f"{root}/{late}", late) for late in (0, 1)]


def test_a_save_that_fails_at_the_end_is_raised_on_all_ranks(tmp_path: Path) -> None:
    for errors in run_ranks(end_with_failed_saves, 2, args=(str(tmp_path),), timeout_s=30):
        assert len(errors) == 2
        assert all("'x'" in error for error in errors), errors


def alone(rank: int, world_size: int, root: str) -> str:
    if rank == 1:
        return ""  # its process stays until the other has returned too
    soon = mock.patch.multiple(rank_group, _TOGETHER_S=1.0, _LONG_S=0.1)
    with soon, pytest.raises(CheckpointError) as raised:
        Checkpointer(root)
    return str(raised.value)


def test_a_checkpointer_on_one_rank_alone_is_an_error(tmp_path: Path) -> None:
    assert run_ranks(alone, 2, args=(str(tmp_path),), timeout_s=60)[0] == (
        "rank 0 constructed a Checkpointer, but rank 1 did not. Construct it on all ranks. This rank has waited 1 s. "
        "If a rank prepares data first, let the others wait in torch.distributed.barrier()."
    )


def without_store(rank: int, world_size: int, root: str) -> str:
    gone = mock.patch.object(requests, "wait_for_keys", side_effect=dist.DistNetworkError("Broken pipe"))
    with pytest.raises(CheckpointError) as raised, gone, Checkpointer(root) as checkpointer:
        checkpointer.maybe_save(1, {"x": 1})
    return str(raised.value)


def test_a_store_that_is_gone_at_the_end_is_named(tmp_path: Path) -> None:
    assert run_ranks(without_store, 2, args=(str(tmp_path),), timeout_s=60) == 2 * [
        "The last step was not saved: the rendezvous store does not respond (Broken pipe). The process that hosts the "
        "store (rank 0 or the launcher) has terminated: check the end of its output."
    ]
