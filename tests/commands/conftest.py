"""Packages that are installed for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., Path]


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
