"""Ranks that save to a URL see one store, which no rank looks for in a file system."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from stagereg.assembly import Checkpointer
from stagereg.testing.ranks import run_ranks


def save_and_restore(rank: int, world_size: int, folder: str) -> tuple[int | None, list[str]]:
    os.chdir(folder)
    url = f"local://{folder}/run"  # fsspec's, so all processes see it
    for step in (1, 2):
        with Checkpointer(url) as checkpointer:
            checkpointer.restore({f"x{rank}": torch.zeros(3)})
            checkpointer.save(step, {f"x{rank}": torch.full((3,), step)})
    with Checkpointer(url) as checkpointer:
        return checkpointer.restore({f"x{rank}": torch.zeros(3)}), os.listdir(folder)


def test_two_ranks_save_to_a_url_and_make_nothing_beside_it(tmp_path: Path) -> None:
    assert run_ranks(save_and_restore, args=(str(tmp_path),)) == [(2, ["run"])] * 2
