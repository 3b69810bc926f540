"""A mean that is given to ``join.mean`` as a sum is warned of, and options that differ between ranks are errors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import stagereg
import stagereg.join.context as context
from stagereg.errors import StageregError
from stagereg.join.mean_loss import is_mean
from stagereg.testing import run_ranks


def test_a_loss_that_is_a_mean_is_seen_in_the_graph() -> None:
    w, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    assert all(map(is_mean, (w.mean(), cross_entropy(w, labels), mse_loss(w, torch.zeros(4, 3)))))
    sums = (w.sum(), cross_entropy(w, labels, reduction="sum"), w.mean() * 4, torch.ones((), requires_grad=True).mean())
    assert not any(map(is_mean, sums))


def differing(rank: int, world_size: int, root: str) -> list[str]:
    """What is raised on ranks whose options differ, and what a mean as a loss is warned of with."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    found = []
    try:
        stagereg.Checkpointer(f"{root}/{rank}")
    except StageregError as error:
        found.append(str(error))
    dist.barrier()
    try:
        with stagereg.Join([model], mode=("counted", "planned")[rank], timeout=20) as join:
            list(join.iterate([]))
    except StageregError as error:
        found.append(str(error))
    with mock.patch.object(context._log, "warning") as warning:
        join = stagereg.Join([model], enable=False)
        for _ in range(2):
            join.mean(model(torch.ones(4, 1)).mean(), 4)
    return [*found, *(call.args[0] % call.args[1:] for call in warning.call_args_list)]


def test_options_that_differ_and_a_mean_as_loss_are_named(tmp_path: Any) -> None:
    for of_dir, of_mode, warned in run_ranks(differing, 2, args=(str(tmp_path),), timeout_s=60):
        assert of_dir == (
            f"Checkpointer(dir=...) is not the same on all ranks: rank 0 has {tmp_path}/0, rank 1 has {tmp_path}/1. "
            'Give all ranks the same path: dir="PATH". A path with the time (${now:...}) is the same on all ranks only '
            "under stagereg.main."
        )
        assert warned == (
            "stagereg: join.mean got a loss that is already a mean over 4 samples, but requires the sum of their "
            'losses. Use reduction="sum", or pass loss * n.'
        )
        assert "Join(mode=...) is not the same on all ranks: this rank has " in of_mode
    assert list(tmp_path.iterdir()) == []
