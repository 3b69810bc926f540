"""However a model is split over ranks, a checkpoint has all of it, and any other split restores it bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from stagereg.assembly import Checkpointer
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

from ...support import splits


def test_another_split_restores_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    pairs = [("zero", "pp_ddp"), ("interleaved", "tp"), ("hsdp", "fsdp2")]
    trained = [("plain_all", "fsdp1")]
    results = run_ranks(splits.restore_all, nproc=4, args=(str(tmp_path), pairs + trained, "dcp"), timeout_s=120)
    assert [differing for differing, _ in results] == [[]] * 4
    wholes = results[0][1]
    assert len(wholes) == 4
    assert len({len(wholes[name]) for name, _ in pairs}) == len({len(wholes[name]) for name, _ in trained}) == 1


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("storage", ["dcp", "safetensors"])
def test_every_split_restores_every_other(tmp_path: Path, storage: str) -> None:
    pairs = [*itertools.product(splits.SPLITS, splits.SPLITS), *itertools.product(splits.TRAINED, splits.TRAINED)]
    results = run_ranks(splits.restore_all, nproc=4, args=(str(tmp_path), pairs, storage), timeout_s=600)
    assert [differing for differing, _ in results] == [[]] * 4
    assert len(results[0][1]) == len({source for source, _ in pairs})


def adafactor(rank: int, world_size: int, root: str) -> list[list[list[float]]]:
    """Two steps, and one after the first was restored. Torch's Adafactor takes no steps of sharded matrices."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for name in ("saved", "restored"):
        x = torch.nn.Parameter(distribute_tensor(torch.full((3, 2), 2.0), mesh, [Replicate()]))
        optimizer = torch.optim.Adafactor([x], lr=0.5)
        state = {"model": {"x": x.detach()}, "optimizer": optimizer}
        for number in range(2):
            if (name, number) == ("restored", 0):
                with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
                    assert checkpointer.restore(state) == 1
                assert {type(each) for key, each in optimizer.state[x].items() if key != "step"} == {DTensor}
                continue
            x.grad = (x * 2 + number).detach()
            optimizer.step()
            if (name, number) == ("saved", 0):
                with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
                    checkpointer.save(1, state)
        found.append(x.full_tensor().tolist())
    return found


def test_rows_and_columns_of_adafactor_are_replicated(tmp_path: Path) -> None:
    for saved, restored in run_ranks(adafactor, nproc=2, args=(str(tmp_path),)):
        assert restored == saved
