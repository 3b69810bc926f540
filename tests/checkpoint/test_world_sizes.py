"""However a model is split over ranks, a checkpoint has all of it, and any other split restores it bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from stagereg.testing.ranks import run_ranks

from . import splits


def test_another_split_restores_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    pairs = [("zero", "pp_ddp"), ("pp_ddp", "zero"), ("fsdp2", "interleaved"), ("interleaved", "tp")]
    pairs += [("tp", "fsdp2"), ("experts", "experts"), ("hsdp", "ddp"), ("activations", "compiled")]
    results = run_ranks(splits.restore_all, nproc=4, args=(str(tmp_path), pairs, "dcp"), timeout_s=120)
    assert [differing for differing, _ in results] == [[]] * 4
    wholes = results[0][1]
    assert len(wholes) == 8
    assert len({len(whole) for name, whole in wholes.items()}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("storage", "first"), [("dcp", 0), ("safetensors", 1)])
def test_every_split_restores_every_other(tmp_path: Path, storage: str, first: int) -> None:
    pairs = [*itertools.product(splits.SPLITS, splits.SPLITS), *itertools.product(splits.TRAINED, splits.TRAINED)]
    pairs = pairs[first::2]
    results = run_ranks(splits.restore_all, nproc=4, args=(str(tmp_path), pairs, storage), timeout_s=1100)
    assert [differing for differing, _ in results] == [[]] * 4
    assert len(results[0][1]) == len({source for source, _ in pairs})
