"""``restore.exact`` skips checkpoints that lack values of a failed rank; without it no random number is drawn again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stagereg.assembly import Checkpointer
from stagereg.base import record
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.load.seeding import Seeding, lowest_twins, seeds_of
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.state import rng
from stagereg.checkpoint.state.entries import per_rank, rng_name
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, CorruptCheckpointError
from stagereg.testing import run_ranks

from ...support.faulty_storage import flip
from .test_damaged import save, state_of

EXACT = Restore(exact=True)


# -- which checkpoint is chosen


def make_inexact(root: Path, *steps: int) -> None:
    """Make these checkpoints such as a surviving rank would have saved."""
    for step in steps:
        path = root / f"step-{step:08d}/manifest.json"
        manifest = Manifest.loads(path.read_bytes())
        path.write_text(dataclasses.replace(manifest, lost={"0": ["random numbers", "own"]}).dumps())


def restore(root: Path, how: Restore = EXACT, **options: Any) -> int | None:
    with Checkpointer(str(root), save_last=False, restore=how, **options) as checkpointer:
        return checkpointer.restore(state_of())


@pytest.fixture
def root(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """A directory with checkpoints of the steps 10, 20 and 30, of which the last one is not exact."""
    save(tmp_path / "run", 10, 20, 30)
    make_inexact(tmp_path / "run", 30)
    caplog.clear()
    caplog.set_level(logging.WARNING)
    return tmp_path / "run"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [each.getMessage() for each in caplog.records if each.name.startswith("stagereg.checkpoint.load")]
    caplog.clear()
    return messages


def test_a_skipped_checkpoint_is_named_with_its_reason_and_the_steps_that_are_repeated(
    root: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with record.recording(tmp_path, 0, 1):
        assert restore(root) == 20
    assert logged(caplog) == [
        f"Skipped step 30, which is not exact: it lacks random numbers, own of rank 0 (restore=Restore(exact=True)): "
        f"{root}/step-00000030",
        "Resumed from step 20 instead of step 30: 10 steps are repeated.",
    ]
    [event] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "fallback" in line]
    assert (event["lost"], event["why"]) == (10, "not exact: it lacks random numbers, own of rank 0")
    assert restore(root, Restore()) == 30
    [text] = logged(caplog)
    assert text.startswith("The resume from step 30 is not exact: ")
    assert "lacks random numbers, own of that rank" in text
    assert text.endswith("add restore=Restore(exact=True).")


def test_an_inexact_checkpoint_behind_the_chosen_one_is_not_mentioned(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_inexact(root, 10)
    assert restore(root) == 20
    assert not any("step-00000010" in each for each in logged(caplog))


def test_of_damaged_and_inexact_checkpoints_each_is_called_what_it_is(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(root / "step-00000020/__0_0.distcp")
    assert restore(root) == 10
    damaged, skipped, end = logged(caplog)
    assert damaged.startswith(f"{root}/step-00000020 is corrupt and was skipped")
    assert skipped.startswith("Skipped step 30, which is not exact")
    assert end == "Resumed from step 10 instead of step 30: 20 steps are repeated."


@pytest.mark.parametrize("resume", ["latest", "step-00000030"])
def test_an_inexact_checkpoint_that_the_user_names_is_refused(root: Path, resume: str) -> None:
    with pytest.raises(CheckpointError, match=r"not exact: .*/step-00000030 was saved without a failed rank") as told:
        restore(root, resume=resume)
    assert not isinstance(told.value, CorruptCheckpointError)
    for advice in ('resume="auto"', "restore=Restore(exact=False)"):
        assert advice in str(told.value)
    assert restore(root, Restore(exact=False), resume=resume) == 30


def test_inexact_checkpoints_alone_are_an_error_and_nothing_starts_from_scratch(root: Path) -> None:
    make_inexact(root, 10, 20)
    with pytest.raises(CheckpointError, match="none of them is exact") as told:
        restore(root)
    assert not isinstance(told.value, CorruptCheckpointError)
    assert "To resume from the newest inexact checkpoint, add restore=Restore(exact=False)." in str(told.value)
    assert 'resume="never"' in str(told.value)
    (root / "step-00000010/__0_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match="none of them is valid") as told:
        restore(root)
    assert "restore=Restore(exact=False)" in str(told.value)


# -- the generators that a checkpoint does not have


def drawn(rank: int, world_size: int, root: str, apart: int) -> list[list[float]]:
    """Draw from each generator after a restore of what two of the ranks have saved; ``apart`` are seeds of ranks.

    At the beginning and, on the two, after the save, then after each of two restores, and after that of a later step.
    """
    two, found = dist.new_group([0, 1]), []

    def begin() -> tuple[list[Any], dict[str, Any]]:
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(7 + apart * rank)
        own = 107 + apart * rank
        made = [torch.Generator().manual_seed(own), random.Random(own), np.random.default_rng(own)]
        state = {"made": made, "own": per_rank(np.random.RandomState(own))}
        draw = [lambda: torch.rand(()).item(), random.random, np.random.rand, state["own"].value.rand]
        draw += [lambda: torch.rand((), generator=made[0]).item(), made[1].random, made[2].random]
        return draw, state

    draw, state = begin()
    found.append([each() for each in draw])
    for step in (5, 6) if rank < 2 else ():
        with Checkpointer(f"{root}/{step}", process_group=two, save_last=False, resume="never") as checkpointer:
            checkpointer.save(step, state)
        found.append([each() for each in draw])
    for step in (5, 5, 6):
        draw, state = begin()
        with Checkpointer(f"{root}/{step}", save_last=False) as checkpointer:
            assert checkpointer.restore(state) == step
        found.append([each() for each in draw])
    return found


def test_another_world_size_draws_no_random_number_again_and_ranks_stay_apart(tmp_path: Path) -> None:
    found = run_ranks(drawn, 3, args=(str(tmp_path), 1))
    once: list[float] = []
    for rank in range(3):
        *before, first, again, later = found[rank]
        assert first == again
        once += itertools.chain(*before, first, later)
    # Rank 0 alone continues with the generators in the state that are not marked as each rank's own.
    assert len(once) - len({*once}) == 2 * 3


def test_another_world_size_leaves_ranks_identical_that_the_program_seeds_identically(tmp_path: Path) -> None:
    one, other, third = (each[-3:] for each in run_ranks(drawn, 3, args=(str(tmp_path), 0)))
    assert one == other == third


def states_of(number: int) -> dict[str, torch.Tensor]:
    return rng.seeded(dict.fromkeys(rng.seeds(), number))


def seed(alike: list[int], rank: int, saved: dict[int, int], step: int = 3, size: int = 3) -> dict[str, bytes]:
    """Return the generators of a failed rank after a restore; ``saved`` has the seed of each saved state, by rank."""
    manifest = Manifest(step, size, 1, {"a": FileDigest(0, 0)}, lost={str(rank): ["random numbers"]})
    seeding = Seeding(manifest, dict.fromkeys(rng.seeds(), alike), rank, size)
    sources = seeding.sources({rng_name(each) for each in saved})
    seeding.apply({}, {}, {each: states_of(saved[each]) for each in sources})
    return rng.capture()


def test_a_failed_rank_is_seeded_from_the_checkpoint_the_step_and_the_rank(tmp_path: Path) -> None:
    before = rng.as_tensors(rng.capture())
    try:
        found = seed([0, 1, 2], 1, {0: 5, 2: 6})
        for seed_python in (1, 2):
            random.seed(seed_python)  # of a program that does not seed it
            assert seed([0, 1, 2], 1, {0: 5, 2: 6}) == found
        others = [
            seed([0, 1, 2], 2, {0: 5, 1: 6}),
            seed([0, 1, 2], 1, {0: 5, 2: 6}, step=4),
            seed([0, 1, 2], 1, {0: 8, 2: 6}),
            *({name: bytes(x.tolist()) for name, x in states_of(number).items()} for number in (5, 6)),
        ]
        for other in others:
            assert all(other[name] != found[name] for name in found)
    finally:
        rng.restore(before)


def test_a_failed_rank_continues_from_a_surviving_rank_of_the_same_seed_that_has_drawn_as_much() -> None:
    before = rng.as_tensors(rng.capture())
    try:
        states = {number: {name: bytes(x.tolist()) for name, x in states_of(number).items()} for number in (5, 6)}
        assert seed([0, 0, 0], 1, {0: 5, 2: 5}) == states[5]
        assert seed([0, 1, 1], 1, {0: 5, 2: 6}) == states[6]
        assert seed([0, 0], 1, {0: 5}, size=2) == states[5]
        apart = seed([0, 0, 0], 1, {0: 5, 2: 6})
        assert all(apart[name] not in (states[5][name], states[6][name]) for name in apart)
    finally:
        rng.restore(before)


def test_ranks_are_compared_by_how_each_of_their_generators_is_seeded() -> None:
    state = {"x": 1, "own": per_rank(torch.Generator().manual_seed(3)), "made": np.random.default_rng(4)}
    found = seeds_of(state)
    assert found.keys() == {"python", "torch", "numpy", ".own", ".made"} | (
        {"accelerator"} if torch.accelerator.is_available() else set()
    )
    assert found[".own"] == "3"
    assert lowest_twins([found, found, {**found, "torch": "9"}, {"torch": "9"}])["torch"] == [0, 0, 2, 2]
    assert lowest_twins([found, {}, {}])["numpy"] == [0, 1, 2]


def test_retention_leaves_the_newest_exact_checkpoint_until_a_newer_one_is_exact(root: Path) -> None:
    def left() -> list[int]:
        found: list[Checkpoint] = open_store(str(root)).checkpoints()[0]
        return sorted(each.manifest.step for each in found)

    with Checkpointer(str(root), keep=1, save_last=False) as checkpointer:
        assert checkpointer.restore(state_of()) == 30
        assert left() == [10, 20, 30]
        checkpointer.save(40, state_of(40))
    assert left() == [40]
