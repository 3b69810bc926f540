"""A crash is reported with its cause and place, whatever ended the process and wherever Python is installed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from stagereg.base.crash_report import describe_after, signal_name, summarize_exception
from stagereg.errors import CheckpointError, StageregError


def test_every_signal_has_a_name() -> None:
    assert signal_name(signal.SIGSEGV) == "SIGSEGV"
    unnamed = set(range(1, signal.SIGRTMAX)) - set(signal.Signals)
    assert {signal_name(number) for number in unnamed} == {f"signal {number}" for number in unnamed} != set()


def test_an_error_has_the_line_of_the_plugin(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    for source, end in (("import json\n\njson.loads('{')", f" ({mine}:3)"), ("def x(:", "SyntaxError: invalid syntax")):
        mine.write_text(source)
        with pytest.raises((ValueError, SyntaxError)) as caught:
            exec(compile(source, mine, "exec"))
        assert summarize_exception(caught.value, __file__).endswith(end)


def not_saved(step: int, why: str = "the disk is full") -> CheckpointError:
    where = f"runs/.step-{step:08}.{step:012x}.tmp/__0_0.distcp"
    return CheckpointError(f"Step {step} was not saved: OSError: {why}: {where}. The newest is step 5.")


def test_a_save_that_fails_for_the_same_reason_is_one_line_and_any_other_failure_is_shown_in_full() -> None:
    same, other = not_saved(11), not_saved(11, "input/output error")
    assert describe_after(same, not_saved(10)) == "Step 11 was not saved, for the same reason as step 10."
    for known in (not_saved(10), ValueError("a bug"), None):
        assert describe_after(other, known) == str(other)
    assert describe_after(StageregError("no room"), StageregError("no room")) == "no room"
