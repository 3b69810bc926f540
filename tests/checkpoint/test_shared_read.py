"""``read=once``: each byte is read by one rank, and arrives wherever it is wanted, bit for bit and checked."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg.checkpoint.shared_read as shared_read
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.reading import File
from stagereg.errors import CheckpointError, ConfigError
from stagereg.registry import build
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

from . import splits


def small(piece: int) -> None:
    """Let there be many pieces of a small checkpoint."""
    shared_read._PIECE_BYTES = shared_read._LEAST_BYTES = piece
    shared_read._FETCH_BYTES = piece // 3
    shared_read._GAP_BYTES = 16


def restore_pairs(
    rank: int, world_size: int, root: str, pairs: Sequence[tuple[str, str]], storage: str, piece: int
) -> list[str]:
    small(piece)
    splits.Checkpointer = functools.partial(Checkpointer, read="once")  # type: ignore[misc,assignment]
    return splits.restore_all(rank, world_size, root, pairs, storage)[0]


PAIRS = [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("zero", "pp"), ("interleaved", "zero"), ("tp", "plain"), ("pp", "tp")]
PAIRS_OF_FOUR = [("tp_fsdp2", "pp_ddp"), ("ddp", "hsdp"), ("experts", "pp_fsdp2")]


@pytest.mark.parametrize(
    ("storage", "piece"), [("dcp", 1000), pytest.param("torch_dcp", 300, marks=pytest.mark.slow), ("dcp", 1 << 20)]
)
def test_any_split_gets_its_bytes_from_one_reader(tmp_path: Path, storage: str, piece: int) -> None:
    assert run_ranks(restore_pairs, nproc=3, args=(str(tmp_path), PAIRS, storage, piece)) == [[]] * 3


@pytest.mark.slow
def test_any_split_of_four_ranks_gets_its_bytes(tmp_path: Path) -> None:
    assert run_ranks(restore_pairs, nproc=4, args=(str(tmp_path), PAIRS_OF_FOUR, "dcp", 700)) == [[]] * 4
