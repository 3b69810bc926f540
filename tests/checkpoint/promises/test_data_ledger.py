"""A ledger of every sample that training has seen: each once an epoch, over kills and other numbers of ranks."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import stagereg
from stagereg.data import ResumableSampler
from stagereg.testing import RankFailure, run_ranks

LENGTH, EPOCHS, SIZE, EVERY = 101, 3, 2, 3
MOMENTS = ("taken", "trained", "saved")
"""When a rank is killed: it has its batch, it has trained on it, or the save of the step may be under way."""


class Kill(NamedTuple):
    """Kills a rank of a run at a step of it; none has the rank -1."""

    rank: int = -1
    step: int = 0
    moment: str = ""


def train(rank: int, world_size: int, root: str, life: int, streams: bool, kill: Kill) -> int:
    """Train on what is left, write every sample down with its step, and return the step of the end."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = ResumableSampler(range(LENGTH), seed=3)
    loader = DataLoader(range(LENGTH), SIZE, sampler=sampler)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    join = stagereg.Join([model, optimizer])
    ledger = os.open(Path(root) / f"life{life}.rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(step: int, samples: list[int]) -> None:
        os.write(ledger, f"{json.dumps([step, samples])}\n".encode())

    with stagereg.Checkpointer(f"{root}/checkpoints", every=EVERY) as checkpointer, join:
        step = start = checkpointer.restore(state) or 0
        write(start, [])

        def reach(moment: str) -> None:
            if (rank, step - start, moment) == kill:
                os.kill(os.getpid(), signal.SIGKILL)

        for epoch in (0,) if streams else range(sampler.epoch, EPOCHS):
            if not streams:
                sampler.set_epoch(epoch)
            for batch in join.iterate(sampler.batches(loader, EPOCHS if streams else None)):
                step += 1
                reach("taken")
                loss = model(batch[:, None].float() / LENGTH).square().sum()
                join.mean(loss, len(batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
                write(step, batch.tolist())
                reach("trained")
                checkpointer.maybe_save(step, state)
                reach("saved")
    return step


def kept(root: Path, lives: int) -> tuple[Counter[int], int]:
    """Count what the last state was trained on, which is what no restore has undone; and how often something was."""
    entries: list[tuple[int, list[int]]] = []
    undone = 0
    for life in range(lives):
        ranks = [
            [json.loads(line) for line in file.read_text().splitlines()] for file in root.glob(f"life{life}.rank*")
        ]
        start = max(lines[0][0] for lines in ranks)
        undone += any(step > start for step, _ in entries)
        entries = [each for each in entries if each[0] <= start]
        entries += [(step, samples) for lines in ranks for step, samples in lines[1:]]
    return Counter(sample for _, samples in entries for sample in samples), undone


def killed(root: Path, life: int, world_size: int, streams: bool, kill: Kill) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(train, nproc=world_size, args=(str(root), life, streams, kill), timeout_s=60)
    assert "SIGKILL" in failure.value.failed[kill.rank]


def expect_each_sample_once_an_epoch(root: Path, lives: list[tuple[int, Kill]], last: int, streams: bool) -> int:
    for life, (world_size, kill) in enumerate(lives):
        killed(root, life, world_size, streams, kill)
    run_ranks(train, nproc=last, args=(str(root), len(lives), streams, Kill()), timeout_s=60)
    counted, undone = kept(root, len(lives) + 1)
    assert counted == Counter(dict.fromkeys(range(LENGTH), EPOCHS))
    return undone


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["epochs", "stream"])
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_and_sizes_see_each_sample_once(tmp_path: Path, seed: int, streams: bool) -> None:
    draw, lives = random.Random(f"{seed} {streams}"), []
    for _ in range(6):
        world_size = draw.randint(1, 4)
        lives.append((world_size, Kill(draw.randrange(world_size), draw.randint(4, 12), draw.choice(MOMENTS))))
    assert expect_each_sample_once_an_epoch(tmp_path, lives, draw.randint(1, 4), streams) >= 1


def last_saved(rank: int, world_size: int, root: str, throws: bool) -> Any:
    """Save what was trained when a loop is left with a batch taken and not trained on; return what is left."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    sampler = ResumableSampler(range(9), shuffle=False)
    state = {"model": model, "sampler": sampler}
    with stagereg.Checkpointer(root, every=100) as checkpointer:
        step, loader = 0, DataLoader(range(9), 2, sampler=sampler)
        join = stagereg.Join([model], throw_on_early_termination=throws, mode="counted")
        try:
            with join:
                for batch in join.iterate(sampler.batches(loader)):
                    if not throws and step == 2:
                        break
                    join.mean(model(batch[:, None].float()).sum(), len(batch)).backward()
                    step += 1
                    checkpointer.maybe_save(step, state)
        except stagereg.UnevenInputsError:
            checkpointer.save(step, state)
        checkpointer.wait()
    again = ResumableSampler(range(9), shuffle=False)
    with stagereg.Checkpointer(root) as checkpointer:
        assert checkpointer.restore({"sampler": again}) == step == 2
    return list(again)


@pytest.mark.parametrize("throws", [False, True], ids=["break", "throw"])
def test_a_batch_that_was_only_taken_is_not_consumed(tmp_path: Path, throws: bool) -> None:
    assert run_ranks(last_saved, nproc=2, args=(str(tmp_path), throws)) == [[8], []]


def test_another_dataset_is_an_error_and_a_plain_loop_too(tmp_path: Path) -> None:
    def state_of(length: int) -> dict[str, Any]:
        return {"sampler": ResumableSampler(range(length))}

    with stagereg.Checkpointer(str(tmp_path), leave=stagereg.Leave(save_last=False)) as checkpointer:
        checkpointer.save(1, state_of(8))
        checkpointer.wait()
        with pytest.raises(stagereg.StageregError, match="length=8, and here length is 9"):
            checkpointer.restore(state_of(9))
        state = state_of(8)
        for _ in DataLoader(range(8), 2, sampler=state["sampler"]):
            with pytest.raises(stagereg.StageregError, match=r"loop over sampler.batches\(loader\) in place of"):
                checkpointer.maybe_save(2, state)
