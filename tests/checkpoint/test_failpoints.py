"""The named moments are those that the code reaches, each of them, and nothing listens unless it is asked to."""

from __future__ import annotations

import re
from pathlib import Path

import stagereg
import stagereg.checkpoint.failpoints as failpoints
from stagereg.checkpoint.checkpointer import Checkpointer

CALL = re.compile(r"\bfailpoint\(\"(\w+)\"\)")


def test_every_moment_that_is_named_is_reached_somewhere_and_no_other() -> None:
    sources = Path(stagereg.__file__).parent.rglob("*.py")
    reached = {name for source in sources for name in CALL.findall(source.read_text())}
    assert reached == set(failpoints.POINTS)


def test_a_save_reaches_its_moments_in_the_order_they_are_listed_in(tmp_path: Path) -> None:
    seen: list[str] = []
    before = failpoints.watch(seen.append)
    try:
        with Checkpointer(str(tmp_path), keep=1) as checkpointer:
            checkpointer.save(1, {"x": 1})
            checkpointer.wait()
            first = list(dict.fromkeys(seen))
            seen.clear()
            checkpointer.save(2, {"x": 2})
            checkpointer.wait()
        assert failpoints.watch(before) == seen.append
    finally:
        failpoints.watch(before)
    assert first == [name for name in failpoints.POINTS if name not in ("aside", "hidden")]
    assert list(dict.fromkeys(seen)) == [name for name in failpoints.POINTS if name not in ("locked", "swept", "aside")]


def test_nothing_listens_once_the_observer_is_gone() -> None:
    seen: list[str] = []
    before = failpoints.watch(seen.append)
    failpoints.watch(before)
    failpoints.failpoint("staged")
    assert seen == []
