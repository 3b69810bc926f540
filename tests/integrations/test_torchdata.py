"""torchdata's StatefulDataLoader as an entry of the state: each rank's own position, exactly, on as many ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import stagereg
from stagereg.errors import CheckpointError, ConfigError
from stagereg.testing import run_ranks

pytest.importorskip("torchdata.stateful_dataloader", reason="make frameworks installs torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader

from ..support.pages import Page

LENGTH, TAKEN = 40, 3


def loader_of(rank: int, workers: int) -> Any:
    """Each rank shuffles in another order, so that the states of generators differ."""
    spawned = {"num_workers": workers, "multiprocessing_context": "spawn"} if workers else {}
    generator = torch.Generator().manual_seed(rank)
    return StatefulDataLoader(range(LENGTH), batch_size=2, shuffle=True, generator=generator, **spawned)


def taken(rank: int, world_size: int, root: str, workers: int) -> tuple[list[Any], list[Any]]:
    """What is left of an epoch when it is saved, and after a restore; rank 1 has taken one batch more."""
    loader, left = loader_of(rank, workers), []
    with stagereg.Checkpointer(root) as checkpointer:
        for i, batch in enumerate(loader):
            if i == TAKEN + rank:
                checkpointer.save(10, {"loader": loader, "epoch": 0})
                checkpointer.wait()
            if i >= TAKEN + rank:
                left.append(batch.tolist())
        fresh = {"loader": loader_of(7, workers), "epoch": 9}
        assert checkpointer.restore(fresh) == 10
        assert fresh["epoch"] == 0
        return left[1:], [batch.tolist() for batch in fresh["loader"]]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_goes_on_where_its_rank_was(tmp_path: Path, workers: int) -> None:
    results = run_ranks(taken, nproc=2, args=(str(tmp_path), workers), timeout_s=100)
    for rank, (left, restored) in enumerate(results):
        assert restored == left
        assert len(left) == LENGTH // 2 - TAKEN - rank - 1
    assert results[0][0][1:] != results[1][0]


def test_another_number_of_ranks_is_an_error_that_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(taken, nproc=2, args=(str(tmp_path), 0), timeout_s=100)
    with stagereg.Checkpointer(str(tmp_path)) as checkpointer:
        with pytest.raises(
            CheckpointError, match="'loader' is the state of a data loader that each of 2 ranks saved"
        ) as refused:
            checkpointer.restore({"loader": loader_of(0, 0), "epoch": 9})
        for advice in ("the world size is now 1", "Start 2 ranks, or", "stagereg.per_rank(loader)", "ResumableSampler"):
            assert advice in str(refused.value)
        with caplog.at_level(logging.WARNING):
            state = {"loader": stagereg.per_rank(loader_of(0, 0)), "epoch": 9}
            assert checkpointer.restore(state) == 10
    assert "loader (saved per rank) keep the values of the program" in caplog.text
    assert len(list(state["loader"].value)) == LENGTH // 2


def test_a_stateful_loader_over_a_resumable_sampler_is_refused() -> None:
    sampler = stagereg.data.ResumableSampler(range(8))
    with pytest.raises(ConfigError, match="not a StatefulDataLoader"):
        sampler.batches(StatefulDataLoader(range(8), 2, sampler=sampler))


def test_the_block_of_the_page_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [text for text in Page("data.md").of("python") if "StatefulDataLoader" in text]
    space: dict[str, Any] = {"torch": torch, "stagereg": stagereg, "dataset": TensorDataset(torch.ones(101, 8))}
    space |= {"model": (model := torch.nn.Linear(8, 1)), "optimizer": torch.optim.AdamW(model.parameters())}
    steps = []
    for stop in ("        if step == 10: break\n", ""):
        exec(block + stop, space)
        steps.append((space["step"], sum(1 for _ in space["loader"]) if not stop else 0))
    assert steps == [(10, 0), (26, 26)]
