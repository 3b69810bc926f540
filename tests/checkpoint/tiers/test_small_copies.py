"""Small copies: as the values were, of the newest steps, without waiting for anybody."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.tiers.small_copies import GENERATORS, SmallCopies, SmallCopySender
from tests.support.programs import comes_true
from tests.support.tier_parts import connected, new_folder, serving

BOUND_S = 30.0
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(SCALARS, inner),
    max_leaves=20,
)
SETS = st.frozensets(st.integers()) | st.sets(st.text())
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)


class Keeper:
    """In the place of a peer: keeps what is sent, after ``before`` was called."""

    def __init__(self, before: Callable[[], object] = int) -> None:
        self.copies, self.steps, self._before = SmallCopies(), list[int](), before

    def send_small(self, rank: int, step: int, content: bytes) -> None:
        self._before()
        self.copies.keep(rank, step, bytearray(content))
        self.steps.append(step)

    def close(self) -> None:
        pass


def sent(values: dict[str, Any]) -> dict[str, Any]:
    """What is kept of values that rank 1 has sent."""
    keeper: Any = Keeper()
    sender = SmallCopySender(1, [keeper])
    sender.send(7, values, rng.note())
    assert comes_true(lambda: keeper.steps == [7], BOUND_S)
    sender.close()
    return keeper.copies.values(1, 7)


@settings(max_examples=25, deadline=None)
@given(PLAIN | TENSORS | SETS)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = sent({"x": value})["x"]
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.shape, torch.equal(found, value)) == (value.dtype, value.shape, True)
    elif isinstance(value, (set, frozenset)):
        assert (type(found), found) == (type(value), value)
    else:
        assert repr(found) == repr(value)  # also of NaN, and of what is equal and of another type


def test_what_is_no_plain_data_or_large_is_left_out_and_the_rest_is_kept() -> None:
    nested: list[Any] = []
    nested.append(nested)
    values = {
        "array": bytearray(b"x"),
        "object": object(),
        "tensors": [torch.zeros(1)],
        "nested": nested,
        "large": [0] * 100_000,
        "wide": torch.zeros(1 << 15),
        "good": [1, (2, "three")],
    }
    found = sent(values)
    assert found.keys() == {GENERATORS, "good"}
    was = rng.as_tensors(rng.capture())
    assert all(torch.equal(found[GENERATORS][name], was[name]) for name in was)


def test_who_sends_waits_for_nobody_and_the_newest_step_arrives() -> None:
    may_go = threading.Event()
    slow: Any = Keeper(lambda: may_go.wait(BOUND_S))
    sender = SmallCopySender(0, [slow])
    for step in range(1, 200):
        sender.send(step, {"at": step}, rng.note())
    may_go.set()
    assert comes_true(lambda: slow.steps[-1:] == [199], BOUND_S)
    assert len(slow.steps) <= 3
    assert slow.copies.values(0, 199)["at"] == 199
    sender.close()


def test_a_keeper_that_fails_is_left_alone_for_a_while_and_others_get_theirs() -> None:
    def fail() -> None:
        failed.append(1)
        raise ConnectionError

    failed: list[int] = []
    bad: Any = Keeper(fail)
    good: Any = Keeper()
    sender = SmallCopySender(0, [bad, good])
    for step in (1, 2, 3):
        sender.send(step, {}, rng.note())
        assert comes_true(lambda step=step: good.steps[-1:] == [step], BOUND_S)
    assert failed == [1]
    sender.close()


def test_the_last_steps_are_kept_and_what_came_after_a_step_that_comes_again_is_not() -> None:
    copies = SmallCopies()
    for step in (10, 20, 30, 40, 50):
        copies.keep(3, step, bytearray())
    assert [*copies._kept[3]] == [20, 30, 40, 50]
    copies.keep(3, 30, bytearray())
    assert [*copies._kept[3]] == [20, 30]
    copies.clear()
    assert copies.listed() == []


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_what_is_none_has_no_values(content: bytes) -> None:
    copies = SmallCopies()
    copies.keep(0, 1, bytearray(content))
    assert copies.values(0, 1) == copies.values(0, 2) == {}


def test_a_server_keeps_what_comes_and_sends_one_away_who_sends_too_much(tmp_path: Path) -> None:
    with serving(new_folder(tmp_path)) as server, connected(server.address) as peer:
        content: list[bytes] = []
        keeper: Any = type("Catches", (Keeper,), {"send_small": lambda self, *of: content.append(of[2])})()
        sender = SmallCopySender(2, [keeper])
        sender.send(5, {"x": 1}, rng.note())
        assert comes_true(lambda: len(content) == 1, BOUND_S)
        sender.close()
        peer.send_small(2, 5, content[0])
        assert comes_true(lambda: server.small.listed() == [(2, 5, [GENERATORS, "x"])], BOUND_S)
        with pytest.raises((ConnectionError, TimeoutError)):  # it has ended
            [peer.send_small(2, 6, bytes(1 << 20)) for _ in range(1000)]
        assert server.small.listed() == [(2, 5, [GENERATORS, "x"])]
