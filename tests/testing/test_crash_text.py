"""A crash is reported with its cause and place, whatever ended the process and wherever Python is installed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

import stagereg
from stagereg.testing.crash_text import innermost_frame, summarize

STDLIB, PACKAGE = sysconfig.get_path("stdlib"), Path(stagereg.__file__).parent


def dump(*frames: str, thread: str = "Current thread") -> str:
    return "\n".join([f"{thread} 0x1 (most recent call first):", *(f'  File "{f}", line 3 in stage' for f in frames)])


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
    died = "was killed by SIGSEGV before it returned\n  noise\n  Fatal Python error: Segmentation fault\n"
    assert summarize(died) == "was killed by SIGSEGV before it returned: Fatal Python error: Segmentation fault"
    assert summarize(died + dump("/home/me/mine.py")).endswith("Segmentation fault, in stage (/home/me/mine.py:3)")
    raised = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no\n'
    assert summarize(raised) == "ValueError: no"
