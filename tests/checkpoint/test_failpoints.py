"""Every named failpoint is reached by the code, and without an observer none does anything."""

from __future__ import annotations

import re
from pathlib import Path

import stagereg
import stagereg.checkpoint.failpoints as failpoints
from stagereg.checkpoint.checkpointer import Checkpointer

CALL = re.compile(r"\bfailpoint\(\"(\w+)\"\)")


def test_the_named_failpoints_are_exactly_those_in_the_code() -> None:
    sources = Path(stagereg.__file__).parent.rglob("*.py")
    reached = {name for source in sources for name in CALL.findall(source.read_text())}
    assert reached == set(failpoints.POINTS)


def test_a_save_reaches_its_failpoints_in_their_listed_order(tmp_path: Path) -> None:
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
    assert first == [name for name in failpoints.POINTS if name != "hidden"]
    assert list(dict.fromkeys(seen)) == [name for name in failpoints.POINTS if name not in ("locked", "swept")]
