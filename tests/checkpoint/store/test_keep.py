"""What a policy keeps is the union of its rules within its budget, and always the newest."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hydra.errors import HydraException
from hypothesis import example, given
from omegaconf.errors import OmegaConfBaseException

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.base.sizes import ByteSize
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.store.keep import Keep
from stagereg.config.suggestions import explain
from stagereg.errors import ConfigError
from stagereg.testing.ranks import run_ranks
from tests.support.keeping import composed, listed, steps, train
from tests.support.places import PLACES, place

VALUES = st.one_of(st.none(), st.integers(-3, 3).map(float), st.just(math.nan), st.just(math.inf), st.just(-math.inf))
POLICIES = st.builds(
    lambda newest, every, best, direction, budget: Keep(
        newest, every, best, "loss" if best else None, direction, budget
    ),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(0, 4 * has("retention")),
    st.sampled_from(["min", "max"]),
    st.one_of(st.none(), st.integers(0, 40)),
)


@st.composite
def directories(draw: st.DrawFn) -> tuple[list[Checkpoint], dict[str, float]]:
    """Checkpoints in any order, of which several may have the same step, and the metrics that were logged."""
    drawn = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12), VALUES), max_size=12))
    made = [checkpoint(step, serial, nbytes) for serial, (step, nbytes, _) in enumerate(drawn, 1)]
    values = {one.path: value for one, (*_, value) in zip(made, drawn, strict=True) if value is not None}
    return draw(st.permutations(made)), values


def checkpoint(step: int, serial: int, nbytes: int = 10) -> Checkpoint:
    return Checkpoint(f"/runs/step-{step}.{serial}", Manifest(step, 1, serial, {"a": FileDigest(nbytes, 0)}))


def logged(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    return {path: {"loss": value, "other": -value} for path, value in values.items()}


def recency(one: Checkpoint) -> int:
    return -one.manifest.serial


def union(policy: Keep, checkpoints: list[Checkpoint], values: dict[str, float]) -> list[str]:
    """What some rule keeps, said once more: one is among the best if fewer than ``best`` others are better."""
    found = []
    for one in checkpoints:
        step, value = one.manifest.step, values.get(one.path, math.nan)
        newer = [each for each in checkpoints if recency(each) < recency(one)]
        better = [
            each
            for each in checkpoints
            for other in [values.get(each.path, math.nan)]
            if (other < value if policy.direction == "min" else other > value) or (other == value and each in newer)
        ]
        if (
            len(newer) < policy.newest
            or (policy.every is not None and step > 0 and step % policy.every == 0)
            or (not math.isnan(value) and len(better) < policy.best)
        ):
            found.append(one)
    return [one.path for one in sorted(found, key=recency)]


@given(POLICIES, directories())
@example(Keep(newest=2, budget=ByteSize(20)), ([checkpoint(1, 1), checkpoint(2, 2)], {}))  # which fits exactly
def test_what_stays_is_the_union_within_the_budget_and_the_newest(policy: Keep, there: tuple[Any, Any]) -> None:
    checkpoints, values = there
    by_path = {one.path: one for one in checkpoints}
    stay, wanted = [*policy.select(checkpoints, logged(values))], union(policy, checkpoints, values)
    assert stay == wanted[: len(stay)]  # the least recent go first
    assert stay[:1] == wanted[:1] == [one.path for one in sorted(checkpoints, key=recency)][:1]
    if policy.budget is None:
        assert stay == wanted
        return
    sizes = [by_path[path].manifest.nbytes for path in wanted]
    assert sum(sizes[: len(stay)]) <= policy.budget or len(stay) <= 1
    assert len(stay) == len(wanted) or sum(sizes[: len(stay) + 1]) > policy.budget


@given(POLICIES, directories())
def test_deleting_at_each_save_loses_none_of_the_best(policy: Keep, there: tuple[Any, Any]) -> None:
    checkpoints, values = there
    policy = Keep(policy.newest, policy.every, policy.best, policy.metric, policy.direction)
    left: list[Checkpoint] = []
    for one in sorted(checkpoints, key=recency, reverse=True):
        stay = policy.select([*left, one], logged(values))
        left = [each for each in [*left, one] if each.path in stay]
    assert {one.path for one in left} == set(union(policy, checkpoints, values))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"newest": 0}, r"newest=\.\.\.\) must be a whole number of at least 1, not 0"),
        ({"newest": True}, r"newest=\.\.\.\) must be"),
        ({"every": 0}, r"every=\.\.\.\) must be a whole number of at least 1"),
        ({"best": -1}, r"best=\.\.\.\) must be a whole number of at least 0"),
        ({"best": 2}, r"best=\.\.\.\) and Keep\(metric=\.\.\.\) must be given together.*metric=None"),
        ({"metric": "loss"}, r"best=\.\.\.\) and Keep\(metric=\.\.\.\) must be given together.*best=0"),
        ({"best": 2, "metric": "loss", "direction": "mim"}, r"direction=.*must be one of min, max.*Did you mean 'min'"),
        ({"budget": "5GiX"}, "'5GiX' has no valid unit of bytes"),
        ({"budget": -1}, "not a size"),
    ],
)
def test_a_policy_of_no_use_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Keep(**given)


# -- a run with a policy


@pytest.fixture(params=PLACES)
def dir(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, tmp_path)


def test_what_a_run_leaves_of_an_earlier_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), 2, [5, 6])
    with Checkpointer(str(tmp_path), keep=1, save_last=False) as checkpointer:
        checkpointer.save(1, {"x": 1})
    assert listed(str(tmp_path), capsys) == {6: "earlier run", 5: "earlier run", 1: "newest"}


def test_a_budget_below_one_checkpoint_keeps_the_newest(dir: str, caplog: pytest.LogCaptureFixture) -> None:
    train(dir, Keep(newest=3, every=1, budget=ByteSize("100B")), range(1, 5))
    assert steps(dir) == [4]
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text.partition(" bytes, ")[2] for text in warned] == [
        'more than keep=Keep(budget="100B"), so only the newest one is retained.'
    ]


def test_what_is_said_of_why_is_not_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), 1, [1])
    for text in ('{"step-00000001": "\\u001b[31m"}', '{"step-00000001": 3}', "[1]", "[" * 9999, "\xff"):
        (tmp_path / "kept.json").write_text(text)
        assert listed(str(tmp_path), capsys) == {1: ""}


# -- on a command line


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ([], Keep()),
        (["checkpoint.keep=3"], Keep(3)),
        (["newest=3", "every=1000"], Keep(3, every=1000)),
        (["every=5", "direction=max"], Keep(every=5, direction="max")),
        (["budget=500GiB"], Keep(budget=ByteSize("500GiB"))),
    ],
)
def test_a_command_line_sets_the_policy(tmp_path: Path, overrides: list[str], meant: Any) -> None:
    overrides = [each if "." in each else f"checkpoint.keep.{each}" for each in overrides]
    with stagereg.instantiate(composed(tmp_path, *overrides).checkpoint) as checkpointer:
        assert checkpointer._target.keep == meant


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "checkpoint.keep=3 checkpoint.keep.every=9",
            "checkpoint.keep is already set as a whole. Set fields instead: checkpoint.keep.every=... and "
            "checkpoint.keep.newest=...",
        ),
        ("checkpoint.keep.buget=9GB", "checkpoint.keep takes no 'buget'. Did you mean 'budget'?"),
    ],
)
def test_a_misspelt_rule_gets_the_nearest_name(tmp_path: Path, overrides: str, line: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        composed(tmp_path, *overrides.split())
    assert explain(caught.value).startswith(line)


def differing(rank: int, size: int, root: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Checkpointer(root, keep=Keep(every=10 + rank))
    Checkpointer(root, keep=2 if rank else Keep(newest=2)).close()
    return str(caught.value)


def test_ranks_with_different_policies_all_raise(tmp_path: Path) -> None:
    for text in run_ranks(differing, nproc=2, args=(str(tmp_path),)):
        assert "Keep(every=...) is not the same on all ranks: rank 0 has 10, rank 1 has 11." in text
