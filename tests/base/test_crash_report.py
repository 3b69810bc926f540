"""A crash is reported with its cause and place, whatever ended the process and wherever Python is installed."""

from __future__ import annotations

import signal
import sysconfig
from pathlib import Path

import pytest

import stagereg
from stagereg.base.crash_report import describe_after, innermost_frame, signal_name, summarize, summarize_exception
from stagereg.errors import CheckpointError, StageregError

STDLIB, PACKAGE = sysconfig.get_path("stdlib"), Path(stagereg.__file__).parent


def dump(*frames: str, thread: str = "Current thread") -> str:
    return "\n".join([f"{thread} 0x1 (most recent call first):", *(f'  File "{f}", line 3 in stage' for f in frames)])


def test_every_signal_has_a_name() -> None:
    assert signal_name(signal.SIGSEGV) == "SIGSEGV"
    unnamed = set(range(1, signal.SIGRTMAX)) - set(signal.Signals)
    assert {signal_name(number) for number in unnamed} == {f"signal {number}" for number in unnamed} != set()


FOREIGN = [f"{STDLIB}/threading.py", "<frozen importlib._bootstrap>", "/v/site-packages/torch/_ops.py"]
WAITING = dump("/home/me/waiting.py", thread="Thread")


@pytest.mark.parametrize(
    ("text", "file"),
    [
        *(
            (dump(*FOREIGN, f"{PACKAGE}/stagers/host.py", mine, "/home/me/other.py"), mine)
            for mine in ("/home/me/mine.py", f"{STDLIB}/site-packages/mine.py", "/usr/lib/dist-packages/m.py")
        ),
        (f"{WAITING}\n\n{dump('/home/me/running.py')}", "/home/me/running.py"),
        (f"{WAITING}\n\n{dump(f'{STDLIB}/ssl.py')}", "/home/me/waiting.py"),
        (dump(f"{STDLIB}/ssl.py"), f"{STDLIB}/ssl.py"),
        ("no stack", ""),
    ],
)
def test_the_frame_of_the_plugin_is_reported(text: str, file: str) -> None:
    assert innermost_frame(text) == (f"stage ({file}:3)" if file else "")


def test_the_cause_of_a_dead_rank_is_one_line_with_its_location() -> None:
    died = "died of SIGSEGV before it returned\n  noise\n  Fatal Python error: Segmentation fault\n"
    assert summarize(died) == "died of SIGSEGV before it returned: Fatal Python error: Segmentation fault"
    assert summarize(died + dump("/home/me/mine.py")).endswith("Segmentation fault, in stage (/home/me/mine.py:3)")
    raised = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no\n'
    assert summarize(raised) == "ValueError: no"


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
