"""A command that is run in this process, and packages that are installed for one test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stagereg.cli import main


class Ran(NamedTuple):
    """What a command has printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Ran]
Install = Callable[..., Path]
GOOD = """
class Good:
    should_synchronize_after_execute = True
    def __init__(self, slots: int = 2) -> None: ...
    def stage(self, state_dict): ...
    def synchronize_staging(self) -> None: ...
    def close(self) -> None: ...
"""


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command of ``stagereg``, which is to end with ``code``; an error is on one screen, and no traceback."""

    def run(*arguments: object, code: int = 0) -> Ran:
        capsys.readouterr()
        try:
            ended = main(list(map(str, arguments)))
        except SystemExit as of_argparse:
            ended = int(of_argparse.code or 0)
        seen = capsys.readouterr()
        assert ended == code, seen
        assert code != 2 or (len(seen.err.splitlines()) < 15 and "Traceback" not in seen.err), seen.err
        return Ran(seen.out, seen.err)

    return run


@pytest.fixture
def install(package: Install) -> Install:
    """As ``package``, with entry points of its own module only, given as ``{"kind.name": "Name"}``."""

    def put(
        name: str, source: str, plugins: dict[str, str], contracts: dict[str, str] | None = None, requires: str = ""
    ) -> Path:
        lines = "".join(f"{point} = {name}:{target}\n" for point, target in (contracts or {}).items())
        points = {point: f"{name}:{target}" for point, target in plugins.items()}
        return package(name, source, requires or "hydra", lines, **points)

    return put
