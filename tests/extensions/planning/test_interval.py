"""``every="auto"``: when it saves, on all ranks at the same steps; and the formulas of the interval."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import stagereg.config.schema as schema
import stagereg.extensions.goodput.phases as phases
import stagereg.extensions.planning.interval as interval
from stagereg import registry
from stagereg.assembly import Checkpointer, _schedule
from stagereg.base import record
from stagereg.checkpoint.options import Failure
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.config.instantiate import instantiate
from stagereg.errors import CheckpointError, ConfigError, StagingError
from stagereg.extensions.planning.automatic import Automatic
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

MTBF_S = 6 * 3600.0


class Training:
    """A rank in simulated time: a step takes ``step_s``, a save holds it ``stall_s`` and is written after ``write_s``.

    A step that begins while a save is under way takes ``slower`` times as long.
    """

    def __init__(self, step_s: float, stall_s: float, write_s: float, slower: float = 1.0, ranks: Any = None) -> None:
        self.step_s, self.stall_s, self.write_s, self.slower = step_s, stall_s, write_s, slower
        self.now = 1000.0
        self.schedule = Automatic(lambda: MTBF_S, clock=lambda: self.now)
        self.schedule.start(None)
        self.schedule._ranks = ranks or self.schedule._ranks
        self.pending: list[float] = []
        self.saved: list[int] = []

    def steps(self, first: int, last: int, noise: Callable[[], float] = lambda: 1.0) -> list[int]:
        """Train these steps, saving when it is time; return the steps that were saved."""
        for step in range(first, last + 1):
            self.now += self.step_s * noise() * (self.slower if self.pending else 1.0)
            self.end_writes()
            if self.schedule.due(step):
                self.save(step, noise())
        return self.saved

    def save(self, step: int, noise: float = 1.0) -> None:
        """Save, however early that is."""
        self.pending.append(self.now)
        self.now += self.stall_s * noise
        self.end_writes()
        self.schedule.held(step, self.stall_s * noise)
        self.saved.append(step)

    def end_writes(self) -> None:
        """Commit what has been written by now."""
        while self.pending and self.now - self.pending[0] >= self.written_s:
            self.pending.pop(0)
            self.schedule.ended(self.write_s)

    @property
    def written_s(self) -> float:
        """How long a save takes to be written, rounded as the simulated clock rounds."""
        return self.write_s * (1 - 1e-6)

    @property
    def best(self) -> int:
        """The interval in steps that is best for these times."""
        beside = max(0.0, -(-(self.written_s - self.stall_s) // (self.step_s * self.slower)))
        cost = self.stall_s + beside * self.step_s * (self.slower - 1)
        return interval.in_steps(interval.daly(cost, MTBF_S), self.step_s, interval.least(cost, self.write_s))


def test_it_saves_after_ten_steps_then_at_the_best() -> None:
    rank = Training(step_s=0.5, stall_s=0.2, write_s=2.0)
    saved = rank.steps(1, 1000)
    assert saved[:2] == [10, 10 + 90]  # ten times the steps that were measured; the first one has no beginning
    assert rank.schedule.every == rank.best == round(interval.daly(0.2, MTBF_S) / 0.5)
    assert {later - earlier for earlier, later in pairwise(saved[1:])} == {rank.best}


TIMES = st.floats(-3, 2).map(lambda power: 10.0**power)


@settings(max_examples=40, deadline=None)
@given(TIMES, TIMES, TIMES, st.floats(1, 2))
def test_the_plan_is_the_best_as_far_as_was_measured(step: float, stall: float, write: float, slower: float) -> None:
    rank = Training(step, stall, write, slower)
    rank.steps(1, 1000)
    if len(rank.saved) > 2 and rank.schedule._ages:
        assert rank.schedule.every == pytest.approx(min(rank.best, 10 * rank.saved[-1]), rel=0.02, abs=1)


def test_a_first_save_that_is_slow_does_not_count_for_long() -> None:
    rank = Training(step_s=0.5, stall_s=30.0, write_s=31.0)
    rank.steps(1, 10)
    rank.stall_s, rank.write_s = 0.2, 2.0
    rank.steps(11, 200)
    assert len(rank.saved) == 2
    assert rank.schedule.every == pytest.approx(rank.best, rel=0.02)


def test_the_plan_follows_a_disk_that_becomes_slow() -> None:
    rank = Training(step_s=1.0, stall_s=0.2, write_s=2.0)
    rank.steps(1, 500)
    before = rank.schedule.every
    rank.stall_s, rank.write_s = 5.0, 900.0
    rank.steps(501, 10_000)
    assert before < 900 - 5 <= rank.schedule.every
    assert rank.schedule.every == rank.best


def test_a_resumed_run_measures_anew_and_a_restore_does_not() -> None:
    fresh = Training(step_s=0.5, stall_s=0.2, write_s=2.0)
    fresh.schedule.restored(500)
    assert fresh.steps(501, 600) == [510, 600]
    plan = fresh.schedule.every
    fresh.schedule.restored(100)
    assert fresh.steps(101, 100 + plan)[2:] == [100 + plan]


def test_a_save_by_the_program_itself_begins_a_new_interval() -> None:
    rank = Training(step_s=0.5, stall_s=0.2, write_s=2.0)
    rank.steps(1, 25)
    rank.save(25)
    plan = rank.schedule.every
    assert rank.steps(26, 25 + plan)[2:] == [25 + plan]


def many_runs(rank: int, world_size: int, seeds: int) -> list[list[int]]:
    runs = []
    ranks = RankGroup()
    for seed in range(seeds):
        chance = random.Random(seed * world_size + rank)  # each rank has times of its own
        times = [10 ** chance.uniform(*between) for between in ((-2, 0), (-2, 1), (-2, 1))]
        training = Training(*times, slower=chance.uniform(1, 2), ranks=ranks)
        extra = random.Random(seed).sample(range(1, 300), 2)  # at the same steps on all ranks
        for first, last in zip([1, *sorted(extra)], [*sorted(extra), 300], strict=True):
            training.steps(first, last - 1, lambda chance=chance: chance.uniform(0.5, 2))  # type: ignore[misc]
            training.save(last)
        runs.append([*training.saved, training.schedule.every])
    return runs


def seen_by(rank: int, world_size: int, root: str) -> tuple[float, float]:
    """What a tier and the store expect, where rank 0 alone has the record of an attempt of 1000 s, and it failed."""
    if rank == 0:
        at = record.now() - 1000
        Path(root, record.file_name(0)).write_text(
            f'{{"event":"start","t":{at},"run":"r.0"}}\n{{"event":"restart","origin":"tier","t":1,"run":"r.0"}}\n'
        )
        phases.begin(Path(root), "r.1", None)
    failure = Failure(mtbf=timedelta(seconds=600))
    found: Any = [_schedule("checkpoint.every", "auto", failure, in_tier=in_tier) for in_tier in (True, False)]
    for each in found:
        each.start(None)
    return found[0]._mtbf_s, found[1]._mtbf_s


def test_all_ranks_expect_failures_as_often_as_the_run_has_seen_them(tmp_path: Path) -> None:
    for near_s, stored_s in run_ranks(seen_by, nproc=2, args=(str(tmp_path),)):
        assert (near_s, stored_s) == (pytest.approx(1600 / 3, rel=0.05), pytest.approx(1600 / 2, rel=0.05))


class Breaks(BlockingAsyncStager):
    broken = False

    def stage(self, state_dict: dict[str, Any]) -> Any:
        if self.broken:
            raise StagingError(("x",), "is broken here")
        return super().stage(state_dict)


def with_files(rank: int, root: str) -> tuple[list[int], list[str], int | None]:
    """After each step the one last saved, the errors, and the step restored; rank 1 cannot stage that of step 30."""
    stager = Breaks()
    state = {"x": torch.ones(3), f"own.rank{rank}": rank}
    saved: list[int] = []
    errors: list[str] = []
    with Checkpointer(f"{root}/auto", every="auto", keep=9, stager=stager) as checkpointer:
        for step in range(1, 31):
            stager.broken = rank == 1 and step == 30
            try:
                (checkpointer.save if step == 30 else checkpointer.maybe_save)(step, state)
                checkpointer.wait()
            except CheckpointError as error:
                errors.append(str(error))
            saved.append(checkpointer.saved or 0)
        dist.barrier()
        return saved, errors, checkpointer.restore(state)


def differing(rank: int, root: str) -> str:
    try:
        Checkpointer(f"{root}/differing", every="auto" if rank else 7)
    except ConfigError as error:
        return str(error)
    return ""


def all_of_it(rank: int, world_size: int, root: str) -> dict[str, Any]:
    return {
        "runs": many_runs(rank, world_size, seeds=10),
        "files": with_files(rank, root),
        "differing": differing(rank, root),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_of_it, nproc=3, args=(str(tmp_path_factory.mktemp("ranks")),))


def test_all_ranks_save_at_the_same_steps(seen: list[dict[str, Any]]) -> None:
    for runs in zip(*(one["runs"] for one in seen), strict=True):
        assert all(run == runs[0] for run in runs)
    assert len({tuple(run) for run in seen[0]["runs"]}) > 5  # that is, they have something to agree upon


def test_ranks_stay_together_when_one_cannot_stage(seen: list[dict[str, Any]]) -> None:
    saved = [one["files"][0] for one in seen]
    assert all(steps == saved[0] for steps in saved)
    assert {10, 30} <= set(saved[0])
    assert all("is broken here" in " ".join(one["files"][1]) for one in seen)
    steps = {one["files"][2] for one in seen}
    assert len(steps) == 1
    assert steps <= set(saved[0]) - {30}


def test_ranks_with_different_options_all_raise(seen: list[dict[str, Any]]) -> None:
    text = (
        "Checkpointer(every=...) is not the same on all ranks: rank 0 has 7, rank 1 has auto. Give all ranks the same"
    )
    assert {one["differing"] for one in seen} == {f"{text} Checkpointer(every=...)."}


def test_every_is_a_number_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), every="auto", keep=9, save_last=False) as checkpointer:
        assert checkpointer.every == 10
        saved = []
        for step in range(1, 22):
            if checkpointer.maybe_save(step, {"x": 1}):
                saved.append(step)
                checkpointer.wait()
        assert saved == [10]
        assert isinstance(checkpointer.every, int)
        assert checkpointer.every > 20  # what takes milliseconds is not worth a save every few of such steps
    with Checkpointer(str(tmp_path), every="auto") as checkpointer:
        assert checkpointer.restore({"x": 0}) == 10
        assert [step for step in range(11, 21) if checkpointer.maybe_save(step, {"x": 1})] == [20]


@pytest.mark.parametrize("every", [50, "auto"])
def test_a_config_takes_a_number_of_steps_or_auto(every: object, tmp_path: Path) -> None:
    typed = OmegaConf.structured(schema.schema(registry.find("checkpoint", "default")))
    config = OmegaConf.merge(typed, {"dir": str(tmp_path), "every": every, "failure": {"mtbf": "90m"}})
    with instantiate(config) as checkpointer:
        assert checkpointer.every == (50 if every == 50 else 10)


# In units of the mean time between failures, which the formulas scale with.
COSTS = st.floats(-6, 0.3).map(lambda power: 10.0**power)
MTBFS = st.floats(0, 7).map(lambda power: 10.0**power)


def lost_fraction(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """The part of the time that is lost to checkpoints and work done twice: the model of ``interval``."""
    held = (interval_s + cost_s) / mtbf_s
    # exp(-x) / (1 - exp(-x)) in place of 1 / (exp(x) - 1), which overflows where nearly everything is lost.
    return 1 - interval_s / mtbf_s * math.exp(-held) / -math.expm1(-held)


def least_of(function: Callable[[float], float], low: float, high: float) -> float:
    """The argument at which ``function`` is least, by golden sections over its logarithm."""
    a, b, part = math.log(low), math.log(high), (math.sqrt(5) - 1) / 2
    for _ in range(50):
        left, right = b - part * (b - a), a + part * (b - a)
        a, b = (a, right) if function(math.exp(left)) < function(math.exp(right)) else (left, b)
    return math.exp((a + b) / 2)


@settings(deadline=None)
@given(COSTS, MTBFS)
def test_dalys_interval_is_near_the_one_that_loses_least(cost: float, mtbf: float) -> None:
    taken = interval.daly(cost * mtbf, mtbf)
    found = least_of(lambda at: lost_fraction(at, cost * mtbf, mtbf), taken / 20, taken * 20)
    assert taken == pytest.approx(found, rel=0.02 if cost < 0.7 else 0.08)


@settings(deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(1e-4, 1e3), st.floats(0, 1e6))
def test_steps_are_the_nearest_number_that_leaves_time_to_write(at: float, step: float, least: float) -> None:
    steps = interval.in_steps(at, step, least)
    assert steps >= 1
    assert steps * step >= least * (1 - 1e-9)
    if steps > 1 and (steps - 1) * step >= least:
        assert abs(steps - at / step) <= 0.5 + 1e-9


def test_a_whole_number_of_steps_is_not_rounded_up() -> None:
    assert interval.in_steps(0.3, 0.1, 0.3) == 3
