"""``stagereg.plugin``: what a plugin may import. The names are there, cost nothing before use, and are enough."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stagereg.plugin

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
PUBLIC = {"stagereg", "stagereg.plugin", "stagereg.testing"}


def test_every_name_is_there() -> None:
    names = dir(stagereg.plugin)
    assert {"HostStager", "Joinable", "JoinHook", "KeepRule", "CommittedCheckpoint", "Tier", "Storage"} < set(names)
    assert [name for name in names if getattr(stagereg.plugin, name).__name__ != name and name != "StateDict"] == []
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from stagereg.plugin import Nothing  # noqa: F401


def test_importing_it_imports_no_torch() -> None:
    code = (
        "import sys, stagereg.plugin; from stagereg.plugin import ByteSize, ConfigError; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "False\n"


def test_the_example_and_so_the_scaffolds_import_nothing_else() -> None:
    imported = {
        node.module
        for file in EXAMPLE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stagereg")
    }
    assert "stagereg.plugin" in imported
    assert imported <= PUBLIC
