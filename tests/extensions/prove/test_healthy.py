"""``stagereg prove`` refutes no healthy program."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import HEALTHY, mostly_slow, prove, record

SAVED = {"killed run": 4}
"""The step of the checkpoint, if it is not 8: the first run was killed two steps after that save."""


@pytest.mark.parametrize("name", mostly_slow(HEALTHY, "AdamW and dropout", "global generators"))
def test_the_resume_of_a_healthy_program_is_proven(name: str, tmp_path: Path) -> None:
    case = HEALTHY[name]
    record(case, tmp_path / "run")
    code, found = prove(case, tmp_path / "run", SAVED.get(name, 8))
    assert (code, found["verdict"], found["first"]) == (0, "proven", None)
