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
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package made of one module; its entry points are given as ``{"kind.name": "Name"}``."""

    def put(
        name: str, source: str, plugins: dict[str, str], contracts: dict[str, str] | None = None, requires: str = ""
    ) -> Path:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{needs}")
        lines = []
        for group, points in (("plugins", plugins), ("contracts", contracts or {})):
            lines += [f"[stagereg.{group}]", *(f"{point} = {name}:{target}" for point, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        # What is installed is remembered for a module path, so each time it is another one.
        monkeypatch.syspath_prepend(tmp_path / f"of_{name}")
        return tmp_path / f"{name}.py"

    monkeypatch.syspath_prepend(tmp_path)
    return put
