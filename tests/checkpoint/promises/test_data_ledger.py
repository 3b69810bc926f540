"""A sampler is saved with the batches that were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import stagereg
from stagereg.data import ResumableSampler
from stagereg.testing import run_ranks


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
