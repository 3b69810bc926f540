"""Packages that are installed for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package made of one module; its entry points are given as ``{"kind.name": "Name"}``."""

    def put(name: str, source: str, points: dict[str, str], version: str = "1.2", requires: str = "") -> Path:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        lines = "".join(f"{point} = {name}:{target}\n" for point, target in points.items())
        (info / "entry_points.txt").write_text(f"[stagereg.plugins]\n{lines}")
        # What is installed is remembered for a module path, so each time it is another one.
        monkeypatch.syspath_prepend(tmp_path / f"of_{name}")
        return tmp_path / f"{name}.py"

    monkeypatch.syspath_prepend(tmp_path)
    return put
